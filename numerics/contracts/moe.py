"""Contract oracles of the latent mixture of experts. Router ids are judged by `numerics.oracles.routing`."""

from __future__ import annotations

import torch
from torch import Tensor

from numerics.contracts import bounded as fp
from numerics.contracts.bounded import Bounded, exact
from numerics.contracts.check import Expected
from numerics.contracts.linear import at
from numerics.contracts.roundings import Contract
from numerics.formats import mxfp4_dequantise
from numerics.oracles.case import Case, numbered
from numerics.oracles.moe import SUM_EPS


def moe_front(case: Case, contract: Contract) -> dict[str, Expected]:
    x = exact(case["x"])
    logits, z = fp.linear(x, case["gate_weight"]), fp.linear(x, case["down_weight"])
    return {"logits": Expected(logits, "f32"), "z": Expected(z, "bf16")}


def route_weights(case: Case, ids: Tensor) -> Expected:
    """Weights of the given ids (in range), from the unbiased scores."""
    chosen = fp.sigmoid(exact(case["logits"])).map(lambda x: x.gather(-1, ids))
    inverse = fp.reciprocal(fp.shifted(fp.total(chosen, keepdim=True), SUM_EPS))
    return Expected(fp.mul(chosen, fp.scaled(inverse, case["scaling"]), 2.0), "f32")


def experts(case: Case, contract: Contract) -> dict[str, Expected]:
    z, ids, w = exact(case["z"]), case["ids"], exact(case["weights"])
    shape = (*ids.shape, z.value.shape[-1])
    value, radius = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for e in ids.unique().tolist():
        n, slot = (ids == e).nonzero(as_tuple=True)
        W13 = mxfp4_dequantise(case["w13_packed"][e], case["w13_scale"][e], torch.float64)
        W2 = mxfp4_dequantise(case["w2_packed"][e], case["w2_scale"][e], torch.float64)
        hidden = at(contract, "hidden", situ(fp.linear(z[n], W13), case["beta"], case["linear_beta"]))
        y = at(contract, "slot", fp.linear(hidden, W2[:, : hidden.value.shape[-1]]))
        value[n, slot], radius[n, slot] = y.value, y.radius
    latent = fp.total(fp.mul(Bounded(value, radius), w.map(lambda x: x[..., None])), 1)
    return {"latent": Expected(latent, "bf16")}


def shared_expert(case: Case, contract: Contract) -> dict[str, Expected]:
    gate_up = at(contract, "gate_up", fp.linear(exact(case["x"]), case["gate_up"]))
    hidden = at(contract, "hidden", situ(gate_up, case["beta"], case["linear_beta"]))
    return {"partial": Expected(fp.linear(hidden, case["down"]), "bf16")}


def moe_tail(case: Case, contract: Contract) -> dict[str, Expected]:
    latent = at(contract, "latent", fp.total_of_parts([exact(x) for x in numbered(case, "latent")]))
    r = at(contract, "norm", fp.mul(fp.normalised(latent, case["eps"]), exact(case["norm_weight"])))
    up = at(contract, "up", fp.linear(r, case["up_weight"]))
    shared = at(contract, "shared", fp.total_of_parts([exact(x) for x in numbered(case, "shared")]))
    return {"delta": Expected(fp.add(up, shared), "bf16")}


def situ(gate_up: Bounded, beta: float, linear_beta: float) -> Bounded:
    """SiTU of [gate | up] along the last axis, before any rounding."""
    gate, up = (gate_up.map(lambda x, i=i: x.chunk(2, dim=-1)[i]) for i in range(2))  # type: ignore[misc]
    product = fp.mul(fp.tanh(fp.scaled(gate, 1.0 / beta)), fp.tanh(fp.scaled(up, 1.0 / linear_beta)))
    return fp.scaled(fp.mul(product, fp.sigmoid(gate)), beta * linear_beta)
