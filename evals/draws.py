"""Whether repeats of a question are draws of their own, or one answer again and again.

A server that ignores temperature or seed says the same at every repeat. Its repeats are one answer then; counted as so
many pairs they would shrink a bound that rests on how many answers there really are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from evals.graded import Pair
from evals.samples import ARMS, BASELINE, CANDIDATE
from evals.statistics import mcnemar_worse

NEARLY_ALL = 0.95
"""Share of the questions from which on an arm repeats itself. Not all: greedy answers to one question may part, too,
where a server batches it otherwise."""

UNLIKE = 0.001
"""p-value up to which one arm repeats itself where the other draws: a false alarm in a thousand comparisons."""


def repeating(pairs: Sequence[Pair]) -> list[str]:
    """Arms whose repeats are one answer: by their temperature, or because nearly every question has one at them all.

    A server that says which temperature and seed it used is believed: a sure model draws the same answer many times.
    """
    answered = [pair for pair in pairs if pair.answered]
    if not answered:
        return []
    if all(pair.request.temperature == 0 for pair in answered):
        return list(ARMS)
    asked = _asked_again(answered)
    return [arm for arm in ARMS if not all(_says_how(pair, arm) for pair in answered) and _repeats(asked, arm)]


def unlike(pairs: Sequence[Pair]) -> Iterator[str]:
    """Why the arms did not draw alike: one repeats itself, and the other answers the same questions in several ways.

    Here nobody is believed: the two arms were asked for the same temperature.
    """
    asked = _asked_again([pair for pair in pairs if pair.answered and pair.request.temperature > 0])
    for arm, other in ((BASELINE, CANDIDATE), (CANDIDATE, BASELINE)):
        same, others = ([_one_answer(question, name) for question in asked] for name in (arm, other))
        alone, others_alone = (
            sum(a and not b for a, b in zip(one, two, strict=True)) for one, two in ((same, others), (others, same))
        )
        if _repeats(asked, arm) and mcnemar_worse(alone, others_alone) <= UNLIKE:
            yield (
                f"{arm}: all repeats of {sum(same)} of {len(asked)} questions are one answer, in the {other} of "
                f"{sum(others)}: the arms did not draw alike; see whether its server ignores temperature or seed"
            )


def _asked_again(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The repeats of each question that was asked more than once in the same words."""
    questions: dict[object, list[Pair]] = defaultdict(list)
    for pair in pairs:
        questions[pair.request.item, pair.request.messages].append(pair)
    return [question for question in questions.values() if len(question) > 1]


def _repeats(asked: Sequence[Sequence[Pair]], arm: str) -> bool:
    return bool(asked) and sum(_one_answer(question, arm) for question in asked) >= NEARLY_ALL * len(asked)


def _one_answer(question: Sequence[Pair], arm: str) -> bool:
    """Whether all repeats have one text and one length, all that is seen of reasoning taken out of the text."""
    responses = [pair.arm(arm).response for pair in question]
    return len({(response.text, response.tokens) for response in responses}) == 1


def _says_how(pair: Pair, arm: str) -> bool:
    return {"temperature", "seed"} <= pair.arm(arm).response.effective.keys()
