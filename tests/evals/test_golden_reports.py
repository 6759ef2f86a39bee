"""Golden transcripts: one test for each public report of an eval that misled, named by what it promises here."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from answering import judged, right, samples

from evals.graded import Fate
from evals.judge import Judgement, JudgeSettings, judge_samples
from evals.samples import Request, Response, Sample
from evals.statistics import Outcome
from evals.tasks import load_task

CAP = 4096
REASONING = "Let x be the number of otters. Then 2x + 3 = 17, so x = 7. Wait, the question asks for "


def reasons(result: Judgement) -> str:
    return " | ".join(result.tasks["aime25"].invalid)


def test_m132_a_difference_within_the_noise_of_30_problems_is_no_regression() -> None:
    """0.867 against 0.900: one problem of thirty, and it is said how many repeats would carry three points."""

    def answer(arm: str, request: Request, text: str) -> Response:
        wrong = int(request.item.split("-")[1]) < (4 if arm == "candidate" else 3)
        return right(arm, request, "\\boxed{0}" if wrong else text)

    result = judged(answer, repeats=1, margin=0.03)
    task = result.tasks["aime25"]
    assert (round(task.means["baseline"], 3), round(task.means["candidate"], 3)) == (0.9, 0.867)
    assert result.outcome is Outcome.UNDECIDED
    assert task.decision is not None
    assert task.design is not None
    assert task.decision.p_change == 0.5
    assert task.design.repeats_needed is not None
    assert task.design.repeats_needed * 30 > 100


def test_m133_a_cap_that_truncates_10_per_cent_is_inconclusive_with_the_cap_named_and_no_score() -> None:
    def answer(arm: str, request: Request, text: str) -> Response:
        cut = arm == "candidate" and int(request.item.split("-")[1]) < 3
        if cut:
            return Response(text=REASONING * 200, finish_reason="length", tokens=400)
        return right(arm, request, text)

    result = judged(answer)
    task = result.tasks["aime25"]
    assert "candidate: 24 of 240 answers (10.0%) are truncated by the cap of 400 tokens" in reasons(result)
    assert task.decision is None
    assert task.means == {}
    assert result.outcome is Outcome.UNDECIDED


@pytest.mark.parametrize(
    ("reason", "tokens", "says"),
    [
        ("length", 128, "truncated at 128 tokens or less, below the cap of 400 tokens"),
        ("max_tokens", 400, "truncated by the cap of 400 tokens"),
        ("", 400, "truncated by the cap of 400 tokens"),
        ("abort", 7, "did not end by themselves (finish_reason 'abort': 24; cap 400 tokens)"),
    ],
)
def test_m133_an_answer_that_did_not_end_is_no_answer_whatever_the_server_calls_it(
    reason: str, tokens: int, says: str
) -> None:
    """The server's own cap, another word for it, no word at all, an aborted request: all with a box in the text."""

    def answer(arm: str, request: Request, text: str) -> Response:
        cut = arm == "candidate" and int(request.item.split("-")[1]) < 3
        return Response(text=text, finish_reason=reason, tokens=tokens) if cut else right(arm, request, text)

    result = judged(answer)
    assert f"candidate: 24 of 240 answers (10.0%) {'are ' * says.startswith('trunc')}{says}" in reasons(result)
    assert result.outcome is Outcome.UNDECIDED


def test_m133_answers_lost_in_several_ways_count_together() -> None:
    """Four of 240 cut, four empty, four unparsed: each within two points, together five, which could hide as many."""

    def answer(arm: str, request: Request, text: str) -> Response:
        place = (int(request.item.split("-")[1]) * 8 + request.repeat) % 60
        if arm == "baseline" and place < 3:
            return Response(text=["x", "", "no idea"][place], finish_reason=["length", "stop", "stop"][place])
        return right(arm, request, text)

    result = judged(answer)
    assert "12 of 240 answers (5.0%) are not whole (4 truncated, 4 empty, 4 unparsed; cap 400 tokens)" in reasons(
        result
    )
    assert result.outcome is Outcome.UNDECIDED


def test_m133_a_budget_spent_on_reasoning_leaves_empty_answers_and_not_wrong_ones() -> None:
    def answer(arm: str, request: Request, text: str) -> Response:
        spent = int(request.item.split("-")[1]) < 6
        return Response(text="\n" if spent else text, finish_reason="stop", tokens=CAP if spent else 9)

    result = judged(answer)
    assert "are empty" in reasons(result)
    assert result.tasks["aime25"].fates["baseline"][Fate.EMPTY] == 48


def test_m135_a_stop_string_inside_the_reasoning_is_seen_as_unparsed_answers() -> None:
    def answer(arm: str, request: Request, text: str) -> Response:
        return right(arm, request, REASONING if arm == "candidate" else text)

    result = judged(answer)
    assert "candidate: 240 of 240 answers (100.0%) are unparsed" in reasons(result)
    assert result.outcome is Outcome.UNDECIDED


def test_m136_a_chat_template_applied_in_one_arm_only_is_seen_by_the_prompts_tokens() -> None:
    def answer(arm: str, request: Request, text: str) -> Response:
        tokens = 57 if arm == "baseline" else 52
        return Response(text=text, finish_reason="stop", effective={"prompt_tokens": tokens})

    result = judged(answer)
    assert "prompt_tokens differs between the arms in 240 of 240 answers" in reasons(result)
    assert "chat templates" in reasons(result)


def test_m137_an_error_is_no_empty_answer_and_no_score() -> None:
    """A server that fails often makes the eval invalid; a single failure leaves its pair out, in both arms."""

    def failing(every: int) -> Judgement:
        def answer(arm: str, request: Request, text: str) -> Response:
            place = int(request.item.split("-")[1]) * 8 + request.repeat
            if arm == "candidate" and place % every == 0:
                return Response(text="", finish_reason="stop", error="HTTP 500")
            return right(arm, request, text)

        return judged(answer)

    assert "candidate: 24 of 240 answers (10.0%) are errors" in reasons(failing(10))
    once = failing(240)
    assert once.outcome is Outcome.GO
    assert len(once.tasks["aime25"].scored) == 239
    assert once.tasks["aime25"].means == {"baseline": 1.0, "candidate": 1.0}


def test_m137_a_silently_replaced_temperature_is_seen_by_its_echo() -> None:
    def answer(arm: str, request: Request, text: str) -> Response:
        used = {"temperature": 1.0 if arm == "baseline" else 0.6, "max_tokens": request.max_tokens}
        return Response(text=text, finish_reason="stop", effective=used)

    assert "candidate: temperature was 0.6 in 240 of 240 answers, asked for was 1.0" in reasons(judged(answer))


@pytest.mark.parametrize("name", ["model", "system_fingerprint"])
def test_m137_answers_of_another_model_in_mid_run_are_seen_by_what_the_server_says(name: str) -> None:
    def answer(arm: str, request: Request, text: str) -> Response:
        used = "other" if arm == "candidate" and request.repeat == 7 else "k3"
        return Response(text=text, finish_reason="stop", effective={name: used})

    result = judged(answer)
    assert f"candidate: {name} changed in mid-run ('k3': 210, 'other': 30)" in reasons(result)
    assert result.outcome is Outcome.UNDECIDED


@pytest.mark.parametrize("name", ["aime25", "gpqa_diamond", "mrcr"])
def test_m138_right_and_wrong_answers_are_known_without_the_scorer(name: str) -> None:
    """Made from the item's own fields and from the question as it was asked, by no code of the scorer or the task."""
    task = load_task(name, items=6)
    for item in task.item_ids:
        row, asked = task.items[item].model_dump(), task.messages(item, 0)[-1]["content"]
        if name == "gpqa_diamond":
            shown = {line[4:]: line[1] for line in asked.splitlines() if line[:1] == "(" and line[2:4] == ") "}
            good, bad = f"Answer: {shown[row['right']]}", f"Answer: {shown[row['wrong2']]}"
        elif name == "aime25":
            good, bad = f"\\boxed{{{row['answer']}}}", f"\\boxed{{{int(row['answer']) + 1}}}"
        else:
            good, bad = row["answer"], row["answer"][1:]
        assert task.grade(item, 0, good).score == 1.0
        assert task.grade(item, 0, bad).score == 0.0


def test_m140_a_test_that_is_not_collected_is_missed_here() -> None:
    """Each report of this file has a test that pytest collects: deleting one, or its file, turns this red."""
    file = Path(__file__)
    named = [
        node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    ]
    for report in ("m132", "m133", "m135", "m136", "m137", "m138", "m140", "m141", "m142"):
        assert any(name.startswith(f"test_{report}_") for name in named), report
    root = file.parents[2]
    options = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert file.relative_to(root).parts[0] in options["testpaths"]
    assert not {"python_files", "python_functions", "norecursedirs"} & set(options)


def test_m141_arms_that_differ_in_two_things_are_not_compared() -> None:
    """Another cap and another seed besides another backend: the pair was not asked alike."""
    task = load_task("aime25", items=4)
    given = samples([task], 1, right)
    changed = [
        Sample(
            arm=s.arm,
            request=s.request.model_copy(update={"max_tokens": 99} if s.arm == "candidate" else {}),
            response=s.response,
        )
        for s in given
    ]
    result = judge_samples(changed, [task], JudgeSettings({"aime25": 0.9}))
    assert result.outcome is Outcome.UNDECIDED
    assert "no question was answered by both arms" in reasons(result)
    one = [*changed[:2], *given[2:]]
    assert "the arms were asked differently 1 times" in reasons(
        judge_samples(one, [task], JudgeSettings({"aime25": 0.9}))
    )


def test_m142_the_mean_is_over_all_repeats_recomputed_from_the_raw_answers() -> None:
    """The first repeat is right in both arms, one later repeat of eight is wrong: the score is 7/8, not 1."""

    def answer(arm: str, request: Request, text: str) -> Response:
        return right(arm, request, "\\boxed{1000}" if request.repeat == 5 else text)

    result = judged(answer)
    task = result.tasks["aime25"]
    raw = [float(f"{{{task.task.expected(p.request.item, 0)}}}" in p.candidate.response.text) for p in task.pairs]
    assert task.means["candidate"] == sum(raw) / len(raw) == 7 / 8
