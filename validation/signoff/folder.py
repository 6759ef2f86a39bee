"""Making a sign-off: records in, one folder out with the document, the policy and the signed statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from validation.errors import UsageError
from validation.files import read_limited
from validation.records.record import RunRecord
from validation.records.storage import RunFolder, write_atomically
from validation.signoff.attestation import key_id, sign, statement
from validation.signoff.decision import Decision, decide
from validation.signoff.evidence import files, require_units, root, sha256
from validation.signoff.mutation import Mutation, read_mutation
from validation.signoff.policy import Policy, load_policy

DOCUMENT = "signoff.html"
ENVELOPE = "signoff.dsse.json"
OWN = "signoff"
"""Before the names of the sign-off's own files among the subjects; run folders are under `runs/<id>`."""


@dataclass(frozen=True)
class Case:
    """Everything that a sign-off rests on. `subjects` are the digests of all evidence files by name."""

    policy: Policy
    policy_file: str
    records: tuple[RunRecord, ...]
    mutation: Mutation | None
    decision: Decision
    subjects: dict[str, str]

    @property
    def root(self) -> str:
        """One digest over the evidence, the sign-off's own files apart."""
        return root(self.subjects)


def gather(folders: Sequence[RunFolder], policy_path: Path, mutation: RunFolder | None, day: date) -> Case:
    """Read records, policy and mutation score, digest all evidence, and decide.

    Raises:
        UsageError: a record, the policy or the matrix cannot be read; evidence is missing; a run is given twice.
    """
    policy = load_policy(policy_path)
    records: list[RunRecord] = []
    subjects: dict[str, str] = {}
    for folder in folders:
        record = folder.read_record()
        if record.run.id in {known.run.id for known in records}:
            raise UsageError(f"run {record.run.id!r} was given twice")
        require_units(folder, record.stable.gates, record.run.seconds)
        records.append(record)
        subjects |= {f"runs/{record.run.id}/{name}": sha for name, sha in files(folder.path).items()}
    score = None
    if mutation is not None:
        score = read_mutation(mutation.path)
        subjects |= {f"runs/{mutation.run_id}/{name}": sha for name, sha in files(mutation.path).items()}
    policy_file = f"policy{policy_path.suffix}"
    return Case(policy, policy_file, tuple(records), score, decide(policy, records, score, day), subjects)


def require_apart(to: Path, folders: Sequence[RunFolder]) -> None:
    """Refuse a sign-off inside of what it signs: its own files would be added to the evidence.

    Raises:
        UsageError: `to` lies in one of the run folders.
    """
    for folder in folders:
        if to.resolve().is_relative_to(folder.path.resolve()):
            raise UsageError(f"--to {str(to)!r} lies in the folder of run {folder.run_id!r}; choose one outside")


def write_signoff(case: Case, document: str, policy_path: Path, to: Path, key: Ed25519PrivateKey | None) -> Path:
    """Write document, policy and, with a key, the signed statement to the new folder `to`; the document comes back.

    Raises:
        UsageError: `to` exists already, or cannot be written.
    """
    if to.exists():
        raise UsageError(f"{str(to)!r} exists already; a sign-off is never overwritten, choose another --to")
    policy = read_limited(policy_path, 2**20, "policy")
    write_atomically(to / case.policy_file, policy)
    write_atomically(to / DOCUMENT, document.encode())
    if key is not None:
        own = {f"{OWN}/{name}": sha256(to / name) for name in (case.policy_file, DOCUMENT)}
        subjects = {**case.subjects, **own}
        signed = sign(statement(case.policy, case.decision, subjects, f"{OWN}/{case.policy_file}"), key)
        write_atomically(to / ENVELOPE, signed)
    return to / DOCUMENT


def signer(key: Ed25519PrivateKey | None) -> str | None:
    """The id of the signing key; None for an unsigned document."""
    return None if key is None else key_id(key.public_key())
