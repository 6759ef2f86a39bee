"""Whether a sign-off still holds: the signature, every byte of every file it rests on, and its waivers' days."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import date
from pathlib import Path, PurePosixPath

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from validation.errors import UsageError
from validation.files import LARGEST_TEXT_FILE, read_limited
from validation.mutation.run import MATRIX
from validation.names import is_safe_name
from validation.records.storage import RECORD
from validation.signoff.attestation import Statement, WrongSignature, opened
from validation.signoff.evidence import NOT_EVIDENCE, files
from validation.signoff.folder import DOCUMENT, ENVELOPE, OWN
from validation.signoff.ruling import Outcome


@dataclass(frozen=True)
class Verified:
    """What became of a sign-off. `problems` is empty where nothing was changed; `runs` are those that it rests on."""

    statement: Statement | None
    problems: tuple[str, ...]
    expired: tuple[str, ...] = ()
    runs: frozenset[str] = frozenset()

    @property
    def exit_code(self) -> int:
        """0 a whole GO; 1 changed, of another key, NO-GO or resting on an expired waiver; 3 whole but inconclusive."""
        if self.statement is None or self.problems or self.expired:
            return 1
        return {Outcome.GO: 0, Outcome.NO_GO: 1, Outcome.INCONCLUSIVE: 3}[self.statement.predicate.sign_off.decision]


def verify(folder: Path, key: Ed25519PublicKey, run_folder: Callable[[str], Path], day: date) -> Verified:
    """Check the sign-off in `folder`; `run_folder` says where the folder of a run id lies now.

    Raises:
        UsageError: there is no sign-off, or its envelope is none.
    """
    path = folder / ENVELOPE
    if not path.exists():
        raise UsageError(_no_sign_off(folder))
    data = read_limited(path, LARGEST_TEXT_FILE, "signed statement")
    try:
        content = opened(data, key)
    except UsageError as error:
        raise UsageError(f"{str(path)!r}: {error}") from error
    except WrongSignature as error:
        return Verified(None, (str(error),))
    signed = _by_folder(content.digests(), str(path))
    problems = []
    for place, expected in signed.items():
        own = place == OWN
        where = folder if own else run_folder(place.partition("/")[2])
        problems += [f"{place}{problem}" for problem in _changes(where, expected, {ENVELOPE} if own else NOT_EVIDENCE)]
    expired = tuple(
        f"waiver of {waiver.gate} by {waiver.owner} expired on {waiver.expires}"
        for waiver in content.predicate.sign_off.waivers
        if waiver.expires < day
    )
    runs = frozenset(place.partition("/")[2] for place in signed if place != OWN)
    return Verified(content, tuple(problems), expired, runs)


def _no_sign_off(folder: Path) -> str:
    """Why there is nothing to verify in `folder`, and which folder to give."""
    give = "give the folder that decodegate signoff wrote (its --to)"
    if not folder.exists():
        return f"there is no folder {str(folder)!r}; {give}"
    if not folder.is_dir():
        return f"{str(folder)!r} is a file; {give}"
    if (folder / RECORD).exists() or (folder / MATRIX).exists():
        return f"{str(folder)!r} is the folder of a run, which is not signed itself; {give}"
    if (folder / DOCUMENT).exists():
        return (
            f"there is no {ENVELOPE} in {str(folder)!r}: nobody signed it, so it cannot be verified; "
            "decodegate signoff --key NAME.pem signs"
        )
    return f"there is no {ENVELOPE} in {str(folder)!r}, so it is no sign-off; {give}"


def _by_folder(digests: Mapping[str, str], where: str) -> dict[str, dict[str, str]]:
    """Digests by folder (`signoff`, `runs/<id>`) and path in it.

    Raises:
        UsageError: a name leads elsewhere.
    """
    found: dict[str, dict[str, str]] = {}
    for name, sha in digests.items():
        parts = PurePosixPath(name).parts
        depth = 1 if parts[:1] == (OWN,) else 2
        safe = len(parts) > depth and parts[0] in (OWN, "runs") and ".." not in parts
        if not safe or not is_safe_name(parts[depth - 1]):
            raise UsageError(f"{where!r}: {name!r} is no name of an evidence file")
        found.setdefault("/".join(parts[:depth]), {})["/".join(parts[depth:])] = sha
    return found


def _changes(folder: Path, expected: Mapping[str, str], apart: Set[str]) -> Iterator[str]:
    if not folder.is_dir():
        yield f": the folder is missing ({len(expected)} files); --out names the folder of runs"
        return
    try:
        now = files(folder, apart)
    except UsageError as error:
        yield f": {error}"
        return
    for name in sorted({*expected, *now}):
        if name not in now:
            yield f"/{name}: removed"
        elif name not in expected:
            yield f"/{name}: added"
        elif now[name] != expected[name]:
            yield f"/{name}: changed"
