"""Training data for k3-mini: shards of packed token rows, a function of the seed alone.

    python -m evals.items.shards --out DATA --length 1024 --shards 40 --seed 1 [--extra-text FILE ...]

`shard-NNNN.npy` is int16 [R, length+1] holding token + 512 * weight, the loss weight in eighths. `heldout.npz` has
the held-out text as tokens by kind, `eval-NAME.npy` eval items; `done` marks the end. A shard appears whole or
not at all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evals.items import aime, chain, gpqa, mrcr
from evals.items.base import Message, rng, split_of
from evals.text import load

BOS, EOS, PAD, END = 256, 257, 258, 262
ROLES = {"system": 259, "user": 260, "assistant": 261}
"""The special tokens of k3-mini's tokenizer that a chat uses; a test holds them to the tokenizer's file."""

WEIGHT = 512
PROMPT_WEIGHT, TEXT_WEIGHT, ANSWER_WEIGHT = 1, 4, 8
SHARE = {"text": 0.22, "aime": 0.15, "gpqa": 0.18, "mrcr": 0.28, "chain": 0.17}
"""Shares of the tokens by kind."""

Tokens = NDArray[np.int16]


def weigh(ids: Sequence[int], weight: int) -> Tokens:
    """Tokens that all have one loss weight, in eighths."""
    return np.array(ids, dtype=np.int16) + np.int16(weight * WEIGHT)


def chat_tokens(messages: list[Message], weight: int, marks: bool = False) -> list[Tokens]:
    """A chat up to the marker that asks for the assistant's answer; `marks` weighs the `(n) ` of replies in full."""
    parts = [weigh([BOS], 0)]
    for message in messages:
        content = message["content"].encode()
        mark = content.index(b" ") + 1 if marks and message["role"] == "assistant" else 0
        parts += [weigh([ROLES[message["role"]]], 0), weigh(list(content[:mark]), ANSWER_WEIGHT)]
        parts += [weigh([*content[mark:], END], weight)]
    return [*parts, weigh([ROLES["assistant"]], 0)]


def document(messages: list[Message], target: str) -> Tokens:
    """A chat with its answer."""
    answer = weigh([*target.encode(), EOS], ANSWER_WEIGHT)
    return np.concatenate([*chat_tokens(messages, PROMPT_WEIGHT), answer])


def prompt_style(r: random.Random) -> int:
    """The usual way to ask in six cases of ten, else one of the three others."""
    return 0 if r.random() < 0.6 else r.randint(1, 3)


def aime_document(r: random.Random, limit: int) -> Tokens:
    """One AIME25-like item."""
    item = aime.item("train", r.getrandbits(48))
    return document(aime.messages(item.row, prompt_style(r)), item.target)


def gpqa_document(r: random.Random, limit: int) -> Tokens:
    """One GPQA-like item under a random repeat's order."""
    item, repeat = gpqa.item("train", r.getrandbits(48)), r.randrange(1 << 20)
    return document(gpqa.messages(item.row, repeat, prompt_style(r)), gpqa.target(item.row, repeat))


def chain_document(r: random.Random, limit: int) -> Tokens:
    """One chain of at most `limit` tokens, short ones more often."""
    most = max(2, (limit - 160) // chain.TOKENS_PER_STEP)
    steps = min(r.randint(2, most), r.randint(2, most)) if r.random() < 0.7 else most
    item = chain.item("train", r.getrandbits(48), steps)
    return document(chain.messages(item.row), item.target)


def mrcr_document(r: random.Random, limit: int) -> Tokens:
    """A conversation with several final questions instead of one, so that more of its tokens teach retrieval."""
    n_needles = r.choice((2, 2, 4, 4, 8)) if limit > 1200 else r.choice((2, 2, 4))
    marked, asked = r.random() < 0.75, r.randint(3, 7)
    room = limit - 170 * asked - 60
    n_chars = int(r.uniform(0.25, 1.0) * room * 0.95) if r.random() < 0.6 else int(room * 0.95)
    while True:
        made = mrcr.conversation(r, n_needles, n_chars, marked)
        if split_of(str(made.turns)) == "train":
            break
    parts = chat_tokens(made.messages(), 0, marks=marked)[:-1]
    order = made.replies(*made.needle)
    repeated = [i for i, t in enumerate(made.turns) if len(made.replies(t[0], t[1])) > 1]
    for k in range(asked):
        turn = r.choice(order) if k < 2 or r.random() < 0.7 or not repeated else r.choice(repeated)
        form, topic, reply = made.turns[turn]
        prefix = mrcr.random_prefix(r)
        asking = mrcr.question(prefix, made.replies(form, topic).index(turn) + 1, form, topic)
        parts += [weigh([ROLES["user"], *asking.encode(), END, ROLES["assistant"]], 0)]
        parts += [weigh([*(prefix + reply).encode(), EOS], ANSWER_WEIGHT)]
    return np.concatenate(parts)


MAKERS: dict[str, Callable[[random.Random, int], Tokens]] = {
    "aime": aime_document,
    "gpqa": gpqa_document,
    "mrcr": mrcr_document,
    "chain": chain_document,
}


def rows(r: random.Random, texts: list[bytes], length: int, count: int) -> Tokens:
    """`count` packed rows of `length`+1 tokens: whole documents, and text in the gaps."""
    weights, used = [len(t) for t in texts], dict.fromkeys(SHARE, 0)
    packed, room, parts = list[Tokens](), length + 1, list[Tokens]()

    def add_text(size: int) -> None:
        text = r.choices(texts, weights)[0]
        start = r.randrange(max(1, len(text) - size))
        piece = list(text[start : start + size - 1])
        parts.append(weigh([BOS, *piece] + [PAD] * (size - 1 - len(piece)), TEXT_WEIGHT))
        used["text"] += size

    while len(packed) < count:
        kind = min(SHARE, key=lambda name: used[name] / SHARE[name])
        tokens = None if kind == "text" else MAKERS[kind](r, length)
        if tokens is not None and len(tokens) > length + 1:
            continue
        if tokens is None or len(tokens) > room:
            size = room if tokens is not None or room < 400 else r.randint(200, room)
            if size > 1:
                add_text(size)
            else:
                parts.append(weigh([PAD] * size, 0))
            room -= size
        if tokens is not None and room == 0:
            packed.append(np.concatenate(parts))
            parts, room = [], length + 1
        if tokens is not None:
            parts.append(tokens)
            room -= len(tokens)
            used[kind] += len(tokens)
        if room == 0:
            packed.append(np.concatenate(parts))
            parts, room = [], length + 1
    return np.stack(packed[:count])


def write_shard(index: int, out: Path, length: int, tokens: int, seed: int, extra: tuple[Path, ...]) -> int:
    """Make shard `index` of about `tokens` tokens; returns its index."""
    texts = [d.text.encode() for d in load("train")] + [path.read_bytes() for path in extra]
    packed = rows(rng("shard", seed, length, index), texts, length, tokens // (length + 1))
    partial_path = out / f"partial-{index}.npy"
    np.save(partial_path, packed)
    os.replace(partial_path, out / f"shard-{index:04d}.npy")
    return index


def write_held_out(out: Path, length: int, count: int = 200) -> None:
    """`heldout.npz` with the held-out text by kind, and `eval-NAME.npy` with one eval item per row, packed alike."""
    kinds = {k: "".join(d.text for d in load("heldout") if d.kind == k) for k in ("prose", "code")}
    arrays = {kind: np.frombuffer(text.encode(), dtype=np.uint8) for kind, text in kinds.items()}
    np.savez(out / "heldout.npz", **arrays)  # type: ignore[arg-type]
    sets = {"aime": [(aime.messages(i.row), i.target) for i in (aime.item("eval", n) for n in range(count))]}
    sets["gpqa"] = [(gpqa.messages(i.row, 0), i.target) for i in (gpqa.item("eval", n) for n in range(count))]
    for n_chars in (limit for limit in mrcr.BINS if limit < length):
        for needles in mrcr.NEEDLES if n_chars > 1024 else (2, 4):
            drawn = [mrcr.item("eval", n, needles, n_chars) for n in range(count // 2)]
            sets[f"mrcr-{needles}-{n_chars}"] = [(mrcr.messages(i.row), i.target) for i in drawn]
    if length > 2048:
        drawn = [mrcr.item("eval", n, 4, 2048, marked=False) for n in range(count // 2)]
        sets["mrcr-4-2048-unmarked"] = [(mrcr.messages(i.row), i.target) for i in drawn]
    for size in (n for n in (500, 1000, 2000, 3800) if n + 150 <= length):
        chains = [chain.item("eval", n, size // chain.TOKENS_PER_STEP) for n in range(count // 4)]
        sets[f"chain-{size}"] = [(chain.messages(i.row), i.target) for i in chains]
    for name, pairs in sets.items():
        documents = [document(*pair) for pair in pairs]
        padded = np.full((len(documents), max(map(len, documents))), PAD, dtype=np.int16)
        for row, tokens in zip(padded, documents, strict=True):
            row[: len(tokens)] = tokens
        np.save(out / f"eval-{name}.npy", padded)


def main() -> None:
    """Write a leg's data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--shard-tokens", type=int, default=1 << 22)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--extra-text", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    job = partial(
        write_shard,
        out=arguments.out,
        length=arguments.length,
        tokens=arguments.shard_tokens,
        seed=arguments.seed,
        extra=tuple(arguments.extra_text),
    )
    with multiprocessing.Pool(arguments.workers) as pool:
        for _ in pool.imap(job, range(arguments.shards)):
            pass
    write_held_out(arguments.out, arguments.length)
    (arguments.out / "done").touch()


if __name__ == "__main__":
    main()
