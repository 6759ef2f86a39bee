"""The rate of false alarms: its bound is exact for any number of seeds, and seeds in turn cover what the gates ask."""

from __future__ import annotations

import pytest

from benchmarks.false_alarms import OTHERS, PARTS, largest_rate, settings_of, statement
from validation.gates.numerics.probes import PROBES
from validation.gates.parity.schedules import SCENARIOS
from validation.gates.registry import load_gate


def clean(runs: int) -> dict[int, dict[str, object]]:
    return {seed: {"verdicts": {"parity": "PASS"}, "cases": 1, "seconds": 1.0} for seed in range(runs)}


@pytest.mark.parametrize(("runs", "bound"), [(1, 0.95), (10, 0.2589), (59, 0.0495), (200, 0.0149)])
def test_the_bound_is_the_rate_at_which_no_red_run_has_a_chance_of_five_per_cent(runs: int, bound: float) -> None:
    assert largest_rate(runs) == pytest.approx(bound, abs=5e-5)
    assert (1 - largest_rate(runs)) ** runs == pytest.approx(0.05)
    assert f"at most {largest_rate(runs):.2%} of such runs" in statement(clean(runs))


def test_one_red_run_is_counted_and_no_bound_is_claimed() -> None:
    results = {**clean(3), 1: {"verdicts": {"parity": "FAIL"}, "cases": 1, "seconds": 1.0}}
    assert statement(results) == "1 of 3 clean runs red (33.3%): seeds 1"


def test_a_few_seeds_in_turn_ask_what_the_gates_ask_before_a_merge() -> None:
    parity = [settings_of(seed, PARTS)["parity"] for seed in range(8)]
    numerics = [settings_of(seed, PARTS)["numerics"] for seed in range(8)]
    cells = {
        (cell["kv_cache_dtype"], cell.get("drafts"), cell.get("context_parallel"))
        for p in parity
        for cell in p["cells"]
    }
    assert len(cells) == 2 * (1 + len(OTHERS))
    assert {name for p in parity[:7] for name in p["schedules"]} == set(SCENARIOS)
    for start in range(6):
        assert any("fuzz_steps" in p for p in parity[start : start + 3])
    assert {n["rows"][0] for n in numerics} == {1, 2, 4, 8, 16, 32, 64}
    assert {n["probes"][0] for n in numerics} == set(PROBES)
    assert all("ops" not in n for n in numerics)


@pytest.mark.parametrize("seed", range(8))
def test_the_settings_of_every_seed_are_settings_of_the_gates(seed: int) -> None:
    for name, settings in settings_of(seed, PARTS).items():
        assert load_gate(name).settings_error(settings) is None


def test_a_part_that_is_left_out_is_not_asked() -> None:
    assert settings_of(0, ["numerics"]).keys() == {"numerics"}
    assert "fuzz_steps" not in settings_of(0, ["parity", "schedules"])["parity"]
