"""`decodegate fit`: is specialised decode for this deployment?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from validation.cli.printing import say

_NO, _UNPROVEN = 1, 3


def fit(
    deployment: Annotated[
        Path, typer.Argument(metavar="DEPLOYMENT", help="A .yaml or .toml file like those in examples/deployments.")
    ],
) -> int:
    """Say whether specialised decode applies to a deployment, everything that stands in its way, and what falls back.

    [bold]Examples[/bold]

    decodegate fit examples/deployments/gb300-tp16-dspark.yaml
    decodegate fit examples/deployments/h200-tp16.yaml

    [bold]Exit codes[/bold]

    0 a path applies and is worth measuring, 1 none, 2 wrong usage or bad input,
    3 only a path that its authors do not say they support here
    """
    from validation.fit.answer import Applies, answers, notes
    from validation.fit.deployment import load_deployment

    given = load_deployment(deployment)
    found = answers(given)
    say(f"{given.name}: {given.model} on {given.hardware.count} {given.hardware.gpu}")
    for answer in found:
        say(f"{answer.path}: applies: {answer.applies}")
        for item in answer.unmet:
            say(f"  {item}")
        if answer.applies is Applies.NO:
            continue
        for reason, share in answer.fallbacks.items():
            say(f"  falls back, {share:.1%} of steps: {reason}")
        say(f"  specialised: {answer.specialised:.1%} of steps")
        worth = "worth measuring" if answer.worth_measuring else "not worth measuring"
        say(
            f"  {worth}: at most {answer.bound:.2f} times, were every specialised step {answer.speed.ratio:.2f} times "
            f"as fast ({answer.speed.said}); {given.least_gain:g} is asked for"
        )
    for note in notes(given):
        say(note)
    good = [answer for answer in found if answer.worth_measuring]
    if any(answer.applies is Applies.YES for answer in good):
        return 0
    return _UNPROVEN if good else _NO


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(fit)
