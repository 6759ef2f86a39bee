"""A drafter's folder: `config.json` and `model.safetensors` with its parameters in BF16."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from decode_impl.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from decode_impl.drafter.config import DrafterError, read_drafter_config
from decode_impl.drafter.model import DrafterModel
from numerics.formats import bf16


def save_drafter(model: DrafterModel, folder: Path) -> int:
    """Write the folder and return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: bf16(tensor.detach().cpu()).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(model.config.to_json(), encoding="utf-8")
    return sum(file.stat().st_size for file in folder.iterdir())


def load_drafter(folder: Path) -> DrafterModel:
    """Read a drafter for inference, parameters in FP32 holding the stored BF16 values.

    Raises:
        DrafterError: a file is missing or unreadable, or a tensor is missing, unknown, of another shape or not finite.
    """
    model = DrafterModel(read_drafter_config(folder / CONFIG_FILE))
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"drafter weights {folder / WEIGHTS_FILE}: {error}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"{n} is {found.get(n)}, expected {expected.get(n)}" for n in sorted(expected | found)]
    problems = [p for p, n in zip(problems, sorted(expected | found), strict=True) if expected.get(n) != found.get(n)]
    problems += [f"{name} holds NaN or infinity" for name, t in tensors.items() if not bool(t.isfinite().all())]
    if problems:
        raise DrafterError(f"drafter weights {folder / WEIGHTS_FILE}: {'; '.join(problems[:4])}")
    model.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    nn.Module.requires_grad_(model, False)
    return model.eval()
