"""Op inputs as they occur in a real decode: captured through a target, by ops that note what they are called with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from decode_impl.mxfp4 import MXFP4Weight
from decode_impl.ops import POOLS
from validation.faults.base import GENERIC, SPECIALIZED, Fault, Ops
from validation.targets.base import ArmConfig, Capability, Target

NEEDS = frozenset({Capability.TEACHER_FORCED, Capability.INJECT_FAULT})
"""What a target must be able to do: decode fixed tokens, with its ops replaced from outside."""


@dataclass
class _Sample:
    """A uniform sample of an op's calls, of fixed size whatever their number."""

    size: int
    chance: random.Random
    seen: int = 0
    cases: list[dict[str, Any]] = field(default_factory=list)

    def offer(self, arguments: Mapping[str, Any], pools: Sequence[str]) -> None:
        self.seen += 1
        place = len(self.cases) if len(self.cases) < self.size else self.chance.randrange(self.seen)
        if place < self.size:
            self.cases[place : place + 1] = [_case_of(arguments, pools)]


def captured_cases(
    target: Target,
    config: ArmConfig,
    sequences: Sequence[Sequence[int]],
    prompt_length: int,
    size: int,
    seed: int,
    wanted: Callable[[str, Mapping[str, Any]], bool],
) -> dict[str, list[dict[str, Any]]]:
    """Up to `size` cases of every op that runs while an arm decodes `sequences` teacher-forced, drawn with `seed` from
    the calls that are `wanted(op, arguments)`.

    The arm is opened anew under `config` and given back. Pools are as they were before the op ran.
    """
    samples: dict[str, _Sample] = {}

    def noting(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        sample = samples.setdefault(name, _Sample(size, random.Random(f"{seed}/{name}")))

        def op_that_notes(**arguments: Any) -> Any:
            if wanted(name, arguments):
                sample.offer(arguments, POOLS.get(name, ()))
            return op(**arguments)

        return op_that_notes

    def mutate(ops: Ops) -> Ops:
        return {name: noting(name, op) for name, op in ops.items()}

    recorder = Fault("captured", "notes what ops are called with", "", (), (GENERIC, SPECIALIZED), mutate)
    decode = target.open(replace(config, faults=(recorder,))).forced_decode(sequences, prompt_length)
    for _ in decode:
        pass
    decode.close()
    return {name: sample.cases for name, sample in samples.items() if sample.cases}


def _case_of(arguments: Mapping[str, Any], pools: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of an op as a case of docs/ops.md, on the CPU; tensors that the op or a later step writes are
    copied."""
    case: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, MXFP4Weight):
            case[f"{name}_packed"], case[f"{name}_scale"] = value.packed, value.scale
        elif isinstance(value, list | tuple):
            case |= {f"{name}.{rank}": part for rank, part in enumerate(value)}
        elif isinstance(value, Tensor):
            case[name] = value.clone() if name in (*pools, "cache", "prefix", "blocks") else value
        elif value is not None:
            case[name] = value
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in case.items()}
