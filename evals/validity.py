"""Whether a task's answers can carry a decision at all. What is wrong here makes an eval undecided, never a score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from evals.graded import INVALID, LENGTH, Fate, Pair, Paired
from evals.samples import ARMS, BASELINE, ECHOED, LASTING, SHARED, Request

MOST_INVALID = 0.05
"""Share of answers of one kind that may be invalid. It is further limited by the margin: as many answers as the margin
is wide could be the whole damage, or hide it."""


def counts(pairs: Sequence[Pair]) -> Mapping[str, Mapping[Fate, int]]:
    """Answers by arm and fate."""
    return {arm: Counter(pair.arm(arm).fate for pair in pairs) for arm in ARMS}


def problems(paired: Paired, margin: float, max_tokens: int, planned: Sequence[Request] = ()) -> list[str]:
    """Every reason why the answers cannot be judged, each with its numbers and what to do.

    `planned` are the questions that both arms were to answer; without them nobody knows of those that both lack.
    """
    if not paired.pairs:
        return ["no question was answered by both arms"]
    found = list(_unplanned(paired, planned)) if planned else []
    if paired.alone:
        found.append(f"{len(paired.alone)} answers have no partner in the other arm (first: {paired.alone[0]}); resume")
    if paired.unlike:
        found.append(
            f"the arms were asked differently {len(paired.unlike)} times (first: {paired.unlike[0]}); "
            "both need the same messages, seed, sampling and cap"
        )
    return [*found, *_parameters(paired.pairs), *_fates(paired.pairs, margin, max_tokens)]


def insensitive(pairs: Sequence[Pair], margin: float, chance: float) -> list[str]:
    """Why these answers would hide any damage: a candidate that lost everything would be within the margin too.

    A baseline without a score, or with that of a guesser, has nothing to lose: equal scores then show nothing. (Trials
    call this assay sensitivity: ICH E10, section 1.5.)
    """
    if not pairs:
        return ["no question was answered by both arms"]
    score = sum(pair.baseline.grade.score for pair in pairs) / len(pairs)
    if score - chance > margin:
        return []
    return [
        f"{BASELINE}: its score is {score:.1%}, guessing gives {chance:.0%}: who lost all between them would be within "
        f"the margin of {100 * margin:g} points; ask items that the baseline can answer, or narrow the margin"
    ]


def _unplanned(paired: Paired, planned: Sequence[Request]) -> Iterator[str]:
    """Questions that nobody was asked, and answers to questions that are not those planned."""
    asked = {pair.request.key: pair.request for pair in paired.pairs}
    known = {*asked, *paired.alone, *paired.unlike}
    lost = [request.key for request in planned if request.key not in known]
    if lost:
        yield f"{len(lost)} of {len(planned)} questions have no answer in either arm (first: {lost[0]}); ask them"
    wanted = {request.key: request for request in planned}
    strange = [key for key, request in asked.items() if wanted.get(key) != request]
    if strange:
        yield f"{len(strange)} answers are to no question of this plan (first: {strange[0]}); start a new run"


def _fates(pairs: Sequence[Pair], margin: float, max_tokens: int) -> Iterator[str]:
    most = min(MOST_INVALID, margin)
    for arm, by_fate in counts(pairs).items():
        found = {fate: by_fate[fate] for fate in INVALID if by_fate.get(fate)}
        worst = {fate: n for fate, n in found.items() if n / len(pairs) > most}
        for fate, n in worst.items():
            what = _truncated(pairs, arm, max_tokens) if fate is Fate.TRUNCATED else _WHAT[fate]
            yield f"{arm}: {n} of {len(pairs)} answers ({n / len(pairs):.1%}) {what}; at most {most:.1%} may be"
        together = sum(found.values())
        if not worst and together / len(pairs) > most:
            kinds = ", ".join(f"{n} {fate}" for fate, n in found.items())
            seen = f"{arm}: {together} of {len(pairs)} answers ({together / len(pairs):.1%})"
            yield f"{seen} are not whole ({kinds}; cap {max_tokens} tokens); at most {most:.1%} may be"


_WHAT = {
    Fate.EMPTY: "are empty (all tokens went into reasoning, or a stop string cut them)",
    Fate.ERROR: "are errors, which are no answers",
    Fate.UNPARSED: "are unparsed: no answer was found in them",
}


def _truncated(pairs: Sequence[Pair], arm: str, cap: int) -> str:
    """What cut these answers: the cap that they were given, a lower one of the server's own, or something else."""
    cut = [pair.arm(arm).response for pair in pairs if pair.arm(arm).fate is Fate.TRUNCATED]
    other = Counter(f"{r.finish_reason[:40]!r}" for r in cut if r.finish_reason and r.finish_reason not in LENGTH)
    if other:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in other.most_common(3))
        return f"did not end by themselves (finish_reason {reasons}; cap {cap} tokens)"
    longest = max((r.tokens for r in cut if r.tokens is not None), default=cap)
    if longest < cap:
        return f"are truncated at {longest} tokens or less, below the cap of {cap} tokens: raise the server's own limit"
    return f"are truncated by the cap of {cap} tokens (max_tokens; raise it if they do not loop)"


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
        for name in LASTING:
            values = Counter(str(v) for p in pairs if (v := p.arm(arm).response.effective.get(name)) is not None)
            if len(values) > 1:
                kinds = ", ".join(f"{value[:60]!r}: {n}" for value, n in values.most_common(3))
                yield f"{arm}: {name} changed in mid-run ({kinds}); its answers are of several servers"
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
