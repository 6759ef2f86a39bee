"""What a run concludes: never green unless the required gates measured the candidate and passed."""

from __future__ import annotations

import pytest
from toy_commandline import CommandLine

from validation.verdict import Verdict


def with_gates(decodegate: CommandLine, required: str, *gates: str) -> None:
    head = f'description = "t"\nrequired = {required}\n[target]\nkind = "toy"\n'
    arms = '[baseline]\ndecode_backend = "auto"\n[candidate]\ndecode_backend = "latency_specialized"\n'
    tables = "".join(f"[gates.{gate}]\nrows = [1, 2, 4]\n" for gate in gates)
    decodegate.write_profile(head + arms + tables)


def verdicts(decodegate: CommandLine) -> dict[str, Verdict]:
    return {gate.name: gate.verdict for gate in decodegate.record().stable.gates}


def test_a_sound_candidate_passes(decodegate: CommandLine) -> None:
    assert decodegate.run() == 0
    record = decodegate.record()
    assert record.stable.verdict is Verdict.PASS
    assert record.status == "finished"
    assert record.run.exit_code == 0
    assert record.stable.not_judged["crash"] == "not in this profile"
    assert record.stable.counters["candidate"].steps == {"specialized": 7}
    assert record.stable.counters["baseline"].steps == {"generic": 7}


def test_a_broken_candidate_fails_and_stops_the_costlier_layer(decodegate: CommandLine) -> None:
    assert decodegate.run("--fault", "toy.column") == 1
    assert verdicts(decodegate) == {"error": Verdict.FAIL, "costly": Verdict.SKIPPED}
    costly = decodegate.record().stable.gates[1]
    assert costly.summary == "not run: layer 1 failed (error: FAIL)"
    assert costly.counts_as is Verdict.FAIL
    assert "FAULT INJECTED ON PURPOSE: toy.column" in decodegate.out


def test_keep_going_runs_the_costlier_layer_all_the_same(decodegate: CommandLine) -> None:
    assert decodegate.run("--fault", "toy.column", "--keep-going") == 1
    assert verdicts(decodegate) == {"error": Verdict.FAIL, "costly": Verdict.FAIL}


def test_a_missing_capability_skips_the_gate_by_name_and_fails_the_run_that_requires_it(
    decodegate: CommandLine,
) -> None:
    with_gates(decodegate, '["error", "ranks"]', "error", "ranks")
    assert decodegate.run() == 1
    ranks = decodegate.record().stable.gates[1]
    assert (ranks.verdict, ranks.counts_as) == (Verdict.SKIPPED, Verdict.FAIL)
    assert ranks.summary == "target 'toy' lacks the capability 'ranks'"


def test_a_missing_capability_of_an_optional_gate_does_not_decide(decodegate: CommandLine) -> None:
    with_gates(decodegate, '["error"]', "error", "ranks")
    assert decodegate.run() == 0
    assert decodegate.record().stable.gates[1].counts_as is None
    assert "ranks" in decodegate.record().stable.not_judged


def test_an_exception_in_a_gate_is_an_error_with_one_line_and_the_traceback_in_the_log(
    decodegate: CommandLine,
) -> None:
    with_gates(decodegate, '["crash", "costly"]', "crash", "costly")
    assert decodegate.run() == 4
    crash = decodegate.record().stable.gates[0]
    assert crash.verdict is Verdict.ERROR
    assert crash.summary == "unit rows-2: ZeroDivisionError: the first line and a second line"
    assert "Traceback" in (decodegate.newest().path / "log.txt").read_text()
    assert "Traceback" not in decodegate.out + decodegate.err
    assert verdicts(decodegate)["costly"] is Verdict.SKIPPED


def test_an_error_is_skipped_by_git_bisect(decodegate: CommandLine) -> None:
    with_gates(decodegate, '["crash", "costly"]', "crash", "costly")
    assert decodegate.run("--bisect-exit") == 125
    assert decodegate.record().run.exit_code == 125


def test_an_optional_gate_that_breaks_does_not_hide_a_required_failure(decodegate: CommandLine) -> None:
    with_gates(decodegate, '["costly"]', "crash", "costly")
    assert decodegate.run() == 0
    assert verdicts(decodegate) == {"crash": Verdict.ERROR, "costly": Verdict.PASS}
    assert decodegate.run("--fault", "toy.column") == 1


def test_a_gate_that_never_opened_the_candidate_cannot_pass(decodegate: CommandLine) -> None:
    with_gates(decodegate, '["idle"]', "idle")
    assert decodegate.run() == 1
    assert decodegate.record().stable.gates[0].findings[0].message == (
        "no unit opened the candidate arm, so nothing was said about it"
    )


def test_a_candidate_that_always_fell_back_cannot_pass(decodegate: CommandLine) -> None:
    with_gates(decodegate, '["error"]', "error")
    profile = (decodegate.folder / "toy.toml").read_text()
    one_row = profile.replace('"latency_specialized"\n', '"latency_specialized"\nmax_batch = 1\n')
    decodegate.write_profile(one_row.replace("rows = [1, 2, 4]", "rows = [2, 4]"))
    assert decodegate.run() == 1
    message = decodegate.record().stable.gates[0].findings[0].message
    assert message == ("all 2 steps of the candidate arm fell back (too many rows: 2), so its own path never ran")


@pytest.mark.parametrize("gate", ["error", "costly"])
def test_a_chosen_gate_is_required_and_the_report_says_what_was_left_out(decodegate: CommandLine, gate: str) -> None:
    assert decodegate.run("--gate", gate) == 0
    record = decodegate.record()
    assert record.stable.selected == [gate]
    assert [doc.name for doc in record.stable.gates if doc.required] == [gate]
    left_out = ({"error", "costly"} - {gate}).pop()
    assert record.stable.not_judged[left_out] == "not selected by --gate"
    page = (decodegate.newest().path / "report.html").read_text()
    assert "Only the gates named with" in page
