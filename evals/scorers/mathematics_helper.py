"""The process behind `mathematics.equal`: reads a pair of expressions a line, writes whether they are equal."""

from __future__ import annotations

import json
import logging
import re
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

_EQUALS = re.compile("\uff1d|:=|==")
"""Other ways to write an equals sign, which math-verify would take for the end of an expression."""


def consistent(expression: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Whether no equation in it, nor a chain a = b = c of them, has two numbers that differ.

    math-verify compares one side of an equation: it would find the 70 in `69 = 70`.
    """
    return all(same(first, other) for first, *others in _numbers(expression) for other in others)


def _numbers(expression: Any) -> Iterator[list[Any]]:
    """The numbers of each equation and chain that an expression is made of; those that have none are left out."""
    from sympy import And, Basic, Eq

    if not isinstance(expression, Basic):
        return
    if isinstance(expression, And | Eq):
        equations = [part for part in (expression, *expression.args) if isinstance(part, Eq)]
        numbers = [side for equation in equations for side in equation.args if side.is_number]
        if numbers:
            yield numbers
        return
    for part in expression.args:
        yield from _numbers(part)


def main() -> None:
    """Serve until standard input ends."""
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        from math_verify import parse, verify
    except ImportError:
        print(json.dumps({"ready": False}), flush=True)
        return
    logging.disable(logging.CRITICAL)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        pair = json.loads(line)
        try:
            gold, answer = (
                parse(f"${_EQUALS.sub('=', pair[name])}$", parsing_timeout=0, raise_on_error=True)
                for name in ("expected", "answer")
            )
            verdict = verify(gold, answer, timeout_seconds=0) if gold and answer else None
            if verdict:
                verdict = consistent(answer[0], lambda one, other: verify(one, other, timeout_seconds=0))
        except Exception:
            # Whatever a parser raises on foreign text: the text is no expression. The caller counts it as unparsed.
            verdict = None
        print(json.dumps({"equal": verdict}), flush=True)


if __name__ == "__main__":
    main()
