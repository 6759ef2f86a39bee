"""What the fuzzer's requests say: a few texts, some with one beginning, so that prefixes hit, hit in part and miss."""

from __future__ import annotations

import numpy as np

TEXTS = 5
"""Texts 1 and 2 begin as text 0 does, text 4 as text 3."""

TEXT_LENGTH = 80
"""The longest prompt, its continuation and the token that is asked for beyond it: five pages."""

_SHARED = ((1, 0, 16), (2, 0, 40), (4, 3, 32))


def random_texts(vocabulary: int, seed: int) -> list[list[int]]:
    """Texts of random tokens, each written with tokens that no text of another beginning has: its codewords.

    A token that turns up in another request's output, or a row of logits that belongs to another text, is then known
    for what it is. The lowest 3 ids are left out: they are special in our models.
    """
    places = np.random.default_rng(seed)
    alphabets = np.array_split(places.permutation(np.arange(3, vocabulary)), TEXTS)
    texts = [places.choice(alphabet, TEXT_LENGTH).tolist() for alphabet in alphabets]
    return alike(texts)


def alike(texts: list[list[int]]) -> list[list[int]]:
    """The texts with the beginnings that they share."""
    for later, earlier, length in _SHARED:
        texts[later][:length] = texts[earlier][:length]
    return texts
