"""The target `openai`, and `decodegate compare`, on made-up servers: who they are, what they show, what ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_openai import FakeServer, Fault, chat_reply, serving
from server_profile import profile_of_servers

from evals.samples import Request
from validation.cli.app import main
from validation.gates.base import Context, GateResult
from validation.gates.parity.gate import ParityGate
from validation.targets.base import ArmConfig, Capability, TargetError
from validation.targets.openai import OpenAITarget
from validation.targets.openai_arm import ONE_PATH, UNSHOWN
from validation.targets.openai_evidence import place
from validation.targets.registry import load_target
from validation.verdict import EXIT_USAGE, Verdict

INFO = "/server_info?config_format=json"
BASELINE = ArmConfig("baseline")
CANDIDATE = ArmConfig("candidate", decode_backend="latency_specialized")
AS_IT_IS = ArmConfig("candidate")


def shows(backend: str) -> dict[str, str]:
    """The page on which vLLM's developer mode tells its configuration."""
    return {INFO: json.dumps({"vllm_config": {"additional_config": {"decode_backend": backend}}})}


@pytest.fixture
def baseline() -> Iterator[FakeServer]:
    with serving(FakeServer()) as server:
        yield server


@pytest.fixture
def candidate() -> Iterator[FakeServer]:
    with serving(FakeServer()) as server:
        yield server


def target_of(baseline: FakeServer, candidate: FakeServer, folder: Path | None = None, **own: Any) -> OpenAITarget:
    options = {"baseline": {"url": baseline.url}, "candidate": {"url": candidate.url, **own}, "patience_seconds": 1}
    target = OpenAITarget.configured(None, options)
    if folder is not None:
        target.keep_in(folder)
    return target


REQUEST = Request(
    task="t",
    item="i",
    repeat=0,
    messages=({"role": "user", "content": "?"},),
    seed=1,
    temperature=0,
    top_p=1,
    max_tokens=4,
)


def test_it_can_answer_chats_and_nothing_else(baseline: FakeServer, candidate: FakeServer) -> None:
    target = target_of(baseline, candidate)
    assert target.capabilities == {Capability.CONVERSE}
    with pytest.raises(TargetError, match="cannot be asked for run op"):
        target.open(BASELINE).run_op("x", {})


def test_answers_of_both_servers_come_back_and_are_kept(
    baseline: FakeServer, candidate: FakeServer, tmp_path: Path
) -> None:
    target = target_of(baseline, candidate, tmp_path / "kept")
    assert [s.arm for s in target.samples([REQUEST], (BASELINE, AS_IT_IS))] == ["baseline", "candidate"]
    assert target.samples([REQUEST], (BASELINE, AS_IT_IS))
    assert len(baseline.seen) == len(candidate.seen) == 1


def test_a_candidate_that_would_show_nothing_is_refused_before_anything_is_asked(
    baseline: FakeServer, candidate: FakeServer
) -> None:
    with pytest.raises(TargetError, match="nothing would show that its server runs latency_specialized"):
        target_of(baseline, candidate).open(CANDIDATE)


def test_a_server_that_was_started_otherwise_is_refused(baseline: FakeServer, candidate: FakeServer) -> None:
    candidate.pages = shows("auto")
    with pytest.raises(TargetError, match="its server was started with 'auto'"):
        target_of(baseline, candidate).open(CANDIDATE)
    candidate.pages = shows("latency_specialized")
    with pytest.raises(TargetError, match="its server was started with 'latency_specialized'"):
        target_of(baseline, candidate).open(AS_IT_IS)


def test_a_configuration_that_names_the_backend_counts_as_shown(
    baseline: FakeServer, candidate: FakeServer, tmp_path: Path
) -> None:
    candidate.pages = shows("latency_specialized")
    target = target_of(baseline, candidate, tmp_path)
    arm = target.open(CANDIDATE)
    target.samples([REQUEST], (ArmConfig("baseline"), CANDIDATE))
    assert arm.counters().steps == {"specialized": 1}
    assert not arm.counters().fallbacks


@pytest.mark.parametrize("place", ["log", "metrics", "nowhere"])
def test_a_sign_counts_where_log_or_metrics_hold_it_and_its_lack_fails_closed(
    place: str, baseline: FakeServer, candidate: FakeServer, tmp_path: Path
) -> None:
    """Even a configuration that names the backend does not help where the sign is missing."""
    candidate.pages = shows("latency_specialized") | {"/metrics": "steps{path='own'} 3\n" * (place == "metrics")}
    (tmp_path / "log").write_text("started\n" + "steps{path='own'}\n" * (place == "log"))
    target = target_of(baseline, candidate, tmp_path / "j", sign="steps{path='own'}", log=str(tmp_path / "log"))
    target.samples([REQUEST], (ArmConfig("baseline"), CANDIDATE))
    counters = target.open(CANDIDATE).counters()
    assert counters.fallbacks == ({UNSHOWN: 1} if place == "nowhere" else {})
    assert set(counters.steps) == ({"generic"} if place == "nowhere" else {"specialized"})


def test_a_baseline_that_shows_the_candidates_sign_too_leaves_nothing_compared(
    baseline: FakeServer, candidate: FakeServer, tmp_path: Path
) -> None:
    """Its metric rises while it answers."""

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        baseline.pages = {"/metrics": "own_steps_total 5\n"}
        return chat_reply("x", question)

    baseline.answer = answer
    candidate.pages = {"/metrics": "own_steps_total 5\n"}
    target = target_of(baseline, candidate, tmp_path, sign="own_steps")
    target.samples([REQUEST], (ArmConfig("baseline"), CANDIDATE))
    counters = target.open(CANDIDATE).counters()
    assert counters.fallbacks == {ONE_PATH: 1}
    assert counters.steps == {"generic": 1}


def test_compare_fails_closed_where_both_servers_show_the_sign(tmp_path: Path) -> None:
    with serving(answers(True)) as a, serving(answers(True)) as b:
        a.pages = b.pages = {"/metrics": "own_steps_total 5\n"}
        code, record = compare(tmp_path, a, b, "--sign", "own_steps")
    assert code == 1
    assert ONE_PATH in json.dumps(record["stable"]["gates"])


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ("# HELP own_steps_total Steps.\n# TYPE own_steps_total counter\nown_steps_total 0.0\n", False),
        ("# HELP own_steps_total Steps.\n", False),
        ('own_steps_total{engine="0"} 0\nown_steps_created{engine="0"} 1.7e9\n', False),
        ('own_steps_total{engine="0"} 12.0\n', True),
        ("own_steps_total 3 1700000000\n", True),
    ],
)
def test_a_metric_that_stands_at_nothing_is_no_sign(
    metrics: str, shown: bool, baseline: FakeServer, candidate: FakeServer
) -> None:
    candidate.pages = {"/metrics": metrics}
    target = target_of(baseline, candidate, sign="own_steps")
    arm = target.open(CANDIDATE)
    assert arm.count(1, target._evidence["candidate"]) == ("specialized" if shown else "generic")


def test_one_server_for_both_arms_is_refused_where_they_are_to_differ(baseline: FakeServer) -> None:
    target = target_of(baseline, baseline, sign="own")
    with pytest.raises(TargetError, match="its server is the baseline's too"):
        target.open(CANDIDATE)
    target.open(AS_IT_IS)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.2", "[::1]", "0.0.0.0"])
def test_another_name_of_this_machine_is_no_other_server(name: str) -> None:
    assert place(f"http://{name}:8000/v1") == place("http://127.0.0.1:8000/v1")
    assert place(f"http://{name}:8000/v1") != place("http://10.0.0.1:8000/v1")
    assert place("http://a/v1") == place("http://A:80/v1") != place("https://a/v1")


def test_a_server_that_became_another_one_ends_the_run(
    baseline: FakeServer, candidate: FakeServer, tmp_path: Path
) -> None:
    metrics = 'vllm:cache_config_info{block_size="16",cache_dtype="%s"} 1.0\n'
    candidate.pages = {"/metrics": metrics % "auto"}
    target = target_of(baseline, candidate, tmp_path)
    assert target.fingerprint()["candidate kv_cache_dtype"] == "auto"

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        candidate.pages = {"/metrics": metrics % "fp8"}
        return chat_reply("x", asked)

    candidate.answer = answer
    with pytest.raises(TargetError, match="kv_cache_dtype was 'auto' and is 'fp8'"):
        target.samples([REQUEST], (BASELINE, AS_IT_IS))
    assert not list(tmp_path.glob("*.jsonl")), "answers of two servers would be gone on with"
    assert list(tmp_path.glob("*.mixed"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "target.options.baseline: Field required"),
        ({"baseline": {"url": "ftp://x"}, "candidate": {"url": "http://x"}}, "is not an address"),
        ({"baseline": {"url": "http://127.0.0.1:9"}, "candidate": {"url": "http://127.0.0.1:9"}}, "cannot be reached"),
        ({"baseline": {"url": "http://a..b"}, "candidate": {"url": "http://x"}}, "cannot be reached"),
        ({"baseline": {"url": "http://\u00e4..b"}, "candidate": {"url": "http://x"}}, "cannot be reached"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        load_target("openai", None, options)
    assert "\n" not in str(refused.value)


def test_a_model_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loads no model"):
        load_target("openai", tmp_path, {})


def test_a_server_without_the_model_says_which_it_has(baseline: FakeServer, candidate: FakeServer) -> None:
    with pytest.raises(TargetError, match="has no model 'big'; it has: tiny"):
        target_of(baseline, candidate, model="big")


def test_an_option_that_a_target_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="url: target builtin has no such option; allowed is device"):
        load_target("builtin", None, {"url": "x"})


ITEMS, REPEATS = 12, 4
PARITY = """
[gates.parity]
prompt_length = 8
decode_length = 8
min_sequences = 2
cells = [{ kv_cache_dtype = "bf16", tensor_parallel = [1], batches = [1] }]
"""
PROFILE = profile_of_servers(ITEMS, REPEATS, 0.3, kind="builtin", required='"evals", "parity"', more=PARITY)


def compare(
    folder: Path, baseline: FakeServer, candidate: FakeServer, *words: str, profile: str = PROFILE
) -> tuple[int, dict[str, Any]]:
    """Exit code and record of a comparison."""
    (folder / "p.toml").write_text(profile)
    given = ["compare", "--baseline", baseline.url, "--candidate", candidate.url, "--profile", str(folder / "p.toml")]
    code = main([*given, "--out", str(folder / "runs"), *words])
    records = sorted((folder / "runs").glob("*/record.json"))
    return code, json.loads(records[-1].read_text()) if records else {}


def answers(right: bool) -> FakeServer:
    """A server that knows every answer of the generated items, or gives a wrong one."""
    from evals.tasks import load_task

    task = load_task("aime25", "generated", ITEMS, 0, None)
    known = {task.messages(item, 0)[0]["content"]: task.items[item].answer for item in task.item_ids}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        number = known[asked["messages"][0]["content"]]
        return chat_reply(f"\\boxed{{{number if right else (int(number) + 1) % 1000}}}", asked)

    return FakeServer(answer=answer)


def test_compare_passes_equal_servers_and_names_what_it_could_not_judge(tmp_path: Path) -> None:
    with serving(answers(True)) as a, serving(answers(True)) as b:
        code, record = compare(tmp_path, a, b, "--backend", "any")
    assert code == 0
    assert record["stable"]["not_judged"]["parity"].startswith("target 'openai' lacks the capability")
    assert record["stable"]["target"]["fingerprint"]["candidate url"] == b.url


def test_compare_fails_a_candidate_that_answers_wrongly(tmp_path: Path) -> None:
    with serving(answers(True)) as a, serving(answers(False)) as b:
        code, _ = compare(tmp_path, a, b, "--backend", "any")
    assert code == 1


def test_compare_takes_a_folder_of_published_sets_and_says_what_is_wrong_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeServer()) as a, serving(FakeServer()) as b:
        words = ("--backend", "any", "--data-dir", str(tmp_path))
        assert compare(tmp_path, a, b, *words)[0] == EXIT_USAGE
        assert "asks generated items" in capsys.readouterr().err
        published = PROFILE.replace('"generated"', '"published"')
        code, record = compare(tmp_path, a, b, *words, profile=published)
    said = capsys.readouterr().err
    assert (code, record) == (EXIT_USAGE, {})
    assert f"{tmp_path}: has no math-ai/aime25/test.jsonl" in said
    assert "--data-dir" in said


def test_compare_fails_closed_where_the_sign_is_missing(tmp_path: Path) -> None:
    with serving(answers(True)) as a, serving(answers(True)) as b:
        code, record = compare(tmp_path, a, b, "--sign", "own kernels ran")
    assert code == 1
    assert UNSHOWN in json.dumps(record["stable"]["gates"])


def test_compare_refuses_a_sign_of_what_it_is_not_to_look_for(
    tmp_path: Path, baseline: FakeServer, candidate: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = compare(tmp_path, baseline, candidate, "--backend", "any", "--sign", "own kernels ran")
    assert code == EXIT_USAGE
    assert "leave one of them out" in capsys.readouterr().err


def test_compare_refuses_a_server_that_could_show_nothing(
    tmp_path: Path, baseline: FakeServer, candidate: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = compare(tmp_path, baseline, candidate)
    assert code == EXIT_USAGE
    assert "VLLM_SERVER_DEV_MODE=1" in capsys.readouterr().err


def test_a_comparison_that_a_server_ended_is_resumed_and_asks_only_what_is_left(tmp_path: Path) -> None:
    away = [Fault("status", 503)] * 1000
    with serving(answers(True)) as a, serving(answers(True)) as b:
        right = b.answer

        def answer(asked: dict[str, Any]) -> Any:
            if len(b.seen) >= 10:
                b.faults = list(away)
            return right(asked)

        b.answer = answer
        code, record = compare(tmp_path, a, b, "--backend", "any", "--patience-seconds", "0.2")
        assert (code, record["stable"]["verdict"]) == (4, "ERROR")
        assert "has not answered for 0.2 s" in record["stable"]["gates"][-1]["summary"]
        b.faults, b.answer = [], right
        answered = len(a.seen)
        code = main(["run", "--resume", record["run"]["id"], "--out", str(tmp_path / "runs")])
        assert code == 0
    assert answered >= 10
    assert len(a.seen) < 2 * ITEMS * REPEATS
    journal = next((tmp_path / "runs").glob("*/target/*.jsonl")).read_bytes()
    assert journal.count(b"\n") == 1 + 2 * ITEMS * REPEATS


VOCAB = 260


def forceable(wrong: float = 0.0, follows: bool = True) -> FakeServer:
    """A vLLM whose logits are a function of the text, with some noise; `wrong` makes them another's."""
    noise = np.random.default_rng(0)

    def step(tokens: list[int]) -> dict[str, float]:
        logits = 2 * np.random.default_rng(tokens[-4:]).standard_normal(VOCAB) + 0.01 * noise.standard_normal(VOCAB)
        logits += wrong * np.random.default_rng([9, *tokens[-4:]]).standard_normal(VOCAB)
        return {f"token_id:{i}": float(logit) for i, logit in enumerate(logits)}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["_path"] == "/tokenize":
            return {"tokens": [byte % VOCAB for byte in asked["prompt"].encode()]}
        forced, prompt = asked["vllm_xargs"]["decodegate_forced"], asked["prompt"]
        told = {
            "tokens": [f"token_id:{token if follows else 7}" for token in forced],
            "top_logprobs": [step([*prompt, *forced[:i]]) for i in range(len(forced))],
        }
        return {"choices": [{"text": "", "logprobs": told}]}

    return FakeServer(answer=answer, owned_by="vllm")


def parity_of(candidate: FakeServer) -> GateResult:
    settings = {
        "prompt_length": 8,
        "decode_length": 6,
        "min_sequences": 8,
        "cells": [{"kv_cache_dtype": "bf16", "tensor_parallel": [1], "batches": [4]}],
    }
    with serving(forceable()) as a, serving(candidate) as b:
        target = target_of(a, b)
        assert {Capability.TEACHER_FORCED, Capability.FULL_LOGITS} <= target.capabilities
        context = Context(target, BASELINE, AS_IT_IS, 0, settings)
        gate = ParityGate()
        return gate.judge({unit.id: gate.measure(unit, context) for unit in gate.plan(context)}, context)


def test_servers_that_can_be_forced_are_judged_by_parity() -> None:
    assert parity_of(forceable()).verdict is Verdict.PASS
    assert parity_of(forceable(wrong=0.2)).verdict is Verdict.FAIL


def test_a_server_that_leaves_the_given_tokens_is_not_judged_by_parity() -> None:
    with serving(forceable()) as a, serving(forceable(follows=False)) as b:
        target = target_of(a, b)
    assert target.capabilities == {Capability.CONVERSE}
    with pytest.raises(TargetError, match="unless you start it with --max-logprobs -1"):
        target.open(BASELINE).forced_decode([[1, 2]], 1)


@pytest.mark.parametrize("told", [[], [None] * 3, [{}] * 3, None])
def test_a_server_that_tells_no_log_probabilities_is_not_judged_by_parity(told: Any) -> None:
    def silent(asked: dict[str, Any]) -> dict[str, Any]:
        tokens = [f"token_id:{token}" for token in asked["vllm_xargs"]["decodegate_forced"]]
        return {"choices": [{"text": "", "logprobs": {"tokens": tokens, "top_logprobs": told}}]}

    with serving(forceable()) as a, serving(FakeServer(answer=silent, owned_by="vllm")) as b:
        assert target_of(a, b).capabilities == {Capability.CONVERSE}


def test_api_keys_are_in_no_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-secret-123456789"
    monkeypatch.setenv("DECODEGATE_CANDIDATE_API_KEY", secret)
    with serving(answers(True)) as a, serving(answers(True)) as b:
        compare(tmp_path, a, b, "--backend", "any")
    assert b.headers[0]["Authorization"] == f"Bearer {secret}"
    assert "Authorization" not in a.headers[0]
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert files
    assert not any(secret.encode() in file.read_bytes() for file in files)
