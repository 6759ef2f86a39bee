"""Faults of a step's layout: padding, slots, positions, tables, wanted rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from validation.faults.base import Kind
from validation.faults.layer import Layer

LAYER = Layer("layout of a step", kind=Kind.OWNERSHIP)

BATCH = partial(LAYER.engine, "build_batch")


def _padding(batch: Any) -> Any:
    """Rows of a step that belong to nobody, bool [decode_rows]."""
    return batch.slots == 0


@BATCH(
    "batch-padding-is-last-request",
    "padded rows are processed as tokens of the last request",
    sources="M83, M86",
    missed_by="batches that fill their bin",
)
def _as_last(right: Any) -> Any:
    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        live = int((~_padding(batch)).sum())
        if not 0 < live < batch.decode_rows:
            return batch
        slots, lengths, table = batch.slots.clone(), batch.lengths.clone(), batch.block_table.clone()
        for own in (slots, lengths, table):
            own[live:] = own[live - 1]
        return replace(batch, slots=slots, lengths=lengths, block_table=table)

    return faulty


@BATCH(
    "batch-padding-clamped-to-slot-1",
    "a padding index is clamped to the first slot that a request can own",
    sources="M84",
    missed_by="tests in which that slot is free",
)
def _clamped(right: Any) -> Any:
    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        return replace(batch, slots=batch.slots.clamp_min(1))

    return faulty


@BATCH(
    "batch-padding-position",
    "padded rows write their latent at the last request's position",
    sources="M86",
    missed_by="batches that fill their bin; short outputs",
)
def _position(right: Any) -> Any:
    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        live = int((~_padding(batch)).sum())
        positions = batch.positions.clone()
        if 0 < live < batch.decode_rows:
            positions[live : batch.decode_rows] = positions[live - 1]
        return replace(batch, positions=positions)

    return faulty


@BATCH(
    "batch-indices-baked",
    "slots of the first step of a size are baked into its graph",
    kind=Kind.STALE,
    sources="M87",
    missed_by="replays with the same slots",
)
def _baked(right: Any) -> Any:
    first: dict[int, Any] = {}

    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        if batch.sequences:
            return batch
        return replace(batch, slots=first.setdefault(batch.decode_rows, batch.slots))

    return faulty


@BATCH(
    "batch-one-token-prefill-stale",
    "a one-token prompt replays the decode graph with the last step's indices",
    kind=Kind.STALE,
    sources="M88",
    missed_by="prompts of more than one token",
)
def _one_token(right: Any) -> Any:
    last: list[Any] = []

    def faulty(chunks: Any, *args: Any, **options: Any) -> Any:
        batch = right(chunks, *args, **options)
        first = [chunk for chunk in chunks if chunk.start == 0]
        if len(first) == len(chunks) and not batch.sequences and last:
            return replace(batch, slots=last[-1][: batch.decode_rows].expand(batch.decode_rows).clone())
        last[:] = [batch.slots] if len(batch.slots) == 1 else last
        return batch

    return faulty


@BATCH(
    "batch-growth-stale-lengths",
    "rows beyond the batch seen at capture keep the lengths of a smaller buffer",
    kind=Kind.STALE,
    sources="M89",
    missed_by="one batch size",
)
def _growth(right: Any) -> Any:
    captured: list[int] = []

    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        captured.append(batch.decode_rows) if not captured and batch.decode_rows else None
        lengths = batch.lengths.clone()
        if captured:
            lengths[captured[0] :] = lengths[captured[0] :].clamp_max(1)
        return replace(batch, lengths=lengths)

    return faulty


@BATCH(
    "batch-chunk-forgets-start",
    "the second chunk of a prompt does not see the first one's keys",
    kind=Kind.STALE,
    sources="M72",
    missed_by="prompts of one chunk",
)
def _forgets(right: Any) -> Any:
    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        return replace(batch, sequences=[replace(rows, start=0) for rows in batch.sequences])

    return faulty


@BATCH(
    "batch-first-row-logits",
    "logits of a chunk's first row are taken for those of its last",
    kind=Kind.INDEX,
    sources="kind of M96",
    missed_by="decode steps",
)
def _first_row(right: Any) -> Any:
    def faulty(chunks: Any, *args: Any, **options: Any) -> Any:
        batch = right(chunks, *args, **options)
        rows = batch.logit_rows.clone()
        for sequence in batch.sequences if len(rows) == len(chunks) else ():
            rows[rows == sequence.rows.stop - 1] = sequence.rows.start
        return replace(batch, logit_rows=rows)

    return faulty


@BATCH(
    "batch-rows-swapped-in-mixed-step",
    "two decode rows change places when a prefill joins the step",
    kind=Kind.INDEX,
    sources="M129",
    missed_by="steps of one kind",
)
def _swapped(right: Any) -> Any:
    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        if not batch.sequences or batch.decode_rows < 2:
            return batch
        slots = batch.slots.clone()
        slots[:2] = batch.slots[:2].flip(0)
        return replace(batch, slots=slots)

    return faulty


@BATCH(
    "batch-table-cut",
    "the page table has room for two pages",
    kind=Kind.INDEX,
    sources="kind of M78",
    missed_by="short contexts",
)
def _cut(right: Any) -> Any:
    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        table = batch.block_table.clone()
        table[:, 2:] = table[:, 1:2]
        return replace(batch, block_table=table)

    return faulty


@BATCH(
    "batch-length-short",
    "a decode row does not see its own token when the batch is padded",
    kind=Kind.INDEX,
    sources="M79",
    missed_by="batches that fill their bin",
)
def _length(right: Any) -> Any:
    def faulty(*args: Any, **options: Any) -> Any:
        batch = right(*args, **options)
        shorter = (batch.lengths > 1) & bool(_padding(batch).any())
        return replace(batch, lengths=batch.lengths - shorter.long())

    return faulty
