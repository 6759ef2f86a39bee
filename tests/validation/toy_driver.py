"""`decodegate` over toys as a program of its own, so that a test can kill it. The first argument is the profile file.

TOY_KILL_AT_WRITE=N kills the process in the N-th atomic write, after the temporary file and before its final name.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import decodegate_toy as toy

from validation import loading
from validation.cli.app import main
from validation.gates import registry as gates
from validation.records import storage
from validation.run import environment
from validation.targets import registry as targets

gates.GATES.clear()
gates.GATES.update(toy.GATES)
targets.TARGETS.clear()
targets.TARGETS["toy"] = "decodegate_toy:ToyTarget"
loading.FAULTS = "decodegate_toy:FAULTS"
# Someone may commit while this test runs; resuming across commits is refused, which is not the matter here.
environment.git_state = lambda root: (None, None)

writes_left = int(os.environ.get("TOY_KILL_AT_WRITE", "0"))
replace = os.replace


def replace_or_die(source: Any, target: Any) -> None:
    global writes_left
    writes_left -= 1
    if writes_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)


storage.os.replace = replace_or_die  # type: ignore[attr-defined]

sys.exit(main())
