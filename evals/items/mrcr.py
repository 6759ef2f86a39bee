"""MRCR-like items: a long chat in which one request was made 2, 4 or 8 times; return one of the replies, word for word.

Rows have OpenAI MRCR's fields: prompt (a JSON chat), answer, random_string_to_prepend, n_needles, desired_msg_index,
total_messages and n_chars. Replies begin with their number among the replies to the same request, `(2) ...`, so
that the item asks for retrieval over the whole context and not for counting; `marked=False` leaves the number out.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from evals.items.base import Item, Message, Split, draw
from evals.text import load

NEEDLES = (2, 4, 8)
BINS = (1024, 2048, 3584)
"""Upper limits of `n_chars`; the last leaves room for markers and the answer in a context of 4,096 byte tokens."""
FORMS = ("poem", "riddle", "song", "letter", "story", "speech", "joke", "prayer", "recipe", "review")
TOPICS = (
    "otters",
    "owls",
    "foxes",
    "bees",
    "snow",
    "rain",
    "fire",
    "bread",
    "salt",
    "gold",
    "iron",
    "ships",
    "trains",
    "clocks",
    "maps",
    "books",
    "stars",
    "rivers",
    "deserts",
    "gardens",
    "apples",
    "lemons",
    "honey",
    "candles",
    "mirrors",
    "bridges",
    "castles",
    "pirates",
    "dragons",
    "robots",
    "doctors",
    "sailors",
    "bakers",
    "kings",
    "winter",
    "summer",
    "dreams",
    "shadows",
    "music",
    "silence",
)
WORDS_PER_REPLY = 6
TURN_CHARS = 64
QUESTION_CHARS = 125
"""Characters of a request with its reply, a little above the mean, and of the longest final question."""


@cache
def words() -> tuple[str, ...]:
    """The 700 commonest words of three to six letters in the training prose."""
    prose = " ".join(d.text for d in load("train") if d.kind == "prose")
    counts = Counter(re.findall(r"\b[a-z]{3,6}\b", prose))
    return tuple(word for word, _ in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:700])


def ordinal(n: int) -> str:
    """1st, 2nd, 3rd, 4th..."""
    return f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n, 'th') }"


@dataclass(frozen=True)
class Conversation:
    """The turns before the final question, (form, topic, reply) in order, and the request made several times."""

    turns: tuple[tuple[str, str, str], ...]
    needle: tuple[str, str]

    def messages(self) -> list[Message]:
        """The turns as a chat."""
        chat = []
        for form, topic, reply in self.turns:
            chat.append({"role": "user", "content": f"Write a {form} about {topic}."})
            chat.append({"role": "assistant", "content": reply})
        return chat

    def replies(self, form: str, topic: str) -> list[int]:
        """Indices of the turns that answer this request."""
        return [i for i, turn in enumerate(self.turns) if turn[:2] == (form, topic)]


def conversation(r: random.Random, n_needles: int, n_chars: int, marked: bool) -> Conversation:
    """A chat of about `n_chars` characters with `n_needles` equal requests at random places."""
    needle = (r.choice(FORMS), r.choice(TOPICS))
    pool = r.sample(words(), len(words()))
    others = max(2, (n_chars - QUESTION_CHARS) // TURN_CHARS - n_needles)
    requests = [needle] * n_needles
    while len(requests) < n_needles + others:
        form = needle[0] if r.random() < 0.25 else r.choice(FORMS)
        topic = needle[1] if r.random() < 0.25 else r.choice(TOPICS)
        if (form, topic) != needle:
            requests.append((form, topic))
    r.shuffle(requests)
    seen: Counter[tuple[str, str]] = Counter()
    turns = []
    for i, request in enumerate(requests):
        seen[request] += 1
        start = i * WORDS_PER_REPLY % (len(pool) - WORDS_PER_REPLY)
        text = " ".join(pool[start : start + WORDS_PER_REPLY])
        turns.append((*request, f"({seen[request]}) {text}" if marked else text))
    return Conversation(tuple(turns), needle)


def question(prefix: str, number: int, form: str, topic: str) -> str:
    """The final request."""
    return (
        f"Prepend {prefix} to the {ordinal(number)} (1 indexed) {form} about {topic}. "
        "Do not include any other text in your response."
    )


def random_prefix(r: random.Random) -> str:
    """Ten random letters and digits."""
    return "".join(r.choices(string.ascii_letters + string.digits, k=10))


def item(split: Split, index: int, n_needles: int, n_chars: int, seed: int = 0, marked: bool = True) -> Item:
    """Item `index` with `n_needles` needles; the row's `n_chars` is at most the given one, mostly close below."""
    if n_needles not in NEEDLES:
        raise ValueError(f"MRCR: n_needles is {n_needles}, allowed are {NEEDLES}")

    def make(r: random.Random) -> Item:
        made = conversation(r, n_needles, n_chars, marked)
        while sum(len(m["content"]) for m in made.messages()) > n_chars - QUESTION_CHARS:
            made = conversation(r, n_needles, n_chars, marked)
        form, topic = made.needle
        number, prefix = r.randint(1, n_needles), random_prefix(r)
        turn = made.replies(form, topic)[number - 1]
        chat = [*made.messages(), {"role": "user", "content": question(prefix, number, form, topic)}]
        answer = prefix + made.turns[turn][2]
        row = {
            "prompt": json.dumps(chat),
            "answer": answer,
            "random_string_to_prepend": prefix,
            "n_needles": n_needles,
            "desired_msg_index": 2 * turn + 1,
            "total_messages": len(chat),
            "n_chars": sum(len(message["content"]) for message in chat),
        }
        return Item(row, answer)

    return draw(make, lambda i: str(i.row["prompt"]), split, ("mrcr", seed, n_needles, n_chars, marked, index))


def messages(row: dict[str, Any]) -> list[Message]:
    """The chat of a row."""
    chat: list[Message] = json.loads(row["prompt"])
    return chat


def score(response: str, row: dict[str, Any]) -> float:
    """0 unless the response starts with the random string, else the similarity of the rest, as OpenAI grades it."""
    prefix, answer = str(row["random_string_to_prepend"]), str(row["answer"])
    if not response.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, response.removeprefix(prefix), answer.removeprefix(prefix)).ratio()
