"""Playing a schedule on decode_impl's engine: tokens as given, drafts as scripted, every step's writes watched."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from decode_impl.batch import Chunk
from decode_impl.engine import Engine
from decode_impl.parallel.context import owner
from decode_impl.parts import PARTS, PartTable
from decode_impl.request import Request
from decode_impl.runner import ModelRunner, StepResult
from decode_impl.sampling import SamplingParams
from numerics.formats import E4M3_NAN
from validation.targets.builtin_caches import caches_of, state_hash
from validation.targets.builtin_ownership import CONTRACTS, misowned_slots, not_given_back
from validation.targets.schedule import NO_DRAFTS, Abort, Played, Preempt, Run, Schedule, Submit, Trace

ENGINE_PARTS: PartTable = {**PARTS, "engine": Engine}
"""Every part that a fault can replace, the scheduler included."""

_LONGEST = 1000
"""Steps after which a schedule is stuck: none needs a tenth of it."""


class StuckEngine(RuntimeError):
    """An engine that works on and on without ending its requests."""


def play(runner: ModelRunner, schedule: Schedule) -> Played:
    """Play the schedule on an engine over `runner`, which nobody else uses."""
    return _Player(runner, schedule).play()


class ForeignSampling(RuntimeError):
    """An engine that samples with a seed, a temperature or a top-p that none of its requests asked for."""


class ScriptedDrafter:
    """Stands in for a drafter: as many right drafts as the schedule says, then wrong ones."""

    taps = ()

    def __init__(self, player: _Player) -> None:
        self._player = player
        self._turns: Counter[str] = Counter()
        self.right: dict[tuple[str, int], int] = {}
        self.cache = torch.zeros(0)

    def observe(self, taps: Any, positions: Tensor, indices: Tensor) -> None:
        """Nothing to learn from the target."""

    def draft(self, anchors: Tensor, indices: Tensor, block_table: Tensor, count: int) -> Tensor:
        """Drafts of every row, whose request is known by its pages. Returns i64 [n, count]."""
        owners = {tuple(r.pages): r for r in self._player.requests() if r.running}
        pages = [tuple(page for page in row if page) for row in block_table.tolist()]
        return torch.tensor(
            [self._row(owners[own], index, count) for own, index in zip(pages, indices.tolist(), strict=True)]
        )

    def _row(self, request: Request, index: int, count: int) -> list[int]:
        submit = self._player.submitted[request.id]
        turn = self._turns[request.id]
        self._turns[request.id] += 1
        right = submit.accepted[turn % len(submit.accepted)] if submit.accepted else NO_DRAFTS
        coming = submit.continuation[index + 1 - len(submit.prompt) :]
        if right == NO_DRAFTS or len(coming) <= count + 1:
            return [NO_DRAFTS] * count
        vocab = self._player.runner.weights.config.vocab_size
        self.right[request.id, index] = right
        return [token if i < right else (token + 1) % vocab for i, token in enumerate(coming[:count])]


class _Player:
    def __init__(self, runner: ModelRunner, schedule: Schedule) -> None:
        self.runner, self._schedule = runner, schedule
        self.submitted: dict[str, Submit] = {}
        self._asked: dict[str, SamplingParams] = {}
        self._order: list[str] = []
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._caches: dict[tuple[str, str], dict[str, Tensor]] = {}
        self._verified: dict[str, dict[int, dict[str, Tensor]]] = defaultdict(dict)
        self._hashes: dict[str, dict[int, str]] = defaultdict(dict)
        self._broken: Counter[str] = Counter(dict.fromkeys(CONTRACTS, 0))
        self._sample = runner.parts["sample"]
        runner.parts = {**runner.parts, "sample": self._forced}
        self._drafter = ScriptedDrafter(self)
        if schedule.drafts:
            runner.drafter = self._drafter  # type: ignore[assignment]
        self._execute = runner.execute
        runner.execute = self._watched  # type: ignore[method-assign, assignment]
        self._engine: Engine = runner.parts["engine"](runner)

    def play(self) -> Played:
        if self._schedule.poisoned:
            self._poison()
        for event in self._schedule.events:
            if isinstance(event, Submit):
                self._submit(event)
            elif isinstance(event, Run):
                self._run(event)
            elif not self._passed_over(event):
                (self._engine.preempt if isinstance(event, Preempt) else self._engine.abort)(event.request)
        self._broken["drafts accepted as scripted"] += self._unscripted()
        if not self._engine.unfinished:
            self._broken.update(not_given_back(self._engine))
        return Played({name: self._trace(name) for name in self._order}, dict(self._broken))

    def requests(self) -> Iterator[Request]:
        """All requests so far."""
        return (self._engine.request(name) for name in self._order)

    def _passed_over(self, event: Preempt | Abort) -> bool:
        request = self._engine.request(event.request)
        missing = not request.running if isinstance(event, Preempt) else bool(request.finish)
        return self._schedule.lenient and missing

    def _unscripted(self) -> int:
        """Verify steps that accepted another number of drafts than the script has right ones among them."""
        return sum(
            accepted != min(drafts, self._drafter.right.get((request.id, place), -1))
            for request in self.requests()
            for place, drafts, accepted in request.verify_steps
        )

    def _submit(self, submit: Submit) -> None:
        self.submitted[submit.request] = submit
        self._rows[submit.request] = {}
        # No default among them, so that none can get lost unseen.
        params = SamplingParams(0.9, 0.8, len(self._order))
        self._asked[submit.request] = params
        self._order.append(submit.request)
        # One token more than is given: the request still owns its caches when the last given one is due.
        self._engine.add(submit.request, submit.prompt, len(submit.continuation) + 1, params)

    def _run(self, run: Run) -> None:
        for _ in range(_LONGEST if run.steps is None else run.steps):
            if self._engine.step() is None:
                return
            self._broken["slots of one owner"] += misowned_slots(self._engine, list(self.requests()))
            for request in list(self.requests()):
                self._look_at(request)
        if run.steps is None:
            raise StuckEngine(f"{self._engine.unfinished} requests have not ended after {_LONGEST} steps")

    def _look_at(self, request: Request) -> None:
        submit = self.submitted[request.id]
        if not request.running:
            return
        if self._schedule.hash_states and request.computed:
            self._hashes[request.id][request.computed] = state_hash(*self._owned_by(request))
        verified = [place + accepted + 1 for place, _, accepted in request.verify_steps[-1:]]
        if self._schedule.verify_caches and verified == [request.computed]:
            self._verified[request.id].setdefault(request.computed, self._caches_of(request))
        if request.computed == len(submit.prompt):
            self._keep(request, "prompt")
        elif request.computed >= len(submit.prompt) + len(submit.continuation) - 1:
            self._keep(request, "end")

    def _keep(self, request: Request, when: str) -> None:
        if (request.id, when) not in self._caches:
            self._caches[request.id, when] = self._caches_of(request)

    def _caches_of(self, request: Request) -> dict[str, Tensor]:
        return caches_of(*self._owned_by(request))

    def _owned_by(self, request: Request) -> tuple[ModelRunner, int, tuple[int, ...], int]:
        return self.runner, request.slot + request.column, tuple(request.pages), request.computed

    def _forced(self, logits: Tensor, params: SamplingParams, position: int) -> int:
        """The given token in place of the sampled one, which is drawn all the same: it may refuse."""
        name = next((one for one, asked in self._asked.items() if asked == params), "")
        if not name:
            # Whose row it is cannot be told by a seed that nobody asked for.
            raise ForeignSampling(f"a token is sampled with {params}, which no request asked for")
        submit = self.submitted[name]
        place = position - len(submit.prompt)
        self._rows[name].setdefault(place, logits.clone().cpu())
        self._sample(logits, params, position)
        return submit.continuation[place] if place < len(submit.continuation) else 0

    def _trace(self, name: str) -> Trace:
        submit = self.submitted[name]
        rows = [self._rows[name][i] for i in range(len(submit.continuation)) if i in self._rows[name]]
        vocab = self.runner.weights.config.vocab_size
        return Trace(
            torch.stack(rows) if rows else torch.zeros(0, vocab),
            self._caches.get((name, "prompt"), {}),
            self._caches.get((name, "end"), {}),
            self._engine.request(name).error,
            tuple(self._engine.request(name).output),
            self._verified[name],
            dict(self._hashes[name]),
        )

    def _pools(self) -> list[Tensor]:
        """Every cache as words, [rows, words]: a row is a slot, or a position of the latent cache."""
        states, latents = self.runner.states, self.runner.latents
        slots = [pool.flatten(1) for pool in (*states.conv.values(), *states.state.values())]
        rows = [cache.flatten(0, 1) for own in latents.shards for cache in own.values()]
        return [_words(pool) for pool in (*slots, *rows)]

    def _poison(self) -> None:
        states, latents = self.runner.states, self.runner.latents
        for pool in (*states.conv.values(), *states.state.values()):
            pool[states.columns :] = torch.nan
        for cache in (cache for own in latents.shards for cache in own.values()):
            cache[1:] = E4M3_NAN if cache.dtype == torch.uint8 else torch.nan

    def _watched(self, chunks: list[Chunk], all_logits: bool = False) -> StepResult:
        pools = self._pools()
        before = [pool.clone() for pool in pools]
        result = self._execute(chunks, all_logits)
        for pool, old, owned in zip(pools, before, self._owned(chunks), strict=True):
            if torch.equal(pool, old):
                continue
            differs = pool != old
            differs[owned] = False
            self._broken["unowned rows unchanged"] += int(differs.sum())
        states, latents = self.runner.states, self.runner.latents
        nulls = [states.columns] * (len(states.conv) + len(states.state))
        nulls += [latents.page_size] * len(latents.layers) * len(latents.shards)
        null_words = sum(int(pool[:rows].count_nonzero()) for pool, rows in zip(pools, nulls, strict=True))
        self._broken["null rows zero"] += null_words
        return result

    def _owned(self, chunks: list[Chunk]) -> list[list[int]]:
        """For every pool the rows that this step may write."""
        slots = [slot for chunk in chunks for slot in (chunk.targets or (chunk.slot,))]
        states, latents = self.runner.states, self.runner.latents
        page, ranks = latents.page_size, len(latents.shards)
        indices = [(chunk, index) for chunk in chunks for index in range(chunk.start, chunk.start + len(chunk.tokens))]
        rows = [
            [
                chunk.pages[index // (page * ranks)] * page + index // ranks % page
                for chunk, index in indices
                if owner(index, ranks) == rank
            ]
            for rank in range(ranks)
        ]
        return [slots] * (len(states.conv) + len(states.state)) + [own for own in rows for _ in latents.layers]


def _words(rows: Tensor) -> Tensor:
    """Bits of a 2-D tensor as integers, as wide as its rows allow; a rank without heads has none."""
    if not rows.numel():
        return rows
    size = rows.shape[1] * rows.element_size()
    return rows.view(next(word for width, word in _WORDS if size % width == 0))


_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
