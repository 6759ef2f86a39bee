"""A fault whose own code fails says nothing about any gate, and must not pass for one that was caught."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

from validation.targets.base import TargetError

Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_FAULTS = Path(__file__).parent
_OURS = tuple(f"{_FAULTS.parents[1] / name}/" for name in ("validation", "decode_impl", "numerics", "evals"))


class BrokenFault(TargetError):
    """The injected code itself raised: mend the fault. An error that the right code raises is not this one."""


def guarded(change: Change, own: str) -> Change:
    """The change of a fault whose functions are written in the file `own`, with its own failures named as such."""

    def guarded_change(ops: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: _watched(part, own) for name, part in _call(change, own, ops).items()}

    return guarded_change


def _watched(part: Any, own: str) -> Any:
    """A function that names its failures; of a class, the methods that the fault wrote."""
    if not isinstance(part, type):
        return partial(_call, part, own)
    for name, method in list(vars(part).items()):
        if isinstance(method, FunctionType) and method.__code__.co_filename == own:
            setattr(part, name, _method(method, own))
    return part


def _method(method: FunctionType, own: str) -> Any:
    return lambda *args, **options: _call(method, own, *args, **options)


def _call(part: Any, own: str, /, *args: Any, **options: Any) -> Any:
    try:
        return part(*args, **options)
    except TargetError:
        # A fault that is broken itself, or that has nothing to break in this target, says so in its own words.
        raise
    except Exception as error:
        if _raised_in_a_fault(error.__traceback__, own):
            raise BrokenFault(f"the fault's own code fails: {type(error).__name__}: {error}") from error
        raise


def _raised_in_a_fault(trace: TracebackType | None, own: str) -> bool:
    """Whether the innermost frame of ours is in the fault's file or its helpers'; a library's frames belong to who
    called it."""
    last = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and (file == own or file.startswith(_OURS)):
            last = file
        trace = trace.tb_next
    return last == own or last.startswith(f"{_FAULTS}/")
