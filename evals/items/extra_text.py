"""Rebuild the training-only text of k3-mini, which is too large to ship: five novels and CPython's standard library.

    python -m evals.items.extra_text --novels RDATA_RDB --library STDLIB --out FOLDER

RDATA_RDB is `usr/lib/R/site-library/janeaustenr/data/Rdata.rdb` of Debian's r-cran-janeaustenr 1.0.0-1 (MIT; the
novels are in the public domain), STDLIB the standard library folder of CPython 3.11.7 (PSF License 2). Documents of
the held-out split are left out. The files made for k3-mini have the SHA-256 digests below; others are refused.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import struct
import zlib
from pathlib import Path

DIGESTS = {
    "prose.txt": "c8c39196b234409faee35e8c28d56de51baddc2337562418132f69c1415b6563",
    "code.txt": "4d811062101c1355a1e9157cdd8029fa9aaf29bb1483b10ec91d973688b36cbd",
}
BOOKS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
"""The data set's objects in stored order."""
TAKEN = ("persuasion", "emma", "mansfieldpark", "prideprejudice", "sensesensibility")
FOLDERS = (
    *("", "json/", "collections/", "concurrent/futures/", "asyncio/", "email/", "http/", "importlib/", "logging/"),
    *("multiprocessing/", "unittest/", "urllib/", "xml/dom/", "xml/etree/", "html/", "ctypes/", "dbm/", "sqlite3/"),
    *("tomllib/", "zoneinfo/", "re/", "curses/"),
)
LEFT_OUT = ("shlex.py", "graphlib.py", "json/encoder.py", "html/entities.py")
LARGEST, CODE_CHARS = 200_000, 4_200_000


def strings(serialised: bytes) -> list[str]:
    """The elements of a character vector in R's binary serialisation (XDR form, version 2 or 3)."""
    (version,) = struct.unpack_from(">i", serialised, 2)
    at = 14
    if version == 3:
        at += 4 + struct.unpack_from(">i", serialised, at)[0]
    flags, count = struct.unpack_from(">ii", serialised, at)
    if flags & 0xFF != 16:
        raise ValueError(f"R object of type {flags & 0xFF}, a character vector (16) was expected")
    at, result = at + 8, []
    for _ in range(count):
        _, size = struct.unpack_from(">ii", serialised, at)
        result.append(serialised[at + 8 : at + 8 + max(size, 0)].decode())
        at += 8 + max(size, 0)
    return result


def novels(path: Path) -> dict[str, str]:
    """The texts of an R lazy-load file: for each object four bytes of its size, then a zlib stream."""
    rest, texts = path.read_bytes(), {}
    for book in BOOKS:
        stream = zlib.decompressobj()
        serialised = stream.decompress(rest[4:])
        texts[book] = "\n".join(strings(serialised)) + "\n"
        rest = stream.unused_data
    return texts


def prose(path: Path) -> str:
    """The novels but the held-out one, without trailing blanks and runs of empty lines."""
    texts = novels(path)
    return "".join(re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", texts[book])) + "\n" for book in TAKEN)


def code(library: Path) -> str:
    """Modules of the standard library by folder and name, cut to the size that was used."""
    paths = [f for folder in FOLDERS for f in sorted((library / folder).glob("*.py"))]
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in paths
        if path.relative_to(library).as_posix() not in LEFT_OUT
    ]
    return "\n".join(text for text in texts if len(text) < LARGEST)[:CODE_CHARS]


def main() -> None:
    """Write prose.txt and code.txt and check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--novels", type=Path, required=True)
    parser.add_argument("--library", dest="stdlib", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, text in {"prose.txt": prose(arguments.novels), "code.txt": code(arguments.stdlib)}.items():
        content = text.encode()
        digest = hashlib.sha256(content).hexdigest()
        if digest != DIGESTS[name]:
            raise SystemExit(f"{name}: SHA-256 {digest}, expected {DIGESTS[name]}; the sources are of another version")
        (arguments.out / name).write_bytes(content)


if __name__ == "__main__":
    main()
