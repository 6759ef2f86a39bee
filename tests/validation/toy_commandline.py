"""The command line over toys, as tests use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import decodegate_toy as toy
import pytest

from validation.cli.app import main
from validation.records.record import RunRecord
from validation.records.storage import RunFolder


@dataclass
class CommandLine:
    """`decodegate` in this process, with a profile file and a folder of runs."""

    folder: Path
    capture: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""
    profile: str = field(init=False)

    def __post_init__(self) -> None:
        self.profile = self.write_profile(toy.PROFILE)

    def write_profile(self, text: str) -> str:
        """Put the text at toy.toml; its path comes back."""
        path = self.folder / "toy.toml"
        path.write_text(text)
        return str(path)

    def __call__(self, *arguments: str) -> int:
        """Run a command; what it printed is in `out` and `err`."""
        self.capture.readouterr()
        code = main(arguments)
        captured = self.capture.readouterr()
        self.out, self.err = captured.out, captured.err
        return code

    def run(self, *arguments: str) -> int:
        """`decodegate run` with the profile file and the folder of runs, in this process alone."""
        return self("run", "--profile", self.profile, "--out", str(self.runs), "--workers", "1", *arguments)

    @property
    def runs(self) -> Path:
        """The folder of runs."""
        return self.folder / "runs"

    def newest(self) -> RunFolder:
        """The only run, or the one made last."""
        return RunFolder(max(self.runs.iterdir(), key=lambda path: path.stat().st_mtime_ns))

    def record(self) -> RunRecord:
        """The record of the newest run."""
        return self.newest().read_record()
