"""All faults by id. A new fault is one entry in its layer's file."""

from __future__ import annotations

from validation.faults import kda, mla, moe
from validation.faults.base import Fault

FAULTS: dict[str, Fault] = {fault.id: fault for module in (kda, mla, moe) for fault in module.FAULTS}
"""Every fault that can be injected, by id."""
