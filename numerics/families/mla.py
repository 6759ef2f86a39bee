"""Input families of multi-head latent attention over a paged latent cache.

Pages of a row are scattered over the pool in random order. Everything that no row owns is large garbage: page 0,
spare pages and the tail of a last page. A BF16 cache ignores the scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numerics.families.constants import EPS, SCALES, TEMPER, turned
from numerics.families.dims import Dims
from numerics.families.draw import Draw
from numerics.families.linear import BEYOND_FP16, FAINT
from numerics.formats import E4M3_MAX, bf16, e4m3_encode

PEAK_SCORE = 18.0
"""Score of a planted key: against some hundred keys of score around +-1.5 it takes nearly all of the
softmax."""
TOWER_SCORE = 300.0
"""Score beyond what exp (88) and exp2 (127) hold in FP32: only a softmax that subtracts its maximum survives it."""
PIT_SCORE = -200.0
"""Score of every key of the `pits` families: below what exp2 holds in FP32, so that a maximum that starts at 0 leaves
nothing."""
PIT_QUERY = 24.0
"""Element of a query, beyond the values' columns, that takes a key down there."""
LONG_PAGES = (65, 80)
"""Pages of the longest request of the `long` families."""
ROOM = (1, 3, 5)
"""Width of a block table in requests as long as the longest: an engine's has room for the longest that it allows, and
the splits of the context follow from that."""
VERIFY_WIDTHS = (2, 3, 4, 5, 6, 7, 8)
LOUD = 400.0
"""Factor that takes a channel of magnitude 1 beyond E4M3's 448 times either scale."""


@dataclass(frozen=True)
class Storage:
    """How queries and cache rows are stored: BF16, which has no use for scales, or E4M3 bytes of value / scale."""

    fp8: bool
    pair: tuple[float, float]

    @property
    def scales(self) -> dict[str, float]:
        return {"q_scale": self.pair[0], "k_scale": self.pair[1]}

    def store(self, x: Tensor, scale: str) -> Tensor:
        return e4m3_encode(x / self.scales[scale]) if self.fp8 else bf16(x)

    def garbage(self, draw: Draw, *shape: int) -> Tensor:
        """Bytes of +-448, or BF16 garbage."""
        return e4m3_encode(draw.signs(*shape) * E4M3_MAX) if self.fp8 else draw.garbage(*shape)


def mla_query(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """Rows write to scattered positions, the first and the last of a page among them; null
    rows have a position inside page 0. `saturating_fp8`: a few channels of every output exceed
    what E4M3 holds."""
    storage = Storage(family.endswith("fp8"), turned(draw, rows, SCALES))
    h, r = dims["num_attention_heads"], dims["q_lora_rank"]
    C, R, nope = dims["kv_lora_rank"], dims["qk_rope_head_dim"], dims["qk_nope_head_dim"]
    page = dims["page_size"]
    a = draw.bf16(rows, r + C + R)
    kv_norm_weight = draw.norm_weight(C)
    q_b, w_uk = draw.bf16(h * (nope + R), r, std=r**-0.5), draw.bf16(h, nope, C, std=nope**-0.5)
    if family == "saturating_fp8":
        kv_norm_weight[:8] *= LOUD
        a[:, -8:] *= LOUD
        w_uk[:, :, 8:12] *= LOUD
        q_b.view(h, nope + R, r)[:, -4:] *= LOUD
    elif family == "subnormals_bf16":
        a = draw.with_subnormals(a)
    elif family == "faint_bf16":
        a *= FAINT
    pages = 3 + -(-2 * rows // page)
    last_page = (pages - 1) * page
    edges = torch.tensor([last_page, pages * page - 1])
    between = page + draw.permutation(last_page - page)
    positions = torch.cat([edges, between])[:rows][draw.permutation(rows)]
    for null in draw.null_rows(rows):
        positions[null] = draw.one(0, page)
    return {
        "a": a,
        "q_norm_weight": draw.norm_weight(r),
        "kv_norm_weight": kv_norm_weight,
        "eps": turned(draw, rows, EPS),
        "q_b": q_b,
        "w_uk": w_uk,
        **storage.scales,
        "cache": storage.garbage(draw, pages, page, C + R),
        "positions": positions,
    }


def mla_attend(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """Strongly ragged lengths: 1, page - 1, page, page + 1, many pages, and 0 (a padded row).

    `verify`: requests of 2 to 8 (drawn) consecutive tokens, each token a row that sees one key more; the last
    request may be cut short by the number of rows. `long`: the first request has 65 to 80 pages."""
    width = VERIFY_WIDTHS[draw.one(0, len(VERIFY_WIDTHS))] if family.startswith("verify") else 1
    owners = [row // width for row in range(rows)]
    queries = [[row for row in range(rows) if owners[row] == request] for request in range(owners[-1] + 1)]
    lengths = _lengths(draw, dims["page_size"], len(queries))
    if family.startswith("long"):
        lengths[0] = draw.one(LONG_PAGES[0], LONG_PAGES[1]) * dims["page_size"] + 1
    seen = [lengths[owners[row]] + (lengths[owners[row]] > 0) * (row % width) for row in range(rows)]
    case, table = _attention(draw, dims, family, rows, [max(seen[row] for row in own) for own in queries], queries)
    return {**case, "block_table": table[owners], "lengths": torch.tensor(seen)}


def mla_attend_sequence(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """`rows` tokens of one request, after 0, page - 1, 2 page - 3 or 5 page tokens (drawn)."""
    page = dims["page_size"]
    start = (0, page - 1, 2 * page - 3, 5 * page)[draw.one(0, 4)]
    case, table = _attention(draw, dims, family, rows, [start + rows], [list(range(rows))])
    return {**case, "block_table": table[0], "start": start}


def mla_value(draw: Draw, dims: Dims, family: str, rows: int) -> dict[str, Any]:
    """`saturated_gates`: gates of +-30, where the sigmoid is 0 or 1 to FP32, on latents beyond what FP16 holds."""
    h, C, v = dims["num_attention_heads"], dims["kv_lora_rank"], dims["v_head_dim"]
    latent, gate = draw.bf16(rows, h, C), draw.bf16(rows, h * v)
    if family == "saturated_gates":
        latent, gate = latent * BEYOND_FP16, bf16(gate.float() * 30)
    elif family == "subnormals":
        latent, gate = draw.with_subnormals(latent), draw.with_subnormals(gate)
    return {"latent": latent, "w_uv": draw.bf16(h, C, v, std=C**-0.5), "gate": gate}


def _lengths(draw: Draw, page: int, rows: int) -> list[int]:
    ragged = [12 * page + 5, 1, page - 1, page, page + 1, 0, 2 * page, 3 * page - 1, 7 * page + 1]
    if rows == 1:
        return [(12 * page + 5, page + 1, page, 3 * page - 1)[draw.one(0, 4)]]
    lengths = [ragged[i] if i < len(ragged) else draw.one(1, 8 * page) for i in range(rows)]
    # A padded batch ends in rows that belong to nobody; from six rows on there is another one among them.
    lengths[-1] = 0
    return lengths


def _attention(
    draw: Draw, dims: Dims, family: str, rows: int, lengths: list[int], queries: list[list[int]]
) -> tuple[dict[str, Any], Tensor]:
    """q, cache and scales for requests of `lengths`, where request i owns the query rows `queries[i]`;
    block table."""
    storage = Storage(family.endswith("fp8"), turned(draw, rows, SCALES))
    h, C, R = dims["num_attention_heads"], dims["kv_lora_rank"], dims["qk_rope_head_dim"]
    page = dims["page_size"]
    softmax_scale = (dims["qk_nope_head_dim"] + R) ** -0.5 * turned(draw, rows, TEMPER)
    q = draw.normal(rows, h, C + R)
    if family == "saturating_fp8":
        # Where q is loud the keys are faint and the other way round, so that scores stay moderate.
        q[..., :2], q[..., 2:6] = LOUD * draw.signs(rows, h, 2), 0.01
    elif family.startswith("pits"):
        q[..., -1] = PIT_QUERY
    elif family.startswith("subnormals"):
        q = draw.with_subnormals(q)
    table, pages = _block_table(draw, lengths, page, turned(draw, rows, ROOM))
    cache = storage.garbage(draw, pages, page, C + R)
    for request, length in enumerate(lengths):
        keys = draw.normal(length, C + R)
        if family == "saturating_fp8":
            keys[:, :2], keys[:, 2:6] = 0.01, LOUD * draw.signs(length, 4)
        elif family.startswith("subnormals") and length:
            keys = draw.with_subnormals(keys)
        elif family.startswith("pits"):
            keys[:, -1] = PIT_SCORE / softmax_scale / PIT_QUERY
        elif family.startswith(("peaks", "towers", "verify", "long")) and length:
            score = TOWER_SCORE if family.startswith("towers") else PEAK_SCORE
            _plant_peaks(keys, q[queries[request]], page, score / softmax_scale)
        own = table[request, : -(-length // page)]
        held = cache[own].flatten(0, 1)
        held[:length] = storage.store(keys, "k_scale")
        cache[own] = held.view(-1, page, C + R)
    case = {
        "q": storage.store(q, "q_scale"),
        "cache": cache,
        "softmax_scale": softmax_scale,
        **storage.scales,
        "kv_rank": C,
    }
    return case, table


def _block_table(draw: Draw, lengths: list[int], page: int, room: int) -> tuple[Tensor, int]:
    """Scattered, shuffled pages per request, unused entries 0, `room` times as many as the longest request needs; and
    the number of pages in the pool."""
    counts = [-(-length // page) for length in lengths]
    pages = 1 + sum(counts) + 3
    shuffled = 1 + draw.permutation(pages - 1)
    table = torch.zeros(len(lengths), room * max(counts) + 2, dtype=torch.int64)
    for row, (count, own) in enumerate(zip(counts, shuffled[: sum(counts)].split(counts), strict=True)):
        table[row, :count] = own
    return table, pages


def _plant_peaks(keys: Tensor, q: Tensor, page: int, score: float) -> None:
    """Give each (query row, head) one key of q.k = score at a page or split boundary, so that losing it is
    gross.

    keys: [length, row], changed in place; q: [queries, h, row].
    """
    length = keys.shape[0]
    splits = [length * i // s + side for s in (2, 3, 4, 8) for i in range(1, s) for side in (-1, 0)]
    last_page = (length - 1) // page * page
    edges = [length - 1, 0, page - 1, page, 2 * page - 1, last_page - 1, last_page, *splits]
    # Rows of a verify step see one key more each: the newest keys are their own.
    edges[1:1] = [length - 1 - row for row in range(1, q.shape[0])]
    places = list(dict.fromkeys(j for j in edges if 0 <= j < length))
    for i, direction in enumerate(q.flatten(0, 1)):
        j = places[i % len(places)]
        peak = direction * (score / float(direction.square().sum()))
        # The first peak at a place replaces the random key; later ones are added to it.
        keys[j] = peak if i < len(places) else keys[j] + peak


_SEQUENCE = (
    "iid_bf16",
    "iid_fp8",
    "peaks_bf16",
    "peaks_fp8",
    "towers_bf16",
    "pits_bf16",
    "saturating_fp8",
    "subnormals_bf16",
)

FAMILIES = {
    "mla_query": ("iid_bf16", "iid_fp8", "saturating_fp8", "faint_bf16", "subnormals_bf16"),
    "mla_attend": (*_SEQUENCE, "long_fp8", "verify_bf16", "verify_fp8"),
    "mla_attend_sequence": _SEQUENCE,
    "mla_value": ("iid", "saturated_gates", "subnormals"),
}
