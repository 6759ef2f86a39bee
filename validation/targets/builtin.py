"""The target `builtin`: decode_impl in this process.

On a CPU with the emulation of its specialised path; with `[target.options] device = "cuda"` with the fused kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from decode_impl.caches import LatentCache, ScaleError
from decode_impl.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Checkpoint, CheckpointError, load_checkpoint
from decode_impl.deployment import Deployment, DeploymentError, prefix_block_for
from decode_impl.drafter.checkpoint import load_drafter
from decode_impl.drafter.config import DrafterError
from decode_impl.drafter.model import DrafterModel
from decode_impl.embedded import EMBEDDED_MODEL
from decode_impl.ops import OpTable
from decode_impl.parts import PartTable
from decode_impl.runner import ModelRunner, Paths, paths_on
from decode_impl.specialized.implementation import implementation
from decode_impl.specialized.requirements import unsupported
from decode_impl.weights import ModelWeights, shard_weights
from validation.faults.base import ENGINE, Fault
from validation.targets.base import ArmConfig, Capability, TargetError
from validation.targets.builtin_arm import BuiltinArm
from validation.targets.builtin_schedule import ENGINE_PARTS
from validation.targets.chat import encode_chat
from validation.targets.layered import Layers
from validation.targets.miniature import miniature

_DEVICES = ("cpu", "cuda")


class BuiltinTarget:
    """A checkpoint of the K3 family decoded by decode_impl. Arms share its weights and own their caches."""

    name = "builtin"
    capabilities = frozenset(
        {
            Capability.FULL_LOGITS,
            Capability.TEACHER_FORCED,
            Capability.READ_STATE,
            Capability.RUN_OP,
            Capability.INJECT_FAULT,
            Capability.RANKS,
            Capability.CONTEXT_PARALLEL,
            Capability.SCHEDULE,
            Capability.GENERATE,
            Capability.DRAFTS,
            Capability.SUBSTITUTE_OP,
            Capability.READ_BOUNDARIES,
            Capability.COLLECTIVES,
        }
    )

    def __init__(self, checkpoint: Checkpoint, folder: Path | None, device: str = "cpu") -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._device = torch.device(device)
        self._sharded: dict[int, ModelWeights] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A loaded target pickles as the way to load it, one made in memory as its checkpoint."""
        if self._folder is None:
            return BuiltinTarget, (self._checkpoint, None, str(self._device))
        return BuiltinTarget.load, (self._folder, str(self._device))

    @classmethod
    def configured(cls, model_path: Path | None, options: Mapping[str, Any]) -> BuiltinTarget:
        """Load with the options of a profile: `device`, "cpu" or "cuda".

        Raises:
            TargetError: as `load`, or other options than these, or no such device here.
        """
        device = options.get("device", "cpu")
        if unknown := sorted(options.keys() - {"device"}):
            raise TargetError(f"target.options.{unknown[0]}: target builtin has no such option; allowed is device")
        if device not in _DEVICES:
            raise TargetError(f"target.options.device is {device!r}, allowed are {' and '.join(_DEVICES)}")
        if device == "cuda" and not torch.cuda.is_available():
            raise TargetError("target.options.device is cuda, but torch finds no CUDA device here; leave it out")
        return cls.load(model_path, device)

    @classmethod
    def load(cls, model_path: Path | None, device: str = "cpu") -> BuiltinTarget:
        """Load a checkpoint folder with its tokenizer, or the embedded model where `model_path` is None.

        Raises:
            TargetError: the checkpoint cannot be used, or its tokenizer is missing or of another vocabulary.
        """
        folder = model_path or EMBEDDED_MODEL
        if not folder.is_dir():
            raise TargetError(f"model {folder}: no such folder; give a checkpoint folder with config.json in it")
        try:
            checkpoint = load_checkpoint(folder)
        except CheckpointError as error:
            raise TargetError(str(error)) from None
        target = cls(checkpoint, folder, device)
        known, size = target._tokenizer.get_vocab_size(), checkpoint.config.vocab_size
        if known > size:
            raise TargetError(f"{folder / 'tokenizer.json'}: has {known} tokens, the model's vocabulary {size}")
        return target

    def fingerprint(self) -> dict[str, str]:
        """Model, digest of its files, what runs the specialised path, and the library that computes."""
        return {
            "model": self._checkpoint.config.name,
            "weights_sha256": self._checkpoint.digest,
            "tokenizer_sha256": self._tokenizer_digest,
            "drafter_sha256": self._drafter_digest,
            "specialised path": implementation(self._device),
            "device": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }

    def tokens(self, text: str) -> list[int]:
        """Token ids of `text`.

        Raises:
            TargetError: the model folder has no readable tokenizer.json.
        """
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat under the template of `tokenizer_config.json`."""
        file = self._folder / "tokenizer_config.json" if self._folder else None
        if file is None:
            raise TargetError(f"model {self._checkpoint.config.name} has no folder, and so no chat template")
        return encode_chat(self._tokenizer, file, messages)

    def stop_tokens(self) -> list[int]:
        """The end-of-sequence token."""
        return [self._checkpoint.config.eos_token_id]

    @cached_property
    def _drafter(self) -> DrafterModel | None:
        folder = self._folder / "drafter" if self._folder else None
        try:
            return load_drafter(folder) if folder and folder.is_dir() else None
        except DrafterError as error:
            raise TargetError(str(error)) from None

    @cached_property
    def _drafter_digest(self) -> str:
        folder = self._folder / "drafter" if self._folder else None
        files = [folder / name for name in (CONFIG_FILE, WEIGHTS_FILE)] if folder and folder.is_dir() else []
        digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files))
        return digest.hexdigest() if files else "none"

    @cached_property
    def _tokenizer_digest(self) -> str:
        file = self._folder / "tokenizer.json" if self._folder else None
        return hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else "none"

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        file = self._folder / "tokenizer.json" if self._folder else None
        if file is None or not file.is_file():
            raise TargetError(f"model {self._checkpoint.config.name}: no tokenizer.json beside config.json")
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:
            # The library raises bare Exception for a malformed file.
            raise TargetError(f"{file}: not a tokenizer file ({error})") from None

    def dims(self) -> Mapping[str, int]:
        """Dimensions by the names of `config.json`."""
        fields = self._checkpoint.config.to_hf()
        flat = {**fields, **{f"linear_attn_{k}": v for k, v in fields["linear_attn_config"].items()}}
        return {name: value for name, value in flat.items() if type(value) is int}

    def miniature(self) -> BuiltinTarget:
        """decode_impl's engine over a random model of next to no size, whatever this target's model is."""
        return BuiltinTarget(miniature(), None, str(self._device))

    def open(self, config: ArmConfig) -> BuiltinArm:
        """Open an arm; refuses with every reason at once, before weights are cut or caches are made."""
        try:
            deployment = Deployment(
                decode_backend=config.decode_backend,
                kv_cache_dtype=config.kv_cache_dtype,
                state_dtype=config.state_dtype,
                tensor_parallel=config.tensor_parallel,
                context_parallel=config.context_parallel,
                prefix_block=prefix_block_for(config.context_parallel),
                max_batch=config.max_batch,
                max_context=config.max_context,
                drafts=config.drafts,
                draft_sampling=config.draft_sampling,
            )
            reasons = self._refusals(deployment)
            if reasons:
                raise DeploymentError("; ".join(reasons))
            weights = self._weights(config.tensor_parallel)
            everywhere = [fault for fault in config.faults if fault.only_in is None or not fault.injectable]
            usual = paths_on(self._device)
            paths, parts = with_faults(usual, ENGINE_PARTS, everywhere)
            layers = Layers(weights)
            paths = layers.applied(paths, config, usual.generic)
            runner = ModelRunner(weights, deployment, paths, parts, self._drafter if config.drafts else None)
        except ValueError as error:
            raise TargetError(f"arm {config.name}: {error}") from None
        return BuiltinArm(config, runner, layers)

    def _refusals(self, deployment: Deployment) -> list[str]:
        """Why this model cannot be deployed so."""
        config, wanted, reasons = self._checkpoint.config, deployment, []
        if wanted.decode_backend == "latency_specialized":
            reasons += [f"latency_specialized is refused: {why}" for why in unsupported(config, wanted)]
        if wanted.max_context > config.max_position_embeddings:
            most = config.max_position_embeddings
            reasons.append(f"max_context is {wanted.max_context}, the model's max_position_embeddings is {most}")
        try:
            # A cache without pages checks the scales, which do not depend on the number of ranks.
            LatentCache(self._weights(1), wanted.kv_cache_dtype, 0, wanted.page_size)
        except ScaleError as error:
            reasons.append(str(error))
        return reasons

    def _weights(self, ranks: int) -> ModelWeights:
        if ranks not in self._sharded:
            self._sharded[ranks] = shard_weights(self._checkpoint.config, self._checkpoint.tensors, ranks, self._device)
        return self._sharded[ranks]


def with_faults(paths: Paths, parts: PartTable, faults: Sequence[Fault]) -> tuple[Paths, PartTable]:
    """The op tables of both paths and the table of engine parts, with each fault's replacements put in.

    Raises:
        TargetError: a fault that is only declared: what it breaks does not exist here.
    """
    tables: dict[str, OpTable] = {"generic": paths.generic, "specialized": paths.specialized, ENGINE: parts}
    for fault in faults:
        if not fault.injectable:
            raise TargetError(
                f"fault {fault.id} is only declared: there is no {fault.component!r} to break here yet; "
                "choose one that `decodegate faults` does not mark so"
            )
        for path in fault.paths:
            tables[path] = {**tables[path], **fault.mutate(tables[path])}
    return Paths(tables["generic"], tables["specialized"]), tables[ENGINE]
