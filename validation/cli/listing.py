"""The tables of `decodegate gates` and `decodegate faults`."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console
from rich.table import Table

from validation.gates.registry import GATES, by_layer, load_gate
from validation.loading import load_faults
from validation.profile import load_profile, profile_names


def show_gates() -> None:
    """Print every gate with its question, needs, cost and profiles."""
    profiles = {name: load_profile(name)[1] for name in profile_names()}
    table = Table("layer", "gate", "question", "needs", "cost", "profiles (* required)", box=None, pad_edge=False)
    for gate in by_layer([load_gate(name) for name in GATES]):
        used = [
            f"{name}*" if gate.name in profile.required else name
            for name, profile in profiles.items()
            if gate.name in profile.gates
        ]
        needs = ", ".join(sorted(need.value for need in gate.needs)) or "nothing"
        table.add_row(str(gate.layer), gate.name, gate.question, needs, gate.cost, ", ".join(used) or "none")
    _print(table, whole=(0, 1))


def show_faults(as_markdown: bool = False) -> None:
    """Print the catalogue: id, what is wrong, in which component, on which paths (none: it is only declared)."""
    if as_markdown:
        from validation.mutation.document import faults_page

        print(faults_page(load_faults()), end="")
        return
    table = Table("fault", "what is wrong", "component", "paths", box=None, pad_edge=False)
    for name, fault in sorted(load_faults().items()):
        table.add_row(name, fault.title, fault.component, ", ".join(fault.paths) or "declared")
    _print(table, whole=(0, 2, 3))


def _print(table: Table, whole: Collection[int]) -> None:
    """Print the table; the columns of these numbers hold names, which stay on one line, the others sentences."""
    for number, column in enumerate(table.columns):
        column.overflow, column.no_wrap = "fold", number in whole
    console = Console()
    console.print(table) if console.is_terminal else Console(width=160).print(table)
