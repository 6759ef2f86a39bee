"""The FP32 masters between legs, in files of at most 14 MiB each, so that they travel anywhere."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from decode_impl.training.model import K3Text

FILE_BYTES = 14 << 20


def save_state(model: K3Text, folder: Path) -> None:
    """Write every parameter and persistent buffer to `folder/state-N.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in model.state_dict().items():
        if size + tensor.nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    for i, tensors in enumerate(files):
        save_file(tensors, folder / f"state-{i}.safetensors")


def load_state(model: K3Text, folder: Path) -> None:
    """Read what `save_state` wrote; raises if a tensor is missing or has another shape."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("state-*.safetensors")):
        tensors |= load_file(path)
    model.load_state_dict(tensors)
