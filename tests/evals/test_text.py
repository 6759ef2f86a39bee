"""The text that ships: two splits that share nothing, clean UTF-8, and a source for every file."""

from __future__ import annotations

from importlib.resources import files

import pytest

from evals.text import Split, load

SPLITS: tuple[Split, ...] = ("train", "heldout")


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_has_prose_and_code(split: Split) -> None:
    documents = load(split)
    assert {d.kind for d in documents} == {"prose", "code"}
    assert documents == sorted(documents, key=lambda d: d.name)
    assert sum(len(d.text) for d in documents) > 100_000


def test_texts_are_clean() -> None:
    for document in [d for split in SPLITS for d in load(split)]:
        assert not {c for c in document.text if ord(c) < 32} - {"\n", "\t"}, document.name
        assert "\ufffd" not in document.text


def test_splits_share_no_document_and_no_long_passage() -> None:
    train = "".join(d.text for d in load("train"))
    assert not {d.name for d in load("train")} & {d.name for d in load("heldout")}
    for document in load("heldout"):
        passages = [document.text[i : i + 200] for i in range(0, len(document.text) - 200, 5_000)]
        assert not any(passage in train for passage in passages)


def test_every_file_has_its_source() -> None:
    sources = files("evals").joinpath("data", "text", "SOURCES.md").read_text(encoding="utf-8")
    for split in SPLITS:
        for document in load(split):
            assert document.name.removesuffix(".py") in sources


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed are train and heldout"):
        load("test")  # type: ignore[arg-type]
