"""The process behind `mathematics.equal`: reads a pair of expressions a line, writes whether they are equal."""

from __future__ import annotations

import json
import logging
import resource
import sys


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
                parse(f"${pair[name]}$", parsing_timeout=0, raise_on_error=True) for name in ("expected", "answer")
            )
            verdict = verify(gold, answer, timeout_seconds=0) if gold and answer else None
        except Exception:
            # Whatever a parser raises on foreign text: the text is no expression. The caller counts it as unparsed.
            verdict = None
        print(json.dumps({"equal": verdict}), flush=True)


if __name__ == "__main__":
    main()
