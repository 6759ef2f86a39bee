"""The smallest real continuous-batching engine: chunked prefill, decode, preempt and resume, prefix reuse, abort."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from decode_impl.batch import Chunk
from decode_impl.caches import CacheFull
from decode_impl.parallel.errors import CollectiveError
from decode_impl.prefix_cache import PrefixCache
from decode_impl.request import Finish, Request, RequestError
from decode_impl.runner import ModelRunner, StepResult
from decode_impl.sampling import SamplingError, SamplingParams
from decode_impl.speculator import Speculator


class EngineStopped(RuntimeError):
    """A step asked of an engine in which a collective has failed."""


class Engine:
    """Schedules requests over a model runner, one step at a time.

    Waiting requests are admitted in order while a slot is free. A step decodes every running request that is past its
    prompt and adds at most one chunk of prefill. When pages run out, cached prefixes are dropped first; then the
    request admitted last is preempted: it gives up everything, and later recomputes its tokens.
    """

    def __init__(self, runner: ModelRunner) -> None:
        deployment = runner.deployment
        self.runner = runner
        self.prefixes: PrefixCache = runner.parts["prefix_cache"](
            runner.latents, deployment.prefix_block, deployment.prefix_snapshots
        )
        self.speculator = Speculator(runner)
        self._failure: CollectiveError | None = None
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams | None = None,
        stop_tokens: Sequence[int] = (),
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: the id is taken, the prompt is empty or out of the vocabulary, or the request cannot fit the
                engine's context or page pool even when alone.
        """
        deployment, vocab = self.runner.deployment, self.runner.weights.config.vocab_size
        total = len(prompt) + max_tokens
        pages = -(-total // deployment.page_tokens)
        problems = [
            (request_id in self._requests, f"request {request_id!r} exists already"),
            (not prompt, f"request {request_id!r} has an empty prompt"),
            (any(not 0 <= t < vocab for t in prompt), f"request {request_id!r} has tokens outside 0..{vocab - 1}"),
            (max_tokens < 1, f"request {request_id!r} wants {max_tokens} tokens, at least 1 is needed"),
            (
                total > deployment.max_context,
                f"request {request_id!r} needs {total} tokens, max_context is {deployment.max_context}",
            ),
            (
                pages > deployment.pool_pages,
                f"request {request_id!r} needs {pages} pages, the pool has {deployment.pool_pages}",
            ),
        ]
        for wrong, message in problems:
            if wrong:
                raise RequestError(message)
        request = Request(request_id, list(prompt), max_tokens, sampling or SamplingParams(), frozenset(stop_tokens))
        self._requests[request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request wherever it stands and give back all it owns.

        Raises:
            RequestError: no such request, or it has ended already.
        """
        request = self.request(request_id)
        if request.finish:
            raise RequestError(f"request {request_id!r} has ended already ({request.finish})")
        if request in self._waiting:
            self._waiting.remove(request)
        self._end(request, Finish.ABORT)

    def preempt(self, request_id: str) -> None:
        """Take everything from a running request and put it at the head of the queue.

        Raises:
            RequestError: no such request, or it is not running.
        """
        request = self.request(request_id)
        if not request.running:
            raise RequestError(f"request {request_id!r} is not running")
        self._preempt(request)

    def request(self, request_id: str) -> Request:
        """A request by id, ended ones included.

        Raises:
            RequestError: no such request.
        """
        if request_id not in self._requests:
            raise RequestError(f"request {request_id!r} is unknown")
        return self._requests[request_id]

    def step(self) -> StepResult | None:
        """Run one step; None when nothing is left to do.

        Raises:
            CollectiveError: a rank stalled, died or decided otherwise; the error names rank, slot and epoch.
            EngineStopped: that has happened in an earlier step.
            CacheFull: requests are left and none can run: pages were lost to an owner that is gone.
        """
        if self._failure is not None:
            raise EngineStopped(f"the engine has stopped and runs no further step: {self._failure}") from self._failure
        self._admit()
        scheduled = self._schedule()
        if not scheduled and self.unfinished:
            free, pool = self.runner.latents.free_pages, self.runner.deployment.pool_pages
            raise CacheFull(f"{self.unfinished} requests wait for pages, {free} of {pool} are free and nobody runs")
        if not scheduled:
            return None
        try:
            result = self.runner.execute([chunk for _, chunk in scheduled])
        except CollectiveError as error:
            # Ranks no longer agree on what has been computed, and nothing here can tell which of them are right.
            self._failure = error
            raise
        for (request, chunk), logits in zip(scheduled, result.by_chunk(), strict=True):
            self._advance(request, chunk, logits)
        self.speculator.draft([request for request, _ in scheduled if request.running])
        return result

    def run(self) -> None:
        """Step until every request has ended."""
        while self.step() is not None:
            pass

    def _admit(self) -> None:
        while self._waiting and self.runner.states.free_slots:
            request = self._waiting.popleft()
            request.slot = self.runner.states.allocate()
            entry = self.prefixes.longest(request.tokens)
            if entry:
                for page in entry.pages:
                    self.runner.latents.share(page)
                request.pages = list(entry.pages)
                self.runner.states.restore(request.slot + request.column, entry.state)
                request.computed = len(entry.tokens)
            self._running.append(request)

    def _schedule(self) -> list[tuple[Request, Chunk]]:
        """Decode rows of all requests past their prompt and one chunk of prefill, each with its pages secured."""
        scheduled: list[tuple[Request, int]] = []
        prefill_taken = False
        for request in list(self._running):
            self._give_back_spare_pages(request)
        for request in list(self._running):
            length = self._next_length(request)
            if not request.running or (length > 1 and prefill_taken):
                continue
            if not self._secure_pages(request, request.computed + length):
                break
            prefill_taken |= length > 1
            scheduled.append((request, length))
        running = [(request, length) for request, length in scheduled if request.running]
        for request, length in running:
            self._secure_drafts(request, length)
        return [(request, self._chunk(request, length)) for request, length in running]

    def _chunk(self, request: Request, length: int) -> Chunk:
        """The request's next tokens; its drafts, if it has any, behind the last one."""
        start, source = request.computed, request.slot + request.column
        tokens = request.tokens[start : start + length] + request.drafts
        targets = range(request.slot, request.slot + len(tokens)) if request.drafts else ()
        return Chunk(tokens, start, source, tuple(request.pages), tuple(targets))

    def _next_length(self, request: Request) -> int:
        """Tokens of the request's next chunk: it ends at the prompt's end, the chunk limit or a prefix boundary."""
        deployment = self.runner.deployment
        remaining = min(len(request.tokens) - request.computed, deployment.prefill_chunk)
        if deployment.prefix_snapshots:
            remaining = min(remaining, deployment.prefix_block - request.computed % deployment.prefix_block)
        return remaining

    def _secure_pages(self, request: Request, length: int) -> bool:
        """Give the request pages for `length` tokens; False if it had to be preempted itself."""
        latents = self.runner.latents
        while len(request.pages) < -(-length // latents.page_tokens):
            if latents.free_pages:
                request.pages.append(latents.allocate())
            elif not self.prefixes.evict_oldest():
                victim = self._running[-1]
                self._preempt(victim)
                if victim is request:
                    return False
        return True

    def _secure_drafts(self, request: Request, length: int) -> None:
        """Give the request pages for its drafts, of those still free once all others have theirs; else no drafts."""
        latents = self.runner.latents
        missing = -(-(request.computed + length + len(request.drafts)) // latents.page_tokens) - len(request.pages)
        if missing > latents.free_pages:
            request.drafts, request.draft_distributions = [], []
            return
        request.pages += [latents.allocate() for _ in range(missing)]

    def _give_back_spare_pages(self, request: Request) -> None:
        """Pages that only held drafts which were refused; nobody is preempted for the sake of drafts."""
        latents = self.runner.latents
        while len(request.pages) > -(-request.computed // latents.page_tokens):
            latents.release(request.pages.pop())

    def _advance(self, request: Request, chunk: Chunk, logits: Tensor) -> None:
        """Take what a step computed for one request: commit tokens, keep the state after the last of them."""
        if chunk.verifies:
            committed = self._commit_verified(request, chunk, logits)
        else:
            committed = len(chunk.tokens)
            if request.computed + committed == len(request.tokens):
                self._commit(request, partial(self._sample, request, logits[-1], request.computed + committed))
        self._keep_prefixes(request, chunk, committed, logits)
        request.computed += committed
        if request.finish:
            self._end(request, request.finish)

    def _commit_verified(self, request: Request, chunk: Chunk, logits: Tensor) -> int:
        """Commit a token after every row, as long as it is the next draft. Returns how many."""
        drafts = chunk.tokens[1:]
        committed = 0
        for row, draft in zip(logits, [*drafts, None], strict=True):
            choose = partial(self.speculator.choose, request, row, chunk.start + committed + 1, committed, draft)
            token = self._commit(request, choose)
            if token is None:
                return committed  # the request has ended in an error; what it verified is no evidence
            committed += 1
            if request.finish or token != draft:
                break
        request.column = committed - 1
        request.verify_steps.append((chunk.start, len(drafts), committed - 1))
        self.speculator.acceptance.count(len(drafts), committed - 1)
        return committed

    def _sample(self, request: Request, logits: Tensor, position: int) -> int:
        token: int = self.runner.parts["sample"](logits, request.sampling, position)
        return token

    def _commit(self, request: Request, choose: Callable[[], int]) -> int | None:
        """Choose the next token and end the request where it ends; None if nothing can be chosen."""
        try:
            token = choose()
        except SamplingError as error:
            request.error, request.finish = str(error), Finish.ERROR
            return None
        request.output.append(token)
        if token in request.stop_tokens:
            request.finish = Finish.STOP
        elif len(request.output) == request.max_tokens:
            request.finish = Finish.LENGTH
        return token

    def _keep_prefixes(self, request: Request, chunk: Chunk, committed: int, logits: Tensor) -> None:
        """Cache the prefixes that end inside this step where their state is known: after it, or in a column of it."""
        for offset in range(1 if chunk.verifies else committed, committed + 1):
            length = chunk.start + offset
            # A state that gave NaN must not be handed to later requests.
            if not self.prefixes.is_boundary(length) or not bool(logits.isfinite().all()):
                continue
            pages = request.pages[: length // self.runner.latents.page_tokens]
            slot = chunk.targets[offset - 1] if chunk.verifies else chunk.slot
            self.prefixes.add(request.tokens[:length], pages, self.runner.states.snapshot(slot))

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.computed = 0
        request.preemptions += 1
        self._waiting.appendleft(request)

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish = finish
        self._release(request)

    def _release(self, request: Request) -> None:
        """Take slot and pages from a request that may own some."""
        if request.running:
            self._running.remove(request)
            self.runner.states.release(request.slot)
        for page in request.pages:
            self.runner.latents.release(page)
        request.slot, request.column, request.pages = 0, 0, []
        request.drafts, request.draft_distributions = [], []
