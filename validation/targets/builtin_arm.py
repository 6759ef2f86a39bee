"""One arm of the builtin target: a runner in one configuration, and what a gate may ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from decode_impl.batch import Chunk
from decode_impl.deployment import Deployment
from decode_impl.drafter.model import DrafterModel
from decode_impl.ops import POOLS, call_on_case
from decode_impl.runner import ModelRunner
from decode_impl.sampling import SamplingParams
from validation.targets.base import ArmConfig, Case, Counters, ForcedStep
from validation.targets.builtin_caches import caches_of
from validation.targets.builtin_schedule import play
from validation.targets.builtin_text import answer
from validation.targets.builtin_verify import BuiltinVerifyDecode
from validation.targets.layered import Layers
from validation.targets.moving import Moved
from validation.targets.schedule import Played, Schedule
from validation.targets.text import Answer, Ask


class BuiltinArm:
    """One configuration of the builtin target."""

    def __init__(self, config: ArmConfig, runner: ModelRunner, layers: Layers) -> None:
        self.config = config
        self._runner = runner
        self._layers = layers

    def ops(self) -> frozenset[str]:
        """All ops: those that the specialised path lacks run generic in its arm, as they do in a decode."""
        return frozenset(self._runner.paths.generic)

    @torch.inference_mode()
    def run_op(self, op: str, case: Case, in_place: bool = False) -> dict[str, Tensor]:
        """Run one op as this arm would run it."""
        paths = self._runner.paths
        specialized = self._runner.specialized_on and op in paths.specialized
        table = paths.specialized if specialized else paths.generic
        there, back = Moved(self._runner.weights.embedding.device), Moved(torch.device("cpu"))
        outputs = call_on_case(table, op, there.case(case), in_place)
        there.write_back()
        own = POOLS.get(op, ()) if in_place else ()
        return {name: case[name] if name in own else back(output) for name, output in outputs.items()}

    def forced_decode(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> BuiltinForcedDecode:
        """Prefill the prompts in one step, then decode the rest teacher-forced in one batch."""
        return BuiltinForcedDecode(self._runner, self._layers, sequences, prompt_length)

    def generate(self, schedule: Schedule) -> Played:
        """Play a schedule on an engine of its own, in this arm's configuration with the schedule's options.

        Raises:
            TargetError: an engine cannot have these options.
        """
        deployment = replace(
            self._runner.deployment,
            max_batch=schedule.max_batch,
            pages=schedule.pages,
            prefill_chunk=schedule.prefill_chunk,
            prefix_block=schedule.prefix_block,
            prefix_snapshots=schedule.prefix_snapshots,
            drafts=schedule.drafts,
        )
        runner = self._own_runner(deployment)
        played = play(runner, schedule)
        self._runner.steps += runner.steps
        self._runner.fallbacks += runner.fallbacks
        return played

    def verify_decode(
        self, sequences: Sequence[Sequence[int]], prompt_length: int, drafts: int, accepted: Sequence[int]
    ) -> BuiltinVerifyDecode:
        """Prefill the prompts in one step, then verify given drafts, on caches of its own with a column per draft."""
        longest = len(sequences[0]) + drafts
        runner = self._own_runner(replace(self._runner.deployment, drafts=drafts, max_context=longest))
        # What it runs is counted with this arm's.
        runner.steps, runner.fallbacks = self._runner.steps, self._runner.fallbacks
        return BuiltinVerifyDecode(runner, sequences, prompt_length, accepted)

    def _own_runner(self, deployment: Deployment) -> ModelRunner:
        """Another runner of this arm's paths and parts, whose caller brings the drafts."""
        # The runner asks a drafter only how many may be made.
        drafter = cast(DrafterModel, SimpleNamespace(config=SimpleNamespace(max_drafts=deployment.drafts)))
        parts = {**self._runner.parts, "drafter": lambda *shape: None}
        return ModelRunner(self._runner.weights, deployment, self._runner.paths, parts, drafter)

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer on an engine over this arm's runner, whose caches are free between two calls."""
        return answer(self._runner, asks)

    def collectives(self) -> Mapping[str, Any]:
        """The rank programs of `decode_impl.parallel` and their parts."""
        table: Mapping[str, Any] = self._runner.parts["collectives"]()
        return table

    def accept(
        self, p: Tensor, q: Tensor, draft: int, accept_number: float, residual_number: float
    ) -> tuple[int, bool]:
        """One draft under the engine's rule of rejection sampling."""
        token, accepted = self._runner.parts["accept"](p, q, draft, accept_number, residual_number)
        return int(token), bool(accepted)

    def sample(self, logits: Tensor, temperature: float, top_p: float, seed: int, position: int) -> int:
        """One token by the engine's sampler."""
        return int(self._runner.parts["sample"](logits, SamplingParams(temperature, top_p, seed), position))

    def counters(self) -> Counters:
        """Steps by path and fallbacks by reason."""
        return Counters(dict(self._runner.steps), {str(k): v for k, v in self._runner.fallbacks.items()})


class BuiltinForcedDecode:
    """A teacher-forced decode on a runner's caches; owns its slots and pages until closed."""

    def __init__(
        self, runner: ModelRunner, layers: Layers, sequences: Sequence[Sequence[int]], prompt_length: int
    ) -> None:
        self._layers = layers
        length = len(sequences[0])
        pages = -(-length // runner.deployment.page_tokens)
        self._runner, self._sequences, self._prompt_length, self._length = runner, sequences, prompt_length, length
        self._slots = [runner.states.allocate() for _ in sequences]
        self._pages = [tuple(runner.latents.allocate() for _ in range(pages)) for _ in sequences]
        self._computed = 0

    def __iter__(self) -> Iterator[ForcedStep]:
        self._runner.execute(self._chunks(0, self._prompt_length))
        self._computed = self._prompt_length
        for position in range(self._prompt_length, self._length):
            result = self._runner.execute(self._chunks(position, position + 1))
            self._computed = position + 1
            count = len(self._sequences)
            # Rows of a decode step lie in the order of its chunks; what follows them is padding.
            between = {name: rows[:count].float().cpu() for name, rows in self._layers.noted.items()}
            yield ForcedStep(result.logits.cpu(), tuple(range(count)), (position,) * count, result.path, between)

    def _chunks(self, start: int, stop: int) -> list[Chunk]:
        owned = zip(self._sequences, self._slots, self._pages, strict=True)
        return [Chunk(list(tokens[start:stop]), start, slot, pages) for tokens, slot, pages in owned]

    def state(self, sequence: int) -> dict[str, Tensor]:
        """This sequence's caches, ranks joined, in f32."""
        return caches_of(self._runner, self._slots[sequence], self._pages[sequence], self._computed)

    def close(self) -> None:
        """Give slots and pages back."""
        for slot, pages in zip(self._slots, self._pages, strict=True):
            self._runner.states.release(slot)
            for page in pages:
                self._runner.latents.release(page)
        self._slots, self._pages = [], []
