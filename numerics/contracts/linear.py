"""Contract oracles of projection, RMSNorm, all-reduce, attention residuals and the output mix."""

from __future__ import annotations

from torch import Tensor

from numerics.contracts import bounded as fp
from numerics.contracts.bounded import Bounded, exact
from numerics.contracts.check import Expected
from numerics.contracts.roundings import Contract
from numerics.oracles.case import Case, numbered


def at(contract: Contract, site: str, x: Bounded) -> Bounded:
    """`x`, rounded to BF16 if the contract rounds this site."""
    return fp.round_bf16(x) if site in contract.sites else x


def projection(case: Case, contract: Contract) -> dict[str, Expected]:
    return {"y": Expected(fp.linear(exact(case["x"]), case["weight"]), "bf16")}


def rms_norm(case: Case, contract: Contract) -> dict[str, Expected]:
    return {"y": Expected(fp.mul(fp.normalised(exact(case["x"]), case["eps"]), exact(case["weight"])), "bf16")}


def all_reduce(case: Case, contract: Contract) -> dict[str, Expected]:
    return {"y": Expected(fp.total_of_parts([exact(y) for y in numbered(case, "y")]), "bf16")}


def attn_res(case: Case, contract: Contract) -> dict[str, Expected]:
    prefix = exact(case["prefix"])
    delta = case.get("delta")
    return _mixed(prefix if delta is None else fp.add(prefix, exact(delta)), case, contract)


def output_mix(case: Case, contract: Contract) -> dict[str, Expected]:
    pairs = zip(numbered(case, "y"), numbered(case, "weight"), strict=True)
    partials = [at(contract, "partial", fp.linear(exact(y), W)) for y, W in pairs]
    a = at(contract, "attention", fp.total_of_parts(partials))
    return _mixed(a if case["replace_prefix"] else fp.add(exact(case["prefix"]), a), case, contract)


def _mixed(unrounded: Bounded, case: Case, contract: Contract) -> dict[str, Expected]:
    """Prefix and mix. Where the stored prefix is known (`stored.prefix`) the mix is held to it: it was made from it."""
    stored = case.get("stored.prefix")
    p = at(contract, "prefix", unrounded) if stored is None else exact(stored)
    mix, square = _mix(p, case, contract)
    if case.get("out_norm_weight") is not None:
        mean = fp.scaled(square, 1.0 / p.value.shape[-1])
        mix = fp.mul(fp.mul(mix, fp.rsqrt(fp.shifted(mean, case["eps"]))), exact(case["out_norm_weight"]))
    return {"prefix": Expected(unrounded, "bf16"), "mixed": Expected(mix, "bf16")}


def _mix(p: Bounded, case: Case, contract: Contract) -> tuple[Bounded, Bounded]:
    """The mix [n, H], not rounded, and its sum of squares [n, 1]."""
    blocks = case["num_blocks"]
    if not blocks:
        return p, fp.dot(p, p, keepdim=True)
    src = fp.concatenated([exact(case["blocks"][:, :blocks]), p.map(lambda x: x[:, None])], 1)
    query = fp.mul(exact(case["norm_weight"]), exact(case["query_weight"]))
    mean = fp.scaled(fp.dot(src, src), 1.0 / src.value.shape[-1])
    logits = fp.mul(fp.rsqrt(fp.shifted(mean, case["eps"])), fp.dot(src, query))
    # The same maximum is subtracted everywhere: its own doubt cancels in the quotient.
    top = logits.value.amax(-1, keepdim=True)
    weights = fp.exp(fp.add(logits, exact(-top)))
    inverse = fp.reciprocal(fp.total(weights, keepdim=True))
    parts = fp.mul(weights.map(lambda w: w[..., None]), src)
    mix = fp.mul(fp.total(parts, 1), inverse)
    square = fp.dot(mix, mix, keepdim=True)
    if contract.quadratic_norm:
        square = Bounded(square.value, square.radius + _quadratic_form_error(parts, inverse))
    return mix, square


def _quadratic_form_error(parts: Bounded, inverse: Bounded) -> Tensor:
    """Error of sum (b + w p)^2 computed as b b + 2 w b p + w w p p, with b the mix of the blocks, in [n, 1].

    Each of the three sums is exact to its own error, and passes through eight roundings of its own size at most, which
    may be far above that of their total: two products with w, two additions, and the inverse squared and multiplied by,
    once more for the inverse's own rounding, twice as it is squared.
    """
    b, wp = fp.total(parts[:, :-1], 1), parts[:, -1]
    pieces = (fp.dot(b, b, keepdim=True), fp.dot(b, wp, keepdim=True), fp.dot(wp, wp, keepdim=True))
    own = pieces[0].radius + 2.0 * pieces[1].radius + pieces[2].radius
    size = pieces[0].size + 2.0 * pieces[1].size + pieces[2].size
    error: Tensor = (own + 8.0 * fp.U * size) * inverse.size.square()
    return error
