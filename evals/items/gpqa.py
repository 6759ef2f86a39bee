"""GPQA-Diamond-like items: a science question, one right and three wrong answers, permuted per (item, repeat).

Rows have GPQA's columns: Record ID, Question, Correct Answer, Incorrect Answer 1..3, Explanation, Subdomain and
High-level domain.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from evals.items.base import Item, Message, Split, draw, rng

LETTERS = "ABCD"


@dataclass(frozen=True)
class Problem:
    """A question with its answer's number and unit, the working, and tempting wrong numbers."""

    question: str
    working: str
    answer: int
    unit: str
    tempting: tuple[int, ...]


def _small(r: random.Random) -> tuple[int, int]:
    return r.randint(2, 12), r.randint(2, 12)


def _product(question: str, formula: str, unit: str) -> Callable[[random.Random], Problem]:
    def make(r: random.Random) -> Problem:
        a, b = _small(r)
        working = f"{formula} = {a}*{b} = {a * b} {unit}"
        return Problem(question.format(a=a, b=b), working, a * b, unit, (a + b, a * b + a, a * b - b, 2 * a * b))

    return make


def _quotient(question: str, formula: str, unit: str) -> Callable[[random.Random], Problem]:
    def make(r: random.Random) -> Problem:
        a, b = _small(r)
        working = f"{formula} = {a * b}/{b} = {a} {unit}"
        return Problem(question.format(a=a * b, b=b), working, a, unit, (a + 1, a * b - b, a * b, b + a))

    return make


def _kinetic(r: random.Random) -> Problem:
    m, v = 2 * r.randint(1, 6), r.randint(2, 9)
    energy = m // 2 * v * v
    working = f"E = m/2*v^2 = {m // 2}*{v * v} = {energy} J"
    return Problem(
        f"What is the kinetic energy of a body of {m} kg that moves at {v} m/s?",
        working,
        energy,
        "J",
        (m * v, m * v * v, energy + v, energy - m // 2),
    )


def _half_life(r: random.Random) -> Problem:
    left, halvings, life = r.randint(2, 12), r.randint(2, 4), r.randint(2, 12)
    start = left * 2**halvings
    chain = "->".join(str(start >> i) for i in range(halvings + 1))
    return Problem(
        f"A sample of {start} mg has a half-life of {life} days. How much is left after {life * halvings} days?",
        f"n = {life * halvings}/{life} = {halvings}, {chain} mg",
        left,
        "mg",
        (left * 2, start // halvings, left + life, start - life),
    )


def _alkane(r: random.Random) -> Problem:
    n = r.randint(2, 60)
    return Problem(
        f"How many hydrogen atoms has an open-chain alkane with {n} carbon atoms?",
        f"H = 2n+2 = {2 * n}+2 = {2 * n + 2}",
        2 * n + 2,
        "H",
        (2 * n, 2 * n - 2, n + 2, 2 * n + 1),
    )


def _nucleons(r: random.Random) -> Problem:
    protons, neutrons = r.randint(5, 99), r.randint(5, 99)
    return Problem(
        f"A nucleus has {protons} protons and {neutrons} neutrons. What is its mass number?",
        f"A = Z+N = {protons}+{neutrons} = {protons + neutrons}",
        protons + neutrons,
        "u",
        (abs(protons - neutrons), protons, neutrons, protons + neutrons + 10),
    )


def _series(r: random.Random) -> Problem:
    a, b, c = (r.randint(2, 99) for _ in range(3))
    return Problem(
        f"Resistors of {a}, {b} and {c} ohm are in series. What is the total resistance?",
        f"R = {a}+{b}+{c} = {a + b}+{c} = {a + b + c} ohm",
        a + b + c,
        "ohm",
        (a + b, b + c, a + b + c + 10, a + c),
    )


def _complement(r: random.Random) -> Problem:
    share = r.randint(5, 45)
    return Problem(
        f"In a double-stranded DNA, {share} % of the bases are adenine. What percentage are guanine?",
        f"G = 50-A = 50-{share} = {50 - share} %",
        50 - share,
        "%",
        (share, 100 - share, 100 - 2 * share, abs(50 - share) + 5),
    )


SUBJECTS: dict[str, tuple[str, Callable[[random.Random], Problem]]] = {
    "Mechanics": (
        "Physics",
        _product("What force gives a body of {a} kg an acceleration of {b} m/s^2?", "F = m*a", "N"),
    ),
    "Electricity": ("Physics", _product("What voltage drives {a} A through {b} ohm?", "U = I*R", "V")),
    "Momentum": ("Physics", _product("What is the momentum of {a} kg at {b} m/s?", "p = m*v", "kg m/s")),
    "Work": ("Physics", _product("What work does a force of {a} N do along {b} m?", "W = F*s", "J")),
    "Waves": ("Physics", _product("A wave has {a} Hz and a length of {b} m. How fast is it?", "v = f*l", "m/s")),
    "Charge": ("Physics", _product("What charge do {a} A carry in {b} s?", "Q = I*t", "C")),
    "Density": ("Physics", _quotient("What is the density of {a} g in {b} cm^3?", "d = m/V", "g/cm^3")),
    "Pressure": ("Physics", _quotient("What pressure does {a} N exert on {b} m^2?", "p = F/A", "Pa")),
    "Amount of substance": (
        "Chemistry",
        _quotient("How many moles are {a} g of a compound of {b} g/mol?", "n = m/M", "mol"),
    ),
    "Concentration": ("Chemistry", _quotient("{a} mol are in {b} L. What is the concentration?", "c = n/V", "mol/L")),
    "Hydrocarbons": ("Chemistry", _alkane),
    "Nuclear physics": ("Physics", _nucleons),
    "Radioactivity": ("Chemistry", _half_life),
    "Kinetic energy": ("Physics", _kinetic),
    "Circuits": ("Physics", _series),
    "Genetics": ("Biology", _complement),
}


EVAL_WEIGHTS = {
    "Nuclear physics": 3,
    "Circuits": 3,
    "Radioactivity": 2,
    "Kinetic energy": 0,
    "Hydrocarbons": 0,
    "Genetics": 0,
}
"""How often a subject is drawn for evaluation, 1 if absent: more where there are many questions, and none where there
are so few (41 to 59) that hardly one is held out."""


def _make(r: random.Random, subject: str) -> Item:
    domain, make = SUBJECTS[subject]
    problem = make(r)
    wrong = [n for n in dict.fromkeys(problem.tempting) if n > 0 and n != problem.answer]
    r.shuffle(wrong)
    while len(wrong) < 3:
        other = problem.answer + r.choice((-3, -2, -1, 1, 2, 3, 5, 10))
        if other > 0 and other != problem.answer and other not in wrong:
            wrong.append(other)
    row: dict[str, Any] = {"Question": problem.question, "Correct Answer": f"{problem.answer} {problem.unit}"}
    row |= {f"Incorrect Answer {i + 1}": f"{n} {problem.unit}" for i, n in enumerate(wrong[:3])}
    row |= {"Explanation": problem.working, "Subdomain": subject, "High-level domain": domain}
    return Item(row, problem.working)


def item(split: Split, index: int, seed: int = 0) -> Item:
    """Item `index` of a split; the target is for repeat 0's order of the choices."""
    # The subject comes first: drawing it again with each rejected question would favour those with many eval questions.
    weights = [1] * len(SUBJECTS) if split == "train" else [EVAL_WEIGHTS.get(name, 1) for name in SUBJECTS]
    subject = rng("gpqa subject", split, seed, index).choices(list(SUBJECTS), weights)[0]
    make = partial(_make, subject=subject)
    made = draw(make, lambda i: str(i.row["Question"]), split, ("gpqa", seed, index))
    row = {"Record ID": f"{split}-{seed}-{index}", **made.row}
    return Item(row, target(row, 0))


def choices(row: dict[str, Any], repeat: int) -> tuple[list[str], str]:
    """The four answers in the order of (item, repeat), and the right one's letter."""
    answers = [str(row["Correct Answer"]), *(str(row[f"Incorrect Answer {i}"]) for i in (1, 2, 3))]
    order = list(range(4))
    rng("gpqa order", row["Record ID"], repeat).shuffle(order)
    return [answers[i] for i in order], LETTERS[order.index(0)]


PROMPTS = (
    "{question}\n{options}",
    "Question: {question}\nChoices:\n{options}",
    "Choose one answer and end with its letter.\n\n{question}\n\n{options}",
    "{question}\nOptions:\n{options}\nShow the working first.",
)
OPTIONS = ("({letter}) {answer}", "({letter}) {answer}", "{letter}) {answer}", "{letter}. {answer}")
"""Ways to ask and to list; the first is the usual one, the others keep the model from depending on its wording."""


def messages(row: dict[str, Any], repeat: int, style: int = 0) -> list[Message]:
    """The chat that asks a row with the choices of `repeat`."""
    answers, _ = choices(row, repeat)
    listed = (OPTIONS[style].format(letter=l, answer=a) for l, a in zip(LETTERS, answers, strict=True))
    content = PROMPTS[style].format(question=row["Question"], options="\n".join(listed))
    return [{"role": "user", "content": content}]


def target(row: dict[str, Any], repeat: int) -> str:
    """A right response: the working, then the letter."""
    return f"{row['Explanation']}. The correct answer is ({choices(row, repeat)[1]})."


def extract(response: str) -> str | None:
    """The letter of the last stated answer, or None."""
    found = re.findall(r"answer is \**\(?([ABCD])(?![A-Za-z])", response)
    return found[-1] if found else None


def correct(response: str, row: dict[str, Any], repeat: int) -> bool:
    """Whether the stated letter is the right one under the order of `repeat`."""
    return extract(response) == choices(row, repeat)[1]
