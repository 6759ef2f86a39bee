"""A sign-off fails closed and shows its reasons, and nothing in it is ever overwritten."""

from __future__ import annotations

import json
import re
import shutil
from datetime import timedelta
from typing import Any

import decodegate_toy as toy
import pytest
from signing import POLICY, TODAY, Signing, edited, ended, failed
from toy_commandline import CommandLine

from validation.records.record import RunRecord
from validation.signoff.decision import _margin_ruling, decide
from validation.signoff.document import not_judged
from validation.signoff.mutation import Mutation
from validation.signoff.policy import Margin, Policy
from validation.signoff.ruling import Outcome


@pytest.fixture
def signing(decodegate: CommandLine) -> Signing:
    decodegate.write_profile(toy.PROFILE_WITH_PLOT)
    assert decodegate.run() == 0
    return Signing(decodegate)


def test_without_a_key_nothing_exits_as_a_signed_go(signing: Signing) -> None:
    assert signing.sign("--mutation", signing.command.newest().run_id) == 2, "a run without a matrix has no score"
    words = ("signoff", signing.command.newest().run_id, "--policy", str(signing.home / "policy.toml"))
    assert signing.command(*words, "--to", str(signing.home / "so"), "--out", str(signing.command.runs)) == 3
    assert "NOT SIGNED" in signing.command.out
    assert "NOT SIGNED" in signing.document
    assert signing.verify() == 2


def test_a_failed_gate_is_a_no_go_unless_someone_answers_for_it_until_a_day(signing: Signing) -> None:
    failed(signing)
    assert signing.sign() == 1
    waiver = '\n[[waivers]]\ngate = "error"\nowner = "A. Person"\nreason = "known"\nexpires = '
    signing.policy(POLICY + waiver + str(TODAY))
    assert signing.sign() == 0
    assert "GO (waived): gate error" in signing.command.out
    assert re.search("waived by <strong>A. Person</strong> until", signing.document)
    signing.policy(POLICY + waiver + str(TODAY - timedelta(days=1)))
    assert signing.sign() == 1
    assert "expired, so it waives nothing" in signing.command.out
    assert "expired, so it waives nothing" in signing.document


def test_a_margin_is_not_met_by_the_one_of_two_records_that_has_the_figure() -> None:
    margin = Margin(gate="error", metric="worst", max=3)
    told, silent = {"worst": 1.0}, dict[str, float]()
    assert _margin_ruling(margin, {"a": told, "b": told}).outcome is Outcome.GO
    ruling = _margin_ruling(margin, {"a": told, "b": silent})
    assert ruling.outcome is Outcome.INCONCLUSIVE
    assert ruling.said.startswith("b: gate error has no such figure")
    assert _margin_ruling(margin, {"a": {"worst": 4.0}, "b": silent}).outcome is Outcome.NO_GO


def test_a_waiver_of_one_component_covers_no_other(signing: Signing) -> None:
    failed(signing)
    waiver = f'\n[[waivers]]\ngate = "error"\nowner = "x"\nreason = "y"\nexpires = {TODAY}\ncomponent = '
    for component, code in (('"projection"', 0), ('"proj*"', 0), ('"router"', 1)):
        signing.policy(POLICY + waiver + component)
        assert signing.sign() == code, component


@pytest.mark.parametrize(
    ("policy", "code", "said"),
    [
        ('required = ["error", "ranks"]', 1, "gate ranks: required, and judged in no record"),
        ('required = ["error"]\nprofiles = ["nightly"]', 1, "profile nightly: asked for, and no record is of it"),
        ('required = ["error"]\nmin_mutation_score = 0.9', 1, "no mutation record was given"),
        ('required = ["error"]\n[[margins]]\ngate = "error"\nmetric = "worst"\nmax = 0.001', 1, "0.001 is asked for"),
        ('required = ["error"]\n[[margins]]\ngate = "error"\nmetric = "ratios.*"\nmax = 3', 0, "(n = 5)"),
        (
            'required = ["error"]\n[[margins]]\ngate = "error"\nmetric = "none"\nmax = 3',
            3,
            "no record has such a figure",
        ),
    ],
)
def test_every_demand_of_the_policy_counts(signing: Signing, policy: str, code: int, said: str) -> None:
    signing.policy(f'name = "toy"\n{policy}\n')
    assert signing.sign() == code
    assert said in signing.command.out


def test_a_run_with_faults_put_in_is_never_signed_off(signing: Signing) -> None:
    assert signing.command.run("--fault", "toy.column") == 1
    assert signing.sign() == 1
    assert "faults were injected on purpose: toy.column" in signing.command.out


def test_a_run_whose_arms_are_one_compared_nothing(signing: Signing) -> None:
    def alike(document: Any) -> None:
        arms = document["stable"]["arms"]
        arms["candidate"] = {**arms["baseline"], "name": "candidate"}

    edited(signing, alike)
    assert signing.sign() == 1
    assert "both arms are one" in signing.command.out
    edited(signing, lambda d: d["stable"]["target"]["fingerprint"].update({"candidate weights_sha256": "other"}))
    signing.sign()
    assert "both arms are one" not in signing.command.out, "two checkpoints are two things"


def test_records_of_different_things_and_a_partial_run_are_no_go(
    signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = signing.command.newest().run_id
    monkeypatch.setattr(toy.ToyTarget, "fingerprint", lambda self: {"model": "another toy"})
    assert signing.command.run("--gate", "error") == 0
    assert signing.sign(runs=(first, signing.command.newest().run_id)) == 1
    assert "judged different things: model (toy, another toy)" in signing.command.out
    assert signing.sign() == 1
    assert "run only for gates named with --gate" in signing.command.out
    assert signing.sign(runs=(first, first)) == 2
    assert "was given twice" in signing.command.err


@pytest.mark.parametrize(
    ("verdict", "counts_as", "code"),
    [("SKIPPED", "FAIL", 1), ("FAIL", "FAIL", 1), ("ERROR", "ERROR", 3), ("INCONCLUSIVE", "INCONCLUSIVE", 3)],
)
def test_no_run_that_did_not_pass_is_signed_off_by_leaving_its_gate_out_of_the_policy(
    signing: Signing, verdict: str, counts_as: str, code: int
) -> None:
    policy = 'name = "toy"\nrequired = ["error"]\nprofiles = ["toy"]\n'
    signing.policy(policy)
    assert signing.sign() == 0
    ended(signing, 1, verdict, counts_as)
    assert signing.sign() == code
    assert f"gate costly: {verdict}" in signing.command.out
    signing.policy(policy + f'[[waivers]]\ngate = "costly"\nowner = "x"\nreason = "y"\nexpires = {TODAY}')
    assert signing.sign() == 0, "somebody may answer for it"


def test_a_gate_that_one_record_skipped_and_another_passed_was_judged(signing: Signing) -> None:
    first = signing.command.newest().run_id
    assert signing.command.run() == 0
    ended(signing, 1, "SKIPPED", "FAIL")
    assert signing.sign(runs=(first, signing.command.newest().run_id)) == 0


@pytest.mark.parametrize("part", ["model", "version", "candidate model", "candidate weights_sha256", "vllm"])
def test_any_part_of_what_was_judged_that_differs_is_another_thing(signing: Signing, part: str) -> None:
    edited(signing, lambda d: d["stable"]["target"]["fingerprint"].update({part: "one"}))
    first = signing.command.newest().run_id
    assert signing.command.run() == 0
    for other, code in (("one", 0), ("another", 1)):
        # Where and how it ran may differ: a premerge run on a CPU and a nightly one on a GPU.
        machine = {part: other, "device": other, "torch": other, "candidate url": other}
        edited(signing, lambda d, machine=machine: d["stable"]["target"]["fingerprint"].update(machine))
        assert signing.sign(runs=(first, signing.command.newest().run_id)) == code
    assert f"judged different things: {part} (one, another)" in signing.command.out


def test_a_resumed_run_is_as_old_as_its_first_unit(signing: Signing) -> None:
    signing.policy('name = "toy"\nrequired = ["error"]\nmax_age_days = 2\n')
    assert signing.sign() == 0
    edited(signing, lambda d: d["run"].update(created=f"{TODAY - timedelta(days=3)}T00:00:00Z"))
    assert signing.sign() == 1
    assert "begun 3 days ago; 2 are allowed" in signing.command.out
    edited(signing, lambda d: d["run"].update(created="yesterday"))
    assert signing.sign() == 2
    assert "run.created is 'yesterday', no ISO 8601 time" in signing.command.err


def test_a_sign_off_does_not_lie_in_what_it_signs(signing: Signing) -> None:
    run = signing.command.newest()
    words = ("signoff", run.run_id, "--policy", str(signing.home / "policy.toml"), "--out", str(signing.command.runs))
    assert signing.command(*words, "--to", str(run.path / "deep" / "so")) == 2
    assert f"lies in the folder of run '{run.run_id}'" in signing.command.err


def test_evidence_whose_name_no_statement_can_hold_is_refused(signing: Signing) -> None:
    for name in ("\udcff.txt", "two\nlines.txt"):
        added = signing.command.newest().path / name
        added.write_text("")
        assert signing.sign() == 2
        assert "has a name that cannot be printed" in signing.command.err
        assert signing.command.err.count("\n") == 1
        added.unlink()


def test_a_record_whose_evidence_is_gone_or_edited_is_refused(signing: Signing) -> None:
    unit = signing.command.newest().path / "units" / "error" / "rows-1.json"
    whole = unit.read_bytes()
    unit.write_bytes(whole.replace(b'"candidate":', b'"candidate":0'))
    assert signing.sign() == 2
    assert "'rows-1' of gate 'error' is missing, torn or edited" in signing.command.err
    unit.unlink()
    assert signing.sign() == 2
    shutil.rmtree(unit.parent)
    edited(signing, lambda d: d["run"].update(seconds={}))
    assert signing.sign() == 2, "nor where the record no longer says that anything was measured"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'name' is missing"),
        ('name = "x"\nrequired = []', "required"),
        ('name = "x"\nrequire = ["a"]', "unknown key 'require'; did you mean 'required'?"),
        (
            'name = "x"\nrequired = ["a"]\n[[waivers]]\ngate = "a"\nreason = "r"\nexpires = 2030-01-01',
            "waivers.0.owner",
        ),
        (
            'name = "x"\nrequired = ["a"]\n[[waivers]]\ngate = "a"\nowner = "o"\nreason = "r"\nexpires = "soon"',
            "expires",
        ),
        ('name = "x"\nrequired = ["a"]\n[[margins]]\ngate = "a"\nmetric = "m"', "neither max nor min"),
        ('name = "x"\nrequired = ["a"]\nmin_mutation_score = 95', "min_mutation_score"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_wrong_policy_is_one_line(signing: Signing, text: str, said: str) -> None:
    signing.policy(text)
    assert signing.sign() == 2
    assert signing.command.err.count("\n") == 1
    assert said in signing.command.err


def test_a_sign_off_is_never_overwritten(signing: Signing) -> None:
    assert signing.sign() == 0
    words = ("signoff", signing.command.newest().run_id, "--policy", str(signing.home / "policy.toml"))
    assert signing.command(*words, "--to", str(signing.home / "so"), "--out", str(signing.command.runs)) == 2
    assert "never overwritten" in signing.command.err


def test_the_document_has_the_decision_first_and_loads_nothing(signing: Signing) -> None:
    assert signing.sign() == 0
    page = signing.document
    order = [
        "Decision",
        "Waivers",
        "What was not judged",
        "What this rests on",
        "Noise floors",
        "Mutation score",
        "Environment",
    ]
    places = [page.index(f"<h2>{title}</h2>") for title in order]
    assert places == sorted(places)
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(?!#|data:,)[^"]*"', page) == []
    assert "default-src 'none'" in page
    assert "n = 5 units" in page
    assert "@media print" in page


def test_the_worst_record_of_a_gate_counts_so_that_no_retry_hides_a_failure(signing: Signing) -> None:
    record = signing.command.record()
    document = record.model_dump()
    document["stable"]["gates"][0].update(verdict="FAIL", counts_as="FAIL")
    document["stable"]["verdict"] = "FAIL"
    document["run"]["id"] = "another"
    bad = RunRecord.model_validate(document)
    policy = Policy(name="x", required=["error"])
    for records in ([record, bad], [bad, record]):
        assert decide(policy, records, None, TODAY).outcome is Outcome.NO_GO
    assert decide(policy, [record], None, TODAY).outcome is Outcome.GO


def mutation_of(record: RunRecord, **more: Any) -> Mutation:
    """A mutation run of all toy faults, with the code that made the record."""
    content = {"run": "m", "created": TODAY, "profile": "toy", "scores": {}, "counts": {}, "sound": True}
    asked = {"version": record.stable.decodegate, "faults": ["toy.column"], "options": {"--gate": []}}
    return Mutation.model_validate({**content, "score": {"caught": 95, "asked": 100}, "asked": asked, **more})


def test_the_mutation_score_is_judged_and_unsound_ones_decide_nothing(signing: Signing) -> None:
    record = signing.command.record()
    policy = Policy(name="x", required=["error"], min_mutation_score=0.9, max_age_days=7)
    asked = mutation_of(record).asked.model_dump(by_alias=True)
    cases: list[tuple[dict[str, Any], Outcome, str]] = [
        ({}, Outcome.GO, "95 of 100"),
        ({"score": {"caught": 80, "asked": 100}}, Outcome.NO_GO, "90% is asked for"),
        ({"score": {"caught": 0, "asked": 0}}, Outcome.INCONCLUSIVE, "nothing was asked"),
        ({"sound": False}, Outcome.INCONCLUSIVE, "not green without a fault"),
        ({"created": TODAY - timedelta(days=8)}, Outcome.NO_GO, "8 days old; 7 are allowed"),
        ({"asked": {**asked, "version": "0.1.0 (code 0)"}}, Outcome.INCONCLUSIVE, "measured with 0.1.0 (code 0)"),
        ({"asked": {**asked, "faults": []}}, Outcome.INCONCLUSIVE, "1 of the catalogue's 1 faults were not asked"),
        ({"asked": {**asked, "options": {"--gate": ["error"]}}}, Outcome.INCONCLUSIVE, "only the gates error"),
    ]
    for more, outcome, said in cases:
        decision = decide(policy, [record], mutation_of(record, **more), TODAY)
        assert decision.outcome is outcome, said
        assert said in decision.rulings[-1].said
    assert decide(policy, [record], None, TODAY).outcome is Outcome.NO_GO


def test_a_mutation_run_of_this_code_is_read_with_what_it_was_asked_for(signing: Signing) -> None:
    record = signing.command.newest().run_id
    words = ("--profile", signing.command.profile, "--workers", "1", "--out", str(signing.command.runs))
    assert signing.command("mutate", *words) == 0
    mutation = next(path.parent for path in signing.command.runs.glob("*/matrix.json"))
    signing.policy('name = "toy"\nrequired = ["error"]\nmin_mutation_score = 1.0\n')
    key = ("--key", str(signing.home / "release.pem"))
    assert signing.sign("--mutation", mutation.name, *key, runs=(record,)) == 0
    assert "mutation score: 1 of 1 faults caught (100.0%)" in signing.command.out
    assert signing.verify() == 0
    request = json.loads((mutation / "request.json").read_bytes())
    (mutation / "request.json").write_text(json.dumps({**request, "faults": []}))
    assert signing.verify() == 1
    assert signing.sign("--mutation", mutation.name, *key, runs=(record,)) == 3
    mutation.rename(mutation.with_name("renamed"))
    assert signing.sign("--mutation", "renamed", *key, runs=(record,)) == 2
    assert "give it the run's name again" in signing.command.err


def test_what_no_gate_decided_is_named(signing: Signing) -> None:
    found = not_judged([signing.command.record()])
    assert found["evals"] == "no gate of layer 5 decided"
    assert found["performance"].startswith("no gate asks about it; decodegate bench measures it")
    assert {"races between ranks", "crash", "idle", "ranks"} <= found.keys()
    assert "each op's accuracy" not in found, "the toy gate of layer 1 passed"
    document = signing.command.record().model_dump()
    document["stable"]["target"]["fingerprint"]["specialised path"] = "emulation"
    assert "fused kernels" in not_judged([RunRecord.model_validate(document)])
    assert "fused kernels" not in found
