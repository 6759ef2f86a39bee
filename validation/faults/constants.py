"""Faults of numbers that are compiled in: an op's argument is ignored and K3's own value, or the usual one, used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from validation.faults.base import Kind
from validation.faults.layer import Layer, at_rows

LAYER = Layer("compiled-in numbers", kind=Kind.CONSTANT, missed_by="the one configuration that the kernel was made for")

NUMBERS: tuple[tuple[str, str, float, str], ...] = (
    ("rms_norm", "eps", 1e-5, "M82"),
    ("attn_res", "eps", 1e-5, "M82"),
    ("output_mix", "eps", 1e-5, "M82"),
    ("mla_query", "eps", 1e-5, "M82"),
    ("moe_tail", "eps", 1e-5, "M82"),
    ("kda_step", "lower_bound", -5.0, "M07"),
    ("kda_verify", "lower_bound", -5.0, "M07"),
    ("route", "scaling", 1.0, "kind of M82"),
    ("experts", "beta", 4.0, "M51"),
    ("experts", "linear_beta", 25.0, "M51"),
    ("shared_expert", "beta", 4.0, "M51"),
    ("shared_expert", "linear_beta", 25.0, "M51"),
    ("mla_attend", "k_scale", 0.7, "kind of M24"),
    ("mla_query", "k_scale", 0.7, "kind of M24"),
)


AT_64: tuple[tuple[str, str, float, str, str], ...] = (
    ("rms_norm", "eps", 1e-5, "x", "M82"),
    ("attn_res", "eps", 1e-5, "prefix", "M82"),
    ("moe_tail", "eps", 1e-5, "latent", "M82"),
    ("mla_query", "eps", 1e-5, "a", "M82"),
    ("kda_step", "lower_bound", -5.0, "proj", "M07"),
    ("route", "scaling", 1.0, "logits", "kind of M82"),
    ("experts", "beta", 4.0, "z", "M51"),
)
"""Op, number, its value in the kernel of the largest batch bin alone, an input with an entry a row, and sources."""


def _fixed(name: str, value: float) -> Callable[..., Any]:
    return lambda op, **case: op(**{**case, name: value})


for _op, _name, _value, _sources in NUMBERS:
    LAYER.op(
        _op,
        f"{_op}-{_name}-compiled-in".replace("_", "-"),
        f"{_name} of {_op} is {_value:g}, whatever the call says",
        sources=_sources,
    )(_fixed(_name, _value))

for _op, _name, _value, _of, _sources in AT_64:
    LAYER.op(
        _op,
        f"{_op}-{_name}-compiled-in-at-64".replace("_", "-"),
        f"{_name} of {_op} is {_value:g} at 64 rows, whatever the call says",
        sources=_sources,
        missed_by="that value at 64 rows; other values at other rows",
    )(at_rows(64, _fixed(_name, _value), of=_of))
