"""Playing cases on a target's candidate, each on an engine and caches of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from validation.errors import describe
from validation.fuzz.case import Case
from validation.fuzz.judge import breaches
from validation.fuzz.solo import Reference, fuzz_config, reference
from validation.fuzz.texts import TEXT_LENGTH, TEXTS, alike, random_texts
from validation.gates.parity.measure import windows
from validation.targets.base import ArmConfig, Capability, Target, TargetError


@dataclass
class Trial:
    """A target, its candidate, and what its requests see alone. `steps` counts the engine's steps so far, by path."""

    target: Target
    candidate: ArmConfig
    reference: Reference
    steps: Counter[str] = field(default_factory=Counter)

    def findings(self, case: Case) -> list[str]:
        """Every breach of the case; none where it is kept."""
        ranks = case.context_ranks
        arm = self.target.open(replace(self.candidate, tensor_parallel=ranks, context_parallel=ranks))
        try:
            played = arm.generate(case.schedule(self.reference.texts))
        except TargetError:
            raise
        except Exception as error:
            # An engine that a schedule brings down is a wrong engine, not a broken fuzzer.
            return [f"the engine raised {describe(error)}"]
        finally:
            self.steps.update(arm.counters().steps)
        return list(breaches(case, played, self.reference))


def prepare(target: Target, baseline: ArmConfig, candidate: ArmConfig, small: bool, seed: int) -> Trial:
    """A trial on the target's miniature where `small`, and on the target itself with real text otherwise.

    Raises:
        ValueError: the target cannot play schedules, or has no miniature.
    """
    lacking = {Capability.SCHEDULE, Capability.TEACHER_FORCED} - target.capabilities
    if lacking:
        raise ValueError(f"target {target.name!r} cannot {' or '.join(sorted(lacking))}; there is nothing to fuzz")
    if small:
        known = _small(target, baseline)
        return Trial(known.target, fuzz_config(candidate), known.reference)
    texts = alike(windows(target, TEXTS, TEXT_LENGTH, seed))
    return Trial(target, fuzz_config(candidate), reference(target, fuzz_config(baseline), texts))


_SMALL: dict[tuple[str, ArmConfig], Trial] = {}
"""By kind of target: its miniature is always the same, and its texts' solo runs are decoded once per process."""


def _small(target: Target, baseline: ArmConfig) -> Trial:
    key = target.name, baseline
    if key not in _SMALL:
        # Asked by name: a target that is watched passes on what it does not know.
        miniature = getattr(target, "miniature", None)
        if miniature is None:
            raise ValueError(f"target {target.name!r} has no miniature; fuzz the model itself")
        small: Target = miniature()
        texts = random_texts(small.dims()["vocab_size"], TEXTS_SEED)
        _SMALL[key] = Trial(small, baseline, reference(small, fuzz_config(baseline), texts))
    return _SMALL[key]


TEXTS_SEED = 1
"""The miniature's texts are always the same, so that a case that failed fails again from its file alone."""
