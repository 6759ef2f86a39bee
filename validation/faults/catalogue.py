"""All faults by id. A new fault is one entry in its layer's file; a new layer is one file and its name here."""

from __future__ import annotations

from validation.faults import (
    drafter,
    experts,
    kda,
    kda_inputs,
    kda_sequence,
    long_output,
    mla_attention,
    mla_scales,
    prefix,
    reduce,
    residual,
    router,
    sampling,
    speculation,
    state,
    step_layout,
    sync,
)
from validation.faults.base import Fault
from validation.faults.layer import Layer

LAYERS: tuple[Layer, ...] = tuple(
    module.LAYER
    for module in (
        kda,
        kda_inputs,
        kda_sequence,
        mla_scales,
        mla_attention,
        router,
        experts,
        residual,
        reduce,
        state,
        prefix,
        step_layout,
        speculation,
        drafter,
        sync,
        long_output,
        sampling,
    )
)
"""The layers in the order of a decode step, then what surrounds it."""

FAULTS: dict[str, Fault] = {fault.id: fault for layer in LAYERS for fault in layer.faults}
"""Every fault, by id."""
