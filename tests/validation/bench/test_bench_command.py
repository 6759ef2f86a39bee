"""`decodegate bench` as a command: what it writes, its exit codes, what it refuses, and that no gate can read it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layout import ROOT, imported

from validation.bench import run as bench_run
from validation.bench.clock import Spread
from validation.bench.lines import Line
from validation.bench.report import CPU_CAVEAT, SYNTHETIC_CAVEAT
from validation.bench.steps import StepBench
from validation.cli.app import main
from validation.errors import UsageError
from validation.records.reading import read_run_record


def command(out: Path, *arguments: str) -> int:
    return main(["bench", "--batch", "1", "--rounds", "1", "--no-serve", *arguments, "--out", str(out)])


def test_a_bench_is_on_disk_with_its_caveats(tmp_path: Path, capsys: Any) -> None:
    assert command(tmp_path, "--drafts", "3") == 0
    data, page = json.loads((tmp_path / "bench.json").read_text()), (tmp_path / "bench.md").read_text()
    assert data["kind"] == "decodegate bench"
    assert data["caveats"] == [CPU_CAVEAT, SYNTHETIC_CAVEAT]
    assert data["implementation"] == "emulation"
    assert data["environment"]["torch"] == torch.__version__
    assert [line["synthetic_acceptance"] for line in data["lines"]] == [False, False, False, True]
    assert all(text in page for text in (CPU_CAVEAT, SYNTHETIC_CAVEAT, "| decode throughput (SYNTHETIC acceptance) |"))
    said = capsys.readouterr().out
    assert CPU_CAVEAT in said
    assert "decode step" in said
    assert command(tmp_path) == 2
    assert "holds a bench already" in capsys.readouterr().err


def test_a_group_that_breaks_is_a_line_and_exit_code_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> Any:
        yield Line("decode step", 1, 0, "us")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StepBench, "lines", breaks)
    assert command(tmp_path, "--no-drafts") == 4
    (_, line) = json.loads((tmp_path / "bench.json").read_text())["lines"]
    assert line["error"] == "RuntimeError: out of memory"
    assert "NOT MEASURED: RuntimeError: out of memory" in (tmp_path / "bench.md").read_text()


def test_a_budget_that_is_spent_is_exit_code_3_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(0, 100)
    monkeypatch.setattr(bench_run, "monotonic", lambda: float(next(ticks)))
    line = Line("decode step", 1, 0, "us", arms={"generic": Spread.of([1.0])})
    monkeypatch.setattr(StepBench, "lines", lambda *_: iter([line, line]))
    assert command(tmp_path, "--no-drafts", "--budget", "250") == 3
    data = json.loads((tmp_path / "bench.json").read_text())
    assert len(data["lines"]) == 1
    assert data["unmeasured"] == ["the rest of decode steps"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shard", "16"), "--shard needs a CUDA device"),
        (("--layers", "4"), "--layers needs --shard"),
        (("--against-compile",), "--against-compile needs a CUDA device"),
        (("--batch", "65"), "--batch or --serve is [65], allowed are 1 to 64"),
        (("--drafts", "2"), "--drafts is [2], allowed are 3 to 7"),
        (("--drafts", "3", "--no-drafts"), "leave one of the two out"),
        (("--serve", "3"), "leave one of the two out"),
        (("--context", "9000"), "a context of 9000 tokens is given"),
        (("--prompt", "5000"), "--prompt or --output is [5000]"),
        (("--rounds", "0"), "--rounds"),
        (("--budget", "0"), "--budget"),
        (("--out", "/dev/null/x"), "/dev/null"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a CUDA device refuses")
def test_wrong_wishes_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: Any, arguments: tuple[str, ...], message: str
) -> None:
    assert main(["bench", "--no-serve", "--out", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_no_figure_of_a_bench_can_enter_a_gate(tmp_path: Path) -> None:
    """Only the command line imports the bench, and its folder is no run that anything else would read."""
    users = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "validation").rglob("*.py")
        if any(name.startswith("validation.bench") for name in imported(path.read_text("utf-8"), "validation"))
    ]
    outside = [path for path in users if not path.startswith("validation/bench/")]
    assert outside == ["validation/cli/bench.py"]
    (tmp_path / "bench.json").write_text('{"kind": "decodegate bench", "lines": []}')
    (tmp_path / "record.json").write_text((tmp_path / "bench.json").read_text())
    with pytest.raises(UsageError):
        read_run_record(tmp_path / "record.json")
