"""Which intermediate results each path rounds, by op: the contract that both the oracle and its bound are made from.

A *site* is an intermediate result of docs/ops.md. Every site named here is rounded to BF16 to nearest, ties to even;
everything else is FP32. Outputs of `mla_query` are stored in the cache's own format instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GENERIC, SPECIALIZED = "generic", "specialized"


@dataclass(frozen=True)
class Contract:
    """Roundings of one op on one path.

    `sites`: what is rounded to BF16, in the order of computation. `split_keys`: attention over slices of the context,
    each with a maximum of its own. `quadratic_norm`: the output norm's sum of squares is a quadratic form of the mix's
    two parts, which costs accuracy where they cancel.
    """

    sites: tuple[str, ...] = ()
    split_keys: bool = False
    quadratic_norm: bool = False


_KDA_GENERIC = Contract(("g1", "conv", "o", "y"))
_KDA_FUSED = Contract(("g1", "y"))

_GENERIC: Mapping[str, Contract] = {
    "projection": Contract(("y",)),
    "rms_norm": Contract(("y",)),
    "all_reduce": Contract(("y",)),
    "attn_res": Contract(("prefix", "mixed")),
    "output_mix": Contract(("partial", "attention", "prefix", "mixed")),
    "kda_step": _KDA_GENERIC,
    "kda_verify": _KDA_GENERIC,
    "kda_sequence": _KDA_GENERIC,
    "mla_query": Contract(("kv_n", "q_n", "q", "absorbed")),
    "mla_attend": Contract(("latent",)),
    "mla_attend_dcp": Contract(("latent",)),
    "mla_attend_sequence": Contract(("latent",)),
    "mla_value": Contract(("value", "y")),
    "moe_front": Contract(("z",)),
    "route": Contract(),
    "experts": Contract(("hidden", "slot", "latent")),
    "shared_expert": Contract(("gate_up", "hidden", "partial")),
    "moe_tail": Contract(("latent", "norm", "up", "shared", "delta")),
}

CONTRACTS: dict[str, dict[str, Contract]] = {
    GENERIC: dict(_GENERIC),
    SPECIALIZED: {
        **_GENERIC,
        "attn_res": Contract(("prefix", "mixed"), quadratic_norm=True),
        "output_mix": Contract(("partial", "attention", "prefix", "mixed"), quadratic_norm=True),
        "kda_step": _KDA_FUSED,
        "kda_verify": _KDA_FUSED,
        "mla_attend": Contract(("p", "latent"), split_keys=True),
        "mla_attend_dcp": Contract(("p", "latent"), split_keys=True),
    },
}
"""Path -> op -> contract. The specialised path has no `*_sequence` ops of its own: it runs the generic ones."""

SITES: Mapping[str, str] = MappingProxyType(
    {
        "absorbed": "q_nope @ w_uk",
        "attention": "sum over ranks of the partials",
        "conv": "convolution after silu",
        "delta": "up + shared",
        "g1": "f_a @ f_b^T",
        "gate_up": "x @ gate_up^T",
        "hidden": "SiTU of gate and up",
        "kv_n": "normalised latent",
        "latent": "attention output, or the sum over slots or ranks",
        "mixed": "normalised mix",
        "norm": "normalised latent of the tail",
        "o": "read-out of the state",
        "p": "softmax numerators, relative to the largest score so far in their split (by blocks of 32 keys)",
        "partial": "this rank's output projection",
        "prefix": "prefix + delta",
        "q": "q_b @ q_n",
        "q_n": "normalised query latent",
        "shared": "sum over ranks of the shared expert",
        "slot": "one expert's output for one row",
        "up": "up-projection of the tail",
        "value": "latent @ w_uv",
        "y": "the output",
        "z": "latent input of the experts",
    }
)
"""What the name of a site stands for."""

SPLITS_BY_BIN: Mapping[int, int] = MappingProxyType({1: 64, 2: 64, 4: 64, 8: 32, 16: 16, 32: 8, 64: 4})
"""Most splits of the specialised attention by batch bin (the smallest that holds the rows)."""

LEAST_SPLIT_PAGES = 4
"""Pages of the shortest split."""

KEYS_PER_BLOCK = 32
"""Keys of a split that share a running maximum."""


def split_length(rows: int, table_pages: int, page: int) -> int:
    """Keys of one split: the block table's width in pages over the bin's splits, rounded up, at least the shortest.

    Raises ValueError for more rows than the largest bin.
    """
    bins = [size for size in SPLITS_BY_BIN if size >= rows]
    if not bins:
        raise ValueError(f"{rows} rows given, the specialised attention takes up to {max(SPLITS_BY_BIN)}")
    return max(-(-table_pages // SPLITS_BY_BIN[min(bins)]), LEAST_SPLIT_PAGES) * page


def contract_table() -> str:
    """The contracts as a Markdown table, one row per op: the sites that each path rounds to BF16."""
    lines = ["| op | generic rounds to BF16 | specialised rounds to BF16 |", "|---|---|---|"]
    for op, generic in CONTRACTS[GENERIC].items():
        fused = CONTRACTS[SPECIALIZED][op]
        same = "the same" if fused.sites == generic.sites else _listed(fused)
        extra = "; split keys" * fused.split_keys + "; norm by a quadratic form" * fused.quadratic_norm
        lines.append(f"| `{op}` | {_listed(generic)} | {same}{extra} |")
    return "\n".join(lines)


def site_list() -> str:
    """What the name of every site stands for, as Markdown."""
    return "Sites: " + "; ".join(f"`{site}` {what}" for site, what in SITES.items()) + "."


def _listed(contract: Contract) -> str:
    return ", ".join(contract.sites) or "nothing"
