"""One step's rows: which tokens of which requests run, and where their caches are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request, `start` of them cached already; `pages` cover all up to the last one."""

    tokens: Sequence[int]
    start: int
    slot: int
    pages: Sequence[int]


@dataclass(frozen=True)
class SequenceRows:
    """A chunk of several tokens inside a step: its rows, its request's slot, its cached tokens and its pages."""

    rows: slice
    slot: int
    start: int
    block_table: Tensor


@dataclass(frozen=True)
class Batch:
    """A step's tensors. Rows 0 .. decode_rows-1 are single tokens, one per request or padding; sequences follow.

    tokens, positions: i64 [n]; slots, lengths: i64 [decode_rows]; block_table: i64 [decode_rows, max_pages].
    `logit_rows` are the rows whose logits are wanted, in the order of the chunks given.
    """

    tokens: Tensor
    positions: Tensor
    decode_rows: int
    slots: Tensor
    lengths: Tensor
    block_table: Tensor
    sequences: Sequence[SequenceRows]
    logit_rows: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same step with its tensors on `device`."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            lengths=self.lengths.to(device),
            block_table=self.block_table.to(device),
            sequences=[replace(rows, block_table=rows.block_table.to(device)) for rows in self.sequences],
            logit_rows=self.logit_rows.to(device),
        )


def build_batch(
    chunks: Sequence[Chunk], page_size: int, max_pages: int, pad_to: int = 0, all_logits: bool = False
) -> Batch:
    """Lay chunks out as a step: single tokens first, then null rows up to `pad_to`, then longer chunks.

    Logits are wanted for the last row of every chunk, or with `all_logits` for all rows of every chunk.
    """
    single = [i for i, chunk in enumerate(chunks) if len(chunk.tokens) == 1]
    longer = [i for i, chunk in enumerate(chunks) if len(chunk.tokens) > 1]
    padding = max(0, pad_to - len(single))
    tokens = [chunks[i].tokens[0] for i in single] + [0] * padding
    positions = [_flat_position(chunks[i], 0, page_size) for i in single] + [0] * padding
    rows_of = {i: range(row, row + 1) for row, i in enumerate(single)}
    sequences = []
    for i in longer:
        chunk = chunks[i]
        first = len(tokens)
        rows_of[i] = range(first, first + len(chunk.tokens))
        tokens += chunk.tokens
        positions += [_flat_position(chunk, offset, page_size) for offset in range(len(chunk.tokens))]
        table = torch.tensor(chunk.pages, dtype=torch.int64)
        sequences.append(SequenceRows(slice(first, len(tokens)), chunk.slot, chunk.start, table))
    wanted = [row for i in range(len(chunks)) for row in (rows_of[i] if all_logits else rows_of[i][-1:])]
    table = torch.zeros(len(single) + padding, max_pages, dtype=torch.int64)
    for row, i in enumerate(single):
        table[row, : len(chunks[i].pages)] = torch.tensor(chunks[i].pages)
    return Batch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        decode_rows=len(single) + padding,
        slots=torch.tensor([chunks[i].slot for i in single] + [0] * padding, dtype=torch.int64),
        lengths=torch.tensor([chunks[i].start + 1 for i in single] + [0] * padding, dtype=torch.int64),
        block_table=table,
        sequences=sequences,
        logit_rows=torch.tensor(wanted, dtype=torch.int64),
    )


def _flat_position(chunk: Chunk, offset: int, page_size: int) -> int:
    page, within = divmod(chunk.start + offset, page_size)
    return chunk.pages[page] * page_size + within
