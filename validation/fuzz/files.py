"""A failing case as a file: all that playing it again needs, and what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.errors import UsageError
from validation.faults.base import Fault
from validation.fuzz.case import Case, as_json, from_json
from validation.fuzz.search import Failure
from validation.fuzz.trial import prepare
from validation.loading import load_faults
from validation.records.jsonio import pretty
from validation.records.storage import write_atomically
from validation.targets.base import ArmConfig
from validation.targets.registry import load_target

KIND = "schedule"
"""The `kind` of such a file among all that `decodegate replay` plays."""

BACKENDS = ("auto", "latency_specialized")


@dataclass(frozen=True)
class Subject:
    """What is fuzzed: the candidate's backend and faults, on the miniature or on the model of a folder itself.

    `seed` chooses the texts of a model; the miniature's are always the same.
    """

    small: bool = True
    model: Path | None = None
    decode_backend: str = "latency_specialized"
    faults: tuple[str, ...] = ()
    seed: int = 0


def document(subject: Subject, case: Case, findings: Sequence[str]) -> dict[str, Any]:
    """The content of a replay file, as plain JSON."""
    return {
        "kind": KIND,
        "miniature": subject.small,
        "model": None if subject.model is None else str(subject.model),
        "decode_backend": subject.decode_backend,
        "faults": list(subject.faults),
        "seed": subject.seed,
        "findings": list(findings),
        "case": as_json(case),
    }


def write_failure(path: Path, subject: Subject, failure: Failure) -> None:
    """Keep the least failing case as a replay file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, pretty(document(subject, failure.case, failure.findings)))


def replay(content: Mapping[str, Any]) -> list[str]:
    """Play a file's case again; what is broken now.

    Raises:
        UsageError: the file's content is not such a case, or names a model or a fault that is not here.
    """
    subject, case = read(content)
    faults = tuple(fault_named(name) for name in subject.faults)
    candidate = ArmConfig("candidate", decode_backend=subject.decode_backend, faults=faults)
    try:
        trial = prepare(
            load_target("builtin", subject.model), ArmConfig("baseline"), candidate, subject.small, subject.seed
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    return trial.findings(case)


def read(content: Mapping[str, Any]) -> tuple[Subject, Case]:
    """Subject and case of a file's content.

    Raises:
        UsageError: a field is missing or has a value that is not allowed.
    """
    backend, model, faults, seed = (content.get(key) for key in ("decode_backend", "model", "faults", "seed"))
    wrong = [
        message
        for holds, message in (
            (content.get("kind") == KIND, f"kind is {str(content.get('kind'))[:40]!r}, {KIND!r} is needed"),
            (isinstance(content.get("miniature"), bool), "miniature is true or false"),
            (backend in BACKENDS, f"decode_backend is one of {', '.join(BACKENDS)}"),
            (model is None or isinstance(model, str), "model is the folder of a checkpoint, or null"),
            (isinstance(faults, list) and all(isinstance(f, str) for f in faults), "faults is a list of fault ids"),
            (type(seed) is int and 0 <= seed < 2**63, "seed is a whole number from 0"),
        )
        if not holds
    ]
    if wrong:
        raise UsageError("not a schedule to replay: " + "; ".join(wrong))
    path = None if model is None else Path(str(model))
    subject = Subject(bool(content["miniature"]), path, str(backend), tuple(faults or ()), int(seed or 0))
    return subject, from_json(content.get("case"))


def fault_named(name: str) -> Fault:
    """A fault of the catalogue that can be put in.

    Raises:
        UsageError: there is none of this id.
    """
    faults = load_faults()
    if name not in faults or not faults[name].injectable:
        raise UsageError(f"no fault that can be put in is called {name[:60]!r}; see decodegate faults")
    return faults[name]
