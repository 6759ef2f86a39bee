"""All faults by id. A new fault is an entry in its layer's file, or a new file here with a `LAYER` in it."""

from __future__ import annotations

import importlib
import pkgutil

from validation import faults
from validation.faults.base import Fault
from validation.faults.layer import Layer

_ORDER = (
    "kda",
    "kda_inputs",
    "kda_pools",
    "kda_sequence",
    "mla_scales",
    "mla_rows",
    "mla_attention",
    "mla_lengths",
    "mla_dcp",
    "mla_projections",
    "router",
    "experts",
    "residual",
    "projections",
    "reduce",
    "constants",
    "ranges",
    "shapes",
    "state",
    "prefix",
    "step_layout",
    "scheduling",
    "verify",
    "speculation",
    "drafter",
    "acceptance",
    "sync",
    "long_output",
    "sampling",
    "answers",
)
"""Files in the order of a decode step, then what surrounds it; any other file with a LAYER comes last."""


def _layers() -> tuple[Layer, ...]:
    names = [module.name for module in pkgutil.iter_modules(faults.__path__) if module.name != "catalogue"]
    ordered = sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    modules = [importlib.import_module(f"{faults.__name__}.{name}") for name in ordered]
    return tuple(module.LAYER for module in modules if hasattr(module, "LAYER"))


LAYERS: tuple[Layer, ...] = _layers()
"""The layers in order."""

FAULTS: dict[str, Fault] = {fault.id: fault for layer in LAYERS for fault in layer.faults}
"""Every fault, by id."""
