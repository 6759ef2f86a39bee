"""Where a candidate runs anything of its own: the (op, layer) places of a decode, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from validation.faults.base import GENERIC, SPECIALIZED, Fault, Ops
from validation.targets.base import ArmConfig, Capability, Target

Place = tuple[str, int]
"""An op of docs/ops.md and a layer; the layer after the last is the model's head."""

NEEDS = frozenset(
    {
        Capability.TEACHER_FORCED,
        Capability.FULL_LOGITS,
        Capability.READ_STATE,
        Capability.INJECT_FAULT,
        Capability.SUBSTITUTE_OP,
    }
)
"""What a target must be able to do for a bisection by op and layer."""


def own_places(
    target: Target, baseline: ArmConfig, candidate: ArmConfig, sequences: Sequence[Sequence[int]], prompt_length: int
) -> list[Place]:
    """Places at which the candidate runs another op than the baseline while it decodes `sequences` teacher-forced."""
    usual: dict[str, Callable[..., Any]] = {}

    def keep(ops: Ops) -> Ops:
        usual.update(ops)
        return {}

    target.open(replace(baseline, faults=(Fault("ops", "keeps the baseline's ops", "", (), (GENERIC,), keep),)))
    seen: dict[Place, None] = {}
    watchers = tuple(_watcher(layer, usual, seen) for layer in range(target.dims()["num_hidden_layers"] + 1))
    decode = target.open(replace(candidate, faults=(*candidate.faults, *watchers))).forced_decode(
        sequences, prompt_length
    )
    for _ in decode:
        pass
    decode.close()
    return list(seen)


def _watcher(layer: int, usual: Ops, seen: dict[Place, None]) -> Fault:
    """Notes which ops other than the usual ones run in a layer."""

    def noting(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def op_that_notes(**arguments: Any) -> Any:
            seen.setdefault((name, layer))
            return op(**arguments)

        return op_that_notes

    def mutate(ops: Ops) -> Ops:
        return {name: noting(name, op) for name, op in ops.items() if op is not usual[name]}

    return Fault("watcher", "notes what runs", "", (), (GENERIC, SPECIALIZED), mutate, only_in=layer)
