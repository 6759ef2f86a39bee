"""The parity gate passes a clean candidate, names what a fault has spoilt, and says so when it cannot decide."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_k3 import context_of, judged, measured, small_target
from torch import Tensor

from evals.text import load
from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS
from validation.gates.base import GateResult
from validation.gates.parity import measure
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.judge import (
    CACHE_MULTIPLE,
    FLIP_SIGMAS,
    TAIL_MULTIPLE,
    TYPICAL_MULTIPLE,
    alpha_of,
    judge_cell,
    leaves_open,
)
from validation.gates.parity.measure import (
    KL_RESOLUTION,
    Arms,
    measure_parity,
    other_composition,
    other_ranks,
    windows,
)
from validation.records.record import gate_doc
from validation.targets.base import Arm, ArmConfig, Capability, Counters, ForcedStep
from validation.targets.builtin import BuiltinTarget
from validation.verdict import Verdict

PROMPT, DECODE = 20, 4


def settings_of(
    kv: str = "fp8",
    ranks: Sequence[int] = (1,),
    batches: Sequence[int] = (2,),
    sequences: int = 4,
    prompt: int = PROMPT,
    decode: int = DECODE,
) -> dict[str, Any]:
    cell = {"kv_cache_dtype": kv, "tensor_parallel": list(ranks), "batches": list(batches)}
    return {"prompt_length": prompt, "decode_length": decode, "min_sequences": sequences, "cells": [cell]}


@cache
def clean() -> tuple[dict[str, dict[str, Any]], GateResult]:
    """A clean measurement of two cells, shared by the tests that look at its figures, and its judgement."""
    context = context_of(settings_of(batches=(1, 2), sequences=8))
    results = measured(ParityGate(), context)
    return results, ParityGate().judge(results, context)


def components(result: GateResult) -> set[str]:
    return {finding.component for finding in result.findings}


def test_a_clean_candidate_passes_on_the_embedded_model() -> None:
    settings = settings_of("bf16", sequences=6, prompt=32, decode=8)
    result = judged(ParityGate(), context_of(settings, target=BuiltinTarget.load(None)))
    assert [finding.message for finding in result.findings] == []
    assert result.verdict is Verdict.PASS
    assert result.metrics["tokens"] == 6 * 8


def test_a_clean_candidate_passes_with_an_fp8_cache_at_either_batch() -> None:
    _, result = clean()
    assert result.verdict is Verdict.PASS
    assert result.metrics["cells"].keys() == {"fp8-tp1-b1", "fp8-tp1-b2"}


@pytest.mark.parametrize(
    ("fault", "ranks", "spoilt"),
    [
        ("kda-state-transposed", 1, {"logits", "state cache"}),
        ("kda-delta-dropped", 1, {"logits", "state cache"}),
        ("mla-fp8-scale-dropped", 1, {"logits"}),
        ("mla-fp8-scale-not-written", 1, {"logits", "latent cache"}),
        ("kda-conv-shifted", 1, {"logits", "state cache"}),
        ("reduce-stale-rank", 2, {"logits"}),
        ("residual-prefix-kept", 1, {"logits"}),
    ],
)
def test_a_fault_turns_the_gate_red_and_what_it_spoilt_is_named(fault: str, ranks: int, spoilt: set[str]) -> None:
    result = judged(ParityGate(), context_of(settings_of(ranks=(ranks,)), faults=(FAULTS[fault],)))
    assert result.verdict is Verdict.FAIL
    assert spoilt <= components(result)
    unit = f"fp8-tp{ranks}-b2"
    assert all(finding.unit == unit and finding.message.startswith(f"{unit}: ") for finding in result.findings)
    assert unit in result.summary


def test_a_candidate_that_never_ran_specialised_fails_whatever_its_logits() -> None:
    result = judged(ParityGate(), context_of(settings_of(sequences=2), backend="auto"))
    assert result.verdict is Verdict.FAIL
    assert [finding.component for finding in result.findings] == ["plan"]
    assert "the candidate ran no specialised step (it is not on); nothing was judged" in result.findings[0].message


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail(value: float) -> None:
    def spoil(ops: Any) -> Any:
        project = ops["projection"]

        def faulty(*, weight: Tensor, **rest: Any) -> Tensor:
            y: Tensor = project(weight=weight, **rest)
            if weight.shape[0] == small_target().dims()["vocab_size"]:
                y = y.clone()
                y[0, 7] = value
            return y

        return {"projection": faulty}

    fault = Fault("spoil", "made up", "projection", (), ("specialized",), spoil)
    result = judged(ParityGate(), context_of(settings_of(sequences=2), faults=(fault,)))
    assert result.verdict is Verdict.FAIL
    assert result.findings[0].component == "logits"
    assert f"{DECODE} of {2 * DECODE} rows hold NaN or infinity (candidate)" in result.findings[0].message
    gate_doc(ParityGate(), result, required=True, units=[])


def test_a_cache_that_is_not_finite_fails() -> None:
    def spoil(ops: Any) -> Any:
        step = ops["kda_step"]

        def faulty(*, state: Tensor, slots: Tensor, **rest: Any) -> Tensor:
            y: Tensor = step(state=state, slots=slots, **rest)
            state[slots[slots > 0][-1], 0, 0, 0] = math.inf
            return y.nan_to_num(0.0)

        return {"kda_step": faulty}

    fault = Fault("spoil", "made up", "kda_step", (), ("specialized",), spoil)
    result = judged(ParityGate(), context_of(settings_of(sequences=2), faults=(fault,)))
    assert result.verdict is Verdict.FAIL
    assert "state cache" in components(result)
    assert any("holds NaN or infinity" in finding.message for finding in result.findings)


N = 16


def figures(log_ratio: Sequence[float], cache_ratio: float = 1.0, rms: float = 0.01) -> dict[str, Any]:
    """What one arm's hand-made measurement says: its KL in floors of 1e-5 nats by sequence."""
    kl = [1e-5 * math.exp(x) for x in log_ratio]
    return {
        "kl_by_sequence": kl,
        "log_kl_by_sequence": [math.log(x) for x in kl],
        "kl_by_position": [sum(kl) / len(kl)] * DECODE,
        "caches": {kind: [0.1 * cache_ratio] * len(kl) for kind in ("state", "conv", "latent")},
        "summary": {
            "judged": len(kl) * DECODE,
            "reference_nonfinite": 0,
            "candidate_nonfinite": 0,
            "overlap": 1.0,
            "flips": [{"low": 0.0, "tokens": len(kl) * DECODE - 1, "flips": 0}, {"low": 4.0, "tokens": 1, "flips": 0}],
            "kl": dict.fromkeys(("mean", "p50", "p99", "p999", "max"), sum(kl) / len(kl)),
            "reverse_kl": dict.fromkeys(("mean", "p50", "p99", "p999", "max"), sum(kl) / len(kl)),
            "logit_rms": dict.fromkeys(("mean", "p50", "p99", "p999", "max"), rms),
        },
    }


def cell(log_ratio: Sequence[float], **candidate: Any) -> dict[str, Any]:
    """A hand-made measurement of one cell."""
    n = len(log_ratio)
    return {
        **{"kv": "fp8", "tp": 1, "batch": 1, "prompt": PROMPT, "floor_tp": 2, "tokens": n * DECODE, "sequences": n},
        **{"paths": {"specialized": n * DECODE, "generic": n}, "fallbacks": {"prefill only": n}},
        "candidate": figures(log_ratio, **candidate),
        "floor": figures([0.0] * n),
    }


def verdict(result: dict[str, Any]) -> Verdict:
    return ParityGate().judge({"cell": result}, context_of(settings_of())).verdict


def spread(mean: float, deviation: float, n: int = N) -> list[float]:
    """Logarithms around log(mean), half of them `deviation` above and half below."""
    return [math.log(mean) + (deviation if i % 2 else -deviation) for i in range(n)]


@pytest.mark.parametrize(
    ("log_ratio", "expected"),
    [
        (spread(1.0, 0.1), Verdict.PASS),
        (spread(0.98 * TYPICAL_MULTIPLE, 0.0), Verdict.PASS),
        (spread(1.02 * TYPICAL_MULTIPLE, 0.0), Verdict.FAIL),
        (spread(2 * TYPICAL_MULTIPLE, 0.1), Verdict.FAIL),
        (spread(0.9 * TYPICAL_MULTIPLE, 1.0), Verdict.INCONCLUSIVE),
        (spread(1.1 * TYPICAL_MULTIPLE, 1.0), Verdict.INCONCLUSIVE),
        (spread(1.0, 2.0, n=4), Verdict.INCONCLUSIVE),
        (spread(1.0, 0.0, n=1), Verdict.INCONCLUSIVE),
    ],
)
def test_pass_needs_the_bound_within_the_allowance_and_fail_needs_it_beyond(
    log_ratio: list[float], expected: Verdict
) -> None:
    assert verdict(cell(log_ratio)) is expected


def test_a_row_that_the_other_path_decoded_is_not_judged_green() -> None:
    assert verdict({**cell(spread(1.0, 0.1)), "elsewhere": 0}) is Verdict.PASS
    assert verdict({**cell(spread(1.0, 0.1)), "elsewhere": 1}) is Verdict.FAIL


def test_an_undecided_gate_says_what_would_decide() -> None:
    result = ParityGate().judge({"cell": cell(spread(1.0, 2.0, n=4))}, context_of(settings_of()))
    assert "undecided: cell (more sequences would decide: raise most_sequences)" in result.summary
    gate_doc(ParityGate(), result, required=True, units=[])


def test_a_proven_failure_outranks_an_undecided_cell() -> None:
    results = {"bad": cell(spread(100.0, 0.1)), "unclear": cell(spread(1.0, 2.0, n=4))}
    assert ParityGate().judge(results, context_of(settings_of())).verdict is Verdict.FAIL


def test_nothing_measured_is_no_pass() -> None:
    assert ParityGate().judge({}, context_of(settings_of())).verdict is Verdict.FAIL


@pytest.mark.parametrize("kind", ["state", "conv", "latent"])
def test_each_cache_has_its_own_allowance(kind: str) -> None:
    for factor, expected in ((0.95, Verdict.PASS), (1.05, Verdict.FAIL)):
        result = cell(spread(1.0, 0.0))
        result["candidate"]["caches"][kind] = [0.1 * CACHE_MULTIPLE * factor] * N
        assert verdict(result) is expected
    findings = judge_cell("cell", result, 0, 1).findings
    assert [finding.component for finding in findings] == [f"{kind} cache"]
    assert f"allowed {CACHE_MULTIPLE:.3g}" in findings[0].message


def test_a_few_tokens_far_away_fail_by_the_mean_though_the_typical_kl_agrees() -> None:
    result = cell(spread(1.0, 0.0))
    result["candidate"]["kl_by_sequence"] = [1.2 * TAIL_MULTIPLE * 1e-5] * N
    findings = judge_cell("cell", result, 0, 1).findings
    assert [finding.component for finding in findings] == ["logits"]
    assert f"allowed {TAIL_MULTIPLE:.3g} floors" in findings[0].message
    result["candidate"]["kl_by_sequence"] = [0.9 * TAIL_MULTIPLE * 1e-5] * N
    assert verdict(result) is Verdict.PASS


def test_a_flip_at_a_margin_beyond_any_noise_fails() -> None:
    result = cell(spread(1.0, 0.0))
    result["candidate"]["summary"]["flips"][1]["flips"] = 1
    assert verdict(result) is Verdict.FAIL
    # Where the floor itself is that noisy, a flip at a margin of 4 logits proves nothing.
    result["floor"]["summary"]["logit_rms"]["max"] = 4.1 / (FLIP_SIGMAS * CACHE_MULTIPLE)
    assert verdict(result) is Verdict.PASS


def test_more_cells_share_out_the_error_rate() -> None:
    close = cell(spread(0.8 * TYPICAL_MULTIPLE, 0.35))
    alone, among_many = (judge_cell("cell", close, 0, cells).typical for cells in (1, 1000))
    assert alone is not None
    assert among_many is not None
    assert among_many.alpha == alone.alpha / 1000
    assert among_many.upper > alone.upper


def test_two_looks_share_one_error_rate() -> None:
    close = cell(spread(0.8 * TYPICAL_MULTIPLE, 0.35))
    once, twice = (judge_cell("cell", {**close, "looks": looks}, 0, 1).typical for looks in (1, 2))
    assert once is not None
    assert twice is not None
    assert twice.alpha == once.alpha / 2


def texts() -> list[list[int]]:
    return [small_target().tokens(document.text) for document in load("heldout")]


def test_windows_are_seeded_pieces_of_heldout_documents_of_every_kind() -> None:
    drawn = windows(small_target(), 9, 64, seed=1)
    assert drawn == windows(small_target(), 9, 64, seed=1)
    assert drawn != windows(small_target(), 9, 64, seed=2)
    assert drawn[:4] == windows(small_target(), 4, 64, seed=1)
    sources = [str(tokens)[1:-1] for tokens in texts()]
    found = [[i for i, source in enumerate(sources) if str(window)[1:-1] in source] for window in drawn]
    assert all(len(window) == 64 for window in drawn)
    assert all(found)
    assert {i for places in found for i in places} == set(range(len(sources)))


def test_a_window_may_be_a_whole_document_and_not_longer() -> None:
    longest = max(texts(), key=len)
    assert windows(small_target(), 1, len(longest), seed=0) == [longest]
    with pytest.raises(ValueError, match=f"no held-out document has {len(longest) + 1} tokens"):
        windows(small_target(), 1, len(longest) + 1, seed=0)


def test_no_window_was_trained_on() -> None:
    target = small_target()
    trained = [str(target.tokens(document.text))[1:-1] for document in load("train")]
    for window in windows(target, 32, 64, seed=0):
        assert not any(str(window)[1:-1] in tokens for tokens in trained)


def test_the_other_composition_holds_every_sequence_once_in_other_company() -> None:
    assert other_composition(1) == [[0, 1]]
    for batch in range(2, 65):
        parts = other_composition(batch)
        assert [member for part in parts for member in part] == list(range(batch))
        assert all(0 < len(part) < batch for part in parts)


def test_the_other_number_of_ranks_is_another_that_the_same_model_allows() -> None:
    assert [other_ranks(ranks) for ranks in (1, 2, 4, 8, 16)] == [2, 1, 2, 4, 8]
    for ranks in range(1, 65):
        assert 1 <= other_ranks(ranks) <= max(2, ranks)
        assert other_ranks(ranks) != ranks


@pytest.mark.parametrize("unit", ["fp8-tp1-b1", "fp8-tp1-b2"])
def test_sequences_positions_and_margins_add_up_to_the_tokens(unit: str) -> None:
    result = clean()[0][unit]
    assert result["tokens"] == 8 * DECODE
    assert result["paths"] == {"specialized": result["tokens"] // result["batch"], "generic": 8 // result["batch"]}
    assert result["fallbacks"] == {"prefill only": 8 // result["batch"]}
    for arm in ("candidate", "floor"):
        seen = result[arm]
        assert len(seen["kl_by_sequence"]) == len(seen["log_kl_by_sequence"]) == result["sequences"] == 8
        assert len(seen["kl_by_position"]) == DECODE
        assert sum(margin["tokens"] for margin in seen["summary"]["flips"]) == seen["summary"]["judged"] == 8 * DECODE
        assert all(len(values) == 8 for values in seen["caches"].values())
        # Means of means over equal groups: float64 sums in three orders, each of some 100 roundings.
        mean = seen["summary"]["kl"]["mean"]
        for split in (seen["kl_by_sequence"], seen["kl_by_position"]):
            assert sum(split) / len(split) == pytest.approx(mean, rel=100 * 2.0**-53)


def test_tables_and_plots_cover_all_cells_margins_and_positions() -> None:
    results, judgement = clean()
    cells, flips = judgement.tables
    assert [row[0] for row in cells.rows] == list(results)
    assert sum(int(row[1]) for row in flips.rows) == sum(result["tokens"] for result in results.values())
    positions = judgement.plots[0]
    edges = [tuple(map(int, str(label).split("-"))) for label in positions.x]
    assert (edges[0][0], edges[-1][1]) == (PROMPT, PROMPT + DECODE - 1)
    assert all(right[0] == left[1] + 1 for left, right in pairwise(edges))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_sequence_is_compared_with_itself_in_the_floor(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same arm three times: equal batches agree in every bit, and mixed-up rows would be far apart."""
    config = ArmConfig("baseline", max_batch=4, max_context=PROMPT + DECODE)
    arms = Arms(*(small_target().open(config) for _ in range(3)))
    sequences = windows(small_target(), 3, PROMPT + DECODE, seed=0)
    right = measure_parity(arms, sequences, batch, PROMPT)
    assert max(right["candidate"]["kl_by_sequence"]) == 0.0
    assert max(right["candidate"]["caches"]["state"]) == 0.0
    monkeypatch.setattr(measure, "other_composition", lambda batch: [[1, 0]] if batch == 1 else [[1, 2], [0]])
    wrong = measure_parity(arms, sequences, batch, PROMPT)
    assert max(right["floor"]["kl_by_sequence"]) < min(wrong["floor"]["kl_by_sequence"])


@pytest.mark.parametrize(("open_still", "sequences"), [(True, 6), (False, 2)])
def test_a_cell_left_open_is_looked_at_again_with_the_reserve(open_still: bool, sequences: int) -> None:
    config = ArmConfig("baseline", max_batch=2, max_context=PROMPT + DECODE)
    arms = Arms(*(small_target().open(config) for _ in range(3)))
    texts = windows(small_target(), 6, PROMPT + DECODE, seed=0)
    asked = []

    def undecided(candidate: Sequence[float], floor: Sequence[float]) -> bool:
        asked.append((len(candidate), len(floor)))
        return open_still

    seen = measure_parity(arms, texts[:2], 2, PROMPT, reserve=texts[2:], undecided=undecided)
    assert asked == [(2, 2)]
    assert seen["sequences"] == len(seen["candidate"]["kl_by_sequence"]) == sequences
    at_once = measure_parity(arms, texts[:sequences], 2, PROMPT)
    assert {**at_once, "looks": 2} == seen


@pytest.mark.parametrize(
    ("spread", "distance", "is_open"),
    [(0.01, 0.0, False), (0.01, 3.0, False), (2.0, 0.5, True), (math.nan, 0.0, False)],
    ids=["within", "beyond", "too noisy", "not a number"],
)
def test_a_second_look_is_for_what_the_first_left_open(spread: float, distance: float, is_open: bool) -> None:
    logs = [distance + spread * (-1) ** i for i in range(8)]
    assert leaves_open(logs, [0.0] * 8, alpha_of(12, looks=2), seed=0) is is_open


def test_caches_and_slots_are_given_back() -> None:
    arm = small_target().open(ArmConfig("baseline", max_batch=2, max_context=PROMPT + DECODE))
    arms = Arms(arm, small_target().open(arm.config), small_target().open(arm.config))
    sequences = windows(small_target(), 6, PROMPT + DECODE, seed=0)
    # Three groups in a pool for one: a slot or a page that is kept would make the next group fail.
    assert measure_parity(arms, sequences, 2, PROMPT)["sequences"] == 6


@dataclass
class CountedLogits:
    """How many logits tensors are alive, and how many were at most."""

    alive: int = 0
    most: int = 0

    def make(self, rows: int) -> Tensor:
        logits = torch.randn(rows, 64)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(logits, self._gone)
        return logits

    def _gone(self) -> None:
        self.alive -= 1


class StubArm:
    """An arm whose decode is random logits, each of them counted while it lives."""

    config = ArmConfig("stub")

    def __init__(self, counted: CountedLogits) -> None:
        self._counted = counted

    def forced_decode(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> Any:
        arm, rows, length = self, len(sequences), len(sequences[0])

        class Decode:
            def __iter__(self) -> Iterator[ForcedStep]:
                for position in range(prompt_length, length):
                    logits = arm._counted.make(rows)
                    yield ForcedStep(logits, tuple(range(rows)), (position,) * rows, "specialized")
                    del logits

            def state(self, sequence: int) -> dict[str, Tensor]:
                return {f"layer.0.{kind}": torch.ones(2) for kind in ("state", "conv", "latent")}

            def close(self) -> None:
                pass

        return Decode()

    def counters(self) -> Counters:
        return Counters()


def test_no_logits_outlive_their_step() -> None:
    most = []
    for steps in (3, 60):
        counted = CountedLogits()
        arm: Arm = StubArm(counted)  # type: ignore[assignment]
        measure_parity(Arms(arm, arm, arm), [[0] * (4 + steps)] * 4, 2, 4)
        assert counted.alive == 0
        most.append(counted.most)
    assert most[0] == most[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_length": 0}, "prompt_length is 0"),
        ({"decode_length": 1.5}, "decode_length is 1.5"),
        ({"min_sequences": True}, "min_sequences is True"),
        ({"min_sequences": 8, "most_sequences": 8}, "most_sequences is 8, more than min_sequences (8) is needed"),
        ({"cells": []}, "a list of tables with kv_cache_dtype, tensor_parallel, batches is needed"),
        ({"cells": [{}]}, "each table needs exactly"),
        ({"cells": [{"kv_cache_dtype": "int4", "tensor_parallel": [1], "batches": [1]}]}, "must be one of bf16, fp8"),
        ({"cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [0], "batches": [1]}]}, "in tensor_parallel a list"),
        ({"cells": [{"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [65]}]}, "in batches a list"),
        ({"cells": settings_of()["cells"] * 2}, "cells name fp8-tp1-b2 more than once"),
        ({"temperature": 1}, "unknown setting 'temperature'"),
    ],
)
def test_settings_that_cannot_be_are_explained(change: dict[str, Any], reason: str) -> None:
    assert reason in (ParityGate().settings_error({**settings_of(), **change}) or "")
    assert ParityGate().settings_error(settings_of()) is None
    assert ParityGate.needs == {Capability.TEACHER_FORCED, Capability.FULL_LOGITS}


def test_logits_that_carry_no_information_decide_nothing() -> None:
    result = cell(spread(1.0, 0.0))
    for arm in ("candidate", "floor"):
        result[arm]["log_kl_by_sequence"] = [math.log(KL_RESOLUTION)] * N
        result[arm]["kl_by_sequence"] = [0.0] * N
    assert verdict(result) is Verdict.INCONCLUSIVE


def test_a_model_without_a_kind_of_cache_is_judged_by_the_others() -> None:
    result = cell(spread(1.0, 0.0))
    for arm in ("candidate", "floor"):
        result[arm]["caches"]["latent"] = []
    assert verdict(result) is Verdict.PASS
