"""A drafter's folder: `config.json` and `model.safetensors` with projections in MXFP4, the rest in BF16."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode_impl.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from decode_impl.drafter.config import DrafterError, read_drafter_config
from decode_impl.drafter.model import DrafterModel, stored_as_mxfp4
from numerics.formats import bf16, mxfp4_dequantise, mxfp4_quantise


def save_drafter(model: DrafterModel, folder: Path) -> int:
    """Write the folder and return its size in bytes.

    A projection `name` is stored as `name_packed` u8 [out, in/2] and `name_scale` u8 [out, in/32].
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if stored_as_mxfp4(name):
            tensors[f"{name}_packed"], tensors[f"{name}_scale"] = mxfp4_quantise(tensor.detach().cpu().float())
        else:
            tensors[name] = bf16(tensor.detach().cpu()).contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(model.config.to_json(), encoding="utf-8")
    return sum(file.stat().st_size for file in folder.iterdir())


def load_drafter(folder: Path) -> DrafterModel:
    """Read a drafter for inference: parameters in FP32 that hold the stored values.

    Raises:
        DrafterError: a file is missing or unreadable, or a tensor is missing, unknown, of another shape or not finite.
    """
    model = DrafterModel(read_drafter_config(folder / CONFIG_FILE))
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"drafter weights {folder / WEIGHTS_FILE}: {error}") from error
    expected = _expected(model)
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    names = sorted(expected | found)
    problems = [f"{n} is {found.get(n)}, expected {expected.get(n)}" for n in names if expected.get(n) != found.get(n)]
    if not problems:
        values = {name: _value(tensors, name) for name in model.state_dict()}
        problems = [f"{name} holds NaN or infinity" for name, t in values.items() if not bool(t.isfinite().all())]
    if problems:
        raise DrafterError(f"drafter weights {folder / WEIGHTS_FILE}: {'; '.join(problems[:4])}")
    model.load_state_dict(values)
    model.requires_grad_(False)
    return model.eval()


def _expected(model: DrafterModel) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every stored tensor."""
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, tensor in model.state_dict().items():
        if stored_as_mxfp4(name):
            rows, columns = tensor.shape
            specs[f"{name}_packed"] = (rows, columns // 2), torch.uint8
            specs[f"{name}_scale"] = (rows, columns // 32), torch.uint8
        else:
            specs[name] = tuple(tensor.shape), torch.bfloat16
    return specs


def _value(tensors: dict[str, Tensor], name: str) -> Tensor:
    if stored_as_mxfp4(name):
        return mxfp4_dequantise(tensors[f"{name}_packed"], tensors[f"{name}_scale"])
    return tensors[name].float()
