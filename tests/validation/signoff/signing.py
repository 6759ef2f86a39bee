"""Signing off toy runs, as tests do it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from toy_commandline import CommandLine

TODAY = datetime.now(UTC).date()
POLICY = 'name = "toy release"\nrequired = ["error", "costly"]\nprofiles = ["toy"]\n'


class Signing:
    """A finished toy run, a key pair, a policy, and the commands over them."""

    def __init__(self, decodegate: CommandLine) -> None:
        self.command = decodegate
        self.home = decodegate.folder
        assert decodegate("keygen", str(self.home / "release.pem")) == 0
        self.policy(POLICY)

    def policy(self, text: str) -> None:
        (self.home / "policy.toml").write_text(text)

    def sign(self, *more: str, runs: tuple[str, ...] = ()) -> int:
        shutil.rmtree(self.home / "so", ignore_errors=True)
        chosen = runs or (self.command.newest().run_id,)
        words = (
            "--policy",
            str(self.home / "policy.toml"),
            "--to",
            str(self.home / "so"),
            "--out",
            str(self.command.runs),
        )
        return self.command("signoff", *chosen, *words, *(more or ("--key", str(self.home / "release.pem"))))

    def verify(self, key: str = "release.pub.pem") -> int:
        words = ("--key", str(self.home / key), "--out", str(self.command.runs))
        return self.command("verify", str(self.home / "so"), *words)

    @property
    def document(self) -> str:
        return (self.home / "so" / "signoff.html").read_text()


def edited(signing: Signing, change: Callable[[Any], object]) -> None:
    """Change the JSON of the newest run's record."""
    path = signing.command.newest().path / "record.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def ended(signing: Signing, gate: int, verdict: str, counts_as: str | None = None, **more: object) -> None:
    """Make the newest run one in which a gate, and the run by it, ended otherwise, without faults put in."""

    def change(document: Any) -> None:
        stable = document["stable"]
        stable["gates"][gate].update(verdict=verdict, counts_as=counts_as or verdict, **more)
        stable["verdict"] = counts_as or verdict

    edited(signing, change)


def failed(signing: Signing) -> None:
    """Make the newest run one in which the error gate failed, without its being a run with faults."""
    ended(signing, 0, "FAIL", findings=[{"component": "projection", "message": "too large", "unit": ""}])
