"""What a user waits for: prefill, time to first token, output throughput and request latency, through the engine.

Both arms run the whole engine: prompts, and steps that mix prompts with decode, on the generic ops; pure decode steps
on the arm's own, captured where the device can. Requests arrive together, decode greedily and end by length.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from decode_impl.batch import Chunk
from decode_impl.deployment import Deployment
from decode_impl.engine import Engine
from decode_impl.ops import OpTable
from decode_impl.runner import ModelRunner, Paths
from decode_impl.weights import ModelWeights
from validation.bench.arms import PAGE, Tables
from validation.bench.clock import Clock, Pair, interleaved
from validation.bench.lines import SECONDS, TOKENS, Line, of_rates, of_times

_LINE_SECONDS = 20.0
"""Most seconds for the rounds of one batch: at least one round is measured."""


@dataclass(frozen=True)
class Served:
    """One load, served: seconds to the last answer, and per request to the first token and to the end (medians)."""

    total: float
    first_token: float
    latency: float


_SERVED = ("total", "first_token", "latency")


class ServingArm:
    """One arm's engine. `decode` are the ops of pure decode steps, `prefill` those of all others."""

    def __init__(
        self, weights: ModelWeights, prefill: OpTable, decode: OpTable, requests: int, prompt: int, output: int
    ) -> None:
        deployment = Deployment(
            decode_backend="latency_specialized",
            kv_cache_dtype="fp8",
            max_batch=requests,
            max_context=prompt + output,
            page_size=PAGE,
            prefix_block=PAGE,
            prefix_snapshots=0,
            graphs=weights.embedding.device.type == "cuda",
        )
        self.runner = ModelRunner(weights, deployment, Paths(prefill, decode))
        self._clock = Clock(weights.embedding.device, flush=False)

    def prefill(self, prompt: list[int]) -> None:
        """Compute one prompt, in the engine's chunks, on pages and a slot of its own that are given back."""
        latents, states, deployment = self.runner.latents, self.runner.states, self.runner.deployment
        slot, pages = states.allocate(), [latents.allocate() for _ in range(-(-len(prompt) // PAGE))]
        for start in range(0, len(prompt), deployment.prefill_chunk):
            self.runner.execute([Chunk(prompt[start : start + deployment.prefill_chunk], start, slot, pages)])
        states.release(slot)
        for page in pages:
            latents.release(page)

    def serve(self, prompts: list[list[int]], output: int) -> Served:
        """Answer all prompts, `output` tokens each."""
        engine = Engine(self.runner)
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, output)
        requests = [engine.request(str(index)) for index in range(len(prompts))]
        first: dict[str, float] = {}
        last: dict[str, float] = {}

        def run() -> None:
            begun = self._clock.now()
            while engine.step() is not None:
                now = self._clock.now() - begun
                for request in requests:
                    if request.output:
                        first.setdefault(request.id, now)
                    if request.finish:
                        last.setdefault(request.id, now)

        total = self._clock.seconds(run)
        wrong = [request.error for request in requests if request.error or len(request.output) != output]
        if wrong:
            raise ArithmeticError(f"{len(wrong)} of {len(requests)} answers ended early: {wrong[0] or 'too short'}")
        return Served(total, statistics.median(first.values()), statistics.median(last.values()))


@dataclass(frozen=True)
class ServingBench:
    """What all lines of serving share."""

    weights: ModelWeights
    tables: Tables
    prompt: int
    output: int
    rounds: int
    seed: int

    def lines(self, batches: tuple[int, ...]) -> Iterator[Line]:
        """Prefill of one prompt, then the lines of every load."""
        if not batches:
            return
        arms = [
            ServingArm(self.weights, self.tables.generic, decode, max(batches), self.prompt, self.output)
            for decode in (self.tables.generic, self.tables.specialised)
        ]
        yield self._prefill(arms[0], arms[1])
        for requests in batches:
            yield from self._load(arms[0], arms[1], requests)

    def _prompts(self, requests: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (requests, self.prompt)
        prompts: list[list[int]] = torch.randint(0, self.weights.config.vocab_size, shape, generator=generator).tolist()
        return prompts

    def _prefill(self, generic: ServingArm, specialised: ServingArm) -> Line:
        (prompt,) = self._prompts(1)
        clock = Clock(self.weights.embedding.device, flush=False)
        first, second = partial(generic.prefill, prompt), partial(specialised.prefill, prompt)
        first()
        pair = interleaved(clock.seconds, first, second, self.rounds, _LINE_SECONDS)
        note = f"{self.prompt} tokens; prompts run the generic ops in both arms"
        return Line("prefill", 1, 0, TOKENS, **of_rates(pair, self.prompt), note=note)

    def _load(self, generic: ServingArm, specialised: ServingArm, requests: int) -> Iterator[Line]:
        prompts = self._prompts(requests)
        loads: tuple[list[Served], list[Served]] = ([], [])

        def serve(side: int) -> float:
            loads[side].append((generic, specialised)[side].serve(prompts, self.output))
            return loads[side][-1].total

        for arm in (generic, specialised):
            arm.serve(prompts, min(2, self.output))
        interleaved(lambda call: float(call()), partial(serve, 0), partial(serve, 1), self.rounds, _LINE_SECONDS)
        pairs = {name: Pair.of(*([getattr(load, name) for load in side] for side in loads)) for name in _SERVED}
        note = f"{self.prompt} tokens in, {self.output} out; all arrive together"
        first_token, latency = (of_times(pairs[name]) for name in ("first_token", "latency"))
        yield Line("time to first token", requests, 0, SECONDS, **first_token, note=note)
        yield Line("request latency", requests, 0, SECONDS, **latency, note=note)
        rates = of_rates(pairs["total"], requests * self.output)
        yield Line("output throughput", requests, 0, TOKENS, **rates, note=note)
