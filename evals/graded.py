"""From samples to graded pairs: what became of every answer, and which answers belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from evals.samples import ARMS, BASELINE, CANDIDATE, Request, Response, Sample
from evals.scorers.grade import Grade
from evals.tasks import EvalTask

LENGTH = frozenset({"length", "max_tokens", "max_length", "max_output_tokens", "model_length"})
"""Finish reasons of an answer that reached its cap, in the words of several servers."""

ENDED = frozenset({"stop", "eos", "eos_token", "end_turn", "stop_sequence"})
"""Finish reasons of an answer that ended by itself. Any other, such as `abort`, is that of a part of an answer."""


class Fate(StrEnum):
    """What became of an answer. A wrong answer is OK too: its grade says that it is wrong.

    TRUNCATED is every answer that did not end by itself, mostly because of its cap.
    """

    OK = "ok"
    TRUNCATED = "truncated"
    EMPTY = "empty"
    ERROR = "error"
    UNPARSED = "unparsed"


INVALID = (Fate.TRUNCATED, Fate.EMPTY, Fate.ERROR, Fate.UNPARSED)


@dataclass(frozen=True)
class Graded:
    """One response with its grade and fate."""

    response: Response
    grade: Grade
    fate: Fate

    @property
    def length(self) -> int:
        """Tokens of the answer, or its characters where the server does not count."""
        return len(self.response.text) if self.response.tokens is None else self.response.tokens


@dataclass(frozen=True)
class Pair:
    """Both arms' answers to one request; `damage` is the baseline's score less the candidate's."""

    request: Request
    baseline: Graded
    candidate: Graded

    @property
    def damage(self) -> float:
        return self.baseline.grade.score - self.candidate.grade.score

    @property
    def answered(self) -> bool:
        """Whether both arms answered at all: an error is no answer, and no score."""
        return Fate.ERROR not in (self.baseline.fate, self.candidate.fate)

    def arm(self, name: str) -> Graded:
        """The answer of an arm, by name."""
        return self.baseline if name == BASELINE else self.candidate


@dataclass(frozen=True)
class Paired:
    """A task's pairs in the order of (item, repeat), and keys that one arm lacks, or that were not asked alike."""

    pairs: Sequence[Pair]
    alone: Sequence[str]
    unlike: Sequence[str]


def graded(task: EvalTask, sample: Sample) -> Graded:
    """The grade and fate of one sample; an error is not graded."""
    response, request = sample.response, sample.request
    if response.error:
        return Graded(response, Grade(0.0, parsed=False), Fate.ERROR)
    grade = task.grade(request.item, request.repeat, response.text)
    if not _ended(response, request.max_tokens):
        fate = Fate.TRUNCATED
    elif not response.text.strip():
        fate = Fate.EMPTY
    else:
        fate = Fate.OK if grade.parsed else Fate.UNPARSED
    return Graded(response, grade, fate)


def _ended(response: Response, cap: int) -> bool:
    """Whether an answer ended by itself; one of a server that gives no reason did if it stayed below its cap."""
    if response.finish_reason:
        return response.finish_reason in ENDED
    return response.tokens is None or response.tokens < cap


def paired(task: EvalTask, samples: Iterable[Sample]) -> Paired:
    """Pair a task's samples by (item, repeat). Order of arrival does not matter.

    Raises:
        ValueError: a sample twice, of an item that the task lacks, or of an arm that is neither.
    """
    found: dict[str, dict[str, Sample]] = {arm: {} for arm in ARMS}
    for sample in samples:
        if sample.arm not in found or sample.request.item not in task.items:
            raise ValueError(f"sample {sample.key}: its arm or item is none of this comparison's")
        if sample.request.key in found[sample.arm]:
            raise ValueError(f"sample {sample.key} is there twice; one answer would count as two")
        found[sample.arm][sample.request.key] = sample
    baseline, candidate = found[BASELINE], found[CANDIDATE]
    place = {item: i for i, item in enumerate(task.item_ids)}
    shared = sorted(
        baseline.keys() & candidate.keys(),
        key=lambda key: (place[baseline[key].request.item], baseline[key].request.repeat),
    )
    pairs = [
        Pair(baseline[key].request, graded(task, baseline[key]), graded(task, candidate[key]))
        for key in shared
        if baseline[key].request == candidate[key].request
    ]
    unlike = [key for key in shared if baseline[key].request != candidate[key].request]
    return Paired(pairs, sorted(baseline.keys() ^ candidate.keys()), unlike)
