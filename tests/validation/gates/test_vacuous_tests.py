"""Two ways of testing a KDA decode kernel that cannot see the delta rule, and this gate, which can.

Both tests draw independent keys and compare elementwise with a loose tolerance. Independent keys of 128 elements are
almost orthogonal and the state decays within a few steps, so the correction `k.S` is a few percent of the state: a
kernel that leaves it out stays within every tolerance. The tests are rebuilt here from their descriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_k3 import context_of, judged
from torch import Tensor

from decode_impl.ops import OpTable, call_on_case
from decode_impl.specialized import emulation
from numerics.oracles import ORACLES
from validation.faults.catalogue import FAULTS
from validation.gates.numerics.gate import NumericsGate
from validation.verdict import Verdict

DROPPED = FAULTS["kda-delta-dropped"]
WRONG: OpTable = {**emulation.OPS, **DROPPED.mutate(emulation.OPS)}
HEADS, SIZE = 4, 128


def iid_case(seed: int, rows: int, state_size: float, gate: float = 0.0) -> dict[str, Any]:
    """What such tests draw: all independent and normal, a small random state, gates around `gate`.

    A gate of 0 decays the state to about a tenth in every step, one of 1.5 to about a sixtieth.
    """
    g = torch.Generator().manual_seed(seed)
    D = HEADS * SIZE

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g) * std

    return {
        "proj": normal(rows, 4 * D + SIZE + HEADS).bfloat16(),
        "f_b": normal(D, SIZE, std=SIZE**-0.5).bfloat16(),
        "conv_weight": normal(3 * D, 4, std=0.25),
        "A_log": normal(HEADS, std=0.1),
        "dt_bias": gate + normal(D, std=0.1),
        "lower_bound": -5.0,
        "norm_weight": (1 + normal(SIZE, std=0.1)).bfloat16(),
        "conv_state": normal(rows + 1, 3 * D, 3).bfloat16(),
        "state": normal(rows + 1, HEADS, SIZE, SIZE, std=state_size),
        "slots": torch.arange(1, rows + 1),
    }


def elementwise(op: OpTable, case: dict[str, Any], tolerance: float) -> bool:
    """Every element of output and state within `tolerance + tolerance * |exact|`."""
    got, exact = call_on_case(op, "kda_step", case), ORACLES["kda_step"](case)
    return all(torch.allclose(got[n].double(), exact[n], rtol=tolerance, atol=tolerance) for n in ("y", "state"))


def one_step_test(op: OpTable, seed: int) -> bool:
    """The first: batches of 1 to 64, tolerance 3e-2, a state of 0.01."""
    return all(elementwise(op, iid_case(seed, rows, 0.01), 3e-2) for rows in (1, 4, 16))


def many_step_test(op: OpTable, seed: int) -> bool:
    """The second: a batch of 2, tolerance 1e-2, a state of 0.05, checked along 64 steps against an fp64 run."""
    case = iid_case(seed, 2, 0.05, gate=1.5)
    now, exact = dict(case), {**case, "state": case["state"].double()}
    for step in range(1, 65):
        proj = iid_case(seed * 1000 + step, 2, 0.05)["proj"]
        got = call_on_case(op, "kda_step", {**now, "proj": proj})
        reference = ORACLES["kda_step"]({**exact, "proj": proj})
        now |= {"state": got["state"], "conv_state": got["conv_state"]}
        exact |= {"state": reference["state"], "conv_state": reference["conv_state"]}
        error = (got["state"].double() - reference["state"])[1:].abs()
        if step & (step - 1) == 0 and not bool((error <= 1e-2 + 1e-2 * reference["state"][1:].abs()).all()):
            return False
    return True


@pytest.mark.parametrize("vacuous", [one_step_test, many_step_test], ids=lambda f: f.__name__)
def test_a_loose_elementwise_test_on_independent_keys_passes_without_the_delta_rule(
    vacuous: Callable[[OpTable, int], bool],
) -> None:
    for seed in range(5):
        assert vacuous(emulation.OPS, seed)
        assert vacuous(WRONG, seed)


@pytest.mark.parametrize("vacuous", [one_step_test, many_step_test], ids=lambda f: f.__name__)
def test_they_do_see_a_kernel_without_any_decay(vacuous: Callable[[OpTable, int], bool]) -> None:
    """Not passing everything is what makes them look trustworthy."""
    undecayed: OpTable = {
        **emulation.OPS,
        "kda_step": lambda *, lower_bound, **case: emulation.OPS["kda_step"](lower_bound=-1e-3, **case),
    }
    assert not all(vacuous(undecayed, seed) for seed in range(5))


@pytest.mark.parametrize("rows", [1, 8])
def test_this_gate_fails_the_same_kernel_by_both_of_its_rules(rows: int) -> None:
    settings = {"ops": ["kda_step"], "rows": [rows], "sequence_rows": [1], "shard_rows": [1], "shards": [], "seeds": 1}
    result = judged(NumericsGate(), context_of(settings, faults=(DROPPED,)))
    messages = [finding.message for finding in result.findings]
    assert result.verdict is Verdict.FAIL
    for family in ("iid", "low_rank_slow_decay", "equal_keys"):
        assert any(f"family {family}" in m and "RMSE of state is" in m for m in messages)
        assert any(f"family {family}" in m and "lie outside its contract" in m for m in messages)
