"""How faults are written down: a decorator over the wrong variant, so that a fault is a few lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from validation.faults.base import ENGINE, SPECIALIZED, Fault, Kind, Ops
from validation.faults.broken import Change, guarded
from validation.targets.base import TargetError

Wrong = Callable[..., Any]


class Layer:
    """The faults of one layer, in the order in which they are written.

    Every decorator takes the component, the fault's id, what is wrong in one line, and the fields of `Fault` by name;
    `sources` is one string, with commas.
    """

    def __init__(self, name: str, **defaults: Any) -> None:
        self.name = name
        self.faults: list[Fault] = []
        self._defaults = defaults

    def op(self, component: str, id: str, title: str, **fields: Any) -> Callable[[Wrong], Wrong]:
        """The decorated function is the wrong op: it gets the right one, then the inputs by name."""

        def keep(wrong: Wrong) -> Wrong:
            self._add(component, id, title, _by(wrong, lambda ops: {component: partial(wrong, ops[component])}), fields)
            return wrong

        return keep

    def part(self, component: str, part: str, id: str, title: str, **fields: Any) -> Callable[[Wrong], Wrong]:
        """The decorated function is the wrong value of one keyword-only part of an op: it gets the right part first."""

        def keep(wrong: Wrong) -> Wrong:
            def mutate(ops: Ops) -> Ops:
                op = ops[component]
                return {component: partial(op, **{part: partial(wrong, part_of(op, part))})}

            self._add(component, id, title, _by(wrong, mutate), fields)
            return wrong

        return keep

    def made_of(self, component: str, id: str, title: str, **fields: Any) -> Callable[[Wrong], Wrong]:
        """The decorated function makes the wrong component out of the whole table."""

        def keep(wrong: Wrong) -> Wrong:
            self._add(component, id, title, _by(wrong, lambda ops: {component: wrong(ops)}), fields)
            return wrong

        return keep

    def engine(self, component: str, id: str, title: str, **fields: Any) -> Callable[[Wrong], Wrong]:
        """The decorated function gets an engine's right part (a class or a function) and returns the wrong one."""

        def keep(wrong: Wrong) -> Wrong:
            mutate = _by(wrong, lambda parts: {component: wrong(parts[component])})
            self._add(component, id, title, mutate, {"paths": (ENGINE,), "gate": "parity", **fields})
            return wrong

        return keep

    def declare(self, component: str, id: str, title: str, **fields: Any) -> None:
        """A fault whose component does not exist here yet, or cannot."""
        self._add(component, id, title, None, {"paths": (), **fields})

    def _add(self, component: str, id: str, title: str, mutate: Any, fields: dict[str, Any]) -> None:
        merged = {"paths": (SPECIALIZED,), "kind": Kind.OPERAND, **self._defaults, **fields}
        sources = tuple(source.strip() for source in merged.pop("sources").split(","))
        given = {} if mutate is None else {"mutate": mutate}
        self.faults.append(Fault(id, title, component, sources, layer=self.name, **given, **merged))


def _by(wrong: Wrong, change: Change) -> Change:
    """The change, which says so where the code of `wrong` itself fails."""
    return guarded(change, wrong.__code__.co_filename)


def part_of(op: Any, name: str) -> Any:
    """The value that a keyword-only part of an op has now, by default or by an earlier fault.

    Raises:
        TargetError: the op is of one piece, as a fused kernel is.
    """
    if isinstance(op, partial):
        return op.keywords[name] if name in op.keywords else part_of(op.args[0] if op.args else op.func, name)
    parts = op.__kwdefaults__ or {}
    if name not in parts:
        raise TargetError(
            f"op {op.__name__} has no part {name!r} that could be another: a fused kernel is of one piece; put this "
            "fault into the emulation, on the CPU"
        )
    return parts[name]


def at_rows(rows: int, wrong: Wrong, of: str) -> Wrong:
    """The wrong op where the input named `of` has exactly this many rows; the right one elsewhere."""

    def sometimes(op: Any, **case: Any) -> Any:
        x = case[of]
        n = (x[0] if isinstance(x, list | tuple) else x).shape[0]
        return wrong(op, **case) if n == rows else op(**case)

    return sometimes
