"""A deployment file: hardware, parallelism, formats, speculation and traffic, as the serving team knows them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from validation.documents import Section, load
from validation.fit.hardware import GPUS


def _no_truth(value: object) -> object:
    """Refuse `yes` where a number is wanted: pydantic would read it as 1."""
    if isinstance(value, bool):
        raise ValueError(f"a number is needed, not {str(value).lower()}")
    return value


Number = BeforeValidator(_no_truth)
Count = Annotated[int, Number, Field(ge=1, le=1_000_000)]
Tokens = Annotated[int, Number, Field(ge=1, le=1_000_000_000)]
Share = Annotated[float, Number, Field(ge=0, le=1)]

_ROUNDING = 1e-3
"""Shares that people write with two or three digits add up to 1 within this."""


class Hardware(Section):
    """`nvlink_domain` is the number of GPUs that reach each other's memory by NVLink with multicast; 0 for none."""

    gpu: str
    count: Count
    nvlink_domain: Annotated[int, Number] = Field(default=0, ge=0)

    @field_validator("gpu")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in GPUS:
            raise ValueError(f"no GPU is called {value!r}; known are {', '.join(GPUS)}")
        return value


class Parallel(Section):
    """Ranks by kind. GPUs beyond tensor x pipeline serve further replicas."""

    tensor: Count = 1
    decode_context: Count = 1
    pipeline: Count = 1
    expert: bool = False


class Engine(Section):
    """Switches of the server. `capture_sizes` are the batch sizes with captured graphs; None: the server's default."""

    runner: Literal["v1", "v2"] = "v2"
    cuda_graphs: Literal["full", "piecewise", "none"] = "full"
    stock_torch_compile: bool = False
    dual_batch_overlap: bool = False
    sleep_mode: bool = False
    lora: bool = False
    replay_ssm: bool = False
    aux_attn_res_stream: bool = False
    max_batch: Count | None = None
    capture_sizes: list[Count] | None = Field(default=None, min_length=1)


class Cache(Section):
    """Formats of the latent KV cache and of KDA's two states."""

    kv: Literal["bf16", "fp8", "fp8_ds_mla"] = "bf16"
    conv_state: Literal["bf16", "fp32"] = "bf16"
    recurrent_state: Literal["fp32", "bf16"] = "fp32"


class Speculation(Section):
    """Drafts a step. `acceptance_length` counts tokens committed a step, the bonus token among them."""

    method: str
    drafts: Count
    adaptive: bool = False
    acceptance_length: float | None = Field(default=None, ge=1)
    acceptance: Literal["measured", "synthetic"] = "measured"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.acceptance_length is not None and self.acceptance_length > self.drafts + 1:
            raise ValueError(
                f"acceptance_length is {self.acceptance_length}, {self.drafts} drafts allow {self.drafts + 1}"
            )
        return self


class Traffic(Section):
    """`batch`: requests decoding in one step -> share of decode steps. `context`: tokens -> share of requests.

    `steps_with_prefill` is the share of all steps that prefill, alone or beside decode rows; `ragged_verify` the share
    of decode steps whose requests have different numbers of drafts.
    """

    batch: dict[Count, Share] = Field(min_length=1)
    context: dict[Tokens, Share] = Field(min_length=1)
    steps_with_prefill: Share = 0.0
    ragged_verify: Share = 0.0

    @field_validator("batch", "context")
    @classmethod
    def _whole(cls, value: dict[int, float]) -> dict[int, float]:
        total = math.fsum(value.values())
        if abs(total - 1) > _ROUNDING:
            raise ValueError(f"the shares add up to {total:g}, they must add up to 1")
        return {key: share / total for key, share in value.items()}


class DeploymentFile(Section):
    """The whole file. `least_gain` is the gain in decode throughput below which the team would not switch."""

    name: str
    model: str = "k3"
    hardware: Hardware
    parallel: Parallel = Parallel()
    engine: Engine = Engine()
    cache: Cache = Cache()
    speculation: Speculation | None = None
    traffic: Traffic
    least_gain: float = Field(default=1.05, ge=1)

    @model_validator(mode="after")
    def _batches_are_admitted(self) -> Self:
        most, largest = self.engine.max_batch, max(self.traffic.batch)
        if most is not None and most < largest:
            raise ValueError(f"engine.max_batch is {most}, traffic.batch has steps of {largest} requests")
        return self

    @property
    def drafts(self) -> int:
        """Drafts a request and step; 0 without speculation."""
        return self.speculation.drafts if self.speculation else 0

    @property
    def max_batch(self) -> int:
        """Requests that may decode together."""
        return self.engine.max_batch or max(self.traffic.batch)

    @property
    def max_context(self) -> int:
        """Tokens of the longest context."""
        return max(self.traffic.context)


def load_deployment(path: Path) -> DeploymentFile:
    """The deployment in a YAML or TOML file.

    Raises:
        UsageError: unreadable, malformed, or something in it cannot be; every objection on one line.
    """
    return load(path, DeploymentFile, "deployment")
