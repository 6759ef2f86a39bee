"""Tasks: items in the published schema, pinned and checked sources, one clear line where a set cannot be had."""

from __future__ import annotations

import csv
import hashlib
import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evals import tasks
from evals.samples import Request, Response, interleaved, plan_requests
from evals.tasks import DataError, load_task, task_names
from evals.tasks.catalogue import PUBLISHED
from evals.tasks.kinds import area, length_bin
from evals.tasks.loading import load_rows
from evals.tasks.sources import AIME26, Source


@pytest.mark.parametrize("name", ["aime25", "gpqa_diamond", "mrcr"])
def test_generated_items_are_in_the_published_schema_and_score_by_its_rule(name: str) -> None:
    task = load_task(name, items=14)
    assert len(task.item_ids) == 14
    assert all(isinstance(item, PUBLISHED[name].kind.schema) for item in task.items.values())
    wrap = {"aime25": "\\boxed{{{}}}", "gpqa_diamond": "Answer: {}", "mrcr": "{}"}[name]
    for item in task.item_ids:
        assert task.grade(item, 1, wrap.format(task.expected(item, 1))).score == 1


def test_every_eval_is_sampled_as_its_authors_do_and_capped_generously() -> None:
    for entry in PUBLISHED.values():
        assert (entry.temperature, entry.top_p) == (1.0, 0.95)
        assert entry.max_tokens >= 32_768


def test_choices_are_permuted_by_item_and_repeat_and_the_same_in_both_arms() -> None:
    task = load_task("gpqa_diamond", items=20)
    letters = [[task.expected(item, repeat) for repeat in range(8)] for item in task.item_ids]
    assert {letter for row in letters for letter in row} == set("ABCD")
    assert all(len(set(row)) > 1 for row in letters)
    again = load_task("gpqa_diamond", items=20)
    assert [task.messages(i, 3) for i in task.item_ids] == [again.messages(i, 3) for i in again.item_ids]


def test_requests_are_paired_seeded_and_a_longer_plan_begins_with_the_shorter() -> None:
    task = load_task("aime25", items=5)
    short, long = plan_requests([task], 2, seed=1), plan_requests([task], 4, seed=1)
    assert long[: len(short)] == short
    assert len({request.seed for request in long}) == len(long)
    assert plan_requests([task], 2, seed=2)[0].seed != short[0].seed
    assert "".join(arm[0] for arm, _ in interleaved(short))[:8] == "bccbbccb"
    assert len({request.key for request in long}) == 20


@pytest.mark.parametrize("repeats", [0, {}])
def test_a_plan_without_repeats_is_refused(repeats: Any) -> None:
    with pytest.raises(ValueError, match="at least one repeat"):
        plan_requests([load_task("aime25", items=2)], repeats, 0)


def test_text_that_is_no_utf8_is_kept_as_replacement_characters() -> None:
    assert Response(text=b"\xff ok").text == "\ufffd ok"
    odd = Response(text="\ud800", raw={"choices": [{"text": "\udfff"}]})
    assert Response.model_validate_json(odd.model_dump_json()) == odd


@pytest.mark.parametrize("change", [{"item": "a/b"}, {"task": ""}, {"seed": -1}, {"top_p": 0.0}, {"messages": []}])
def test_a_request_that_has_no_key_or_cannot_be_sent_is_refused(change: dict[str, Any]) -> None:
    good = plan_requests([load_task("aime25", items=1)], 1, 0)[0].model_dump()
    with pytest.raises(ValueError, match=next(iter(change))):
        Request.model_validate({**good, **change})


def sha(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


LINES = b"".join(json.dumps({"id": str(i), "problem": f"{i}+1?", "answer": i + 1}).encode() + b"\n" for i in range(3))


def source(content: bytes = LINES, **changes: Any) -> Source:
    made = Source("someone/sums", "0" * 40, {"test.jsonl": (sha(content),)}, 3, "CC0")
    return replace(made, **changes)


@pytest.mark.parametrize("place", ["test.jsonl", "sums/test.jsonl", "someone/sums/test.jsonl"])
def test_a_local_folder_is_read_and_its_digest_reported(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_bytes(LINES)
    rows, digest = load_rows(source(), tmp_path)
    assert [row["answer"] for row in rows] == [1, 2, 3]
    assert len(digest) == 64


def test_a_changed_file_is_refused_with_both_digests(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(LINES.replace(b"1", b"2"))
    with pytest.raises(DataError, match=r"is not the pinned one \(sha256:.*get revision 0{40} from https://"):
        load_rows(source(), tmp_path)


def test_a_files_git_blob_id_pins_it_as_well(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(LINES)
    blob = hashlib.sha1(b"blob %d\0" % len(LINES) + LINES).hexdigest()
    assert len(load_rows(source(files={"test.jsonl": (f"git:{blob}",)}), tmp_path)[0]) == 3


def test_a_set_without_a_known_digest_needs_the_folders_own_sums(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(LINES)
    unpinned = source(files={"test.jsonl": ()})
    with pytest.raises(DataError, match="SHA256SUMS; make that file with `sha256sum`"):
        load_rows(unpinned, tmp_path)
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(LINES).hexdigest()} *./test.jsonl\n")
    assert len(load_rows(unpinned, tmp_path)[0]) == 3
    (tmp_path / "test.jsonl").write_bytes(LINES + b"\n")
    with pytest.raises(DataError, match="SHA256SUMS"):
        load_rows(unpinned, tmp_path)


def test_a_missing_set_names_its_licence_page_and_the_option(tmp_path: Path) -> None:
    for name in task_names("published"):
        page = PUBLISHED[name].source.page
        with pytest.raises(DataError, match=rf"{page} \(licence: .*--data-dir"):
            load_task(name, "published", data_dir=tmp_path)


def test_a_set_that_nobody_pinned_is_not_downloaded() -> None:
    with pytest.raises(DataError, match=r"no pinned revision here.*licence.*--data-dir"):
        load_rows(source(revision=None))


@pytest.mark.parametrize(
    ("error", "said"), [("LocalEntryNotFoundError", "cannot be reached"), ("GatedRepoError", "gated")]
)
def test_an_unreachable_or_gated_set_gives_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, error: str, said: str
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="needs pip install 'decodegate[evals]'")
    from huggingface_hub import errors

    class Reply:
        headers = types.MappingProxyType({})
        request = None

    def refuse(*_: Any, **__: Any) -> str:
        kind = getattr(errors, error)
        raise kind("no", response=Reply()) if error == "GatedRepoError" else kind("no")

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    with pytest.raises(
        DataError, match=rf"{said}.*licence \(CC BY 4.0.*huggingface\.co/datasets/Idavidrein/gpqa.*--data-dir"
    ):
        load_task("gpqa_diamond", "published")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1]\n[2]\n[3]\n", "a row is no table"),
        (b"[" * 100_000 + b"\n", "cannot be read"),
        (b"\xff\n", "cannot be read"),
    ],
)
def test_a_file_that_is_no_table_is_one_clear_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "test.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=said):
        load_rows(source(content), tmp_path)


def test_a_text_may_hold_line_separators_that_are_not_the_files(tmp_path: Path) -> None:
    content = '{"problem": "a\u2028b\x85c"}\n{"problem": "d"}\n{"problem": "e"}\n'.encode()
    (tmp_path / "test.jsonl").write_bytes(content)
    assert load_rows(source(content), tmp_path)[0][0]["problem"] == "a\u2028b\x85c"


def test_another_number_of_rows_is_another_set(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(LINES)
    with pytest.raises(DataError, match="3 rows, 30 are known"):
        load_rows(source(rows=30), tmp_path)


def test_a_csv_as_gpqas_is_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers such as 0.50 stay as they are written, and a question may hold braces, quotes and newlines."""
    row = {
        "Record ID": "recX 1", "Question": 'Is {choices} "odd"?\nYes?', "Correct Answer": "0.50",
        "Incorrect Answer 1": "1", "Incorrect Answer 2": "2", "Incorrect Answer 3": "3", "Canary": "do not publish",
    }  # fmt: skip
    path = tmp_path / "gpqa_diamond.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    entry = PUBLISHED["gpqa_diamond"]
    pinned = replace(entry.source, files={path.name: (sha(path.read_bytes()),)}, rows=1)
    monkeypatch.setitem(tasks.PUBLISHED, "gpqa_diamond", replace(entry, source=pinned))
    task = load_task("gpqa_diamond", "published", data_dir=tmp_path)
    (item,) = task.item_ids
    asked = task.messages(item, 0)[0]["content"]
    assert row["Question"] in asked
    assert f"({task.expected(item, 0)}) 0.50" in asked
    assert task.source.startswith("Idavidrein/gpqa@83022cefff93")


def test_a_parquet_as_mrcrs_is_read_and_binned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pip install 'decodegate[evals]'")
    from pyarrow import parquet

    rows = [item.model_dump() for item in load_task("mrcr", items=2).items.values()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    entry = PUBLISHED["mrcr"]
    pinned = replace(entry.source, files={"a.parquet": (sha((tmp_path / "a.parquet").read_bytes()),)}, rows=2)
    monkeypatch.setitem(tasks.PUBLISHED, "mrcr", replace(entry, source=pinned))
    task = load_task("mrcr", "published", data_dir=tmp_path)
    assert [task.group(item) for item in task.item_ids] == ["1-32768"] * 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"id": "1", "problem": "x"}, "row 1: answer: Field required"),
        ({"id": "0", "problem": "x", "answer": "1"}, "two items have the id '0'"),
    ],
)
def test_a_row_that_is_no_item_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, str], reason: str
) -> None:
    content = json.dumps({"id": "0", "problem": "y", "answer": "2"}).encode() + b"\n" + json.dumps(row).encode()
    (tmp_path / "test.jsonl").write_bytes(content)
    entry = PUBLISHED["aime25"]
    monkeypatch.setitem(tasks.PUBLISHED, "aime25", replace(entry, source=replace(source(content), rows=2)))
    with pytest.raises(DataError, match=reason):
        load_task("aime25", "published", data_dir=tmp_path)


def test_a_set_beside_these_is_one_more_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test.jsonl").write_bytes(LINES)
    monkeypatch.setitem(tasks.PUBLISHED, "sums", replace(PUBLISHED["aime26"], source=source()))
    task = load_task("sums", "published", data_dir=tmp_path)
    assert task.grade("2", 0, "\\boxed{3}").score == 1
    assert AIME26.rows == 30


def test_unknown_names_and_too_many_items_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no generated eval is called 'hle'"):
        load_task("hle")
    (tmp_path / "test.jsonl").write_bytes(LINES)
    monkeypatch.setitem(tasks.PUBLISHED, "sums", replace(PUBLISHED["aime26"], source=source()))
    with pytest.raises(DataError, match="has 3 items, 5 were asked for"):
        load_task("sums", "published", items=5, data_dir=tmp_path)


def test_bins_and_the_area_under_their_scores() -> None:
    assert [length_bin(n, (512, 1024)) for n in (1, 512, 513, 1025)] == ["1-512", "1-512", "513-1024", "> 1024"]
    assert area([0.7]) == area([0.7, 0.7, 0.7]) == pytest.approx(0.7)
    assert area([1.0, 0.5, 0.0]) == pytest.approx(0.5)
