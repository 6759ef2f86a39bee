"""The examples of docs/extending.md are run as they stand."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_k3 import context_of, judged

from decode_impl.ops import OUTPUTS
from numerics import contracts, families, oracles
from numerics.extend import register
from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS, LAYERS
from validation.gates.base import GateResult
from validation.gates.numerics import NumericsGate
from validation.verdict import Verdict

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {match[1]: match[2] for match in re.finditer(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, flags=re.DOTALL)}
FAULT, OP = "validation/faults/example.py", "numerics/softcap.py"
SETTINGS: dict[str, Any] = {"rows": [1, 8], "sequence_rows": [17], "shard_rows": [2], "shards": [], "seeds": 1}


def loaded(file: str) -> ModuleType:
    """The example as a module that only this test knows."""
    name = f"extending_{Path(file).stem}"
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(FILES[file], file, "exec"), module.__dict__)
    return module


def run(op: str, *faults: Fault) -> GateResult:
    return judged(NumericsGate(), context_of({**SETTINGS, "ops": [op]}, faults=faults))


@pytest.fixture
def softcap() -> Iterator[Fault]:
    """The example op in the numerics tables, and what puts a right implementation of it into both paths."""
    loaded(OP)
    OUTPUTS["softcap"] = ("y",)  # type: ignore[index]

    def right(*, x: torch.Tensor, cap: float) -> torch.Tensor:
        return (cap * torch.tanh(x.double() / cap)).float().bfloat16()

    yield Fault("softcap", "", "softcap", (), ("generic", "specialized"), lambda ops: {"softcap": right})
    del OUTPUTS["softcap"], families.FAMILIES["softcap"], oracles.ORACLES["softcap"]  # type: ignore[attr-defined]
    for path in (contracts.GENERIC, contracts.SPECIALIZED):
        del contracts.CONTRACTS[path]["softcap"]


def test_the_page_has_both_examples_and_a_fault_takes_thirty_lines_at_most() -> None:
    assert FILES.keys() == {FAULT, OP}
    assert len(FILES[FAULT].rstrip().splitlines()) <= 30


def test_the_example_fault_is_caught() -> None:
    [fault] = loaded(FAULT).LAYER.faults
    assert fault.id not in FAULTS
    assert run("rms_norm").verdict is Verdict.PASS
    assert run("rms_norm", fault).verdict is Verdict.FAIL


def test_a_file_with_a_layer_is_found_by_the_catalogue() -> None:
    folder = Path(__file__).parents[2] / "validation" / "faults"
    with_layer = [f.stem for f in folder.glob("*.py") if "\nLAYER = Layer(" in f.read_text(encoding="utf-8")]
    assert len(with_layer) == len(LAYERS)


def test_the_example_op_is_judged_in_both_arms(softcap: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    from validation.targets import builtin

    paths = builtin.with_faults(builtin.BUILTIN_PATHS, builtin.ENGINE_PARTS, [softcap])[0]
    monkeypatch.setattr(builtin, "BUILTIN_PATHS", paths)
    clean = run("softcap")
    assert [finding.message for finding in clean.findings] == []
    assert clean.verdict is Verdict.PASS
    wrong = Fault(
        "softcap-of-30",
        "",
        "softcap",
        (),
        ("specialized",),
        lambda ops: {"softcap": lambda *, x, cap: ops["softcap"](x=x, cap=30.0)},
    )
    assert run("softcap", wrong).verdict is Verdict.FAIL


def test_an_op_that_is_known_or_has_no_families_is_refused() -> None:
    rest: dict[str, Any] = {"make": None, "oracle": None, "contract": None, "sites": ()}
    with pytest.raises(ValueError, match="op 'route' is known already"):
        register("route", cases=("iid",), **rest)
    with pytest.raises(ValueError, match="op 'nothing' needs at least one input family"):
        register("nothing", cases=(), **rest)
