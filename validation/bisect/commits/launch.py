"""Runs the decodegate of the working folder, not the installed one: `python launch.py run OPTIONS`.

A commit that has none, or whose command line cannot be imported, cannot be judged: exit code 125.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

_CANNOT_JUDGE = 125


def launch() -> int:
    """Run the working folder's command line and return its exit code."""
    if not Path("validation", "cli", "app.py").is_file():
        print(f"{Path.cwd()} has no validation/cli/app.py", file=sys.stderr)
        return _CANNOT_JUDGE
    # Python put the folder of this file there.
    sys.path[0] = str(Path.cwd())
    try:
        from validation.cli.app import main
    except Exception:
        traceback.print_exc()
        return _CANNOT_JUDGE
    return main()


if __name__ == "__main__":
    sys.exit(launch())
