"""An arm of the target `openai`: one server, its answers counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from validation.targets.base import OWN_PATH, ArmConfig, Capability, Counters, TargetError
from validation.targets.openai_evidence import Evidence
from validation.targets.openai_forced import HOW_TO_FORCE, OpenAIForcedDecode

if TYPE_CHECKING:
    from validation.targets.openai import OpenAITarget

UNSHOWN = "the server shows no sign of it"
"""Why answers of an arm that was asked for its own path count as fallbacks."""

ONE_PATH = "the baseline's server shows the same sign: both arms ran one path"
"""Why they do although the server shows the sign: nothing was compared."""


class OpenAIArm:
    """One server. It counts its answers; those of an own path that the server does not show are fallbacks."""

    def __init__(self, config: ArmConfig, target: OpenAITarget) -> None:
        self.config = config
        self._target = target
        self._steps: dict[str, int] = {}
        self._fallbacks: dict[str, int] = {}

    def forced_decode(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> OpenAIForcedDecode:
        """Decode fixed tokens, all sequences sent together; only where the target is capable of it."""
        if Capability.TEACHER_FORCED not in self._target.capabilities:
            raise TargetError(f"a server cannot be asked for forced decode, unless you {HOW_TO_FORCE}")
        return self._target.forced_decode(self, sequences, prompt_length)

    def count(self, answers: int, evidence: Evidence, one_path: bool = False) -> str:
        """Note answers, or decode steps, as steps of the path that the server shows; that path.

        `one_path` where the baseline's server shows the same: then they are no steps of a path of the arm's own.
        """
        own = self.config.decode_backend != "auto"
        path = OWN_PATH if own and evidence.shown and not one_path else "generic"
        self._steps[path] = self._steps.get(path, 0) + answers
        if own and path == "generic":
            reason = ONE_PATH if evidence.shown else UNSHOWN
            self._fallbacks[reason] = self._fallbacks.get(reason, 0) + answers
        return path

    def counters(self) -> Counters:
        """Answers, by the path that the server shows."""
        return Counters(dict(self._steps), dict(self._fallbacks))

    def ops(self) -> frozenset[str]:
        """None: ops run inside the server alone."""
        return frozenset()

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("run_op", "generate", "answer"):
            raise TargetError(f"a server cannot be asked for {name.replace('_', ' ')}")
        raise AttributeError(name)
