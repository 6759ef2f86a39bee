"""Generated items: schemas of the real sets, splits that stay apart, graders, and the packed training rows."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from decode_impl.training.tokenizer import CHAT_TEMPLATE, SPECIALS, build_tokenizer
from evals.items import aime, chain, gpqa, mrcr, shards
from evals.items.base import Item, Split, rng, split_of

Make = Callable[[Split, int, int], Item]

SETS: dict[str, tuple[Make, str]] = {
    "aime": (lambda split, index, seed: aime.item(split, index, seed), "problem"),
    "gpqa": (lambda split, index, seed: gpqa.item(split, index, seed), "Question"),
    "mrcr": (lambda split, index, seed: mrcr.item(split, index, 4, 1024, seed), "prompt"),
    "chain": (lambda split, index, seed: chain.item(split, index, 40, seed), "problem"),
}


@pytest.mark.parametrize("name", SETS)
def test_an_item_depends_on_split_index_and_seed_alone(name: str) -> None:
    make, _ = SETS[name]
    assert make("eval", 3, 0) == make("eval", 3, 0)
    others = [make("eval", 4, 0), make("eval", 3, 1), make("train", 3, 0)]
    assert all(other.row != make("eval", 3, 0).row for other in others)


@pytest.mark.parametrize("name", SETS)
def test_splits_share_no_question_whatever_the_seed(name: str) -> None:
    make, field = SETS[name]
    asked = {split: {str(make(split, i, seed).row[field]) for i in range(15) for seed in (0, 1)} for split in SPLITS}
    assert not asked["train"] & asked["eval"]
    assert all(split_of(question) == split for split in SPLITS for question in asked[split])


SPLITS: tuple[Split, ...] = ("train", "eval")


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed are train and eval"):
        aime.item("test", 0)  # type: ignore[arg-type]


def test_aime_rows_have_the_real_fields_and_answers_from_0_to_999() -> None:
    for index in range(100):
        item = aime.item("eval", index)
        assert list(item.row) == ["problem", "answer", "id"]
        assert 0 <= int(item.row["answer"]) <= 999
        assert aime.correct(item.target, item.row)
        assert not aime.correct(item.target.replace(f"{{{item.row['answer']}}}", "{1000}"), item.row)


def test_every_step_of_an_aime_target_is_true() -> None:
    checked = 0
    for index in range(60):
        for line in aime.item("eval", index).target.splitlines():
            for part in line.split(": ")[-1].split(" "):
                left, _, right = part.partition("=")
                if right.isdigit() and "mod" not in line and left and set(left) <= set("0123456789+-*"):
                    checked += 1
                    assert eval(left) == int(right), line
    assert checked > 200


@pytest.mark.parametrize(
    ("response", "value"),
    [("so \\boxed{17}", 17), ("\\boxed{1} then \\boxed{ 042 }", 42), ("17", None), ("\\boxed{x}", None), ("", None)],
)
def test_the_last_boxed_integer_is_taken(response: str, value: int | None) -> None:
    assert aime.extract(response) == value


def test_gpqa_rows_have_the_real_columns_and_four_different_answers() -> None:
    columns = ["Record ID", "Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    for index in range(100):
        row = gpqa.item("eval", index).row
        assert list(row) == [*columns, "Explanation", "Subdomain", "High-level domain"]
        assert len({row[c] for c in columns[2:]}) == 4


def test_gpqa_choices_are_permuted_per_item_and_repeat_and_stay_fixed() -> None:
    rows = [gpqa.item("eval", index).row for index in range(200)]
    letters = Counter(gpqa.choices(row, repeat)[1] for row in rows for repeat in range(4))
    assert set(letters) == set("ABCD")
    assert min(letters.values()) > 150
    row = rows[0]
    assert len({tuple(gpqa.choices(row, repeat)[0]) for repeat in range(40)}) > 10
    for repeat in range(5):
        options, letter = gpqa.choices(row, repeat)
        assert gpqa.choices(row, repeat) == (options, letter)
        assert options["ABCD".index(letter)] == row["Correct Answer"]


def test_gpqa_grading_follows_the_repeats_order() -> None:
    row = gpqa.item("eval", 5).row
    for repeat in range(8):
        assert gpqa.correct(gpqa.target(row, repeat), row, repeat)
        wrong = next(letter for letter in "ABCD" if letter != gpqa.choices(row, repeat)[1])
        assert not gpqa.correct(f"The correct answer is ({wrong}).", row, repeat)
    assert gpqa.extract("no letter") is None


@pytest.mark.parametrize("n_needles", mrcr.NEEDLES)
@pytest.mark.parametrize("n_chars", mrcr.BINS)
def test_mrcr_rows_are_consistent(n_needles: int, n_chars: int) -> None:
    row = mrcr.item("eval", 1, n_needles, n_chars).row
    fields = "prompt answer random_string_to_prepend n_needles desired_msg_index total_messages n_chars"
    assert list(row) == fields.split()
    chat = json.loads(row["prompt"])
    assert [m["role"] for m in chat] == ["user", "assistant"] * (len(chat) // 2) + ["user"]
    assert (row["total_messages"], row["n_needles"]) == (len(chat), n_needles)
    assert 0.85 * n_chars < row["n_chars"] == sum(len(m["content"]) for m in chat) <= n_chars
    assert row["answer"] == row["random_string_to_prepend"] + chat[row["desired_msg_index"]]["content"]
    needle = chat[row["desired_msg_index"] - 1]["content"]
    places = [i for i, m in enumerate(chat) if m["content"] == needle]
    assert len(places) == n_needles
    nth = mrcr.ordinal(places.index(row["desired_msg_index"] - 1) + 1)
    assert f"{row['random_string_to_prepend']} to the {nth} (1 indexed)" in chat[-1]["content"]
    assert chat[row["desired_msg_index"]]["content"].startswith(f"({nth[:-2]}) ")


def test_mrcr_grading_needs_the_string_and_then_compares() -> None:
    row = {"answer": "abcdefghij(2) red green", "random_string_to_prepend": "abcdefghij"}
    assert mrcr.score("abcdefghij(2) red green", row) == 1.0
    assert mrcr.score("(2) red green", row) == 0.0
    assert mrcr.score(" abcdefghij(2) red green", row) == 0.0
    assert 0.3 < mrcr.score("abcdefghij(1) red violet", row) < 1.0


def test_mrcr_without_marks_has_the_same_form() -> None:
    row = mrcr.item("eval", 0, 2, 1024, marked=False).row
    assert "(1) " not in row["answer"]
    with pytest.raises(ValueError, match="allowed are"):
        mrcr.item("eval", 0, 3, 1024)


def test_a_chain_has_one_right_token_at_every_place() -> None:
    item = chain.item("eval", 2, 66)
    assert list(item.row) == ["problem", "table", "start", "steps", "answer", "id"]
    assert chain.correct(item.target, item.row)
    body = item.target.rsplit("\n", 1)[0]
    assert 900 < len(body) < 1100
    assert chain.right_tokens(item.target, item.row) == len(body)
    assert chain.right_tokens(body[:500] + "#" + body[501:], item.row) == 500
    assert chain.right_tokens(body[:30], item.row) == 30
    x = item.row["start"]
    for line in body.splitlines():
        assert (
            line.split(" ")[1]
            == f"{x:03d}+{item.row['table'][x % 10]:03d}={(x + item.row['table'][x % 10]) % 1000:03d}"
        )
        x = (x + item.row["table"][x % 10]) % 1000


def test_a_chain_uses_all_ten_entries_again_and_again() -> None:
    lines = chain.item("eval", 7, 100).target.splitlines()[:100]
    used = Counter(line.split(" ")[1][2] for line in lines)
    assert used == {str(d): 10 for d in range(10)}


def test_special_tokens_are_the_tokenizers() -> None:
    tokenizer = build_tokenizer()
    ids = {name: tokenizer.token_to_id(name) for name in SPECIALS}
    assert (ids["<|bos|>"], ids["<|eos|>"], ids["<|pad|>"]) == (shards.BOS, shards.EOS, shards.PAD)
    assert ids["<|end|>"] == shards.END
    assert all(shards.ROLES[role] == ids[f"<|{role}|>"] for role in shards.ROLES)


def test_training_chats_are_what_the_chat_template_renders() -> None:
    jinja2 = pytest.importorskip("jinja2")
    chat = mrcr.messages(mrcr.item("eval", 0, 2, 1024).row)
    text = jinja2.Template(CHAT_TEMPLATE).render(messages=chat, bos_token="<|bos|>", add_generation_prompt=True)
    packed = np.concatenate(shards.chat_tokens(chat, shards.PROMPT_WEIGHT))
    assert build_tokenizer().encode(text).ids == [int(t) & 511 for t in packed]


def test_packed_rows_are_full_whole_documents_of_the_train_split_and_the_seeds_alone() -> None:
    texts = [b"some text to fill the gaps. " * 200]
    packed = shards.rows(rng("a"), texts, 1024, 12)
    assert np.array_equal(packed, shards.rows(rng("a"), texts, 1024, 12))
    assert packed.shape == (12, 1025)
    tokens, weights = packed & 511, packed >> 9
    assert set(np.unique(weights)) <= {0, 1, 4, 8}
    assert (tokens[:, 0] == shards.BOS).all()
    assert 0.05 < (weights == shards.TEXT_WEIGHT).mean() < 0.5
    for row, weight in zip(tokens, weights, strict=True):
        answers = (row == shards.ROLES["assistant"]).sum()
        assert ((row == shards.EOS) & (weight == shards.ANSWER_WEIGHT)).sum() <= answers


@pytest.mark.parametrize("kind", ["aime", "gpqa", "chain"])
def test_training_documents_are_drawn_from_the_train_split_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = {"aime": aime, "gpqa": gpqa, "chain": chain}[kind], []
    right = module.item

    def item(split: str, *rest: Any) -> Any:
        asked.append(split)
        return right(split, *rest)

    monkeypatch.setattr(module, "item", item)
    for seed in range(20):
        shards.MAKERS[kind](random.Random(seed), 1024)
    assert asked == ["train"] * 20


def test_training_conversations_of_the_eval_split_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = iter(["eval", "eval", "train"])
    monkeypatch.setattr(shards, "split_of", lambda text: next(verdicts))
    shards.mrcr_document(random.Random(0), 1024)
    assert next(verdicts, None) is None


@pytest.mark.parametrize(
    ("response", "letter"),
    [("The answer is (B).", "B"), ("answer is **C**", "C"), ("The answer is Apparently not clear", None), ("", None)],
)
def test_a_letter_is_a_letter_and_not_the_beginning_of_a_word(response: str, letter: str | None) -> None:
    assert gpqa.extract(response) == letter


def test_a_boxed_number_of_thousands_of_digits_is_a_wrong_answer_and_no_crash() -> None:
    row = aime.item("eval", 0).row
    assert not aime.correct("\\boxed{" + "1" * 5000 + "}", row)
    assert aime.correct("\\boxed{000" + row["answer"] + "}", row)
