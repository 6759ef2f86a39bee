"""Steps are found where they are, and no oftener where there are none than is stated."""

from __future__ import annotations

import numpy as np
import pytest

from validation.history.entry import Entry
from validation.history.steps import ALPHA, steps
from validation.history.trend import FALSE_SHARE, courses

RUNS = 40


def test_a_step_is_placed_exactly_where_it_is_clear() -> None:
    for place in (10, 20, 33):
        noise = np.random.default_rng(place).normal(0, 0.1, RUNS)
        (found,) = steps(np.where(np.arange(RUNS) < place, 1.0, 2.0) + noise)
        assert found.index == place
        # A mean of n values is known to 4 standard errors.
        assert abs(found.before - 1) < 4 * 0.1 / place**0.5


def test_two_steps_are_both_found() -> None:
    levels = np.repeat([0.0, 3.0, 1.0], 20) + np.random.default_rng(1).normal(0, 0.2, 60)
    assert [step.index for step in steps(levels)] == [20, 40]


def test_noise_of_any_shape_is_split_no_oftener_than_stated() -> None:
    trials = 200
    random = np.random.default_rng(2)
    for draw in (random.normal, random.standard_cauchy, random.exponential):
        false = sum(bool(steps(draw(size=25), seed=trial)) for trial in range(trials))
        # Binomial: more than mean plus 4 standard deviations has a chance below 1e-4.
        assert false <= trials * ALPHA + 4 * (trials * ALPHA * (1 - ALPHA)) ** 0.5


def test_few_constant_and_tied_values_have_no_step() -> None:
    assert steps([]) == []
    assert steps([1.0, 5.0, 5.0, 5.0]) == []
    assert steps([2.0] * 50) == []
    assert steps([1.0, 2.0] * 25) == []
    with pytest.raises(ValueError, match="not finite"):
        steps([1.0, float("nan")] * 10)


def test_among_many_figures_few_false_steps_are_believed() -> None:
    random = np.random.default_rng(3)
    figures = 100
    values = random.normal(size=(30, figures))
    values[15:, 0] += 8
    runs = [
        Entry(
            str(i), "", "s", "", "p", "PASS", (), {}, {}, {("g", f"f{j}"): float(values[i, j]) for j in range(figures)}
        )
        for i in range(30)
    ]
    stepped = [course.name for course in courses(runs, None, None, None) if course.steps]
    assert "f0" in stepped
    assert len(stepped) <= 1 + FALSE_SHARE * figures
