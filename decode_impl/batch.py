"""One step's rows: which tokens of which requests run, and where their caches are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request, `start` of them cached already; `pages` cover all up to the last one.

    `slot` holds the state before the first token. A *verify* chunk, the last committed token and its drafts, also has
    `targets`: the slot that receives the state after each of its tokens. Other chunks leave only their last state, in
    `slot`.
    """

    tokens: Sequence[int]
    start: int
    slot: int
    pages: Sequence[int]
    targets: Sequence[int] = ()

    @property
    def verifies(self) -> bool:
        """True for a committed token with drafts behind it."""
        return bool(self.targets)


@dataclass(frozen=True)
class SequenceRows:
    """A chunk of several tokens inside a step: its rows, its request's slot, its cached tokens and its pages."""

    rows: slice
    slot: int
    start: int
    block_table: Tensor


@dataclass(frozen=True)
class VerifyRows:
    """The verify chunks of one width: their rows, request by request, and the slots they read and write.

    sources: i64 [n]; targets: i64 [n, width].
    """

    rows: slice
    sources: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Batch:
    """A step's tensors. Rows come in three parts: single tokens, one per request or padding (`decode_rows`); verify
    chunks, by width (up to `attend_rows`); longer chunks of prompts.

    tokens, positions (page * page_size + offset), indices (the token's place in its request): i64 [n];
    slots: i64 [decode_rows]; lengths: i64 [attend_rows]; block_table: i64 [attend_rows, max_pages].
    `logit_rows` are the rows whose logits are wanted, in the order of the chunks given (i64 [m], or all rows),
    `logit_counts` of each chunk.
    """

    tokens: Tensor
    positions: Tensor
    indices: Tensor
    decode_rows: int
    slots: Tensor
    attend_rows: int
    lengths: Tensor
    block_table: Tensor
    verify: Sequence[VerifyRows]
    sequences: Sequence[SequenceRows]
    logit_rows: Tensor | slice
    logit_counts: Sequence[int]

    def to(self, device: torch.device) -> Batch:
        """The same step with its tensors on `device`."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            indices=self.indices.to(device),
            slots=self.slots.to(device),
            lengths=self.lengths.to(device),
            block_table=self.block_table.to(device),
            verify=[
                replace(rows, sources=rows.sources.to(device), targets=rows.targets.to(device)) for rows in self.verify
            ],
            sequences=[replace(rows, block_table=rows.block_table.to(device)) for rows in self.sequences],
            logit_rows=self.logit_rows if isinstance(self.logit_rows, slice) else self.logit_rows.to(device),
        )


def build_batch(
    chunks: Sequence[Chunk],
    page_size: int,
    max_pages: int,
    pad_to: int = 0,
    all_logits: bool = False,
    verify_width: int = 1,
) -> Batch:
    """Lay chunks out as a step: single tokens, null rows, verify chunks by width, longer chunks.

    Null rows fill single and verify rows up to `pad_to`. Behind verify chunks they are whole null requests of the
    same width, as many as fit, so that a step's shape is a function of `pad_to` and the width alone; `verify_width` is
    that width where no chunk tells it. Logits are wanted for all rows of a verify chunk and the last row of every
    other, or with `all_logits` for all rows.
    """
    verify = sorted((i for i, chunk in enumerate(chunks) if chunk.verifies), key=lambda i: len(chunks[i].tokens))
    single = [i for i, chunk in enumerate(chunks) if len(chunk.tokens) == 1 and not chunk.verifies]
    longer = [i for i, chunk in enumerate(chunks) if len(chunk.tokens) > 1 and not chunk.verifies]
    missing = max(0, pad_to - len(single) - sum(len(chunks[i].tokens) for i in verify))
    width = len(chunks[verify[-1]].tokens) if verify else verify_width
    requests = missing // width if width > 1 else 0
    padding, requested = missing - requests * width, requests * width
    decode_rows = len(single) + padding
    rows = dict(_consecutive(chunks, single, 0)) | dict(_consecutive(chunks, verify, decode_rows))
    attend_rows = decode_rows + sum(len(chunks[i].tokens) for i in verify) + requested
    rows |= dict(_consecutive(chunks, longer, attend_rows))

    parts = [_rows(chunks, single, page_size), _null_rows(padding), _rows(chunks, verify, page_size)]
    parts += [_null_rows(requested), _rows(chunks, longer, page_size)]
    attending = [*single, *[None] * padding, *(i for i in verify for _ in chunks[i].tokens), *[None] * requested]
    table = torch.zeros(len(attending), max_pages, dtype=torch.int64)
    for row, owner in enumerate(attending):
        if owner is not None:
            table[row, : len(chunks[owner].pages)] = torch.tensor(chunks[owner].pages)
    indices = [index for part in parts for index in part.indices]
    wanted = [list(rows[i]) if all_logits or chunk.verifies else [rows[i][-1]] for i, chunk in enumerate(chunks)]
    return Batch(
        tokens=torch.tensor([token for part in parts for token in part.tokens]),
        positions=torch.tensor([position for part in parts for position in part.positions]),
        indices=torch.tensor(indices),
        decode_rows=decode_rows,
        slots=torch.tensor([chunks[i].slot for i in single] + [0] * padding, dtype=torch.int64),
        attend_rows=attend_rows,
        lengths=torch.tensor(
            [0 if owner is None else indices[row] + 1 for row, owner in enumerate(attending)], dtype=torch.int64
        ),
        block_table=table,
        verify=list(_verify_rows(chunks, verify, decode_rows, requests, width)),
        sequences=[
            SequenceRows(
                slice(rows[i].start, rows[i].stop),
                chunks[i].slot,
                chunks[i].start,
                torch.tensor(chunks[i].pages, dtype=torch.int64),
            )
            for i in longer
        ],
        logit_rows=torch.tensor([row for each in wanted for row in each], dtype=torch.int64),
        logit_counts=[len(each) for each in wanted],
    )


@dataclass(frozen=True)
class _Rows:
    tokens: list[int]
    positions: list[int]
    indices: list[int]


def _null_rows(count: int) -> _Rows:
    return _Rows([0] * count, [0] * count, [0] * count)


def _rows(chunks: Sequence[Chunk], order: Sequence[int], page_size: int) -> _Rows:
    rows = _Rows([], [], [])
    for chunk in (chunks[i] for i in order):
        rows.tokens.extend(chunk.tokens)
        for index in range(chunk.start, chunk.start + len(chunk.tokens)):
            page, within = divmod(index, page_size)
            rows.positions.append(chunk.pages[page] * page_size + within)
            rows.indices.append(index)
    return rows


def _consecutive(chunks: Sequence[Chunk], order: Sequence[int], first: int) -> Iterable[tuple[int, range]]:
    for i in order:
        yield i, range(first, first + len(chunks[i].tokens))
        first += len(chunks[i].tokens)


def _verify_rows(
    chunks: Sequence[Chunk], verify: Sequence[int], first: int, null: int, width: int
) -> Iterable[VerifyRows]:
    """Verify chunks by width from row `first` on, and `null` null requests behind those of the largest `width`."""
    owned: dict[int, list[tuple[int, list[int]]]] = {}
    for i in verify:
        owned.setdefault(len(chunks[i].tokens), []).append((chunks[i].slot, list(chunks[i].targets)))
    if null:
        owned.setdefault(width, []).extend([(0, [0] * width)] * null)
    for rows, requests in owned.items():
        stop = first + rows * len(requests)
        yield VerifyRows(
            slice(first, stop),
            torch.tensor([source for source, _ in requests]),
            torch.tensor([targets for _, targets in requests]),
        )
        first = stop
