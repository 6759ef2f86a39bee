"""The smoke subset: one fault of every layer that a cheap gate sees, each asked of the one unit that sees it.

The whole catalogue takes tens of minutes, this takes 100 seconds of one core. It answers whether the gates still see
anything of every layer, not how much: that is the whole run's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from validation.faults.base import Fault
from validation.gates.base import Context, Gate, Json
from validation.mutation.measure import BLIND, MutationGate, asked

SMOKE = "smoke"
"""The profile whose settings, with those below, the subset is asked with."""

Looks = Mapping[str, tuple[str, str]]
"""The gate and its unit that are asked about a fault, by the fault's id."""

LOOKS: Looks = MappingProxyType(
    {
        "kda-delta-dropped": ("numerics", "kda_step-model-n8"),
        "kda-conv-shifted": ("numerics", "kda_step-model-n8"),
        "kda-null-slot-written": ("numerics", "kda_step-model-n8"),
        "kda-state-transposed": ("numerics", "kda_sequence-model-n17"),
        "mla-scales-swapped": ("numerics", "mla_attend-model-n8"),
        "mla-write-off-by-one": ("numerics", "mla_query-model-n8"),
        "mla-last-key-forgotten": ("numerics", "mla_attend-model-n8"),
        "dcp-share-rounded-down": ("numerics", "mla_attend_dcp-model-n8"),
        "mla-rope-applied": ("numerics", "mla_query-model-n8"),
        "moe-bias-in-weights": ("numerics", "route-model-n8"),
        "moe-gate-up-swapped": ("numerics", "experts-model-n8"),
        "residual-bank-overwritten": ("numerics", "output_mix-model-n8"),
        "projection-bf16-partials": ("numerics", "projection-model-n8"),
        "reduce-rank-missing": ("numerics", "moe_tail-model-n8"),
        "rms-norm-eps-compiled-in": ("numerics", "rms_norm-model-n8"),
        # Five cases over shapes are five numbers of ranks, whatever the seed.
        "moe-tail-sixteen-ranks-at-8": ("numerics", "moe_tail-shapes-n8"),
        "moe-weight-above-one": ("numerics", "experts-model-n8"),
        "verify-snapshot-by-slot": ("numerics", "kda_verify-model-n2-w4"),
        "state-not-reset": ("parity", "schedule-slot-reuse"),
        "prefix-scale-on-hit": ("parity", "schedule-page-pressure"),
        "batch-one-token-prefill-stale": ("parity", "schedule-one-token-prompts"),
        "engine-token-computed-twice": ("parity", "schedule-preemption"),
        "spec-one-token-too-many": ("parity", "schedule-verify-caches"),
        "draft-id-out-of-range": ("parity", "containment"),
        "accept-other-q": ("parity", "rejection"),
        "long-nan-sanitised": ("parity", "sampler"),
        "sample-constant-seed": ("parity", "sampler"),
        "sync-shared-epoch": ("sync", "collectives-2"),
    }
)

LEFT_OUT = ("MLA lengths",)
"""Layers whose faults show in contexts of hundreds of keys and more alone, which cost more than the rest together."""

BESIDES: Mapping[str, Mapping[str, Json]] = {
    "numerics": {"shape_rows": [8]},
    "parity": {
        "schedules": sorted({u.removeprefix("schedule-") for _, u in LOOKS.values() if u.startswith("schedule-")}),
        # The units that ask sampler, acceptance and drafter exist where there is fuzzing; no schedule is drawn here.
        "fuzz_seeds": 1,
        "fuzz_steps": 1,
    },
}
"""Settings of a gate in place of the profile's, without which it lacks units that are asked."""


def looks_of(gates: Collection[str]) -> Looks:
    """What these gates are asked."""
    return {fault: look for fault, look in LOOKS.items() if look[0] in gates}


@dataclass
class OneLook(MutationGate):
    """Faults of which each is asked of one gate's one unit alone."""

    looks: Looks = field(default_factory=dict)

    def _asked(self, gate: Gate, fault: Fault, context: Context) -> dict[str, Json]:
        name, wanted = self.looks[fault.id]
        if gate.name != name:
            return {"says": BLIND, "units": 0}
        own = replace(context, settings=self.settings[name])
        return asked(gate, [unit for unit in gate.plan(own) if unit.id == wanted], own)


def used(looks: Looks, gate: str) -> list[str]:
    """The units of a gate that are asked: those that must be green without a fault."""
    return sorted({unit for name, unit in looks.values() if name == gate})


def with_settings(gates: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings of a profile's gates as the subset is asked with."""
    return {name: {**settings, **BESIDES.get(name, {})} for name, settings in gates.items()}
