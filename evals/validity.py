"""Whether a task's answers can carry a decision at all. What is wrong here makes an eval undecided, never a score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from evals.graded import INVALID, Fate, Pair, Paired
from evals.samples import ARMS, ECHOED, SHARED

MOST_INVALID = 0.05
"""Share of answers of one kind that may be invalid. It is further limited by the margin: as many answers as the margin
is wide could be the whole damage, or hide it."""


def counts(pairs: Sequence[Pair]) -> Mapping[str, Mapping[Fate, int]]:
    """Answers by arm and fate."""
    return {arm: Counter(pair.arm(arm).fate for pair in pairs) for arm in ARMS}


def problems(paired: Paired, margin: float, max_tokens: int) -> list[str]:
    """Every reason why the answers cannot be judged, each with its numbers and what to do."""
    if not paired.pairs:
        return ["no question was answered by both arms"]
    found = []
    if paired.alone:
        found.append(f"{len(paired.alone)} answers have no partner in the other arm (first: {paired.alone[0]}); resume")
    if paired.unlike:
        found.append(
            f"the arms were asked differently {len(paired.unlike)} times (first: {paired.unlike[0]}); "
            "both need the same messages, seed, sampling and cap"
        )
    return [*found, *_parameters(paired.pairs), *_fates(paired.pairs, margin, max_tokens)]


def _fates(pairs: Sequence[Pair], margin: float, max_tokens: int) -> Iterator[str]:
    most = min(MOST_INVALID, margin)
    for arm, by_fate in counts(pairs).items():
        for fate in INVALID:
            share = by_fate[fate] / len(pairs) if fate in by_fate else 0.0
            if share > most:
                seen = f"{arm}: {by_fate[fate]} of {len(pairs)} answers ({share:.1%})"
                yield f"{seen} {_what(fate, max_tokens)}; at most {most:.1%} may be"


def _what(fate: Fate, max_tokens: int) -> str:
    return {
        Fate.TRUNCATED: f"are truncated by the cap of {max_tokens} tokens (max_tokens; raise it if they do not loop)",
        Fate.EMPTY: "are empty (all tokens went into reasoning, or a stop string cut them)",
        Fate.ERROR: "are errors, which are no answers",
        Fate.UNPARSED: "are unparsed: no answer was found in them",
    }[fate]


def _parameters(pairs: Sequence[Pair]) -> Iterator[str]:
    """What a server says it used, against what it was asked to use, and between the arms."""
    for arm in ARMS:
        for name in ECHOED:
            wrong = [
                (pair.arm(arm).response.effective[name], getattr(pair.request, name))
                for pair in pairs
                if name in pair.arm(arm).response.effective
                and pair.arm(arm).response.effective[name] != getattr(pair.request, name)
            ]
            if wrong:
                used, asked = wrong[0]
                yield f"{arm}: {name} was {used!r} in {len(wrong)} of {len(pairs)} answers, asked for was {asked!r}"
    for name in SHARED:
        apart = [
            pair.request.key
            for pair in pairs
            if all(name in pair.arm(arm).response.effective for arm in ARMS)
            and pair.baseline.response.effective[name] != pair.candidate.response.effective[name]
        ]
        if apart:
            yield (
                f"{name} differs between the arms in {len(apart)} of {len(pairs)} answers (first: {apart[0]}); "
                "they did not read the same prompt: compare chat templates"
            )


def echoed(pairs: Sequence[Pair]) -> int:
    """Answers, of both arms, whose server said at least one of the parameters that it used."""
    return sum(any(name in pair.arm(arm).response.effective for name in ECHOED) for pair in pairs for arm in ARMS)
