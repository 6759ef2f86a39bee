"""Input families of Kimi delta attention.

The state that a case starts from is what the oracle leaves after a history of the same kind, not noise: k
then meets what earlier tokens wrote, and S k is as large as v wherever keys repeat and decay is slow.
Random keys under-estimate the error of a wrong state several times over, which is why `iid` is never the
only family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numerics.families.constants import LOWER_BOUND, turned
from numerics.families.dims import Dims
from numerics.families.draw import Draw
from numerics.formats import bf16
from numerics.oracles.kda import kda_sequence as oracle

HISTORIES = 3
"""Histories simulated for a batch. Rows share them, with the value channels rotated by the row's index:
every slot then differs from every other while its keys stay those of the history."""


@dataclass(frozen=True)
class Kind:
    """How a family's tokens look. `dt`: range of dt_bias, so decay; `rank`: number of different keys (0:
    all differ); `beta`: mean and deviation of the raw beta; `history`: tokens before the case; `faint`:
    factor on q and k of the heads of even index, whose norms then meet the constant under their root; `rate`: range of
    A_log, of which a head has one; `loud`: factor on q, k, v and the output gate
    of the heads of odd index."""

    dt: tuple[float, float]
    rank: int = 0
    beta: tuple[float, float] = (0.0, 1.0)
    history: int = 24
    faint: float = 1.0
    rate: tuple[float, float] = (-0.3, 0.3)
    loud: float = 1.0


KINDS = {
    "iid": Kind(dt=(-2.0, 3.0)),
    "low_rank_slow_decay": Kind(dt=(-9.0, -6.0), rank=4, beta=(1.0, 1.0), history=64),
    "equal_keys": Kind(dt=(-9.0, -6.0), rank=1, beta=(6.0, 0.3), history=24),
    "decay_near_one": Kind(dt=(-16.0, -13.0), history=48),
    "decay_at_bound": Kind(dt=(10.0, 14.0)),
    "subnormals": Kind(dt=(-2.0, 3.0)),
    # Beyond 88 an exponential overflows in FP32, and a gate is open or shut.
    "faint_keys": Kind(dt=(-2.0, 3.0), faint=2.0**-12, rate=(-2.0, 2.8), loud=64.0),
}


@dataclass(frozen=True)
class Stream:
    """Weights of one layer and the keys that its tokens repeat: [rank, h, d], or none."""

    weights: dict[str, Any]
    kind: Kind
    keys: Tensor | None
    h: int
    d: int

    def tokens(self, draw: Draw, n: int) -> Tensor:
        """Projections of n tokens, bf16 [n, 4D+d+h]."""
        D = self.h * self.d
        q, k = draw.normal(n, D), draw.normal(n, D)
        if self.keys is not None:
            head = torch.arange(self.h)
            rank = self.keys.shape[0]
            k = self.keys[draw.integers(0, rank, n, self.h), head].flatten(1)
            q = 0.3 * q + self.keys[draw.integers(0, rank, n, self.h), head].flatten(1)
        if self.kind.faint != 1.0:
            q.view(n, self.h, self.d)[:, ::2] *= self.kind.faint
            k.view(n, self.h, self.d)[:, ::2] *= self.kind.faint
        mean, deviation = self.kind.beta
        v, gate, f_a = draw.normal(n, D), draw.normal(n, D, mean=1.0), draw.normal(n, self.d)
        for x in (q, k, v, gate):
            x.view(n, self.h, self.d)[:, 1::2] *= self.kind.loud
        return bf16(torch.cat([q, k, v, gate, f_a, draw.normal(n, self.h, std=deviation, mean=mean)], dim=1))

    def history(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Conv window [3D, 3] and state [h, d, d], both float64, after `kind.history` tokens from an empty
        slot."""
        D = self.h * self.d
        empty = {
            "conv_state": torch.zeros(2, 3 * D, 3, dtype=torch.float64),
            "state": torch.zeros(2, self.h, self.d, self.d, dtype=torch.float64),
        }
        after = oracle({**self.weights, **empty, "proj": self.tokens(draw, self.kind.history), "slot": 1})
        return after["conv_state"][1], after["state"][1]


def kda_step(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """Slots are scattered over a pool larger than the batch, its last slot among them. Null rows
    (slot 0) bring garbage; unowned slots and slot 0 hold garbage too."""
    stream = stream_of(draw, dims, family, rows)
    pool = rows + rows // 4 + 4
    slots = pool - 1 - _scattered(draw, pool - 1, rows)
    conv_state, state = _garbage_pools(draw, stream, pool)
    histories = [stream.history(draw) for _ in range(min(rows, HISTORIES))]
    for row, slot in enumerate(slots.tolist()):
        window, S = histories[row % len(histories)]
        conv_state[slot] = window
        conv_state[slot, -stream.h * stream.d :] = draw.bf16(stream.h * stream.d, 3)
        state[slot] = S.roll(row, dims=-2)
    proj = stream.tokens(draw, rows)
    if family == "subnormals":
        proj = draw.with_subnormals(proj)
        conv_state[slots] = draw.with_subnormals(conv_state[slots])
        state[slots] = draw.with_subnormals(state[slots])
    for null in draw.null_rows(rows):
        slots[null] = 0
        proj[null] = draw.garbage(proj.shape[1])
    return {**stream.weights, "proj": proj, "conv_state": conv_state, "state": state, "slots": slots}


def kda_verify(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """`rows` requests of `verify_width` tokens each. Every request owns that many scattered slots beyond the batch.

    Its source is one of them, at any column, or for every third request a slot of its own that must stay. Null
    requests (source 0) have garbage tokens; slots that are only written hold garbage.
    """
    stream, width = stream_of(draw, dims, family, rows), dims["verify_width"]
    pool = rows * (width + 1) + 4
    columns = (pool - 1 - _scattered(draw, pool - 1, rows * (width + 1))).view(rows, width + 1)
    targets = columns[:, :width].clone()
    sources = columns[torch.arange(rows), draw.integers(0, width, rows)]
    sources[2::3] = columns[2::3, width]
    conv_state, state = _garbage_pools(draw, stream, pool)
    histories = [stream.history(draw) for _ in range(min(rows, HISTORIES))]
    for row, slot in enumerate(sources.tolist()):
        window, S = histories[row % len(histories)]
        conv_state[slot], state[slot] = window, S.roll(row, dims=-2)
    proj = stream.tokens(draw, rows * width)
    if family == "subnormals":
        proj = draw.with_subnormals(proj)
        conv_state[sources] = draw.with_subnormals(conv_state[sources])
        state[sources] = draw.with_subnormals(state[sources])
    for null in draw.null_rows(rows):
        sources[null], targets[null] = 0, 0
        proj.view(rows, width, -1)[null] = draw.garbage(width, proj.shape[1])
    return {**stream.weights, "proj": proj, "conv_state": conv_state, "state": state} | {
        "sources": sources,
        "targets": targets,
    }


def kda_sequence(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """`rows` consecutive tokens in slot 3 of 5, continuing a history; the other slots hold garbage."""
    stream = stream_of(draw, dims, family, rows)
    conv_state, state = _garbage_pools(draw, stream, 5)
    window, S = stream.history(draw)
    conv_state[3], state[3] = window, S
    proj = stream.tokens(draw, rows)
    if family == "subnormals":
        proj = draw.with_subnormals(proj)
        state[3] = draw.with_subnormals(state[3])
    return {**stream.weights, "proj": proj, "conv_state": conv_state, "state": state, "slot": 3}


def stream_of(draw: Draw, dims: Dims, family: str, rows: int) -> Stream:
    """The weights of one layer, and what its tokens look like."""
    kind = KINDS[family]
    h, d = dims["kda_num_heads"], dims["kda_head_dim"]
    D = h * d
    taps = torch.tensor([0.15, 0.2, 0.35, 0.7]).expand(3 * D, 4) * draw.uniform(0.7, 1.3, 3 * D, 4)
    keys = None
    if kind.rank:
        # Older taps mix neighbouring tokens' keys; kept small for q and k they leave the keys nearly of
        # that rank.
        taps[: 2 * D, :3] *= 0.2
        keys = draw.normal(kind.rank, h, d, std=2.0)
    weights = {
        "f_b": draw.bf16(D, d, std=0.5 * d**-0.5),
        "conv_weight": taps,
        "A_log": draw.uniform(*kind.rate, h),
        "dt_bias": draw.uniform(*kind.dt, D),
        "lower_bound": turned(draw, rows, LOWER_BOUND),
        "norm_weight": draw.norm_weight(d),
    }
    return Stream(weights, kind, keys, h, d)


def _scattered(draw: Draw, n: int, rows: int) -> Tensor:
    """`rows` different numbers below n in random order, 0 among them."""
    chosen = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + draw.permutation(n - 1)[: rows - 1]])
    return chosen[draw.permutation(rows)]


def _garbage_pools(draw: Draw, stream: Stream, slots: int) -> tuple[Tensor, Tensor]:
    """Pools whose every slot holds its own large values: conv_state bf16 [slots, 3D, 3], state f32 [slots,
    h, d, d]."""
    h, d = stream.h, stream.d
    state = draw.normal(1, h, d, d, std=1000.0) + 1000.0 * torch.arange(1, slots + 1).view(-1, 1, 1, 1)
    return draw.garbage(slots, 3 * h * d, 3), state


FAMILIES = {"kda_step": tuple(KINDS), "kda_verify": tuple(KINDS), "kda_sequence": tuple(KINDS)}
