"""Reading a published set from the Hub or a local folder: pinned, checked, and refused with one clear line."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evals.tasks.sources import Source

SUMS = "SHA256SUMS"
"""A local folder vouches for files that have no known digest by this file, in the format of `sha256sum`."""

_GIVE = "give its folder as data_dir of [gates.evals] (or by --data-dir of `decodegate compare`)"


class DataError(ValueError):
    """A set that cannot be had, or is not what was pinned; the message says where its licence is and what to do."""


def load_rows(source: Source, data_dir: Path | None = None) -> tuple[list[dict[str, Any]], str]:
    """All rows of a set, and the SHA-256 over its files' digests, which goes into reports.

    With `data_dir` the files are read from that folder: under the repository's name (`math-ai/aime25/test.jsonl`), or
    directly. Without, they are downloaded at the pinned revision (needs `pip install 'decodegate[evals]'`).

    Raises:
        DataError: a file is missing, unreachable, gated, or not the pinned one, or the rows are not as many as known.
    """
    rows: list[dict[str, Any]] = []
    digests = []
    for name, accepted in source.files.items():
        path = _local(source, name, data_dir) if data_dir is not None else _downloaded(source, name)
        content = path.read_bytes()
        digests.append(_checked(source, path, content, accepted, data_dir))
        try:
            rows += _parsed(path.suffix, content)
        except (ValueError, KeyError, RecursionError, csv.Error) as error:
            raise DataError(f"{path}: cannot be read ({error})") from None
    if len(rows) != source.rows:
        raise DataError(f"{source.repository}: {len(rows)} rows, {source.rows} are known; see {source.page}")
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{source.repository}: a row is no table of names and values; see {source.page}")
    renamed = [{source.renamed.get(key, key): value for key, value in row.items()} for row in rows]
    return renamed, hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _local(source: Source, name: str, folder: Path) -> Path:
    places = (folder / source.repository / name, folder / source.repository.partition("/")[2] / name, folder / name)
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"{folder}: has no {source.repository}/{name}; get the set from {source.page} (licence: {source.licence}) "
        f"and {_GIVE}"
    )


def _downloaded(source: Source, name: str) -> Path:
    instead = f"; its licence ({source.licence}) is at {source.page}; or, of a local copy, {_GIVE}"
    if source.revision is None:
        raise DataError(f"{source.repository}: has no pinned revision here, so it is not downloaded{instead}")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import GatedRepoError
    except ImportError:
        raise DataError(f"{source.repository}: downloading needs `pip install 'decodegate[evals]'`{instead}") from None
    try:
        return Path(hf_hub_download(source.repository, name, repo_type="dataset", revision=source.revision))
    except Exception as error:
        # The Hub's client raises its own, its HTTP library's and the system's errors.
        gated = isinstance(error, GatedRepoError)
        what = "gated: ask for access on its page, then `hf auth login`" if gated else "cannot be reached from here"
        raise DataError(f"{source.repository}: {what} ({type(error).__name__}){instead}") from None


def _checked(source: Source, path: Path, content: bytes, accepted: tuple[str, ...], folder: Path | None) -> str:
    digest = hashlib.sha256(content).hexdigest()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if accepted and not {f"sha256:{digest}", f"git:{blob}"} & set(accepted):
        raise DataError(
            f"{path}: its SHA-256 {digest} is not the pinned one ({', '.join(accepted)}); get revision "
            f"{source.revision} from {source.page}"
        )
    if not accepted and folder is not None and digest != _vouched(path, folder):
        raise DataError(
            f"{path}: its SHA-256 {digest} is not in {folder / SUMS}; make that file with `sha256sum` when the set is "
            f"fetched from {source.page}, so that a later change is seen"
        )
    return digest


def _vouched(path: Path, folder: Path) -> str | None:
    sums = folder / SUMS
    if not sums.is_file():
        return None
    lines = (
        line.split(maxsplit=1)
        for line in sums.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    )
    listed = {entry[1].lstrip("*").removeprefix("./"): entry[0] for entry in lines if len(entry) == 2}
    return listed.get(path.relative_to(folder).as_posix())


def _parsed(suffix: str, content: bytes) -> Iterator[dict[str, Any]]:
    if suffix == ".jsonl":
        # Not splitlines(): a text may hold other line separators than the file's.
        yield from (json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip())
    elif suffix == ".csv":
        yield from csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""))
    elif suffix == ".parquet":
        try:
            from pyarrow import BufferReader, parquet
        except ImportError:
            raise ValueError("Parquet files need `pip install 'decodegate[evals]'`") from None
        yield from parquet.read_table(BufferReader(content)).to_pylist()
    else:
        raise ValueError(f"{suffix} files are not known")
