"""The target `vllm` on a stand-in for the library: what it promises of engines, forced decode and evidence."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.vllm_reference import run_gate
from decode_impl.embedded import EMBEDDED_MODEL
from validation.cli.app import main
from validation.gates.base import Context, GateResult
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.measure import windows
from validation.targets.base import ArmConfig, TargetError
from validation.targets.builtin import BuiltinTarget
from validation.targets.optional import open_floor
from validation.targets.registry import load_target
from validation.targets.text import Ask
from validation.targets.vllm import VllmTarget
from validation.targets.vllm_arm import VllmArm
from validation.targets.vllm_process import VllmProcess
from validation.verdict import Verdict

LENGTH, PROMPT = 24, 16
SETTINGS: dict[str, Any] = {
    "prompt_length": PROMPT,
    "decode_length": LENGTH - PROMPT,
    "min_sequences": 8,
    "cells": [{"kv_cache_dtype": "bf16", "tensor_parallel": [1], "batches": [4]}],
}


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "fake_vllm"))
    monkeypatch.setenv("FAKE_VLLM_STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def checkpoint(folder: Path, seed: int = 0, **fake: Any) -> Path:
    """A checkpoint folder whose tokenizer has a token a letter."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = {"vocab_size": len(alphabet), "seed": seed, "eos_token_id": 0, "fake": fake}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def target_of(model: Path, **options: Any) -> VllmTarget:
    return VllmTarget.configured(model, {"python": sys.executable, "start_seconds": 60, "call_seconds": 60, **options})


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text().splitlines())


def judged(target: VllmTarget, candidate: str = "auto") -> GateResult:
    arms = ArmConfig("baseline"), ArmConfig("candidate", decode_backend=candidate)
    context = Context(target, *arms, seed=0, settings=SETTINGS)
    gate = ParityGate()
    try:
        return gate.judge({unit.id: gate.measure(unit, context) for unit in gate.plan(context)}, context)
    finally:
        target.engines.close()


def test_forced_decode_yields_every_decode_step_with_the_whole_vocabulary(tmp_path: Path) -> None:
    target = target_of(checkpoint(tmp_path / "m"))
    sequences = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]
    steps = list(target.open(ArmConfig("baseline")).forced_decode(sequences, 3))
    assert [step.positions for step in steps] == [(3, 3), (4, 4), (5, 5)]
    assert {tuple(step.logits.shape) for step in steps} == {(2, 256)}
    # A step's logits follow the given tokens, not those that would have been drawn.
    alone = list(target.open(ArmConfig("baseline")).forced_decode([s[:6] for s in sequences], 5))
    assert torch.equal(alone[0].logits, steps[2].logits)
    target.engines.close()


def test_an_engine_that_leaves_the_given_tokens_is_refused(tmp_path: Path) -> None:
    target = target_of(checkpoint(tmp_path / "m", leaves=True))
    with pytest.raises(TargetError, match="left the given tokens"):
        target.open(ArmConfig("baseline")).forced_decode([[1, 2, 3, 4]], 2)


def test_equal_engines_pass_parity_and_the_report_says_what_was_not_seen(tmp_path: Path) -> None:
    result = judged(target_of(checkpoint(tmp_path / "m")))
    assert result.verdict is Verdict.PASS, result.summary
    assert "not judged on target 'vllm': caches (they cannot be read), the curve by layer" in result.summary


def test_a_candidate_of_other_weights_fails_parity(tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "o", seed=1)
    result = judged(target_of(checkpoint(tmp_path / "m"), candidate={"model": str(other)}, engines=1))
    assert result.verdict is Verdict.FAIL
    assert starts(tmp_path) == 2, "opened in turn, an engine starts once for each arm"


def test_an_own_path_that_vllm_does_not_show_fails_closed(tmp_path: Path) -> None:
    result = judged(target_of(checkpoint(tmp_path / "m")), "latency_specialized")
    assert result.verdict is Verdict.FAIL
    assert "ran no specialised step (vLLM shows no specialised decode: " in result.findings[0].message


def test_an_own_path_that_vllm_shows_is_judged_by_its_logits(tmp_path: Path) -> None:
    good = judged(target_of(checkpoint(tmp_path / "m", shows=True)), "latency_specialized")
    bad = judged(target_of(checkpoint(tmp_path / "w", shows=True, specialized_off_by=0.2)), "latency_specialized")
    assert (good.verdict, bad.verdict) == (Verdict.PASS, Verdict.FAIL)


@pytest.mark.parametrize("additional", [{"decode_backend": "latency_specialized"}, "x"])
@pytest.mark.parametrize("place", ["engine", "candidate"])
def test_the_backend_is_the_arms_to_say_and_not_the_engines(tmp_path: Path, place: str, additional: Any) -> None:
    """Else both arms could run one path, and nothing would be compared."""
    engine = {"additional_config": additional}
    with pytest.raises(TargetError, match="a table without decode_backend"):
        target_of(checkpoint(tmp_path / "m"), **{place: engine if place == "engine" else {"engine": engine}})


def test_other_additional_configuration_goes_on_with_the_backend(tmp_path: Path) -> None:
    target = target_of(checkpoint(tmp_path / "m"), engine={"additional_config": {"other": 1}})
    arm = target.open(ArmConfig("candidate", decode_backend="latency_specialized"))
    assert isinstance(arm, VllmArm)
    assert arm._engine["additional_config"] == {"other": 1, "decode_backend": "latency_specialized"}


def test_the_builtin_decode_can_be_judged_against_vllm(tmp_path: Path) -> None:
    """Here against the stand-in, which is no K3: so it fails, by finite figures."""
    options = {"candidate_kind": "builtin", "prepare": "fake_prepare:prepare"}
    target = target_of(EMBEDDED_MODEL, **options)
    assert target.fingerprint()["candidate model"]
    result = judged(target)
    assert result.verdict is Verdict.FAIL
    assert "typical KL is" in result.findings[0].message
    assert (tmp_path / "starts").read_text() == f"{EMBEDDED_MODEL} prepared\n"


def test_an_answer_has_its_tokens_end_and_entropies(tmp_path: Path) -> None:
    target = target_of(checkpoint(tmp_path / "m"))
    arm = target.open(ArmConfig("baseline"))
    first = arm.answer([Ask((1, 2, 3), 5, 0)])[0]
    assert (len(first.tokens), first.finish, len(first.entropies)) == (5, "length", 5)
    assert all(0 < entropy < 5.6 for entropy in first.entropies)
    stopped = arm.answer([Ask((1, 2, 3), 5, 0, stop_tokens=(first.tokens[1],))])[0]
    assert (stopped.finish, stopped.tokens) == ("stop", first.tokens[:2])
    assert arm.counters().steps == {"generic": 7}
    target.engines.close()


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"refuses": "no such dtype"}, "no such dtype"),
        ({"dies": True}, "the vLLM engine has ended"),
        ({"hangs": True}, "did not finish 'forced' within 1 s"),
    ],
)
def test_an_engine_that_fails_is_one_line_and_leaves_no_process(
    fake: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[VllmProcess] = []
    end = VllmProcess._call
    monkeypatch.setattr(VllmProcess, "_call", lambda self, *a, **k: (made.append(self), end(self, *a, **k))[1])
    target = target_of(checkpoint(tmp_path / "m", **fake), call_seconds=1)
    with pytest.raises(TargetError, match=message):
        target.open(ArmConfig("baseline")).forced_decode([[1, 2, 3, 4]], 2)
    target.engines.close()
    deadline = time.monotonic() + 5
    while any(_alive(process._process.pid) for process in made) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(_alive(process._process.pid) for process in made)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


PROFILE = """
description = "vLLM against itself."
required = ["parity", "stability"]
[target]
kind = "vllm"
[target.options]
python = "{python}"
engines = 2
[baseline]
decode_backend = "auto"
[candidate]
decode_backend = "latency_specialized"
[gates.parity]
prompt_length = 16
decode_length = 8
min_sequences = 8
cells = [{{ kv_cache_dtype = "bf16", tensor_parallel = [1], batches = [4] }}]
[gates.stability]
chains = 4
chain_tokens = 24
texts = 4
text_tokens = 24
drift_sequences = 8
drift_tokens = 48
batch = 4
drafts = 0
kv_cache_dtype = "bf16"
"""


@pytest.mark.parametrize(("shows", "code"), [(True, 0), (False, 1)])
def test_a_run_judges_vllm_by_parity_and_stability_and_keeps_its_log(shows: bool, code: int, tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text(PROFILE.format(python=sys.executable))
    model = checkpoint(tmp_path / "m", shows=shows)
    words = ["run", "--profile", str(profile), "--model", str(model), "--out", str(tmp_path / "runs")]
    assert main(words) == code
    run = next((tmp_path / "runs").iterdir())
    assert (run / "target" / "vllm.log").exists()
    record = json.loads((run / "record.json").read_text())["stable"]
    assert record["target"]["fingerprint"]["vllm"] == "0.0.fake"
    assert set(record["counters"]["candidate"]["steps"]) == {"specialized" if shows else "generic"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pyhton": "x"}, "target.options.pyhton"),
        ({"engines": 0}, "target.options.engines"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_target("vllm", checkpoint(tmp_path / "m"), options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_context": 4096}, "max_context is 4096, the engine's max_model_len 2048"),
        ({"drafts": 3}, "speculative_config"),
    ],
)
def test_what_vllm_cannot_be_asked_for_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=message):
        target_of(checkpoint(tmp_path / "m")).open(ArmConfig("baseline", **change))


def test_the_gate_runs_across_vllm_and_ours_without_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run_gate.PROFILE.read_text().replace("benchmarks.vllm_reference.as_target", "fake_prepare")
    text = text.replace("trace_replay = true", f'python = "{sys.executable}"').replace("[8, 24]", "[2]")
    text = (
        text.replace('candidate_device = "cuda"\n', "")
        .replace("min_sequences = 24", "min_sequences = 2")
        .replace("_length = 64", "_length = 8")
    )
    (tmp_path / "p.toml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["run_gate", str(tmp_path / "out"), "--profile", str(tmp_path / "p.toml")])
    assert run_gate.main() == 1
    written = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert (written["verdict"], written["fingerprint"]["vllm"]) == ("FAIL", "0.0.fake")


def test_two_implementations_are_held_to_the_noise_between_our_ranks_and_not_to_their_distance() -> None:
    """A floor that were our own distance from vLLM would let both of ours be equally wrong."""
    target = target_of(EMBEDDED_MODEL, candidate_kind="builtin", prepare="fake_prepare:prepare")
    config = ArmConfig("baseline", max_batch=2, max_context=LENGTH)
    sequences = windows(target, 2, LENGTH, seed=0)
    steps = [arm.forced_decode(sequences, PROMPT) for arm in (target.open(config), open_floor(target, config))]
    ours = [BuiltinTarget.load(None).open(replace(config, tensor_parallel=ranks)) for ranks in (1, 2)]
    noise = [arm.forced_decode(sequences, PROMPT) for arm in ours]
    for theirs, floor, one, two in zip(*steps, *noise, strict=True):
        assert torch.equal(floor.logits, theirs.logits + (two.logits - one.logits))
        assert 0 < float((two.logits - one.logits).abs().max()) < 1
    target.engines.close()
    assert isinstance(open_floor(target_of(EMBEDDED_MODEL), config), VllmArm)
