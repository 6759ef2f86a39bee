"""Dimensions of a drafter, read from and written to its `config.json`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path


class DrafterError(ValueError):
    """A drafter that cannot be used; the message names the file or field and what is wrong."""


_MOST = {
    "vocab_size": 1 << 20,
    "hidden_size": 1 << 16,
    "layers": 32,
    "max_drafts": 64,
    "latent_size": 1 << 16,
    "heads": 1024,
    "head_dim": 1024,
    "mlp_size": 1 << 18,
    "markov_rank": 1 << 14,
}
"""Largest sizes that are believed: memory is taken before the weights are seen."""


@dataclass(frozen=True)
class DrafterConfig:
    """Layers of attention over the target's tapped hidden states, each with an MLP, and a Markov head.

    `taps` are mixtures of the target's residual stream (see `model.forward`). `max_drafts` is the block: drafts of one
    pass. The vocabulary, the embedding and the output head are the target's.
    """

    vocab_size: int
    hidden_size: int
    taps: tuple[int, ...]
    layers: int = 2
    max_drafts: int = 7
    latent_size: int = 160
    heads: int = 6
    head_dim: int = 32
    mlp_size: int = 192
    markov_rank: int = 32
    rope_theta: float = 10_000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)!r}, a whole number from 1 to {most} is needed"
            for name, most in _MOST.items()
            if not (type(getattr(self, name)) is int and 1 <= getattr(self, name) <= most)
        ]
        problems += [
            f"{name} is {value!r}, a finite number > 0 is needed"
            for name, value in (("rope_theta", self.rope_theta), ("eps", self.eps))
            if not (type(value) in (int, float) and math.isfinite(value) and value > 0)
        ]
        whole = all(type(tap) is int and tap >= 0 for tap in self.taps)
        if not self.taps or not whole or list(self.taps) != sorted(set(self.taps)):
            problems.append(f"taps are {self.taps!r}, rising layer numbers from 0 are needed")
        if not problems and self.head_dim % 2:
            problems.append(f"head_dim is {self.head_dim}, an even number is needed (rotary pairs)")
        blocked = {
            "hidden_size": self.hidden_size,
            "latent_size": self.latent_size,
            "mlp_size": self.mlp_size,
            "heads * head_dim": self.heads * self.head_dim,
        }
        problems += [
            f"{n} is {s}, a multiple of 32 is needed (MXFP4)" for n, s in blocked.items() if not problems and s % 32
        ]
        if problems:
            raise DrafterError("drafter config: " + "; ".join(problems))

    @property
    def row(self) -> int:
        """Elements of one cached context row: keys and values of all heads, layer by layer."""
        return self.layers * 2 * self.heads * self.head_dim

    def to_json(self) -> str:
        """The text of `config.json`."""
        return json.dumps({"model_type": "decodegate_block_drafter", **asdict(self)}, indent=1) + "\n"


def read_drafter_config(path: Path) -> DrafterConfig:
    """Read `config.json`.

    Raises:
        DrafterError: unreadable, not a drafter's, or a field is missing, unknown or out of range.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DrafterError(f"drafter config {path}: {error}") from error
    if not isinstance(data, dict) or data.pop("model_type", None) != "decodegate_block_drafter":
        raise DrafterError(f"drafter config {path}: model_type is not decodegate_block_drafter")
    unknown = sorted(set(data) - {f.name for f in fields(DrafterConfig)})
    if unknown:
        raise DrafterError(f"drafter config {path}: unknown fields {', '.join(unknown)}")
    try:
        return DrafterConfig(**{**data, "taps": tuple(data.get("taps", ()))})
    except (TypeError, OverflowError) as error:
        raise DrafterError(f"drafter config {path}: {error}") from error
