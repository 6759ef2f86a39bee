"""Signals that stop a command: SIGTERM ends it as Ctrl-C does, with everything kept and a word on how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM do in the main thread what Ctrl-C does; what was there before comes back afterwards.

    Only the main thread may say what a signal does; in another nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
