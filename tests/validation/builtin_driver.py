"""`decodegate` over the real target as a program of its own, so that a test can kill it."""

from __future__ import annotations

import sys

from validation.cli.app import main
from validation.run import environment

if __name__ == "__main__":
    # Someone may commit while the test runs; resuming across commits is refused, which is not the matter here.
    environment.git_state = lambda root: (None, None)
    sys.exit(main())
