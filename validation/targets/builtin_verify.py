"""A teacher-forced decode by verify steps: given tokens as drafts, some of them wrong on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

from torch import Tensor

from decode_impl.batch import Chunk
from decode_impl.runner import ModelRunner
from validation.targets.base import ForcedStep
from validation.targets.builtin_caches import caches_of


class BuiltinVerifyDecode:
    """A decode on the caches of `runner`, which has a column per draft and is nobody else's."""

    def __init__(
        self, runner: ModelRunner, sequences: Sequence[Sequence[int]], prompt_length: int, accepted: Sequence[int]
    ) -> None:
        self._runner, self._sequences, self._prompt_length = runner, sequences, prompt_length
        self._accepted = cycle(accepted)
        # Drafts of the last step may lie beyond the text.
        pages = -(-(len(sequences[0]) + runner.deployment.drafts) // runner.deployment.page_tokens)
        self._slots = [runner.states.allocate() for _ in sequences]
        self._pages = [tuple(runner.latents.allocate() for _ in range(pages)) for _ in sequences]
        self._column = self._computed = 0

    def __iter__(self) -> Iterator[ForcedStep]:
        length, count = len(self._sequences[0]), len(self._sequences)
        owned = list(zip(self._sequences, self._slots, self._pages, strict=True))
        self._runner.execute(
            [Chunk(list(tokens[: self._prompt_length]), 0, slot, pages) for tokens, slot, pages in owned]
        )
        self._computed = self._prompt_length
        while self._computed < length:
            first = self._computed
            right = min(next(self._accepted), length - first - 1)
            result = self._runner.execute(
                [
                    Chunk(
                        [tokens[first], *self._drafts(tokens, first + 1, right)],
                        first,
                        slot + self._column,
                        pages,
                        tuple(range(slot, slot + 1 + self._runner.deployment.drafts)),
                    )
                    for tokens, slot, pages in owned
                ]
            )
            self._column, self._computed = right, first + right + 1
            rows = result.logits.cpu().unflatten(0, (count, -1))
            for kept in range(right + 1):
                yield ForcedStep(rows[:, kept], tuple(range(count)), (first + kept,) * count, result.path)

    def _drafts(self, tokens: Sequence[int], first: int, right: int) -> list[int]:
        """The tokens from place `first` on: `right` of them as given, then others, which are none of the text's."""
        vocab = self._runner.weights.config.vocab_size
        coming = [*tokens[first:], *[0] * self._runner.deployment.drafts][: self._runner.deployment.drafts]
        return [token if i < right else (token + 1) % vocab for i, token in enumerate(coming)]

    def state(self, sequence: int) -> dict[str, Tensor]:
        """This sequence's caches after the last kept token, ranks joined, in f32."""
        slot, pages = self._slots[sequence] + self._column, self._pages[sequence]
        return caches_of(self._runner, slot, pages, self._computed)

    def close(self) -> None:
        """Nothing: the caches end with their runner."""
