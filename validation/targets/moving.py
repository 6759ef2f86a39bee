"""Tensors on another device and back, bytes and strides as they were.

A copy of a view would close its gaps and cut its ties to other views; what a gate asks of an op (that nothing between
rows is written, that a pool is one for all) would be lost on the way. So whole storages move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Moved:
    """Tensors on `device`, each storage moved once; the way back is another `Moved`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        """A tensor's view of the moved storage, with its sizes, strides and offset; anything else as it is."""
        if not isinstance(value, Tensor) or value.device == self.device:
            return value
        moved = self._whole(value)
        layout = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=self.device).set_(moved.untyped_storage(), *layout)

    def case(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """All tensors of an op's case."""
        return {name: self(value) for name, value in case.items()}

    def write_back(self) -> None:
        """Bring what was written to the copies, by right or not, to the storages that they are copies of."""
        for here, there in self._storages.values():
            here.copy_(there)

    def _whole(self, value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._storages:
            here = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            self._storages[storage.data_ptr()] = here, here.to(self.device)
        return self._storages[storage.data_ptr()][1]
