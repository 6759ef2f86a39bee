"""The answer for a deployment: which paths apply, what share of steps falls back and why, and whether to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from validation.claims.model import published
from validation.fit.conditions import Kind, Unmet
from validation.fit.deployment import DeploymentFile
from validation.fit.memory import too_large
from validation.fit.own import MEASURED_ON, measured, own, own_fallback
from validation.fit.upstream import amd, amd_fallback, nvidia, nvidia_fallback
from validation.targets.own_path import model_config

_PAYS = 2.0
"""Tokens a step from which on at least one draft is accepted beside the bonus token, on average."""

_PREFILL = "prefill, alone or mixed with decode"
_RAGGED = "verify steps of different widths"

Fallback = Callable[[DeploymentFile, int], str | None]
"""Why a decode step of so many requests runs generic; None where it is specialised."""


class Applies(StrEnum):
    """Whether a path runs in this deployment. UNPROVEN: it starts, but its authors do not say that it is supported."""

    YES = "yes"
    UNPROVEN = "unproven"
    NO = "no"


@dataclass(frozen=True)
class Speed:
    """How many times as fast a specialised step was where it was measured; `said` is by whom and on what."""

    ratio: float
    said: str


@dataclass(frozen=True)
class PathAnswer:
    """One path. `fallbacks` are shares of all steps by reason; `speed` is the largest figure known of such a path."""

    path: str
    unmet: tuple[Unmet, ...]
    fallbacks: dict[str, float]
    speed: Speed
    least_gain: float

    @property
    def applies(self) -> Applies:
        """Refused and assumed conditions forbid; a stated scope only warns."""
        if any(item.kind is not Kind.SCOPE for item in self.unmet):
            return Applies.NO
        return Applies.UNPROVEN if self.unmet else Applies.YES

    @property
    def specialised(self) -> float:
        """Share of all steps that run specialised."""
        return 0.0 if self.applies is Applies.NO else max(0.0, 1 - sum(self.fallbacks.values()))

    @property
    def bound(self) -> float:
        """The gain in decode steps' throughput, were every specialised step as fast as `speed` says."""
        return gain_bound(1 - sum(self.fallbacks.values()), self.speed.ratio)

    @property
    def worth_measuring(self) -> bool:
        """Whether even the largest gain known would leave enough."""
        return self.applies is not Applies.NO and self.bound >= self.least_gain


def answers(given: DeploymentFile) -> list[PathAnswer]:
    """Upstream's two forms and this project's path.

    Raises:
        UsageError: the model is none of the K3 family.
    """
    model = model_config(given.model)
    common = tuple(too_large(given, model))
    upstream = upstream_speed()

    def answer(path: str, unmet: list[Unmet], fallback: Fallback, speed: Speed) -> PathAnswer:
        return PathAnswer(path, (*common, *unmet), step_shares(given, fallback), speed, given.least_gain)

    return [
        answer("upstream, NVIDIA", nvidia(given, model), nvidia_fallback, upstream),
        answer("upstream, AMD", amd(given, model), amd_fallback, upstream),
        answer("decodegate's own", own(given), own_fallback, own_speed(given.drafts)),
    ]


def step_shares(given: DeploymentFile, fallback: Fallback) -> dict[str, float]:
    """Share of all steps that fall back, by reason; each step is counted under the first reason that it meets."""
    traffic = given.traffic
    shares = {_PREFILL: traffic.steps_with_prefill} if traffic.steps_with_prefill else {}
    decode = 1 - traffic.steps_with_prefill
    ragged = traffic.ragged_verify if given.drafts else 0.0
    if ragged:
        shares[_RAGGED] = decode * ragged
    for requests, share in traffic.batch.items():
        reason = fallback(given, requests)
        if reason is not None and share:
            shares[reason] = shares.get(reason, 0.0) + decode * (1 - ragged) * share
    return shares


def upstream_speed() -> Speed:
    """The largest ratio of decode throughput that upstream published."""
    ratios = [
        (claim.ratio, claim)
        for file in published()
        for claim in file.claims
        if claim.ratio is not None and claim.metric.startswith("aggregate decode throughput")
    ]
    ratio, claim = max(ratios, key=lambda pair: pair[0])
    given = claim.conditions
    setting = f"{given.gpu}, TP{given.tensor_parallel}, batch {given.batch}"
    return Speed(ratio, f"the largest that vLLM published, on {setting}, claim {claim.id}, not reproduced here")


def own_speed(drafts: int) -> Speed:
    """The largest ratio that we measured of our own path."""
    most, least = measured(drafts)
    return Speed(most, f"our own figure, on {MEASURED_ON}, batch 1; {least:.2f} at the least of larger batches")


def gain_bound(specialised: float, ratio: float) -> float:
    """What steps become faster by at most, with this share specialised: Amdahl's law, a specialised step at `ratio`.

    Steps are counted alike; large batches, which fall back, take longer, so the true bound is lower.
    """
    return 1 / (1 - specialised + specialised / ratio)


def notes(given: DeploymentFile) -> list[str]:
    """What the team should know beside the answer."""
    speculation = given.speculation
    if speculation is None:
        return []
    length = speculation.acceptance_length
    if length is None:
        return ["acceptance_length is not given: tokens a second cannot be told from steps a second"]
    if speculation.acceptance == "synthetic":
        return [f"acceptance length {length:g} is synthetic: it says nothing about your traffic; measure it first"]
    said = f"acceptance length {length:g}, measured: both paths commit as many tokens a step, so their ratio keeps"
    if length < _PAYS:
        return [f"{said}; less than one draft in a step is accepted: measure without speculation too"]
    return [f"{said}; the published figures with speculation were taken at a synthetic length of 6"]
