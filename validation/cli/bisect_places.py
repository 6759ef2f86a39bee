"""`bisect layers` and `bisect tokens` from options to files: the search, its figures, the tensors of what was found."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from datetime import UTC, datetime

from rich.console import Console
from safetensors.torch import save

from validation.bisect.localise import Located, Place, boundary_tensors, locate, measure
from validation.cli.bisect_inside import InsideOptions, model_name, question_of
from validation.cli.lines import say
from validation.gates.parity.judge import CACHE_MULTIPLE
from validation.profile import DEFAULT_PROFILE
from validation.records.jsonio import named, pretty
from validation.records.storage import RunFolder, new_run_id
from validation.run.version import code_version
from validation.targets.base import Capability
from validation.verdict import Verdict, exit_code

TENSORS_FILE = "boundary.safetensors"

NEEDS = frozenset({Capability.TEACHER_FORCED, Capability.FULL_LOGITS, Capability.READ_BOUNDARIES})
"""What a target must be able to do for a bisection by layer or token."""

_PARTS = {
    "attention_in": "in front of attention",
    "mlp_in": "behind attention and its output projection",
    "mlp_out": "behind the MLP",
    "in": "behind the mix of the blocks",
    "logits": "behind the output projection",
}
"""Where a boundary lies, by the last part of its name."""


def bisect_places(options: InsideOptions, by: str) -> int:
    """Find the first layer, or with `by` "tokens" the first token, that leaves the noise floor; the exit code.

    Raises:
        UsageError: something in the options cannot be.
    """
    question = question_of(options, NEEDS)
    located = locate(measure(question), options.seed)
    folder = RunFolder.create(options.out, new_run_id(datetime.now(UTC)))
    place = located.token if by == "tokens" else located.layer
    if place is not None:
        folder.write(save(boundary_tensors(question, place)), TENSORS_FILE)
    document = {
        "schema_version": 1,
        "decodegate": code_version(),
        "command": command_of(options, by),
        "model": model_name(options),
        "fingerprint": dict(question.target.fingerprint()),
        "verdict": located.verdict,
        "summary": summary(located, by),
        "allowed": CACHE_MULTIPLE,
        "found": None if place is None else asdict(place),
        "layer": None if located.layer is None else asdict(located.layer),
        "token": None if located.token is None else asdict(located.token),
        "over_tokens": {name: asdict(ratio) for name, ratio in located.over_tokens.items()},
    }
    folder.write(pretty(named(document)), f"{by}.json")
    console = Console()
    say(console, f"{located.verdict}: {summary(located, by)}")
    say(console, f"again: {shlex.join(command_of(options, by))}")
    for file in (f"{by}.json", TENSORS_FILE) if place is not None else (f"{by}.json",):
        say(console, str(folder.file(file)))
    return exit_code(located.verdict)


def summary(located: Located, by: str) -> str:
    """What was found, in words with numbers."""
    if located.layer is None or located.token is None:
        furthest = max(located.over_tokens.items(), key=lambda item: item[1].upper)
        shown = f"at {furthest[0]} at most {furthest[1].upper:.3g} floors, allowed {CACHE_MULTIPLE:.3g}"
        said = "nothing to bisect" if located.verdict is Verdict.PASS else "neither is shown, take more --sequences"
        return f"{said}: no boundary leaves the noise floor ({shown}, n = {furthest[1].n} sequences)"
    first, other = (located.token, located.layer) if by == "tokens" else (located.layer, located.token)
    if by == "tokens":
        text = f"first token out: position {first.position}, in {_words(first)}"
        more = f"; the first boundary that is out at all is {other.boundary}"
    else:
        text = f"first out: {_words(first)}, at position {first.position}"
        more = f"; the first token at which any boundary is out is at position {other.position}"
    ratio = first.ratio
    shown = f"{ratio.mean:.3g} floors there, at least {ratio.lower:.3g}, allowed {CACHE_MULTIPLE:.3g}, n = {ratio.n}"
    return f"{text} ({shown} sequences){more if first != other else ''}"


def command_of(options: InsideOptions, by: str) -> list[str]:
    """The command that asks the same question."""
    cell = options.cell
    words = ["decodegate", "bisect", by, "--profile", options.profile or DEFAULT_PROFILE, "--cell", cell.name]
    words += [] if options.model is None else ["--model", str(options.model)]
    words += [word for fault in options.faults for word in ("--fault", fault)]
    words += ["--sequences", str(cell.sequences), "--prompt", str(cell.prompt), "--decode", str(cell.decode)]
    words += [] if options.threads is None else ["--threads", str(options.threads)]
    return [*words, "--seed", str(options.seed)]


def _words(place: Place) -> str:
    where, _, part = place.boundary.rpartition(".")
    layer = "the head" if where == "head" else f"layer {where.removeprefix('layer.')}"
    return f"{layer}, {_PARTS[part]} ({place.boundary})"
