"""How the parity gate decides on the figures of a cell: by the bound, and each thing by its own allowance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from parity_settings import DECODE, PROMPT, settings_of
from small_k3 import context_of

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
from validation.gates.parity.measure import KL_RESOLUTION
from validation.records.record import gate_doc
from validation.verdict import Verdict

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


@pytest.mark.parametrize(
    ("spread", "distance", "is_open"),
    [(0.01, 0.0, False), (0.01, 3.0, False), (2.0, 0.5, True), (math.nan, 0.0, False)],
    ids=["within", "beyond", "too noisy", "not a number"],
)
def test_a_second_look_is_for_what_the_first_left_open(spread: float, distance: float, is_open: bool) -> None:
    logs = [distance + spread * (-1) ** i for i in range(8)]
    assert leaves_open(logs, [0.0] * 8, alpha_of(12, looks=2), seed=0) is is_open


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
