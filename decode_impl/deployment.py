"""How a model is run: the options of an engine, checked where they enter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from decode_impl.caches import KV_DTYPES, STATE_DTYPES

BACKENDS = ("auto", "latency_specialized")
"""`auto` is the generic path; `latency_specialized` runs pure decode steps on the specialised one."""

DRAFT_SAMPLING = ("greedy", "sampled")
"""How drafts are chosen: the drafter's first choice, or drawn from its distribution under the request's sampling."""


class DeploymentError(ValueError):
    """Options that no engine can have; the message lists every reason."""


@dataclass(frozen=True)
class Deployment:
    """Options of an engine. `max_context` counts tokens of one request, prompt and output together.

    `context_parallel` is 1, or `tensor_parallel`: every rank then holds its share of every context.
    `drafts` is the number of tokens that a drafter guesses per step; 0 decodes without speculation.
    `graphs` captures every specialised step at start-up and replays it; on CUDA devices only.
    `pages` is the latent-cache pool (all requests); None gives every request its full context.
    """

    decode_backend: str = "auto"
    kv_cache_dtype: str = "bf16"
    state_dtype: str = "f32"
    tensor_parallel: int = 1
    context_parallel: int = 1
    max_batch: int = 64
    max_context: int = 1024
    page_size: int = 16
    pages: int | None = None
    prefill_chunk: int = 256
    prefix_block: int = 64
    prefix_snapshots: int = 32
    drafts: int = 0
    draft_sampling: str = "greedy"
    graphs: bool = False

    def __post_init__(self) -> None:
        checks = [
            _one_of("decode_backend", self.decode_backend, BACKENDS),
            _one_of("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_DTYPES)),
            _one_of("draft_sampling", self.draft_sampling, DRAFT_SAMPLING),
            _one_of("state_dtype", self.state_dtype, tuple(STATE_DTYPES)),
            *(
                _at_least(name, getattr(self, name), 1)
                for name in ("tensor_parallel", "max_batch", "max_context", "page_size", "prefill_chunk")
            ),
            _one_of("context_parallel", self.context_parallel, tuple(dict.fromkeys((1, self.tensor_parallel)))),
            None if self.pages is None else _at_least("pages", self.pages, 1),
            _at_least("prefix_snapshots", self.prefix_snapshots, 0),
            _at_least("drafts", self.drafts, 0),
        ]
        whole = type(self.page_size) is int and type(self.prefix_block) is int and self.page_size > 0
        if not whole or self.prefix_block < 1 or self.prefix_block % self.page_size:
            checks.append(f"prefix_block is {self.prefix_block}, a multiple of page_size {self.page_size} is needed")
        elif self.context_parallel in (1, self.tensor_parallel) and self.prefix_block % self.page_tokens:
            checks.append(
                f"prefix_block is {self.prefix_block}, a multiple of page_size {self.page_size} times context_parallel "
                f"{self.context_parallel} is needed"
            )
        problems = [problem for problem in checks if problem]
        if problems:
            raise DeploymentError("; ".join(problems))

    @property
    def page_tokens(self) -> int:
        """Tokens of a page: with context parallelism a page has `page_size` rows on every rank."""
        return self.page_size * self.context_parallel

    @property
    def max_pages(self) -> int:
        """Pages of one request at full context."""
        return -(-self.max_context // self.page_tokens)

    @property
    def pool_pages(self) -> int:
        """Pages of the latent cache, the null page aside."""
        return self.pages if self.pages is not None else self.max_batch * self.max_pages


def prefix_block_for(context_parallel: int) -> int:
    """The least multiple of the default prefix block that pages of the default size fill."""
    return math.lcm(Deployment.prefix_block, Deployment.page_size * context_parallel)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> str | None:
    fits = any(value == one and type(value) is type(one) for one in allowed)
    return None if fits else f"{name} is {value!r}, allowed are {', '.join(map(str, allowed))}"


def _at_least(name: str, value: object, least: int) -> str | None:
    # bool is an int to Python, and no count to anybody.
    fits = type(value) is int and value >= least
    return None if fits else f"{name} is {value!r}, a whole number of at least {least} is needed"
