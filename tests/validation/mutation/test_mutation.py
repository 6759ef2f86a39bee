"""Mutation runs: outcomes follow the gates' own verdicts, a stopped run is resumed, hostile text stays text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import decodegate_toy as toy
import pytest
import torch
from small_k3 import small_target
from toy_commandline import CommandLine

from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS
from validation.gates.base import Context
from validation.gates.parity.gate import ParityGate
from validation.mutation.document import faults_page
from validation.mutation.matrix import Matrix, Outcome, Score, row_of
from validation.mutation.measure import waits
from validation.mutation.plan import CELLS_TRIED, components_first, units_for
from validation.mutation.run import _used
from validation.mutation.shared import SharedTarget
from validation.profile import load_profile
from validation.reports.mutation import headline, render_html, render_markdown
from validation.targets.base import ArmConfig

COLUMN = replace(toy.FAULTS["toy.column"], gate="error", layer="toy", missed_by="cosine")


def same(ops: Any) -> Any:
    return dict(ops)


CATALOGUE = {
    fault.id: fault
    for fault in (
        COLUMN,
        replace(COLUMN, id="toy.harmless", title="nothing at all", mutate=same),
        replace(COLUMN, id="toy.equal", title="the same", mutate=same, equivalent="it is the same function"),
        replace(COLUMN, id="toy.liar", title="said to be the same", equivalent="it is not"),
        replace(COLUMN, id="toy.absent", title="not here", paths=(), not_applicable="needs a GPU"),
        replace(COLUMN, id="toy.later", title="a later gate's", mutate=same, gate="sync"),
        replace(COLUMN, id="toy.declared", title="no component", paths=(), component="drum"),
    )
}


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy faults of every outcome in the place of the toy catalogue."""
    monkeypatch.setattr(toy, "FAULTS", CATALOGUE)


def mutate(decodegate: CommandLine, *arguments: str) -> int:
    common = ("--profile", decodegate.profile, "--out", str(decodegate.runs), "--workers", "1")
    return decodegate("mutate", *common, *arguments)


def matrix_of(decodegate: CommandLine) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((decodegate.newest().path / "matrix.json").read_bytes())
    return document


def test_every_outcome_follows_from_what_the_gates_said(decodegate: CommandLine, catalogue: None) -> None:
    assert mutate(decodegate) == 1
    document = matrix_of(decodegate)
    outcomes = {row["fault"]: row["outcome"] for row in document["rows"]}
    assert outcomes == {
        "toy.column": "caught",
        "toy.harmless": "missed",
        "toy.equal": "equivalent",
        "toy.liar": "contradicted",
        "toy.absent": "not applicable",
        "toy.later": "gate missing",
        "toy.declared": "gate missing",
    }
    assert document["score"] == {"caught": 1, "asked": 2}
    assert document["scores"]["error"] == {"caught": 1, "asked": 2}
    assert not document["passed"]
    [column] = [row for row in document["rows"] if row["fault"] == "toy.column"]
    assert column["said"]["error"]["unit"] == "rows-1"
    assert "times the baseline's; 2.00 is allowed" in column["said"]["error"]["reason"]
    assert "missed: toy.harmless: nothing at all" in decodegate.out
    assert "contradicted: toy.liar" in decodegate.out


def test_a_score_without_misses_passes(decodegate: CommandLine, catalogue: None) -> None:
    assert mutate(decodegate, "--fault", "toy.column", "--fault", "toy.equal", "--fault", "toy.absent") == 0
    assert "1 of 1 (100%) caught; none missed" in decodegate.out
    page = decodegate.newest().path / "matrix.html"
    assert str(page) in decodegate.out.replace("\n", "")
    assert page.exists()


def test_one_gate_can_be_asked_alone(decodegate: CommandLine, catalogue: None) -> None:
    assert mutate(decodegate, "--fault", "toy.column", "--gate", "error") == 0
    assert list(matrix_of(decodegate)["scores"]) == ["error"]


def test_gates_that_are_red_without_a_fault_make_the_matrix_an_error(
    decodegate: CommandLine, catalogue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "split_matmul", lambda x, weight: 2.0 * (x @ weight.T))
    assert mutate(decodegate, "--fault", "toy.column") == 4
    assert "ERROR: not green without a fault (error FAIL, costly FAIL), so nothing counts" in decodegate.out


def test_a_gate_that_breaks_is_an_error_and_no_catch(decodegate: CommandLine, catalogue: None) -> None:
    decodegate.write_profile(toy.PROFILE.replace("gates.error", "gates.crash").replace('"error"', '"crash"'))
    assert mutate(decodegate, "--fault", "toy.harmless", "--gate", "crash") == 4
    [row] = matrix_of(decodegate)["rows"]
    assert row["outcome"] == "error"
    assert "ZeroDivisionError: the first line and a second line" in row["note"]


@pytest.mark.parametrize("fault", ["../../etc/passwd", "", "toy.column;rm -rf /", "<script>", "no such"])
def test_ids_that_are_no_faults_are_refused_in_one_line(decodegate: CommandLine, catalogue: None, fault: str) -> None:
    assert mutate(decodegate, "--fault", fault) == 2
    assert len(decodegate.err.strip().splitlines()) == 1
    assert "no fault is called" in decodegate.err
    assert not decodegate.runs.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gate", "ranks"), "has no [gates.ranks] table"),
        (("--gate", "nothing"), "no gate is called 'nothing'"),
        (("--resume", "../up"), "is not a run id"),
        (("--resume", "20260101-000000-aaaaaa"), "there is no run"),
    ],
)
def test_wrong_options_are_refused(
    decodegate: CommandLine, catalogue: None, arguments: tuple[str, ...], message: str
) -> None:
    assert mutate(decodegate, *arguments) == 2
    assert message in decodegate.err


def test_an_interrupted_run_is_resumed_and_measures_only_the_rest(
    decodegate: CommandLine, catalogue: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("TOY_LOG", str(log))
    monkeypatch.setenv("TOY_INTERRUPT_AT", "rows-2")
    assert mutate(decodegate) == 130
    assert "decodegate mutate --resume" in decodegate.err
    run_id = decodegate.newest().run_id
    monkeypatch.delenv("TOY_INTERRUPT_AT")
    assert mutate(decodegate, "--resume", run_id) == 1
    whole = matrix_of(decodegate)
    log.write_text("")
    assert mutate(decodegate, "--resume", run_id) == 1
    assert list(toy.measured(log)) == []
    assert {**matrix_of(decodegate), "created": ""} == {**whole, "created": ""}


def test_a_torn_result_is_measured_again(
    decodegate: CommandLine, catalogue: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert mutate(decodegate, "--fault", "toy.column") == 0
    folder = decodegate.newest()
    (folder.path / "units" / "mutate" / "toy.column.json").write_text("{")
    log = tmp_path / "log"
    monkeypatch.setenv("TOY_LOG", str(log))
    assert mutate(decodegate, "--fault", "toy.column", "--resume", folder.run_id) == 0
    assert set(toy.measured(log)) == {"rows-1", "rows-32"}


def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    profile = tmp_path / "toy.toml"
    profile.write_text(toy.PROFILE)
    driver = Path(__file__).parents[1] / "toy_driver.py"
    command = [sys.executable, str(driver), "mutate", "--profile", str(profile), "--out", str(tmp_path / "runs")]
    command += ["--workers", "1"]
    here = str(Path(__file__).parents[1])
    paths = {"PYTHONPATH": os.pathsep.join([here, str(Path(__file__).parents[3])])}
    killed = subprocess.run(command, env={**os.environ, **paths, "TOY_KILL_AT": "rows-64"}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    [folder] = (tmp_path / "runs").iterdir()
    again = subprocess.run([*command, "--resume", folder.name], env={**os.environ, **paths}, capture_output=True)
    assert again.returncode == 0, again.stderr
    assert json.loads((folder / "matrix.json").read_bytes())["passed"]


HOSTILE = "<script>alert(1)</script> | `x` [a](javascript:b) \u202e @all"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)


def hostile_matrix() -> Matrix:
    said = {"error": {"says": "caught", "units": 1, "unit": HOSTILE, "reason": HOSTILE}}
    fault = replace(COLUMN, title=HOSTILE, layer=HOSTILE, missed_by=HOSTILE, component=HOSTILE)
    missed = replace(fault, id="toy.missed")
    rows = (row_of(fault, said, ["error"]), row_of(missed, {"error": {"says": "missed", "units": 1}}, ["error"]))
    about = {"command": HOSTILE, "profile": HOSTILE, "seed": 0, "created": HOSTILE, "target": {"model": HOSTILE}}
    return Matrix(("error",), rows, {"error": {"says": "PASS", "units": 1, "reason": HOSTILE}}, about)


def test_hostile_text_stays_text_in_both_renderings() -> None:
    page, text = render_html(hostile_matrix()), render_markdown(hostile_matrix())
    tags = Tags()
    tags.feed(page)
    assert not tags.seen & {"script", "a", "img", "iframe"}
    assert "<script>" not in page
    assert "<script>" not in text.replace("    " + HOSTILE.replace("`", "'"), "")
    assert "\u202e" not in page
    assert "[a](javascript:b)" not in text.replace("    " + HOSTILE.replace("`", "'"), "")


def test_rows_that_nobody_caught_come_first() -> None:
    text = render_markdown(hostile_matrix())
    assert text.index("### Not caught") < text.index("`toy.missed` (missed)") < text.index("| `toy.column` |")
    assert headline(hostile_matrix()) == "1 of 2 (50%) caught; 1 missed"


def test_nothing_measured_is_not_sound() -> None:
    empty = Matrix(("error",), (), {})
    assert not empty.passed
    assert headline(empty).startswith("ERROR: not green without a fault")
    assert Score(0, 0).share is None


@pytest.mark.parametrize(
    ("says", "outcome"),
    [
        (("caught", "missed"), Outcome.CAUGHT),
        (("missed", "missed"), Outcome.MISSED),
        (("cannot see it", "missed"), Outcome.MISSED),
        (("error", "missed"), Outcome.ERROR),
        (("error", "caught"), Outcome.CAUGHT),
        (("cannot see it", "cannot see it"), Outcome.GATE_MISSING),
    ],
)
def test_one_gate_that_catches_is_enough(says: tuple[str, str], outcome: Outcome) -> None:
    said = {gate: {"says": word, "reason": "r"} for gate, word in zip(("error", "costly"), says, strict=True)}
    assert row_of(COLUMN, said, ["error", "costly"]).outcome is outcome


def test_faults_of_one_component_are_neighbours() -> None:
    order = [(fault.paths, fault.component) for fault in components_first(list(FAULTS.values())) if fault.injectable]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes == len(set(order)) - 1


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("kda-delta-dropped", ["cell"] * CELLS_TRIED),
        ("verify-width-6", ["schedule"] * 2 + ["cell"]),
        # A schedule compares the arm with itself, so the engine's faults are asked of a cell too.
        ("state-not-reset", ["schedule"] * 13 + ["fuzz"] * 7 + ["cell"]),
        ("accept-other-q", ["fuzz"]),
        ("sample-constant-seed", ["fuzz"] * 2),
        ("draft-id-out-of-range", ["fuzz"]),
    ],
)
def test_units_are_those_that_can_see_the_fault_in_the_order_of_their_cost(fault: str, kinds: list[str]) -> None:
    profile = load_profile("premerge")[1]
    context = Context(small_target(), ArmConfig("baseline"), ArmConfig("candidate"), 0, profile.gates["parity"])
    units = units_for(ParityGate(), context, FAULTS[fault])
    assert [next((kind for kind in ("schedule", "fuzz") if kind in unit.params), "cell") for unit in units] == kinds
    assert fault != "verify-width-6" or all("verify" in unit.id or "drafts" in unit.params for unit in units)


def test_the_healthy_run_has_every_unit_that_a_fault_is_judged_on() -> None:
    faults = [FAULTS["dcp-written-by-next-rank"], FAULTS["page-given-twice"]]
    assert len({(fault.component, fault.paths) for fault in faults}) == 1
    gate, settings = ParityGate(), load_profile("premerge")[1].gates
    context = Context(small_target(), ArmConfig("baseline"), ArmConfig("candidate"), 0, settings["parity"])
    wanted = {unit.id for fault in faults for unit in units_for(gate, context, fault)}
    for order in (faults, faults[::-1]):
        assert set(_used([gate], settings, order, context)["parity"]) == wanted


def test_a_shared_baseline_gives_what_its_own_arm_gives_and_computes_once() -> None:
    config = ArmConfig("baseline", kv_cache_dtype="fp8", max_batch=2, max_context=48)
    own, shared = small_target().open(config), SharedTarget(small_target())
    arm = shared.open(config)
    assert shared.open(config) is arm
    case = {"x": torch.randn(3, 8).bfloat16(), "weight": torch.randn(5, 8).bfloat16()}
    first = arm.run_op("projection", case)["y"]
    assert torch.equal(first, own.run_op("projection", case)["y"])
    assert arm.run_op("projection", {**case})["y"] is first
    assert arm.run_op("projection", {**case, "x": case["x"] * 2})["y"] is not first
    sequences = [list(range(12)), list(range(20, 32))]
    steps, again = list(arm.forced_decode(sequences, 9)), list(own.forced_decode(sequences, 9))
    assert [s.positions for s in steps] == [s.positions for s in again]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(steps, again, strict=True))
    before = arm.counters()
    list(arm.forced_decode(sequences, 9))
    assert arm.counters() == before


def test_an_arm_with_a_fault_is_never_shared() -> None:
    shared = SharedTarget(small_target())
    config = ArmConfig("candidate", "latency_specialized", faults=(FAULTS["kda-delta-dropped"],))
    assert shared.open(config) is not shared.open(config)


def test_the_page_of_the_catalogue_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "faults.md"
    assert page.read_text(encoding="utf-8") == faults_page(FAULTS), (
        "write it again: decodegate faults --markdown > docs/faults.md"
    )


def test_the_page_names_every_fault_once() -> None:
    page = faults_page(FAULTS)
    for fault in FAULTS:
        assert page.count(f"| `{fault}` |") == 1


def test_a_fault_without_code_is_a_fault(decodegate: CommandLine, catalogue: None) -> None:
    assert isinstance(CATALOGUE["toy.declared"], Fault)
    assert decodegate("faults") == 0
    assert "declared" in decodegate.out


@pytest.mark.parametrize(
    ("gate", "asked", "waiting"),
    [
        ("numerics", ("numerics", "parity"), False),
        ("numerics", ("parity",), False),
        ("stability", ("numerics", "parity"), True),
        ("stability", ("numerics", "stability"), False),
        ("evals", ("stability",), True),
        ("error", ("costly",), False),
    ],
)
def test_a_fault_of_a_costlier_gate_than_those_asked_waits(gate: str, asked: tuple[str, ...], waiting: bool) -> None:
    assert waits(replace(COLUMN, gate=gate), asked) is waiting
