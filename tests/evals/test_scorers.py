"""Golden answers of each scorer, and hostile ones in bounded time."""

from __future__ import annotations

import time

import pytest

from evals.scorers import boxed, choice, mathematics, needle
from evals.scorers.grade import Grade

SECONDS = 1.0
"""For a megabyte: a linear scan takes milliseconds, quadratic time would take hours."""


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"Therefore \boxed{70}.", 1),
        (r"\boxed{070}", 1),
        (r"\boxed{ 70 }", 1),
        (r"First \boxed{12}, but no: $\boxed{70}$", 1),
        (r"First \boxed{70}, but no: $\boxed{12}$", 0),
        (r"\boxed{$70$}", 1),
        (r"\boxed{70.0}", 1),
        (r"\boxed{\frac{140}{2}}", 1),
        (r"\boxed{x = 70}", 1),
        (r"\boxed{\text{70}}", 1),
        ("\\boxed{\uff17\uff10}", 1),
        (r"\boxed{70}. The final answer is inside \boxed{}.", 1),
        (r"\boxed{70 = x = 70.0}", 1),
        (r"\boxed{m + n = 33 + 37 = 70}", 1),
        (r"\boxed{69 = 70}", 0),
        (r"\boxed{70 = 69}", 0),
        (r"\boxed{69 == 70}", 0),
        (r"\boxed{69 := 70}", 0),
        ("\\boxed{69 \uff1d 70}", 0),
        (r"\boxed{69 \equiv 70}", 0),
        (r"\boxed{x = 69 = 70}", 0),
        (r"\boxed{69 = x = 70}", 0),
        (r"\boxed{70 \text{ or } 71}", 0),
        (r"\boxed{70, 71}", 0),
        (r"\boxed{\{70, 71\}}", 0),
        (r"\boxed{7}", 0),
        (r"\boxed{-70}", 0),
        ("<think>\\boxed{12}</think> \\boxed{70}", 1),
    ],
)
def test_the_last_boxed_value_counts_however_it_is_written(response: str, score: int) -> None:
    grade = boxed.grade(response, "70")
    assert (grade.score, grade.parsed) == (score, True)


@pytest.mark.parametrize(
    "response", ["", "70", r"\boxed{}", r"\boxed{70", r"\boxed 70", "<think>so \\boxed{70}", "\\box{70}"]
)
def test_without_a_closed_box_there_is_no_answer(response: str) -> None:
    assert boxed.grade(response, "70") == Grade(0.0, parsed=False)


def test_expressions_of_contests_are_compared_by_value() -> None:
    assert boxed.grade(r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}").score == 1
    assert boxed.grade(r"\boxed{\frac{3}{2\sqrt{3}}}", r"\frac{\sqrt{3}}{2}").score == 1
    assert boxed.grade(r"\boxed{\frac{1}{2}}", r"\frac{\sqrt{3}}{2}").score == 0
    assert boxed.grade(r"\boxed{1,234}", "1234").score == 1


def test_plain_integers_are_read_as_math_verify_reads_them() -> None:
    for answer, expected in (("70", "70"), ("070", "70"), ("7", "70"), ("-70", "70"), ("+70", "70")):
        assert mathematics.equal(answer, expected) == (boxed.integer(answer) == boxed.integer(expected)), answer


def test_an_expression_that_never_ends_is_stopped_and_the_next_one_is_compared() -> None:
    started = time.monotonic()
    grade = boxed.grade(r"\boxed{9^{9^{9^{9}}}}", "70")
    assert (grade.parsed, grade.note) == (False, "not understood in time")
    assert time.monotonic() - started < mathematics.LIMIT + mathematics.START
    assert boxed.grade(r"\boxed{2^{10}}", "1024").score == 1
    again = time.monotonic()
    assert not boxed.grade(r"\boxed{9^{9^{9^{9}}}}", "71").parsed
    assert time.monotonic() - again < SECONDS


def test_an_equation_with_a_side_that_never_ends_is_stopped_too() -> None:
    started = time.monotonic()
    assert boxed.grade(r"\boxed{9^{9^{9^{9}}} = 70}", "70").score == 0
    assert boxed.grade("\\boxed{" + "=".join(["70"] * 130) + "}", "70").score in (0, 1)
    assert time.monotonic() - started < 2 * (mathematics.LIMIT + mathematics.START)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The correct answer is (C).", "C"),
        ("Answer: C", "C"),
        ("**Answer:** **C**", "C"),
        ("Answer: $\\boxed{\\text{C}}$", "C"),
        ("so \\boxed{C}", "C"),
        ("Answer: A. On reflection:\nAnswer: C", "C"),
        ("C", "C"),
        ("(C)", "C"),
        ("answer is a good thing", None),
        ("Answer: A or C", None),
        ("answer: (A) and (C)", None),
        ("Answer: Certainly", None),
        ("Answer: \\(C\\)", "C"),
        ("Answer: `C`", "C"),
        ("Answer\uff1a\uff23", "C"),
        ("Answer: A is tempting, but the answer is option (C).", "C"),
        ("Answer: \\(\\boxed{\\mathbf{C}}\\)", "C"),
        ("Answer: C (not A)", "C"),
        ("Answer: C. Hmm, the answer is A or B.", None),
        ("Answer: A & C", None),
        ("Answer: A; C", None),
        ("Answer: A and maybe B", None),
        ("\\boxed{A\\text{ and }C}", None),
        ("Answer: E", None),
        ("<think>Answer: C", None),
        ("<think>Answer: A</think>Answer: C", "C"),
        ("", None),
    ],
)
def test_the_last_stated_letter_counts_and_two_letters_are_none(response: str, letter: str | None) -> None:
    assert choice.letter(response) == letter


PREFIX, ANSWER = "aB3dE6gH9j", "aB3dE6gH9jOnce upon a time there was an otter."


@pytest.mark.parametrize(
    ("response", "score", "note"),
    [
        (ANSWER, 1.0, ""),
        ("\n\r\n" + ANSWER, 1.0, ""),
        ("Sure! " + ANSWER, 0.0, needle.PREFIX),
        (" " + ANSWER, 0.0, needle.PREFIX),
        (ANSWER.removeprefix(PREFIX), 0.0, needle.PREFIX),
        (PREFIX, 0.0, ""),
        ("<think>\nwhich one?</think>\n\n" + ANSWER, 1.0, ""),
    ],
)
def test_mrcr_scores_as_openai_does_and_newlines_in_front_are_no_matter(response: str, score: float, note: str) -> None:
    grade = needle.grade(response, ANSWER, PREFIX)
    assert (grade.score, grade.note) == (score, note)


def test_mrcr_gives_the_ratio_of_difflib_on_what_follows_the_prefix() -> None:
    from difflib import SequenceMatcher

    other = "Once upon a time there was a beaver."
    expected = SequenceMatcher(None, other, ANSWER.removeprefix(PREFIX)).ratio()
    assert needle.grade(PREFIX + other, ANSWER, PREFIX).score == pytest.approx(expected)


MEGABYTE = 10**6
BAIT = {
    "one character": "a" * MEGABYTE,
    "spaces": " " * MEGABYTE,
    "braces": "\\boxed{" + "{" * MEGABYTE,
    "boxes": "\\boxed{" * (MEGABYTE // 7),
    "statements": "answer is (" * (MEGABYTE // 11),
    "answers": "Answer: " * (MEGABYTE // 8),
    "controls": "\x1b[31m\x00" * (MEGABYTE // 6),
    "replacement characters": "\ufffd" * MEGABYTE,
    "digits": "\\boxed{" + "9" * MEGABYTE + "}",
    "a prefix, then one character": PREFIX + "a" * MEGABYTE,
    "a prefix, then the answer for ever": PREFIX + ANSWER * (MEGABYTE // len(ANSWER)),
}


@pytest.mark.parametrize("bait", BAIT)
def test_a_megabyte_of_anything_is_scored_in_bounded_time(bait: str) -> None:
    started = time.process_time()
    assert boxed.grade(BAIT[bait], "70").score == 0
    assert choice.grade(BAIT[bait], "C").score == 0
    assert needle.grade(BAIT[bait], PREFIX + "a" * 199, PREFIX).score < 0.01
    assert needle.grade(BAIT[bait], ANSWER * 100, PREFIX).score < 2 / 9
    assert time.process_time() - started < 4 * SECONDS


def test_an_overlong_copy_is_no_good_copy() -> None:
    grade = needle.grade(PREFIX + "x" * 100_000, ANSWER, PREFIX)
    assert grade.note == needle.OVERLONG
    assert grade.score < 2 / 9
