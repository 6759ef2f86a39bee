"""Reports show everything, escape everything, load nothing, and never decide."""

from __future__ import annotations

import html
import re
import tomllib
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree as Xml

import decodegate_toy as toy
import pytest
from rich.console import Console
from toy_commandline import CommandLine

from validation.profile import Profile
from validation.records.record import ArmUse, FindingDoc, GateDoc, PlotDoc, RunRecord, TableDoc
from validation.records.storage import RunFolder
from validation.reports import github, junit, markdown, plots, scope, terminal
from validation.reports.text import cell, whole_clauses
from validation.reports.write import write_reports
from validation.run.runner import Request, run
from validation.verdict import Verdict

HOSTILE = (
    "<script>alert(1)</script>",
    "a | b `code` **bold** [x](http://evil.example) ![i](http://evil.example/i.png)",
    "line one\nline two\r\n::error::three",
    "../../etc/passwd",
    "\x00\x1b[31mred\x1b[0m\x07 \u202eright to left",
    "{{ 7 * 7 }}{% raw %} & \" ' --> ]]> $\\frac$",
    "\ud800 half a surrogate, @everyone",
)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The record of a failed toy run."""
    profile = Profile.model_validate(tomllib.loads(toy.PROFILE_WITH_PLOT))
    command = "decodegate run --profile toy.toml --fault toy.column --seed 0 --keep-going"
    request = Request(
        profile_name="toy",
        profile=profile,
        gates=[toy.ErrorGate(), toy.CostlyGate()],
        faults=tuple(toy.FAULTS.values()),
        keep_going=True,
        command=tuple(command.split()),
    )
    return run(request, toy.ToyTarget(), tmp_path_factory.mktemp("runs"))[1]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """An empty folder for reports."""
    return RunFolder(tmp_path)


def with_gate(record: RunRecord, **changes: object) -> RunRecord:
    """The record with the first gate changed."""
    first, *rest = record.stable.gates
    changed = GateDoc.model_validate({**first.model_dump(), **changes})
    return record.model_copy(update={"stable": record.stable.model_copy(update={"gates": [changed, *rest]})})


def hostile_record(record: RunRecord) -> RunRecord:
    """The record with hostile text wherever foreign text may come from."""
    every = " ".join(HOSTILE)
    changed = with_gate(
        record,
        summary=every,
        units=["rows-1", *HOSTILE],
        findings=[{"component": text, "message": text, "unit": text} for text in HOSTILE],
        tables=[{"title": every, "header": [*HOSTILE], "rows": [[*HOSTILE]], "caption": every}],
        plots=[
            {
                "title": every,
                "kind": "bar",
                "x": [*HOSTILE],
                "series": {text: [1.0] * len(HOSTILE) for text in HOSTILE},
                "x_label": every,
                "y_label": every,
            }
        ],
        metrics={every: every},
    )
    target = changed.stable.target.model_copy(update={"name": every, "fingerprint": {every: every}})
    profile = changed.stable.profile.model_copy(update={"name": every})
    stable = changed.stable.model_copy(update={"target": target, "profile": profile, "not_judged": {every: every}})
    run = changed.run.model_copy(update={"command": ["decodegate", "run", "--profile", every]})
    return changed.model_copy(update={"stable": stable, "run": run})


class Page(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.text += " "
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: RunFolder, record: RunRecord) -> Page:
    return Page(write_reports(folder, record).read_text(encoding="utf-8"))


def test_the_page_says_what_matters(folder: RunFolder, record: RunRecord) -> None:
    text = " ".join(page_of(folder, record).text.split())
    for part in (
        "FAIL",
        "exit code 1",
        "FAULT INJECTED ON PURPOSE: toy.column",
        "Why it did not pass",
        "2.00 is allowed",
        "On toy (model toy, version 1)",
        "decode backend auto latency_specialized",
        "What was not judged",
        "not in this profile",
        "Is the candidate's rounding error at most twice the baseline's?",
        "n = 5 units",
        "specialized: 7",
        "decodegate run --profile",
        "--fault toy.column --seed 0 --keep-going --gate error",
    ):
        assert part in text


def test_the_page_loads_nothing_and_runs_nothing(folder: RunFolder, record: RunRecord) -> None:
    for shown in (record, hostile_record(record)):
        page = page_of(folder, shown)
        assert not {"script", "link", "img", "iframe", "object", "embed", "form"} & set(page.tags)
        for name, value in page.attributes:
            assert not name.startswith("on")
            if name in ("href", "xlink:href", "src", "srcset", "action"):
                assert re.fullmatch(r"#[\w-]+", value), (name, value)
            if name == "style" or "url(" in value:
                assert not re.search(r"url\((?!#)|@import|expression", value), (name, value)
        style = (Path(plots.__file__).parent / "templates" / "style.css").read_text()
        assert "url(" not in style
        assert "@import" not in style


def test_hostile_text_is_shown_as_text(folder: RunFolder, record: RunRecord) -> None:
    raw = write_reports(folder, hostile_record(record)).read_text(encoding="utf-8")
    assert "<script" not in raw
    assert "{{ 7 * 7 }}" in raw
    assert not [c for c in raw if not c.isprintable() and c not in "\n\t"]
    shown = " ".join(Page(raw).text.split())
    assert "<script>alert(1)</script>" in shown
    assert r"\x00\x1b[31mred\x1b[0m\x07 \u202eright to left" in shown
    assert r"\ud800 half a surrogate" in shown


def test_junit_parses_and_puts_findings_on_the_units_they_name(record: RunRecord) -> None:
    root = Xml.fromstring(junit.render(record))
    error = root.find("testsuite[@name='error']")
    assert error is not None
    assert root.get("tests") == "9"
    named = {finding.unit for finding in record.stable.gates[0].findings}
    for case in error:
        failed = case.find("failure") is not None
        assert failed == (case.get("name") in named or case.get("name") == "verdict")
    failure = error.find("testcase[@name='rows-1']/failure")
    assert failure is not None
    assert "2.00 is allowed" in failure.get("message", "")


def test_junit_of_hostile_text_parses(record: RunRecord) -> None:
    root = Xml.fromstring(junit.render(hostile_record(record)))
    messages = [element.get("message", "") for element in root.iter("failure")]
    assert any("<script>alert(1)</script>" in message for message in messages)
    assert len(root.findall("testsuite[1]/testcase")) == 2 + len(HOSTILE)


@pytest.mark.parametrize(
    ("verdict", "required", "say", "tag"),
    [
        (Verdict.PASS, True, Verdict.PASS, None),
        (Verdict.FAIL, False, Verdict.FAIL, "failure"),
        (Verdict.ERROR, True, Verdict.ERROR, "error"),
        (Verdict.INCONCLUSIVE, True, Verdict.INCONCLUSIVE, "error"),
        (Verdict.SKIPPED, True, Verdict.FAIL, "failure"),
        (Verdict.INCONCLUSIVE, False, None, "skipped"),
        (Verdict.SKIPPED, False, None, "skipped"),
    ],
)
def test_junit_is_green_exactly_where_the_run_is(
    record: RunRecord, verdict: Verdict, required: bool, say: Verdict | None, tag: str | None
) -> None:
    shown = with_gate(record, verdict=verdict, required=required, counts_as=say, findings=[])
    case = Xml.fromstring(junit.render(shown)).find("testsuite[1]/testcase[@name='verdict']")
    assert case is not None
    assert [child.tag for child in case if child.tag != "system-out"] == ([] if tag is None else [tag])


def test_markdown_of_hostile_text_stays_in_its_place(record: RunRecord) -> None:
    text, command = markdown.render(hostile_record(record)).split("### Repeat\n\n")
    assert "<script" not in text
    assert not re.search(r"(?<!\\)!?(?<!\\)\[[^\]]*(?<!\\)\]\(", text)
    assert not re.search(r"@\w", text)
    assert "://evil" not in text
    assert re.match(r"    decodegate run .*\n\n", command), "an indented block shows anything as it is"
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {8}
    assert not [line for line in text.splitlines() if line.startswith("::")]


def test_markdown_has_the_brief_tables_alone_and_hostile_cells_stay_cells(record: RunRecord) -> None:
    hostile = {"title": HOSTILE[1], "header": ["a", HOSTILE[1]], "rows": [[1, text] for text in HOSTILE], "caption": ""}
    tables = [{**hostile, "brief": True}, {**hostile, "title": "long one"}]
    text = markdown.render(with_gate(record, tables=tables))
    assert "long one" not in text
    rows = text[text.index("### a \\|") :].split("### Repeat")[0].split("### Not judged")[0].splitlines()[2:]
    table = [row for row in rows if row.startswith("| ")]
    assert len(table) == len(HOSTILE) + 2
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in table} == {3}
    assert "<script" not in text


def test_markdown_fits_a_comment_and_says_that_it_was_cut(record: RunRecord) -> None:
    finding = FindingDoc(component="projection", message="x" * 5000).model_dump()
    gates = [
        with_gate(record, findings=[finding] * 400, summary="y" * 5000)
        .stable.gates[0]
        .model_copy(update={"name": f"gate-{index}"})
        for index in range(30)
    ]
    long = record.model_copy(update={"stable": record.stable.model_copy(update={"gates": gates})})
    text = markdown.render(long)
    assert len(text) <= markdown.LONGEST
    assert "cut here; `report.html` has the rest" in text
    assert len(markdown.render(record)) < 6000


def test_workflow_commands_cannot_be_forged(record: RunRecord) -> None:
    lines = github.workflow_commands(hostile_record(record))
    assert 2 <= len(lines) <= 2 * github.MOST + 1
    for line in lines:
        assert "\n" not in line
        assert "\r" not in line
        assert re.match(r"::(error|warning|notice) title=[^:,\x00-\x1f]*::", line)


def test_the_github_format_writes_annotations_and_the_summary_page(
    decodegate: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "summary-of-the-job.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    assert decodegate.run("--fault", "toy.column", "--format", "github") == 1
    assert "\n::error title=decodegate error FAIL%3A projection::error is" in decodegate.out
    assert "\n::notice title=decodegate FAIL::" in decodegate.out
    assert page.read_text() == (decodegate.newest().path / "summary.md").read_text()


def test_junit_suites_name_what_was_judged_before_their_cases(record: RunRecord) -> None:
    for suite in Xml.fromstring(junit.render(record)):
        assert suite[0].tag == "properties"
        found = {item.get("name"): item.get("value") for item in suite[0]}
        assert found["decodegate.run"] == record.run.id
        assert found["decodegate.seed"] == "0"
        assert {child.tag for child in suite[1:]} == {"testcase"}
        assert int(suite.get("tests", "")) == len(suite) - 1


def test_what_a_run_prints_cannot_act_as_a_workflow_command(decodegate: CommandLine) -> None:
    assert decodegate.run("--format", "github") == 0
    first, *rest = decodegate.out.splitlines()
    stopped = re.fullmatch("::stop-commands::([0-9a-f]{32})", first)
    assert stopped
    resumed = rest.index(f"::{stopped[1]}::")
    assert any("report: " in line for line in rest[:resumed])
    assert [line.split("::")[1].split()[0] for line in rest[resumed + 1 :]] == ["notice"]


def test_more_annotations_than_github_shows_end_with_their_number(record: RunRecord) -> None:
    many = [{"component": "op", "message": str(i), "unit": ""} for i in range(25)]
    lines = github.workflow_commands(with_gate(record, findings=many))
    errors = [line for line in lines if line.startswith("::error")]
    costly = len(record.stable.gates[1].findings)
    assert len(errors) == github.MOST
    assert f"{25 + costly - (github.MOST - 1)} more of this kind" in errors[-1]


def test_wrong_input_is_an_annotation_too(decodegate: CommandLine) -> None:
    assert decodegate.run("--gate", "nonsense", "--format", "github") == 2
    assert "\n::error title=decodegate%3A nothing was judged::no gate is called 'nonsense'" in decodegate.out
    assert "no gate is called" in decodegate.err


def test_a_report_can_be_written_again_from_the_record_alone(decodegate: CommandLine) -> None:
    decodegate.write_profile(toy.PROFILE_WITH_PLOT)
    assert decodegate.run("--fault", "toy.column") == 1
    folder = decodegate.newest()
    names = ("report.html", "junit.xml", "summary.md", "plots/error-1.svg")
    before = {name: (folder.path / name).read_bytes() for name in names}
    for name in names:
        (folder.path / name).unlink()
    assert decodegate("report", folder.run_id, "--out", str(decodegate.runs)) == 0
    assert {name: (folder.path / name).read_bytes() for name in names} == before
    assert decodegate("report", str(folder.path)) == 0
    assert "FAIL" in decodegate.out


def test_an_unfinished_run_is_reported_as_such(folder: RunFolder, record: RunRecord) -> None:
    stable = record.stable.model_copy(update={"verdict": None, "gates": []})
    run = record.run.model_copy(update={"exit_code": None, "finished": None})
    unfinished = record.model_copy(update={"status": "running", "stable": stable, "run": run})
    text = page_of(folder, unfinished).text
    assert "NOT FINISHED" in text
    assert "exit code" not in text
    assert "NOT FINISHED" in markdown.render(unfinished)


PLOTS = {
    "line": PlotDoc(title="t", kind="line", x=[1, 2, 64], series={"a": [1, 2, 3]}, x_label="x", y_label="y"),
    "log": PlotDoc(
        title="t", kind="line", x=[1, 8], series={"a": [0, 1e-9]}, x_label="x", y_label="y", log_x=True, log_y=True
    ),
    "words": PlotDoc(title="t", kind="line", x=["a", "b"], series={"a": [1, None]}, x_label="x", y_label="y"),
    "bar": PlotDoc(title="t", kind="bar", x=list(range(99)), series={"_a": [1.0] * 99}, x_label="x", y_label="y"),
    "histogram": PlotDoc(title="t", kind="histogram", x=[0, 1, 2], series={"a": [5, 6]}, x_label="x", y_label="y"),
    "nothing": PlotDoc(title="t", kind="line", x=[1], series={"a": ["NaN"]}, x_label="x", y_label="y", log_y=True),
}


@pytest.mark.parametrize("kind", PLOTS)
def test_a_plot_is_one_well_formed_svg_with_the_same_bytes_each_time(kind: str) -> None:
    first = plots.svg(PLOTS[kind], "salt")
    assert first == plots.svg(PLOTS[kind], "salt")
    root = Xml.fromstring(first)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("aria-label") == "t"
    assert "date" not in first.lower()
    assert "mathdefault" not in first
    assert html.unescape(first).count("currentColor") > 3


def test_bars_on_a_logarithmic_axis_are_drawn() -> None:
    bars = PlotDoc(title="t", kind="bar", x=["a"], series={"s": [0.5]}, x_label="x", y_label="y", log_y=True)
    drawn = re.search(r'd="([^"]*)"[^>]*style="fill: #0072b2"', plots.svg(bars, "salt"))
    assert drawn is not None
    heights = {float(y) for y in re.findall(r"[ML] [\d.]+ (-?[\d.]+)", drawn[1])}
    assert max(heights) - min(heights) > 10


def test_plots_on_one_page_share_no_ids() -> None:
    ids = [set(re.findall(r' id="([^"]+)"', plots.svg(PLOTS["line"], salt))) for salt in ("a", "b")]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_table_cells_keep_text_and_round_numbers() -> None:
    table = TableDoc(title="t", header=["a"], rows=[[1234567], [0.000123456], ["1.50"]])
    assert [cell(row[0]) for row in table.rows] == ["1,234,567", "0.0001235", "1.50"]


PARITY_SAYS = (
    "3072 tokens in 12 cells; largest typical KL 0.759 floors (fp8-tp1-b8), allowed 2.5; all within allowance; 13 "
    "schedules, none broken; 384 steps of random schedules, none broken; a state in BF16 (control) has 463 times the "
    "error of the candidate's after 256 steps of low-rank keys (0.02 against 4.3e-05, relative RMS)"
)


def on_a_terminal(record: RunRecord, width: int) -> str:
    out = StringIO()
    terminal.show(record, Path("report.html"), Console(file=out, force_terminal=True, width=width, color_system=None))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_summary_is_whole_on_a_terminal_of_any_width(record: RunRecord, width: int) -> None:
    shown = on_a_terminal(with_gate(record, summary=PARITY_SAYS), width)
    assert "…" not in shown
    assert set(PARITY_SAYS.split()) <= set(shown.split())


def test_a_summary_beyond_measure_ends_with_a_whole_clause_and_names_the_report(record: RunRecord) -> None:
    long = "; ".join(f"clause number {index} (of many; many)" for index in range(100))
    for shown in (
        on_a_terminal(with_gate(record, summary=long), 2000),
        markdown.render(with_gate(record, summary=long)),
    ):
        assert re.search(r"clause number \d+ \(of many; many\); (the report|report\.html) has the rest", shown)
        assert "number 99" not in shown


def test_a_text_is_cut_behind_a_clause_outside_brackets_or_else_behind_a_word() -> None:
    assert whole_clauses("short; text", 11, "more below") == "short; text"
    assert whole_clauses("one, two; three (four; five) six", 27, "more below") == "one, two; more below"
    assert whole_clauses("It is so. 4.3e-05 is said", 20, "more below") == "It is so; more below"
    assert whole_clauses("no clause at all", 11, "more below") == "no clause …; more below"
    assert whole_clauses("x" * 50, 10, "more below") == "x" * 10 + " …; more below"


def with_use(record: RunRecord, use: ArmUse, **fingerprint: str) -> RunRecord:
    """The record with other counters of the candidate, and its target's fingerprint changed."""
    target = record.stable.target.model_copy(
        update={"fingerprint": {k.replace("_", " "): v for k, v in fingerprint.items()}}
    )
    changes = {"counters": {**record.stable.counters, "candidate": use}, "target": target}
    return record.model_copy(update={"stable": record.stable.model_copy(update=changes)})


def test_beside_the_verdict_stand_what_ran_the_pairs_of_answers_and_the_share_of_generic_steps(
    folder: RunFolder, record: RunRecord
) -> None:
    use = ArmUse(
        steps={"specialized": 1129, "generic": 363}, fallbacks={"prefill only": 100, "mixed: with decode": 263}
    )
    judged = with_gate(record, metrics={"aime25": {"pairs": 12}, "other": 3})
    shown = with_use(judged, use, specialised_path="emulation", device="cpu")
    raw = write_reports(folder, shown).read_text(encoding="utf-8")
    banner = " ".join(Page(raw[raw.index("<header") : raw.index("</header>")]).text.split())
    ran = "363 of the candidate's 1,492 steps (24.3%) ran generic"
    assert banner.endswith(
        f"specialised path: its emulation on cpu, not the kernels · pairs of answers: aime25 12 · {ran}"
    )
    reasons = f"{ran}: mixed: with decode (263), prefill only (100)"
    for text in (" ".join(Page(raw).text.split()), markdown.render(shown), on_a_terminal(shown, 200)):
        assert reasons in text


@pytest.mark.parametrize(
    ("fingerprint", "said"),
    [
        ({"specialised_path": "kernels", "device": "cuda"}, "specialised path: kernels on cuda"),
        ({"candidate_specialised_path": "kernels"}, "specialised path: kernels"),
        ({}, "the target does not say what its specialised path runs"),
    ],
)
def test_the_banner_says_kernels_only_of_a_target_that_says_so(
    record: RunRecord, fingerprint: dict[str, str], said: str
) -> None:
    assert scope.at_a_glance(with_use(record, ArmUse(), **fingerprint)) == [said]


def test_what_gates_take_instead_of_the_arms_settings_is_read_from_the_profile(record: RunRecord) -> None:
    cells = [
        {"kv_cache_dtype": "fp8", "tensor_parallel": [1, 16]},
        {"kv_cache_dtype": "bf16", "tensor_parallel": [2], "context_parallel": 2, "drafts": 7},
    ]
    evals = {"drafts": 0, "kv_cache_dtype": "fp8", "evals": [{"name": "a"}, {"name": "b", "drafts": 4}]}
    settings = {"error": {"cells": cells, "replay": [{"op": "route"}]}, "costly": evals}
    content = {**record.stable.profile.content, "gates": settings}
    profile = record.stable.profile.model_copy(update={"content": content})
    changed = record.model_copy(update={"stable": record.stable.model_copy(update={"profile": profile})})
    assert scope.varied(changed)[1] == [
        ["error", "fp8, bf16", "1, 2, 16", "1, 2", "0, 7"],
        ["costly", "fp8", "as above", "as above", "0, 4"],
    ]
    assert scope.varied(record)[1] == []


def test_the_time_of_units_is_called_work_and_stands_beside_the_clock(folder: RunFolder, record: RunRecord) -> None:
    info = record.run.model_copy(update={"created": "2026-01-02T03:04:05Z", "finished": "2026-01-02T03:05:10Z"})
    timed = record.model_copy(update={"run": info})
    said = "Work: the time of a gate's units, added up over all workers; by the clock the run took 1 min 05 s."
    page = " ".join(page_of(folder, timed).text.split())
    assert "Units Work Summary" in page
    for text in (page, markdown.render(timed), " ".join(on_a_terminal(timed, 200).split())):
        assert said in text
    for finished in (None, "never", "2026-01-01T00:00:00Z"):
        unknown = record.model_copy(update={"run": info.model_copy(update={"finished": finished})})
        assert scope.work(unknown) == "Work: the time of a gate's units, added up over all workers."
