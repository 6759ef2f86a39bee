"""The builtin target's specialised path as seen by `decodegate fit`: what it refuses and where a step goes.

Nothing is loaded. The answers are decode_impl's own predicates, not a copy of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode_impl.batch import Chunk
from decode_impl.config import ModelConfig
from decode_impl.config_fields import ConfigError
from decode_impl.deployment import Deployment, DeploymentError
from decode_impl.presets import preset
from decode_impl.specialized.implementation import CAPABILITY
from decode_impl.specialized.plan import plan
from decode_impl.specialized.requirements import unsupported
from validation.errors import UsageError, one_line
from validation.files import read_limited

KERNEL_CAPABILITY = CAPABILITY
"""Least CUDA capability that the fused kernels are built for; elsewhere their emulation runs, which has no speed."""

DEVICES = 1
"""Ranks of the builtin engine are virtual: all of them run in one process, on one device."""

_PRESETS = ("k3", "k3-mini")
_LARGEST_CONFIG = 2**20


def model_config(name: str) -> Mapping[str, Any]:
    """Fields of `config.json` of a model: `k3`, `k3-mini`, or the path of a `config.json`.

    Raises:
        UsageError: no such model, or not one of the K3 family; every reason on one line.
    """
    return _config(name).to_hf()


def refusals(name: str, options: Mapping[str, Any]) -> list[str]:
    """Every reason why the specialised path refuses this model with these engine options."""
    try:
        deployment = Deployment(decode_backend="latency_specialized", **options)
    except DeploymentError as error:
        return str(error).split("; ")
    return unsupported(_config(name), deployment)


def fallback(requests: int, drafts: int) -> str | None:
    """Why a decode step of so many requests, each with so many drafts, runs generic; None where it is specialised."""
    width = 1 + drafts
    targets = tuple(range(1, width + 1)) if drafts else ()
    chunk = Chunk(tokens=(1,) * width, start=1, slot=1, pages=(1,), targets=targets)
    decision = plan((chunk,) * requests)
    return None if decision.reason is None else decision.reason.value


def _config(name: str) -> ModelConfig:
    if name in _PRESETS:
        return preset(name)
    path = Path(name)
    if not path.exists():
        raise UsageError(f"model {name!r}: k3, k3-mini, or the path of a config.json is needed")
    try:
        return ModelConfig.from_hf(json.loads(read_limited(path, _LARGEST_CONFIG, "config.json")), path.parent.name)
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"model {name!r} is not one of the K3 family: {one_line(error)}") from error
