"""Contract oracles of Kimi delta attention: one token, or several consecutive ones, of every request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from numerics.contracts import bounded as fp
from numerics.contracts.bounded import Bounded, exact
from numerics.contracts.check import Expected
from numerics.contracts.linear import at
from numerics.contracts.roundings import Contract
from numerics.oracles.case import Case, pool
from numerics.oracles.kda import L2_EPS, O_NORM_EPS

CHUNK = 16
"""Tokens that a chunked form may treat together: its sums have that many terms more, and its decays are differences of
running sums of that many logarithms."""


@dataclass(frozen=True)
class Token:
    """What one token brings: q, k, v, decay, gate [n, h, d]; beta [n, h]."""

    q: Bounded
    k: Bounded
    v: Bounded
    decay: Bounded
    beta: Bounded
    gate: Bounded

    def __getitem__(self, index: Tensor | slice) -> Token:
        return Token(*(getattr(self, name)[index] for name in ("q", "k", "v", "decay", "beta", "gate")))


@dataclass(frozen=True)
class State:
    """S [n, h, d(v), d(k)] after some steps.

    `carried` [n, h, d(v)] bounds the 2-norm of what a row of S inherited from earlier steps' doubt. It never grows: a
    step multiplies it by Diag(decay) (I - beta k k^T), whose norm is the largest decay at most. Elementwise bounds
    would double with every step.
    """

    S: Bounded
    carried: Tensor

    def whole(self) -> Bounded:
        """S with all doubt as an elementwise radius: no element exceeds its row's norm."""
        return Bounded(self.S.value, self.S.radius + self.carried[..., None])


def kda_step(case: Case, contract: Contract) -> dict[str, Expected]:
    return kda_verify({**case, "sources": case["slots"], "targets": case["slots"][:, None]}, contract)


def kda_verify(case: Case, contract: Contract) -> dict[str, Expected]:
    """Every token's state starts from the FP32 result of the token before, whose doubt it carries on."""
    conv_state, state = pool(case["conv_state"]), exact(case["state"])
    requests, width = case["targets"].shape
    live = case["sources"] > 0
    sources, targets = case["sources"][live], case["targets"][live]
    proj = case["proj"].double().view(requests, width, -1)[live]
    history = torch.cat([conv_state[sources], proj[..., : conv_state.shape[1]].mT], dim=-1)
    now, outputs = fresh(state[sources]), []
    value, radius = state.value.clone(), state.radius.clone()
    for j in range(width):
        window = history[..., j : j + 4]
        now, o = delta_rule(settled(now) if j else now, prepare(case, contract, proj[:, j], window))
        outputs.append(_finished(case, contract, o, proj[:, j]).map(lambda x: x[:, None]))
        whole = now.whole()
        conv_state[targets[:, j]] = window[..., 1:]
        value[targets[:, j]], radius[targets[:, j]] = whole.value, whole.radius
    y = torch.zeros(requests, width, conv_state.shape[1] // 3, dtype=torch.float64)
    joined = fp.concatenated(outputs, 1)
    return {
        "y": Expected(joined.map(lambda x: _put(y, live, x).flatten(0, 1)), "bf16"),
        "conv_state": Expected(exact(conv_state), "bf16"),
        "state": Expected(Bounded(value, radius), "f32"),
    }


def kda_sequence(case: Case, contract: Contract) -> dict[str, Expected]:
    conv_state, state, slot = pool(case["conv_state"]), exact(case["state"]), case["slot"]
    proj = case["proj"].double()
    history = torch.cat([conv_state[slot].T, proj[:, : conv_state.shape[1]]])
    conv_state[slot] = history[-3:].T
    tokens = _in_chunks(prepare(case, contract, proj, history.unfold(0, 4, 1)))
    now, outputs = fresh(state[slot : slot + 1]), []
    for i in range(proj.shape[0]):
        now, o = delta_rule(settled(now), tokens[i : i + 1], chunk=CHUNK)
        outputs.append(o)
    y = _finished(case, contract, fp.concatenated(outputs, 0), proj)
    value, radius = state.value.clone(), state.radius.clone()
    value[slot], radius[slot] = now.S.value[0], now.whole().radius[0]
    return {
        "y": Expected(y, "bf16"),
        "conv_state": Expected(exact(conv_state), "bf16"),
        "state": Expected(Bounded(value, radius), "f32"),
    }


def fresh(S: Bounded) -> State:
    """A stored state, which has no doubt yet."""
    return State(S, torch.zeros_like(S.value[..., 0]))


def prepare(case: Case, contract: Contract, proj: Tensor, window: Tensor) -> Token:
    """Projections [n, 4D+d+h] and conv windows [n, 3D, 4] (oldest first) as what the recurrence takes."""
    n, h, d = proj.shape[0], case["A_log"].numel(), case["norm_weight"].numel()
    D = h * d
    g, f_a, beta = proj[:, 3 * D : 4 * D], proj[:, 4 * D : 4 * D + d], proj[:, 4 * D + d :]
    taps = fp.dot(exact(window), exact(case["conv_weight"].expand_as(window)))
    conv = at(contract, "conv", fp.mul(taps, fp.sigmoid(taps)))
    q, k, v = (conv.map(lambda x, i=i: x.view(n, 3, h, d)[:, i]) for i in range(3))  # type: ignore[misc]
    g1 = fp.add(at(contract, "g1", fp.linear(exact(f_a), case["f_b"])), exact(case["dt_bias"].expand(n, D)))
    A = fp.exp(exact(case["A_log"])).map(lambda x: x[:, None])
    gate = fp.sigmoid(fp.mul(g1.map(lambda x: x.view(n, h, d)), A.map(lambda x: x.expand(n, h, d))))
    decay = fp.exp(fp.scaled(gate, case["lower_bound"]))
    q = fp.scaled(_unit(q), d**-0.5)
    return Token(q, _unit(k), v, decay, fp.sigmoid(exact(beta)), exact(g.reshape(n, h, d)))


def delta_rule(state: State, t: Token, chunk: int = 1) -> tuple[State, Bounded]:
    """One token of the recurrence. Returns the new state and o [n, h, d(v)].

    `chunk` above 1 stands for a form that solves for that many tokens at once: every result passes through as many
    FP32 additions more.
    """
    k, q = (x.map(lambda x: x[..., None, :]) for x in (t.k, t.q))
    decayed = fp.mul(state.S, t.decay.map(lambda x: x[..., None, :]), float(chunk))
    Sk = fp.dot(decayed, k)
    u = fp.mul(fp.add_rounded(t.v, Bounded(-Sk.value, Sk.radius)), t.beta.map(lambda x: x[..., None]), float(chunk))
    S = fp.add_rounded(decayed, fp.mul(u.map(lambda x: x[..., None]), k))
    carried = state.carried * t.decay.size.amax(-1, keepdim=True)
    o = fp.dot(S, q)
    return State(S, carried), Bounded(o.value, o.radius + carried * q.size.square().sum(-1).sqrt())


def _in_chunks(tokens: Token) -> Token:
    """Tokens whose decays carry the rounding of running sums of their logarithms, two of which are subtracted.

    A sum of up to CHUNK logarithms is rounded at its own size, however close together the two tokens are.
    """
    steepest = tokens.decay.value.log().abs().amax(0)
    relative = 2.0 * fp.U * CHUNK * steepest
    return replace(tokens, decay=Bounded(tokens.decay.value, tokens.decay.radius + relative * tokens.decay.value))


def settled(state: State) -> State:
    """The state after a step, its elementwise doubt moved to the rows' norms: what the next step starts from."""
    norms = state.carried + state.S.radius.square().sum(-1).sqrt()
    return State(Bounded(state.S.value, torch.zeros_like(state.S.radius)), norms)


def _finished(case: Case, contract: Contract, o: Bounded, proj: Tensor) -> Bounded:
    """Gated norm of o [n, h, d] before its last rounding: [n, h*d]."""
    n, h, d = o.value.shape
    g = exact(proj[:, 3 * h * d : 4 * h * d].reshape(n, h, d))
    weight = exact(case["norm_weight"].expand(n, h, d))
    normed = fp.mul(fp.normalised(at(contract, "o", o), O_NORM_EPS), weight)
    return fp.mul(normed, fp.sigmoid(g)).map(lambda x: x.flatten(-2))


def _unit(x: Bounded) -> Bounded:
    return fp.mul(x, fp.rsqrt(fp.shifted(fp.dot(x, x, keepdim=True), L2_EPS)))


def _put(pool: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    filled = pool.clone()
    filled[rows] = values
    return filled
