"""The noise floor between vLLM and decode_impl: vLLM's logits, moved by what another number of ranks moves ours by.

vLLM's own other batch composition hardly moves a small model's logits, and no other implementation can be held to so
little. How far our generic path's logits move when it sums over two ranks instead of one is what a second valid
rounding of this model does, and it does not grow where vLLM runs another model than the candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from validation.targets.base import Arm, ArmConfig, ForcedDecode, ForcedStep
from validation.targets.vllm_arm import VllmArm, VllmForcedDecode
from validation.targets.vllm_process import VllmEngines


class RankNoiseArm(VllmArm):
    """A baseline's arm with the noise of our generic path on one rank (`one`) against `two`."""

    def __init__(self, config: ArmConfig, engines: VllmEngines, engine: dict[str, Any], one: Arm, two: Arm) -> None:
        super().__init__(config, engines, engine)
        self._one, self._two = one, two

    def forced_decode(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> RankNoiseDecode:
        """vLLM's decode and both of ours, in lockstep."""
        theirs = super().forced_decode(sequences, prompt_length)
        return RankNoiseDecode(theirs, *(arm.forced_decode(sequences, prompt_length) for arm in (self._one, self._two)))


class RankNoiseDecode(VllmForcedDecode):
    """Steps of vLLM's decode, moved."""

    def __init__(self, theirs: VllmForcedDecode, one: ForcedDecode, two: ForcedDecode) -> None:
        self._theirs, self._one, self._two = theirs, one, two

    def __iter__(self) -> Iterator[ForcedStep]:
        for step, one, two in zip(self._theirs, self._one, self._two, strict=True):
            yield replace(step, logits=step.logits + (two.logits - one.logits))

    def state(self, sequence: int) -> dict[str, Tensor]:
        """Not possible here."""
        return self._theirs.state(sequence)

    def close(self) -> None:
        """Give our slots and pages back."""
        self._one.close()
        self._two.close()
