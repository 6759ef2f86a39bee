"""docs/extending.md is followed to the letter: in a copy of the project, nothing is done but what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from small_k3 import context_of, judged, small_target

from decode_impl.ops import call_on_case
from numerics.extend import register
from validation.faults.base import GATES_BY_COST, Fault
from validation.faults.catalogue import FAULTS, LAYERS
from validation.gates.base import GateResult
from validation.gates.numerics.gate import NumericsGate
from validation.gates.registry import GATES, load_gate
from validation.signoff.document import LAYERS as SIGNOFF_LAYERS
from validation.targets.base import ArmConfig
from validation.verdict import Verdict

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {m[1]: m[2] for m in re.finditer(r"```(?:python|toml)\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL)}
TABLES = re.findall(r"^\| `(\S+\.py)` \| `(\w+)` \| `(.+?)` \| (?:`(.+?)`)? ?\|$", PAGE, flags=re.MULTILINE)
PLACES = re.findall(r"^\| `(\S+)` \| (`.+?`) \| [^`|]", PAGE.partition("## A gate")[2], flags=re.MULTILINE)
FAULT, OP, PROFILE = "validation/faults/example.py", "numerics/added/softcap.py", "softcap.toml"
GENERIC, EMULATION = "decode_impl/generic/softcap.py", "decode_impl/specialized/emulation/softcap.py"
SETTINGS: dict[str, Any] = {"rows": [1, 8], "sequence_rows": [17], "shard_rows": [2], "shards": [], "seeds": 1}

EVERY_ORDER = """
import pkgutil, sys, importlib
import numerics
modules = [m.name for m in pkgutil.walk_packages(numerics.__path__, "numerics.")]
for first in modules:
    for name in [name for name in sys.modules if name.partition(".")[0] == "numerics"]:
        del sys.modules[name]
    importlib.import_module(first)
    from numerics.contracts import CONTRACTS
    from numerics.families import FAMILIES
    from numerics.oracles import ORACLES
    assert "softcap" in FAMILIES and "softcap" in ORACLES and "softcap" in CONTRACTS["generic"], first
print(len(modules))
"""


def project(folder: Path) -> Path:
    """A copy of the project's code in the folder, without what no one edits for an op."""
    for package in ("numerics", "decode_impl"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("assets"))
    (folder / "decode_impl" / "assets").symlink_to(ROOT / "decode_impl" / "assets")
    for package in ("validation", "evals"):
        (folder / package).symlink_to(ROOT / package)
    return folder


def followed(folder: Path, *left_out: str) -> Path:
    """The project after every step of the page, but for the tables left out."""
    for name in (OP, GENERIC, EMULATION, PROFILE):
        (project(folder) if name == OP else folder).joinpath(name).write_text(FILES[name])
    for name, table, entry, imported in TABLES:
        if name in left_out:
            continue
        text = (folder / name).read_text()
        text, found = re.subn(rf"^({table}: .*{{)$", rf"{imported}\n\1\n    {entry}", text, flags=re.MULTILINE)
        assert found == 1, (name, table)
        (folder / name).write_text(text)
    return folder


def python(folder: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    here = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code, *words], cwd=folder, env=here, capture_output=True, text=True)


def decodegate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "import sys; from validation.cli.app import main; sys.exit(main())", *words)


def run(op: str, *faults: Fault) -> GateResult:
    return judged(NumericsGate(), context_of({**SETTINGS, "ops": [op]}, faults=faults))


def test_the_page_has_every_file_and_a_fault_takes_thirty_lines_at_most() -> None:
    assert FILES.keys() == {FAULT, OP, GENERIC, EMULATION, PROFILE}
    assert len(FILES[FAULT].rstrip().splitlines()) <= 30
    assert len(FILES[PROFILE].rstrip().splitlines()) <= 14
    assert [name for name, *_ in TABLES] == [
        "decode_impl/ops.py",
        "decode_impl/generic/__init__.py",
        "decode_impl/specialized/emulation/__init__.py",
    ]


def test_the_example_fault_is_caught() -> None:
    module = ModuleType("extending_example")
    exec(compile(FILES[FAULT], FAULT, "exec"), module.__dict__)
    [fault] = module.LAYER.faults
    assert fault.id not in FAULTS
    assert run("rms_norm").verdict is Verdict.PASS
    assert run("rms_norm", fault).verdict is Verdict.FAIL


def test_a_file_with_a_layer_is_found_by_the_catalogue() -> None:
    folder = ROOT / "validation" / "faults"
    with_layer = [f.stem for f in folder.glob("*.py") if "\nLAYER = Layer(" in f.read_text(encoding="utf-8")]
    assert len(with_layer) == len(LAYERS)


def test_who_does_what_the_page_says_has_the_op_judged_in_both_arms(tmp_path: Path) -> None:
    folder = followed(tmp_path)
    right = decodegate(folder, "run", "--profile", PROFILE, "--workers", "1")
    assert right.returncode == 0, right.stdout + right.stderr
    path = folder / EMULATION
    path.write_text(path.read_text().replace("-2 * scaled.abs()", "-1.98 * scaled.abs()", 1))
    wrong = decodegate(folder, "run", "--profile", PROFILE, "--workers", "1")
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr


def test_an_added_op_is_there_whatever_is_imported_first(tmp_path: Path) -> None:
    (project(tmp_path) / OP).write_text(FILES[OP])
    seen = python(tmp_path, EVERY_ORDER)
    assert seen.returncode == 0, seen.stderr
    assert int(seen.stdout) > 30


def test_a_table_that_was_forgotten_is_named(tmp_path: Path) -> None:
    folder = followed(tmp_path, "decode_impl/ops.py")
    seen = decodegate(folder, "run", "--profile", PROFILE, "--workers", "1")
    assert seen.returncode not in (0, 1)
    assert "op softcap has no entry in OUTPUTS of decode_impl/ops.py" in " ".join((seen.stdout + seen.stderr).split())


def test_an_added_file_that_fails_is_named_in_one_line(tmp_path: Path) -> None:
    (project(tmp_path) / OP).write_text(FILES[OP].replace("    oracle=oracle,\n", "    oracle=orakel,\n"))
    seen = decodegate(tmp_path, "gates")
    assert seen.returncode == 2
    assert "numerics/added/softcap.py fails: NameError: name 'orakel' is not defined" in seen.stderr
    assert len(seen.stderr.strip().splitlines()) == 1


def test_an_op_without_outputs_is_refused_by_the_name_of_the_table() -> None:
    with pytest.raises(LookupError, match=r"op softcap has no entry in OUTPUTS of decode_impl/ops\.py"):
        call_on_case({"softcap": lambda x: x}, "softcap", {"x": 1})
    with pytest.raises(LookupError, match="op softcap has no entry in this path's table OPS"):
        small_target().open(ArmConfig("baseline")).run_op("softcap", {})


def test_an_op_that_is_known_or_has_no_families_is_refused() -> None:
    rest: dict[str, Any] = {"make": None, "oracle": None, "contract": None, "sites": ()}
    with pytest.raises(ValueError, match="op 'route' is known already"):
        register("route", cases=("iid",), **rest)
    with pytest.raises(ValueError, match="op 'nothing' needs at least one input family"):
        register("nothing", cases=(), **rest)


def test_every_place_that_names_a_gate_is_there_as_the_page_says() -> None:
    assert len(PLACES) == 8
    for name, words in PLACES:
        files = sorted((ROOT / name).glob("*.toml")) if name.endswith("/") else [ROOT / name]
        assert files, name
        for word in re.findall("`(.+?)`", words):
            assert all(word in file.read_text(encoding="utf-8") for file in files), (name, word)


@pytest.mark.parametrize("name", GATES)
def test_every_gate_is_named_where_the_page_says(name: str) -> None:
    gate = load_gate(name)
    assert name in GATES_BY_COST
    assert gate.layer in SIGNOFF_LAYERS
    assert f"| {gate.layer} | `{name}` |" in (ROOT / "README.md").read_text(encoding="utf-8")
