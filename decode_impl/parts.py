"""The parts that an engine is built from besides its ops: caches, step layout, planner, sampler, drafter, acceptance.

A table of factories and functions by name, as the ops are: who builds an engine may replace one from outside, and no
part knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from decode_impl.batch import build_batch
from decode_impl.caches import LatentCache, StateCache
from decode_impl.drafter.drafter import Drafter
from decode_impl.parallel.table import collectives
from decode_impl.prefix_cache import PrefixCache
from decode_impl.rejection import accept
from decode_impl.sampling import sample
from decode_impl.specialized.plan import plan

PartTable = Mapping[str, Callable[..., Any]]
"""An engine's parts by name."""

PARTS: PartTable = {
    "latent_cache": LatentCache,
    "state_cache": StateCache,
    "prefix_cache": PrefixCache,
    "build_batch": build_batch,
    "plan": plan,
    "sample": sample,
    "accept": accept,
    "drafter": Drafter,
    "collectives": collectives,
}
"""The parts of every engine, as they are meant to be."""
