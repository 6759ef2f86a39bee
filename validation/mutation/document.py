"""`docs/faults.md`, made from the catalogue: what every fault is, which gate should see it, what else would not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from validation.faults.base import ENGINE, Fault, Kind
from validation.faults.reports import REPORTS
from validation.gates.registry import GATES
from validation.reports.text import markdown

_HEAD = """\
# What the suite sees: the fault catalogue

Every fault is a wrong variant of one component that somebody met in a public decode stack, or the same kind of mistake
elsewhere. `decodegate mutate` puts each of them into the candidate, from outside and through the target alone, and asks
the gates; a fault counts as *caught* only by a gate's own verdict. The share caught is the *mutation score*. It is
measured only while the same gates are green without a fault.

```sh
decodegate mutate                             # all faults: matrix.html, matrix.md and matrix.json in runs/<id>/
decodegate mutate --profile smoke             # one fault of every layer: do the gates see anything at all? 2 minutes
decodegate mutate --fault kda-delta-dropped   # one fault
decodegate run --fault kda-delta-dropped      # the whole report of a run with that fault in it
decodegate faults --markdown > docs/faults.md # write this page again
```

The smoke subset is one fault of every layer that the gates numerics, parity or sync see, and each is asked of the one
unit that sees it (the list is `validation/mutation/smoke.py`); only these units must be green without a fault. It takes
about 100 seconds of a core. It shows that a gate still looks at every layer; how much of a layer it sees is what the
whole run says. Layers that stability or evals alone see, and the lengths of contexts, are not in it.

A run prints its folder first. One that was stopped, by Ctrl-C, SIGTERM or a dead machine, goes on with
`decodegate mutate --resume ID`: what was asked for is in the folder, and an option that contradicts it is refused.

The last measured matrix is kept in [measurements/](measurements/) (`*-detection-matrix.md`).
[extending.md](extending.md) shows how to add a fault.

## How to read it

- **seen by**: the gate that should see the fault first. *(later)* marks a gate that does not exist here yet: the matrix
  then says *gate missing*.
- **missed by**: common checks that a fault of this kind passes.
- **sources**: `M..` are public bug reports, listed at the end; *kind of* marks a variant of our own of the same
  mistake, `F` a mistake whose size was measured on synthetic inputs.
- A fault marked *declared* has no component to break here yet. *Equivalent* ones are listed with the reason why no gate
  can or should tell them from the right variant; a test runs every such claim. *Not applicable* ones need what is not
  here.
"""


def faults_page(faults: Mapping[str, Fault]) -> str:
    """The page as Markdown."""
    layers = list(dict.fromkeys(fault.layer for fault in faults.values()))
    lines = [_HEAD, *_counts(faults), *_kinds(faults)]
    for layer in layers:
        lines += [
            f"## {layer[0].upper()}{layer[1:]}",
            "",
            *_table([f for f in faults.values() if f.layer == layer]),
            "",
        ]
    used = {source.removeprefix("kind of ") for fault in faults.values() for source in fault.sources}
    lines += ["## Sources", "", "| report | where |", "|---|---|"]
    lines += [f"| {report} | {markdown(where)} |" for report, where in REPORTS.items() if report in used]
    return "\n".join(lines).rstrip() + "\n"


def _counts(faults: Mapping[str, Fault]) -> list[str]:
    every = list(faults.values())
    ops = sum(f.injectable and f.paths != (ENGINE,) for f in every)
    parts = sum(f.paths == (ENGINE,) for f in every)
    declared = sum(not f.injectable and not f.not_applicable for f in every)
    equivalent, absent = (sum(bool(getattr(f, name)) for f in every) for name in ("equivalent", "not_applicable"))
    return [
        f"{len(every)} faults: {ops} of ops, {parts} of an engine's parts, {declared} declared, {absent} not "
        f"applicable. {equivalent} are equivalent.",
        "",
    ]


def _kinds(faults: Mapping[str, Fault]) -> list[str]:
    counted = Counter(fault.kind for fault in faults.values())
    gates = {kind: sorted({f.gate for f in faults.values() if f.kind is kind}) for kind in Kind}
    lines = ["| kind of mistake | faults | seen by |", "|---|--:|---|"]
    lines += [
        f"| {kind.value} | {counted[kind]} | {', '.join(map(_gate, gates[kind]))} |" for kind in Kind if counted[kind]
    ]
    return [*lines, ""]


def _table(faults: Sequence[Fault]) -> list[str]:
    lines = ["| fault | what is wrong | in | kind | seen by | missed by | sources |", "|---|---|---|---|---|---|---|"]
    for fault in faults:
        cells = (
            f"`{fault.id}`",
            markdown(fault.title) + _note(fault),
            f"`{fault.component}`",
            fault.kind.value,
            _gate(fault.gate) if not (fault.equivalent or fault.not_applicable) else "none",
            markdown(fault.missed_by),
            markdown(", ".join(fault.sources)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _note(fault: Fault) -> str:
    if fault.equivalent:
        return f". *Equivalent*: {markdown(fault.equivalent)}"
    if fault.not_applicable:
        return f". *Not applicable*: {markdown(fault.not_applicable)}"
    return "" if fault.injectable else " (*declared*)"


def _gate(name: str) -> str:
    return name if name in GATES else f"{name} (later)"
