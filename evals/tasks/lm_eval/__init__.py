"""The evals as tasks of lm-evaluation-harness, for its users; `FOLDER` is what `--include_path` takes."""

from pathlib import Path

FOLDER = Path(__file__).parent
