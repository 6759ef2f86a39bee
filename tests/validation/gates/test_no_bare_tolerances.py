"""Every tolerance of the gates and of numerics is made by a rule: none is a bare constant handed to a comparison."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
JUDGES = ("validation/gates", "numerics")
NAMES = {"atol", "rtol", "abs_tol", "rel_tol", "tol", "tolerance"}
CALLS = {"allclose", "isclose", "assert_close", "assert_allclose", "approx"}


def bare_tolerances(source: str) -> Iterator[str]:
    """Calls of library comparisons, and tolerances given or set as numbers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in CALLS:
                yield f"line {node.lineno}: {name}(...)"
            for keyword in node.keywords:
                if keyword.arg in NAMES and isinstance(keyword.value, ast.Constant):
                    yield f"line {node.lineno}: {keyword.arg}={keyword.value.value}"
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id.lower() in NAMES:
                yield f"line {node.lineno}: {target.id} = ..."


def _explained(following: list[ast.stmt]) -> bool:
    """Whether a docstring comes next, after further assignments at most."""
    for node in following:
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if not isinstance(node, ast.Assign):
            return False
    return False


@pytest.mark.parametrize("folder", JUDGES)
def test_no_gate_compares_with_a_bare_tolerance(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {str(file): list(bare_tolerances(file.read_text(encoding="utf-8"))) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize("folder", JUDGES)
def test_every_constant_that_decides_is_named_and_says_where_it_comes_from(folder: str) -> None:
    """A module constant that is a floating-point number carries a docstring; constants in a row may share one."""
    bare = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        for i, node in enumerate(body):
            constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            if constant and isinstance(node.value.value, float) and not _explained(body[i + 1 :]):
                bare.append(f"{file.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert bare == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.allclose(a, b)", 1),
        ("torch.testing.assert_close(a, b, atol=1e-3, rtol=0.1)", 3),
        ("ATOL = 1e-2", 1),
        ("tol: float = 1e-2", 1),
        ("bounds.accept(a, b, floor)", 0),
        ("f(rtol=rule(x))", 0),
    ],
)
def test_a_bare_tolerance_is_seen(source: str, count: int) -> None:
    assert len(list(bare_tolerances(source))) == count
