"""What a target or an arm may offer besides `validation/targets/base.py`, for those who know of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from evals.samples import Request, Sample
from validation.targets.base import Arm, ArmConfig, ForcedDecode, Target

ForcedWork = tuple[Sequence[Sequence[int]], int]
"""The arguments of one `Arm.forced_decode`: sequences and prompt length."""


@runtime_checkable
class Conversing(Protocol):
    """A target with the capability to answer chats: text in, text out, whatever the tokens are."""

    def samples(self, requests: Sequence[Request], arms: Sequence[ArmConfig]) -> list[Sample]:
        """Ask every arm every request, interleaved (A B B A); by request, arms in turn. `Sample.arm` is the arm's name.

        Raises:
            TargetError: an arm could not be asked at all; nothing that it answered is lost.
        """
        ...


@runtime_checkable
class Foreseeing(Protocol):
    """An arm that cannot stay open beside another one: told what will be asked, it does all of it while it is open."""

    def expect(self, work: Sequence[ForcedWork]) -> None:
        """These decodes will be asked for."""
        ...


@runtime_checkable
class Miniature(Protocol):
    """A target whose engine can also run a model of next to no size, for the thousands of steps of a fuzzer."""

    def miniature(self) -> Target:
        """The same engine over that model; always the same one."""
        ...


@runtime_checkable
class Floored(Protocol):
    """A target whose arms come from two implementations, so that the noise floor is more than a batch composition."""

    def open_floor(self, config: ArmConfig) -> Arm:
        """The arm that the floor of a cell is measured with, in the baseline's other composition."""
        ...


@runtime_checkable
class Accepting(Protocol):
    """An arm whose sampler and rule of rejection can be asked about one row of logits and one draft."""

    def accept(
        self, p: Tensor, q: Tensor, draft: int, accept_number: float, residual_number: float
    ) -> tuple[int, bool]:
        """The token to commit, and whether it is the draft; p, q f64 [vocab], numbers uniform in [0, 1)."""
        ...

    def sample(self, logits: Tensor, temperature: float, top_p: float, seed: int, position: int) -> int:
        """The token drawn from a row of logits, f32 [vocab], at a position of a request with this seed.

        Raises:
            ValueError: the row holds NaN or infinity.
        """
        ...


@runtime_checkable
class Verifying(Protocol):
    """An arm that decodes given tokens several at a time, by verify steps."""

    def verify_decode(
        self, sequences: Sequence[Sequence[int]], prompt_length: int, drafts: int, accepted: Sequence[int]
    ) -> ForcedDecode:
        """As `forced_decode`, but a step runs the last kept token of every sequence and `drafts` drafts behind it.

        In turn, cyclically, the first `accepted` of them are the tokens that follow, the others wrong on purpose and
        refused. Yields a `ForcedStep` for every kept position, without boundaries.
        """
        ...


@runtime_checkable
class Keeping(Protocol):
    """A target with files of its own (answers as they come, logs), kept with the run."""

    def keep_in(self, folder: Path) -> None:
        """Put them into this folder, and go on with what is there."""
        ...


def open_floor(target: Target, config: ArmConfig) -> Arm:
    """The arm of the noise floor: the baseline's in another composition, unless the target has another."""
    return target.open_floor(config) if isinstance(target, Floored) else target.open(config)


def expect(arm: object, work: Sequence[ForcedWork]) -> None:
    """Tell an arm that wants to know."""
    if isinstance(arm, Foreseeing):
        arm.expect(work)
