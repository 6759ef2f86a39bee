"""How many drafts of each verify step were committed."""

from __future__ import annotations

from collections import Counter


class Acceptance:
    """Counts verify steps by (drafts verified, drafts accepted). `drafts` is the engine's setting."""

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts
        self.steps: Counter[tuple[int, int]] = Counter()

    def count(self, drafts: int, accepted: int) -> None:
        """Count one verify step of one request."""
        self.steps[drafts, accepted] += 1

    @property
    def length(self) -> float:
        """Mean tokens committed by a step with the full number of drafts, the target's own token included; NaN if none.

        Steps cut short by the end of an answer count: what they commit is what a user gets.
        """
        full = {accepted: n for (drafts, accepted), n in self.steps.items() if drafts == self.drafts}
        steps = sum(full.values())
        return sum((accepted + 1) * n for accepted, n in full.items()) / steps if steps else float("nan")

    def by_position(self) -> list[float]:
        """Share of full steps whose draft at position 1, 2, .. was accepted."""
        full = [(accepted, n) for (drafts, accepted), n in self.steps.items() if drafts == self.drafts]
        steps = sum(n for _, n in full)
        return [sum(n for a, n in full if a >= k) / steps if steps else float("nan") for k in range(1, self.drafts + 1)]
