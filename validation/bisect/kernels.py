"""`bisect kernels`: the candidate's ops that carry its failure, found by putting the baseline's ops in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from validation.bisect.places import Place, own_places
from validation.bisect.question import ParityQuestion
from validation.delta_debugging import Asked, failing_sets
from validation.errors import UsageError
from validation.gates.base import GateResult
from validation.verdict import Verdict

Told = Callable[[str], None]


class _Doc(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PlaceDoc(_Doc):
    """An op in a layer."""

    op: str
    layer: int


class RunDoc(_Doc):
    """One run of the gate: how many places kept the candidate's op, which (by index), and what the gate said."""

    kept: list[int]
    verdict: Verdict
    summary: str


class CellDoc(_Doc):
    """The cell that was measured."""

    name: str
    sequences: int
    prompt: int
    decode: int


class KernelsDoc(_Doc):
    """The replay file: the question, every place, every run and what was found. Places are named by their index."""

    schema_version: Literal[1] = 1
    decodegate: str
    profile: str
    model: str
    fingerprint: dict[str, str]
    seed: int
    faults: list[str]
    cell: CellDoc
    places: list[PlaceDoc]
    runs: list[RunDoc]
    sets: list[list[int]]
    complete: bool
    verdict: Verdict
    summary: str

    def named(self, places: Sequence[int]) -> str:
        """Places in words."""
        head = max((place.layer for place in self.places), default=0)
        return " and ".join(_words((self.places[i].op, self.places[i].layer), head) for i in places)


@dataclass(frozen=True)
class Found:
    """What a search saw and concluded. FAIL: the failing sets are named; PASS: nothing to bisect."""

    places: Sequence[Place]
    runs: Sequence[tuple[tuple[Place, ...], GateResult]]
    sets: Sequence[Sequence[Place]]
    complete: bool
    verdict: Verdict
    summary: str


class Search:
    """Asks the gate about parts of the candidate, and remembers what it said.

    Raises:
        UsageError: a fault of one layer whose op does not run there.
    """

    def __init__(self, question: ParityQuestion, most: int, told: Told = lambda line: None) -> None:
        self._question, self._told = question, told
        baseline, candidate, _ = question.arms()
        texts = question.sequences(question.cell.unit().params["batch"])
        self.places = own_places(question.target, baseline, candidate, texts, question.cell.prompt)
        self._require_faults_to_run()
        self.runs: list[tuple[tuple[Place, ...], GateResult]] = []
        self.asked = Asked(self.places, self._run, most)

    def _require_faults_to_run(self) -> None:
        for fault in self._question.candidate.faults:
            if fault.only_in is not None and (fault.component, fault.only_in) not in self.places:
                layers = sorted(layer for op, layer in self.places if op == fault.component)
                ran = f"layers {', '.join(map(str, layers))}" if layers else "no layer"
                raise UsageError(f"fault {fault.id}: {fault.component!r} does not run there; here it runs in {ran}")

    def _run(self, kept: tuple[Place, ...]) -> Verdict:
        result = self._question.ask([place for place in self.places if place not in set(kept)])
        self.runs.append((kept, result))
        self._told(f"run {len(self.runs)}: {len(kept)} of {len(self.places)} ops are the candidate's: {result.verdict}")
        return result.verdict

    def find(self) -> Found:
        """Search for the failing sets."""
        if not self.places:
            return self._found(Verdict.INCONCLUSIVE, "the candidate ran no op of its own: there is nothing to replace")
        whole = self.asked.verdict(self.places)
        said = self.runs[-1][1].summary
        if whole is Verdict.PASS:
            return self._found(Verdict.PASS, f"nothing to bisect: the candidate is healthy here ({said})")
        if whole is not Verdict.FAIL:
            return self._found(Verdict.INCONCLUSIVE, f"the candidate was not shown to fail here ({said})")
        if self.asked.fails(()):
            return self._found(
                Verdict.INCONCLUSIVE,
                "the failure stays with every op replaced: it is in no op, but in what surrounds them "
                "(caches, layout of a step, planner)",
            )
        sets, complete = failing_sets(self.asked)
        verdict = Verdict.FAIL if sets else Verdict.INCONCLUSIVE
        return self._found(verdict, self._in_words(sets, complete), sets, complete)

    def _in_words(self, sets: Sequence[Sequence[Place]], complete: bool) -> str:
        head = max(layer for _, layer in self.places)
        each = "; ".join(" and ".join(_words(place, head) for place in one) for one in sets)
        effort = f"{len(self.asked.answers)} runs of the gate over {len(self.places)} ops"
        if not complete:
            why = "no run is left" if len(self.asked.answers) >= self.asked.most else "the rest is not shown to pass"
            return f"{each or 'no set yet'} (incomplete: {why}; {effort})"
        return f"{each}: with the baseline's op there the candidate passes ({effort})"

    def _found(
        self, verdict: Verdict, summary: str, sets: Sequence[Sequence[Place]] = (), complete: bool = True
    ) -> Found:
        return Found(self.places, self.runs, sets, complete, verdict, summary)


def confirm(search: Search, sets: Sequence[Sequence[Place]]) -> tuple[Verdict, str]:
    """Ask again what a replay file says: each set fails alone, and without any of them the candidate does not."""
    if not search.asked.fails(search.places):
        return search.asked.verdict(search.places), f"the candidate no longer fails ({search.runs[-1][1].summary})"
    other = [f"set {i + 1} alone does not fail" for i, one in enumerate(sets) if not search.asked.fails(one)]
    culprits = {place for one in sets for place in one}
    if search.asked.fails([place for place in search.places if place not in culprits]):
        other.append("it still fails without them")
    if other:
        return Verdict.INCONCLUSIVE, f"not confirmed: {'; '.join(other)}"
    return Verdict.FAIL, f"confirmed: {len(sets)} failing sets, each alone, and the rest does not fail"


def document(found: Found, question: ParityQuestion, profile: str, model: str, code: str) -> KernelsDoc:
    """The replay file of a search."""
    index = {place: i for i, place in enumerate(found.places)}
    cell = question.cell
    return KernelsDoc(
        decodegate=code,
        profile=profile,
        model=model,
        fingerprint=dict(question.target.fingerprint()),
        seed=question.seed,
        faults=[fault.id for fault in question.candidate.faults],
        cell=CellDoc(name=cell.name, sequences=cell.sequences, prompt=cell.prompt, decode=cell.decode),
        places=[PlaceDoc(op=op, layer=layer) for op, layer in found.places],
        runs=[
            RunDoc(kept=[index[place] for place in kept], verdict=result.verdict, summary=result.summary)
            for kept, result in found.runs
        ],
        sets=[[index[place] for place in one] for one in found.sets],
        complete=found.complete,
        verdict=found.verdict,
        summary=found.summary,
    )


def _words(place: Place, head: int) -> str:
    return f"{place[0]} in {'the head' if place[1] == head else f'layer {place[1]}'}"
