"""Imports flow one way: a reference shares no code with what it judges, a gate sees an implementation as a target."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("numerics", "decode_impl", "evals", "validation")

ALLOWED = {
    "numerics": ("numerics",),
    "decode_impl": ("decode_impl", "numerics.formats"),
    "evals": ("evals", "numerics"),
    "validation": PACKAGES,
    "validation/gates": ("validation", "evals", "numerics"),
    "validation/fuzz": ("validation", "evals", "numerics"),
    "validation/reports": ("validation",),
}
"""Folder -> prefixes of our modules that it may import. The longest folder that fits a file decides."""


def imported(source: str, package: str) -> Iterator[str]:
    """Names of all modules that a source imports, wherever in the file, as absolute names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # `from numerics import oracles` imports the module numerics.oracles.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden(path: str, source: str) -> list[str]:
    """Our modules that the file at this path (relative, with slashes) imports and may not."""
    folder = max((known for known in ALLOWED if path.startswith(f"{known}/")), key=len)
    package = path.rpartition("/")[0].replace("/", ".")
    return sorted(
        name
        for name in imported(source, package)
        if name.split(".")[0] in PACKAGES
        and not any(name == prefix or name.startswith(f"{prefix}.") for prefix in ALLOWED[folder])
    )


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_flow_one_way(package: str) -> None:
    assert files(package)
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in files(package)
        if (names := forbidden(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is_for(package: str) -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in files(package)
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("path", "source", "names"),
    [
        ("numerics/a.py", "import evals.scorers", ["evals.scorers"]),
        ("numerics/oracles/a.py", "from ..formats import bf16\nfrom ...evals import x", ["evals.x"]),
        ("decode_impl/a.py", "from numerics.formats import bf16", []),
        ("decode_impl/a.py", "from numerics import formats", []),
        ("decode_impl/a.py", "def f():\n    from numerics.oracles import kda", ["numerics.oracles.kda"]),
        ("decode_impl/a.py", "import numerics.formats_of_others", ["numerics.formats_of_others"]),
        ("validation/gates/a.py", "from decode_impl.ops import OPS", ["decode_impl.ops.OPS"]),
        ("validation/targets/a.py", "from decode_impl.ops import OPS", []),
        ("validation/reports/a.py", "import numerics", ["numerics"]),
    ],
)
def test_a_wrong_import_is_seen(path: str, source: str, names: list[str]) -> None:
    assert forbidden(path, source) == names
