"""What a gate may ask of something that decodes. Gates see targets only through these types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from validation.targets.schedule import Played, Schedule
from validation.targets.text import Answer, Ask

if TYPE_CHECKING:
    from torch import Tensor

    from validation.faults.base import Fault

Case = Mapping[str, Any]
"""Inputs of one op as named in docs/ops.md: tensors and plain numbers."""


OWN_PATH = "specialized"
"""What counters and steps call the candidate's own path."""


class TargetError(RuntimeError):
    """A target that cannot be opened as asked; the message lists every reason (exit code 2)."""


class Capability(StrEnum):
    """One thing that a target can do; a gate names those it needs."""

    GENERATE = "generate"
    TOPK_LOGPROBS = "top-k logprobs"
    FULL_LOGITS = "full logits"
    TEACHER_FORCED = "teacher-forced decode"
    READ_STATE = "read caches"
    RUN_OP = "run one op"
    INJECT_FAULT = "inject a fault"
    RANKS = "ranks"
    CONTEXT_PARALLEL = "decode context parallelism"
    SCHEDULE = "play a schedule of requests"
    DRAFTS = "speculative decoding"
    CONVERSE = "answer chats"
    SUBSTITUTE_OP = "substitute an op"
    READ_BOUNDARIES = "read between layers"
    COLLECTIVES = "show the protocols of its collectives"


@dataclass(frozen=True)
class ArmConfig:
    """How a target decodes in one arm of a comparison.

    `context_parallel`: 1, or `tensor_parallel`, over whose ranks every context is dealt out then.

    `draft_sampling`: drafts are their drafter's first choice ("greedy"), or drawn from its distribution and verified by
    rejection sampling ("sampled").

    `substitutions` are (op, layer) places at which the arm runs the baseline's op instead of its own; the layer after
    the last is the model's head. With `boundaries` a teacher-forced step also tells what passed between its layers.
    """

    name: str
    decode_backend: str = "auto"
    kv_cache_dtype: str = "bf16"
    state_dtype: str = "f32"
    tensor_parallel: int = 1
    context_parallel: int = 1
    max_batch: int = 64
    max_context: int = 1024
    drafts: int = 0
    draft_sampling: str = "greedy"
    faults: tuple[Fault, ...] = ()
    substitutions: tuple[tuple[str, int], ...] = ()
    boundaries: bool = False


@dataclass(frozen=True)
class ForcedStep:
    """Logits of one teacher-forced decode step: row i belongs to sequence `sequences[i]`.

    `logits` is f32 [n, V]; row i predicts token `positions[i] + 1` of its sequence. `path` names the path that ran.
    `boundaries` has, where the arm's configuration asks for them, the hidden states inside and between layers, joined
    over ranks, f32 [n, H] each, in the order in which they were computed: `layer.<i>.attention_in` (the mix in front of
    attention), `layer.<i>.mlp_in` (the mix behind it), `layer.<i>.mlp_out`, and `head.in` behind the last layer.
    """

    logits: Tensor
    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    path: str
    boundaries: Mapping[str, Tensor] = field(default_factory=dict, hash=False, compare=False)


class ForcedDecode(Protocol):
    """Teacher-forced decode of a fixed set of sequences, one batch, one step at a time."""

    def __iter__(self) -> Iterator[ForcedStep]: ...

    def state(self, sequence: int) -> dict[str, Tensor]:
        """Copies of this sequence's caches now, whole-model (all ranks joined), in f32.

        Keys: `layer.<i>.state`, `layer.<i>.conv`, `layer.<i>.latent` (rows so far, dequantised).
        """
        ...

    def close(self) -> None:
        """Give the slots and pages back."""
        ...


@dataclass(frozen=True)
class Counters:
    """What ran in an arm so far: steps by path, and steps that fell back, by reason."""

    steps: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)


def counted(fallbacks: Mapping[str, int]) -> str:
    """Reasons of fallbacks with their numbers, in one line; empty where there is none."""
    return ", ".join(f"{reason}: {n}" for reason, n in sorted(fallbacks.items()))


class Arm(Protocol):
    """An opened target in one configuration."""

    config: ArmConfig

    def ops(self) -> frozenset[str]:
        """Names of the ops that `run_op` accepts here."""
        ...

    def run_op(self, op: str, case: Case, in_place: bool = False) -> dict[str, Tensor]:
        """Run one op of docs/ops.md on copies of the pools that it writes; inputs are never changed.

        Strides of the pools are kept. `in_place` writes the case's own pools instead, for pools too large to copy.
        """
        ...

    def forced_decode(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> ForcedDecode:
        """Prefill the first `prompt_length` tokens of each sequence, then decode the rest teacher-forced, one batch.

        Sequences have one length; a step yields one row per sequence, at positions prompt_length .. length-1.
        """
        ...

    def generate(self, schedule: Schedule) -> Played:
        """Play a schedule of requests on an engine of its own; see `validation/targets/schedule.py`."""
        ...

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Continue every prompt on an engine, all of them together, with the arm's number of drafts."""
        ...

    def counters(self) -> Counters:
        """Steps and fallbacks since the arm was opened."""
        ...


class CollectiveArm(Arm, Protocol):
    """An arm of a target that shows the protocols of its collectives."""

    def collectives(self) -> Mapping[str, Callable[..., Any]]:
        """The rank programs of this arm's collectives and their parts by name, its faults put in."""
        ...


class Target(Protocol):
    """Something that decodes."""

    name: str
    capabilities: frozenset[Capability]

    def fingerprint(self) -> dict[str, str]:
        """What was judged: model name, weight hash, implementation that ran (kernel or emulation), versions."""
        ...

    def tokens(self, text: str) -> list[int]:
        """Token ids of `text` under the model's tokenizer, without special tokens."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat under the model's chat template, up to where the assistant's answer begins.

        Raises:
            TargetError: the model has no chat template that can be used.
        """
        ...

    def stop_tokens(self) -> list[int]:
        """Token ids that end an answer."""
        ...

    def dims(self) -> Mapping[str, int]:
        """Model dimensions by the names of `config.json`, for gates that build cases at model size."""
        ...

    def open(self, config: ArmConfig) -> Arm:
        """Open an arm.

        Raises:
            TargetError: the configuration is unsupported; all reasons at once.
        """
        ...
