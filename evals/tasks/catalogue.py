"""The table of evals. A set beside these is one more entry here (and a source, where it is published)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evals.items import aime, gpqa, mrcr
from evals.items.base import Item
from evals.tasks.kinds import Kind, choice_kind, math_kind, needle_kind
from evals.tasks.sources import AIME25, AIME26, GPQA_DIAMOND, HMMT26, MRCR, Source

BOX = "{problem}\n\nReason step by step, and give the final answer inside \\boxed{}."
LETTER = (
    "{question}\n\n{choices}\n\nExactly one choice is right. Think it through step by step, then end with a line "
    "of the form `Answer: X`, where X is A, B, C or D."
)
MRCR_BINS = tuple(2**n * 4 for n in range(13, 21))
"""Upper limits in characters, about four of them a token: the published bins of 8K to 1M tokens."""


@dataclass(frozen=True)
class Entry:
    """One published set: how it is asked, how it is sampled, and how many tokens an answer may take."""

    kind: Kind
    source: Source
    max_tokens: int
    repeats: int
    temperature: float = 1.0
    top_p: float = 0.95


@dataclass(frozen=True)
class Generated:
    """Items like the published ones, made for k3-mini: `make(index, seed)` is item `index` of the eval split."""

    kind: Kind
    make: Callable[[int, int], Item]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 0.95


PUBLISHED: dict[str, Entry] = {
    "aime25": Entry(math_kind(BOX), AIME25, max_tokens=131_072, repeats=32),
    "gpqa_diamond": Entry(choice_kind(LETTER), GPQA_DIAMOND, max_tokens=65_536, repeats=8),
    "mrcr": Entry(needle_kind(MRCR_BINS), MRCR, max_tokens=32_768, repeats=1),
    "aime26": Entry(math_kind(BOX), AIME26, max_tokens=131_072, repeats=32),
    "hmmt_feb26": Entry(math_kind(BOX), HMMT26, max_tokens=131_072, repeats=32),
}


_SHORT = 384
"""Characters of the shortest chats: two needles and two other turns."""

_LENGTHS = (_SHORT, *mrcr.BINS[:2])


def _needles(index: int, seed: int) -> Item:
    """A dozen short chats with two needles, which are cheap, then dozens of longer ones with two, four and eight."""
    length = _LENGTHS[index // 12 % len(_LENGTHS)]
    needles = 2 if length == _SHORT else mrcr.NEEDLES[index % 3]
    return mrcr.item("eval", index, needles, length, seed)


GENERATED: dict[str, Generated] = {
    "aime25": Generated(
        math_kind(aime.PROMPTS[0].replace("{{}}", "{}")), lambda i, seed: aime.item("eval", i, seed), 400
    ),
    "gpqa_diamond": Generated(choice_kind("{question}\n{choices}"), lambda i, seed: gpqa.item("eval", i, seed), 128),
    "mrcr": Generated(needle_kind((512, *mrcr.BINS)), _needles, max_tokens=128),
}
"""Under the names of what they are like; a report says which was asked. Caps are a quarter above the longest right
answer and more (312, 63 and 50 tokens)."""
