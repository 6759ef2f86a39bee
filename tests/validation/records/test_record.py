"""The record: atomic, of one schema, with the same bytes from run to run, and never with a bare NaN."""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path

import decodegate_toy as toy
import jsonschema
import pytest
from toy_commandline import CommandLine

from validation.errors import UsageError
from validation.gates.base import GateResult, Plot, Table
from validation.records import jsonio
from validation.records.record import ArmUse, PlotDoc, RunRecord, UnitResult, gate_doc
from validation.records.schema import record_schema, schema_text
from validation.records.storage import RunFolder, is_safe_name, new_run_id, write_atomically
from validation.verdict import Verdict

DOCS = Path(__file__).parents[3] / "docs"


def test_the_schema_in_docs_is_the_schema_of_the_code() -> None:
    message = "write it again: python -m validation.records.schema > docs/record.schema.json"
    assert (DOCS / "record.schema.json").read_text() == schema_text(), message


def test_a_real_record_validates_against_the_schema_and_a_changed_one_does_not(decodegate: CommandLine) -> None:
    assert decodegate.run() == 0
    schema = json.loads((DOCS / "record.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads((decodegate.newest().path / "record.json").read_text())
    jsonschema.validate(document, schema)
    document["stable"]["gates"][0]["verdict"] = "GREEN"
    with pytest.raises(jsonschema.ValidationError, match="GREEN"):
        jsonschema.validate(document, schema)


def test_the_schema_names_every_field_as_the_prose_does() -> None:
    prose = (DOCS / "record.md").read_text()
    fields = set(record_schema()["properties"])
    for name, definition in record_schema()["$defs"].items():
        if name in ("RunInfo", "Stable", "Environment", "GateDoc"):
            fields |= set(definition["properties"])
    assert [field for field in sorted(fields) if f"`{field}`" not in prose] == []


def test_a_record_survives_its_file(decodegate: CommandLine) -> None:
    assert decodegate.run("--fault", "toy.column") == 1
    record = decodegate.record()
    assert RunRecord.model_validate_json(record.model_dump_json()) == record
    assert [fault.id for fault in record.stable.faults] == ["toy.column"]
    assert record.stable.arms["candidate"]["faults"] == ["toy.column"]
    assert record.stable.arms["baseline"]["faults"] == []
    assert record.run.command[:3] == ["decodegate", "run", "--profile"]
    assert record.environment.threads >= 1


def test_the_files_of_a_run_are_complete(decodegate: CommandLine) -> None:
    decodegate.write_profile(toy.PROFILE_WITH_PLOT)
    assert decodegate.run() == 0
    folder = decodegate.newest().path
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    units = {f"units/error/rows-{n}.json" for n in (1, 2, 4, 8, 16)} | {f"units/costly/rows-{n}.json" for n in (32, 64)}
    reports = {"report.html", "junit.xml", "summary.md", "plots/error-1.svg"}
    samples = {"samples/error.jsonl", "samples/costly.jsonl"}
    assert files == units | reports | samples | {"record.json", "log.txt", "lock"}
    lines = (folder / "samples" / "error.jsonl").read_text().splitlines()
    assert [json.loads(line)["unit"] for line in lines] == [f"rows-{n}" for n in (1, 2, 4, 8, 16)]
    assert json.loads(lines[0])["params"] == {"rows": 1}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UsageError, match="No space left on device"):
        write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", ".hidden", "a/b", "a\\b", "a b", "a\n", "é", "x" * 129])
def test_an_unsafe_name_is_not_a_file_name(name: str, tmp_path: Path) -> None:
    assert not is_safe_name(name)
    with pytest.raises(UsageError, match="safe file name"):
        RunFolder(tmp_path).write(b"", "units", name)
    assert list(tmp_path.iterdir()) == []


def test_a_link_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    inside.mkdir()
    (inside / "units").symlink_to(outside)
    with pytest.raises(UsageError, match="leads out of the run's folder"):
        RunFolder(inside).write(b"x", "units", "a.json")
    assert list(outside.iterdir()) == []


def test_run_ids_are_safe_sort_by_time_and_differ() -> None:
    early = [new_run_id(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) for _ in range(50)]
    late = new_run_id(datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC))
    assert all(is_safe_name(run_id) for run_id in early)
    assert len(set(early)) == 50
    assert max(early) < late


NUMBERS = {"a": [math.nan, math.inf, -math.inf, 1.5, 0], "b": "NaN", "c": (True, None)}


def test_non_finite_numbers_have_names_for_readers_and_survive_for_gates() -> None:
    assert jsonio.named(NUMBERS) == {"a": ["NaN", "Infinity", "-Infinity", 1.5, 0], "b": "NaN", "c": [True, None]}
    back = jsonio.unpacked(json.loads(jsonio.canonical(jsonio.packed(NUMBERS))))
    assert math.isnan(back["a"][0])
    assert back["a"][1:] == [math.inf, -math.inf, 1.5, 0]
    assert back["b"] == "NaN"
    with pytest.raises(ValueError, match="Out of range float"):
        jsonio.canonical(NUMBERS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [{"b": {1, 2}}]}, r"a\[0\].b is of type set"),
        ({"a": {1: 2}}, "a has the key 1; keys must be strings"),
        ({"x": {"$float": "NaN"}}, r"x uses the reserved key '\$float'"),
        ({"x": b"bytes"}, "x is of type bytes; plain JSON is needed"),
    ],
)
def test_what_is_not_plain_json_is_refused_with_its_place(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        jsonio.packed(value)


def test_a_unit_file_with_non_finite_results_is_read_back_whole(tmp_path: Path) -> None:
    result = UnitResult(
        gate="g",
        unit="u",
        identity="i",
        result=jsonio.packed({"x": math.nan}),
        arms={"candidate": ArmUse(steps={"generic": 1})},
        seconds=0.1,
    )
    folder = RunFolder(tmp_path)
    folder.write_unit(result)
    assert folder.read_unit("g", "u", "i") == result
    assert folder.read_unit("g", "u", "another identity") is None
    assert folder.read_unit("g", "v", "i") is None


def test_a_gate_result_that_does_not_fit_together_is_refused() -> None:
    ragged = GateResult("error", Verdict.PASS, "s", tables=[Table("T", ("a", "b"), [(1,)])])
    with pytest.raises(ValueError, match="every row needs 2 cells"):
        gate_doc(toy.ErrorGate(), ragged, required=True, units=[])
    short = GateResult("error", Verdict.PASS, "s", plots=[Plot("P", "line", [1, 2], {"a": [1.0]}, "x", "y")])
    with pytest.raises(ValueError, match="every series needs 2 values"):
        gate_doc(toy.ErrorGate(), short, required=True, units=[])


def test_non_finite_points_and_gaps_of_a_plot_are_told_apart() -> None:
    plot = Plot("P", "line", [1, 2, 3], {"a": [math.nan, None, 2.0]}, "x", "y")
    doc = gate_doc(toy.ErrorGate(), GateResult("error", Verdict.PASS, "s", plots=[plot]), required=True, units=[])
    assert doc.plots[0].series == {"a": ["NaN", None, 2.0]}
    assert isinstance(doc.plots[0], PlotDoc)
