"""Promises of README.md and docs/: what a page points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them: small letters, words joined by hyphens, no other signs."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken(page: Path, text: str) -> list[str]:
    """Links of `text`, of this page, to a file or a heading that does not exist."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in headings(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


def test_a_link_that_leads_nowhere_is_seen() -> None:
    text = "[a](docs/nothing.md) [b](docs/extending.md#an-op) [c](docs/extending.md#a-song) [d](https://example.org/x)"
    assert broken(ROOT / "README.md", text) == ["docs/nothing.md", "docs/extending.md#a-song"]
