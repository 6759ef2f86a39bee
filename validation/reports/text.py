"""Foreign text made safe to show. Model output, file names and exceptions may hold anything."""

from __future__ import annotations

import html
import re

_KEPT = "\n\t"
_MARKDOWN = re.compile(r"([\\`*_\[\]~|#])")
_CLAUSE = re.compile(r"[;.](?=\s)")
_BREAK = "\N{ZERO WIDTH SPACE}"


def visible(text: str) -> str:
    """`text` with every character that does not print (controls, bidirectional marks, surrogates) as its escape.

    Newlines and tabs stay. The result is valid in XML 1.0 and in UTF-8.
    """
    return "".join(c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode() for c in text)


def visible_line(text: str) -> str:
    """As `visible`, on one line."""
    return " ".join(visible(text).split())


def markdown(text: str) -> str:
    """`text` on one line that Markdown shows as it is: no markup, no HTML, no table cell, no link, no mention."""
    escaped = _MARKDOWN.sub(r"\\\1", html.escape(visible_line(text), quote=False))
    for opener in ("@", "://", "www."):
        escaped = escaped.replace(opener, opener[0] + _BREAK + opener[1:])
    return escaped


def number(value: float) -> str:
    """A number as reports print it: whole numbers in full, others with four significant digits."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


def cell(value: str | int | float) -> str:
    """A table cell as text."""
    return visible_line(value) if isinstance(value, str) else number(value)


def shortened(text: str, longest: int) -> str:
    """`text`, cut at `longest` characters with a mark that says so."""
    return text if len(text) <= longest else text[: longest - 2].rstrip() + " …"


def whole_clauses(text: str, longest: int, rest: str) -> str:
    """`text`; where it has more than `longest` characters, the clauses of it that fit, and where the `rest` is.

    Clauses end with `;` or a full stop outside brackets. Where not even the first fits, the text ends at a word.
    """
    if len(text) <= longest:
        return text
    ends = [found.start() for found in _CLAUSE.finditer(text, 0, longest + 1)]
    whole = [text[:end] for end in ends if text.count("(", 0, end) == text.count(")", 0, end)]
    kept = whole[-1] if whole else text[:longest].rpartition(" ")[0] or text[:longest]
    return f"{kept}{'' if whole else ' …'}; {rest}"
