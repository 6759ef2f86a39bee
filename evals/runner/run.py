"""A run: every question to both arms, interleaved, a bounded number at a time, each answer kept as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from evals.runner.client import Client
from evals.runner.endpoint import Endpoint, Limits
from evals.runner.journal import Journal, plan_digest
from evals.samples import Request, Response, Sample, interleaved

CONCURRENCY = 16
"""Questions on their way at once, both arms together."""


class Asked(Protocol):
    """Something that answers; `client.Client` is one."""

    async def ask(self, request: Request) -> Response: ...


def run_requests(
    requests: Sequence[Request],
    endpoints: Mapping[str, Endpoint],
    journal: Path,
    *,
    concurrency: int = CONCURRENCY,
    limits: Limits | None = None,
) -> list[Sample]:
    """Ask every endpoint (by its arm's name) every request; what the journal has already is not asked again.

    The samples come in the order of the requests, arms in turn: the order of answers leaves no trace.

    Raises:
        EndpointDown: a server was away too long; run again to go on.
        EndpointError, JournalError: an endpoint or the journal cannot be used.
    """
    plan = plan_digest(requests, {arm: endpoint.public() for arm, endpoint in endpoints.items()})

    async def run() -> None:
        async with AsyncExitStack() as stack:
            clients = {
                arm: await stack.enter_async_context(Client(endpoint, limits)) for arm, endpoint in endpoints.items()
            }
            await ask_all(requests, clients, kept, concurrency)

    with Journal(journal, plan) as kept:
        try:
            asyncio.run(run())
        except* Exception as group:
            raise _first(group) from None
        return [kept.samples[f"{arm}/{request.key}"] for request in requests for arm in endpoints]


async def ask_all(
    requests: Sequence[Request], clients: Mapping[str, Asked], journal: Journal, concurrency: int
) -> None:
    """Ask what the journal lacks, in the order A B B A, at most `concurrency` questions at once.

    The first exception of a client ends the run; questions on their way are dropped, and asked again next time.

    Raises:
        ValueError: two requests of one key, or no room for a question.
    """
    if len({request.key for request in requests}) != len(requests):
        raise ValueError("two requests have the same task, item and repeat")
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; 1 or more is needed")
    left = iter(
        [(arm, r) for arm, r in interleaved(requests, tuple(clients)) if f"{arm}/{r.key}" not in journal.samples]
    )

    async def work() -> None:
        for arm, request in left:
            journal.add(Sample(arm=arm, request=request, response=await clients[arm].ask(request)))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
