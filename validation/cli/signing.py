"""`decodegate signoff`, `verify` and `keygen`: a policy applied to records, signed, and whether that still holds."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from validation.cli import options
from validation.cli.printing import say
from validation.errors import UsageError

if TYPE_CHECKING:
    from validation.records.storage import RunFolder

_NOT_SIGNED = 3

RunsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Ids of runs in the folder of runs, or the runs' own folders.")
]
PolicyOption = Annotated[
    Path, typer.Option("--policy", metavar="FILE", help="The policy: a .toml, .yaml or .yml file.")
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", help="Ed25519 private key in PEM form that signs. Without it nothing is signed."
    ),
]
PublicKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", help="The signer's public key in PEM form, the NAME.pub.pem of keygen. Always needed."
    ),
]
MutationOption = Annotated[
    str | None, typer.Option("--mutation", metavar="RUN", help="Run of decodegate mutate, for the mutation score.")
]
ToOption = Annotated[
    Path | None,
    typer.Option("--to", metavar="DIR", help="Folder of the sign-off, a new one. Default: signoffs/<time>."),
]


def run_folder(run: str, out: Path) -> RunFolder:
    """The folder of a run that is named by its id in `out`, or by its own path.

    Raises:
        UsageError: there is no such run.
    """
    from validation.records.storage import RunFolder

    path = Path(run) if os.sep in run else out / run
    return RunFolder.find(path.parent, path.name)


def signoff(
    runs: RunsArgument,
    policy: PolicyOption,
    key: KeyOption = None,
    mutation: MutationOption = None,
    to: ToOption = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Apply a policy to run records: one document with the decision first, and a signed statement over all evidence.

    [bold]Examples[/bold]

    decodegate signoff PREMERGE NIGHTLY --policy policy.toml --key release.pem
    decodegate signoff NIGHTLY --policy policy.toml --mutation MUTATE --key release.pem --to signoffs/v1.2
    decodegate signoff NIGHTLY --policy policy.toml            what would the decision be? (never exit code 0)

    [bold]Exit codes[/bold]

    0 signed GO, 1 NO-GO, 2 wrong usage or bad input, 3 inconclusive, or GO without a signature
    """
    from validation.records.storage import new_run_id
    from validation.signoff.document import render
    from validation.signoff.folder import gather, require_apart, signer, write_signoff
    from validation.signoff.keys import read_private_key
    from validation.signoff.ruling import Outcome

    secret = read_private_key(key) if key is not None else None
    folders = [run_folder(run, out) for run in runs]
    matrix = run_folder(mutation, out) if mutation is not None else None
    now = datetime.now(UTC)
    target = to or Path("signoffs") / new_run_id(now)
    require_apart(target, [*folders, matrix] if matrix is not None else folders)
    case = gather(folders, policy, matrix, now.date())
    document = write_signoff(case, render(case, signer(secret)), policy, target, secret)
    for ruling in case.decision.rulings:
        waived = " (waived)" if ruling.waivers else ""
        say(f"{ruling.outcome}{waived}: {ruling.subject}: {ruling.said}")
        for note in ruling.notes:
            say(f"  {note}")
    decided = case.decision.outcome
    signed = "signed" if secret is not None else "NOT SIGNED: give --key"
    say(f"{decided} ({signed}): {len(case.subjects)} evidence files, digest {case.root}")
    say(f"document: {document}")
    if decided is Outcome.GO and secret is None:
        return _NOT_SIGNED
    return case.decision.exit_code


def verify(
    folder: Annotated[Path, typer.Argument(metavar="SIGNOFF", help="Folder of a sign-off.")],
    key: PublicKeyOption = None,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN...]", help="Folders of runs that do not lie in the folder of runs."),
    ] = None,
    out: options.OutOption = Path("runs"),
) -> int:
    """Check a sign-off: signature, every byte of every file it rests on, nothing added or removed, waivers in force.

    [bold]Examples[/bold]

    decodegate verify signoffs/v1.2 --key release.pub.pem
    decodegate verify signoffs/v1.2 archive/20260102-030405-abcdef --key release.pub.pem

    [bold]Exit codes[/bold]

    0 unchanged and GO; 1 changed, signed by another key, NO-GO, or a waiver has expired; 2 wrong usage or bad input;
    3 unchanged and inconclusive
    """
    from validation.signoff.attestation import key_id
    from validation.signoff.keys import read_public_key
    from validation.signoff.verify import verify as check

    elsewhere = {Path(run).name: Path(run) for run in runs or ()}
    if len(elsewhere) < len(runs or ()):
        raise UsageError("two folders of one run were given; a sign-off rests on one")
    if key is None:
        raise UsageError(
            "--key is missing: verify needs the signer's public key, the .pub.pem that decodegate keygen wrote; "
            f"decodegate verify {folder} --key NAME.pub.pem"
        )
    public = read_public_key(key)
    found = check(folder, public, lambda run: elsewhere.get(run, out / run), datetime.now(UTC).date())
    if found.statement is not None and (strange := elsewhere.keys() - found.runs):
        raise UsageError(f"run {min(strange)!r} is not one of this sign-off's: {', '.join(sorted(found.runs))}")
    for problem in found.problems[:20]:
        say(f"NOT VERIFIED: {problem}")
    if len(found.problems) > 20:
        say(f"NOT VERIFIED: {len(found.problems) - 20} more")
    if found.statement is None or found.problems:
        say(f"{folder}: this is not what key {key_id(public)[:16]} ({key}) signed")
        return found.exit_code
    for expired in found.expired:
        say(f"EXPIRED: {expired}")
    own = found.statement.predicate.sign_off
    count = len(found.statement.subject)
    say(f"{own.decision}, decided {own.day} under policy {own.policy}: {count} files, none changed, added or removed")
    return found.exit_code


def keygen(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where the private key goes; NAME.pub.pem lies beside it.")
    ],
) -> int:
    """Make an ed25519 key pair for sign-offs. The private key is encrypted where DECODEGATE_KEY_PASSPHRASE is set.

    [bold]Example[/bold]

    decodegate keygen release.pem                release.pem (keep it) and release.pub.pem (hand it out)

    [bold]Exit codes[/bold]

    0 written, 2 the file exists or cannot be written
    """
    from validation.signoff.keys import make_keys

    say(f"private key {path}; public key {make_keys(path)}")
    return 0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (signoff, verify, keygen):
        app.command()(command)
