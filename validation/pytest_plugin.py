"""pytest plugin: gates as test items, so that they run inside a project's own tests.

    pytest --decodegate-profile smoke                  every gate of the profile is one more test
    pytest --decodegate-profile smoke -m decodegate    only the gates
    pytest --decodegate-profile smoke -n 4             under xdist each gate is run by one worker

A gate that passes is a test that passes. FAIL is a failure; so is every other outcome of a gate that the profile
requires, since it was not judged. Other gates that were not judged are skipped, with the reason. What a gate measured
lies in a run folder of its own, as after `decodegate run --gate NAME`.

pytest loads this module wherever decodegate is installed, so it imports nothing of it until a gate is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from validation.gates.base import Gate
    from validation.profile import Profile
    from validation.records.record import RunRecord

_PROFILE = "--decodegate-profile"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("decodegate", "gates of decodegate as test items")
    group.addoption(_PROFILE, metavar="NAME|FILE", help="run the gates of this profile as tests")
    group.addoption("--decodegate-model", metavar="PATH", help="folder of a checkpoint (default: the profile's)")
    group.addoption("--decodegate-seed", type=int, default=0, metavar="N", help="seed of every draw (default: 0)")
    group.addoption("--decodegate-out", default="runs", metavar="DIR", help="folder of run folders (default: runs)")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; refuse a wrong profile before anything is collected, in every process."""
    config.addinivalue_line("markers", f"decodegate: a gate of decodegate ({_PROFILE})")
    if config.getoption(_PROFILE) is not None:
        _chosen(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one item per gate, before -k and -m choose among them."""
    if config.getoption(_PROFILE) is None:
        return
    name, profile, gates = _chosen(config)
    for gate in gates:
        nodeid = f"decodegate::{name}::{gate.name}"
        item: GateItem = GateItem.from_parent(session, name=f"decodegate-{gate.name}", nodeid=nodeid)
        item.gate, item.profile_name, item.profile = gate, name, profile
        item.add_marker("decodegate")
        items.append(item)


class GateItem(pytest.Item):
    """One gate. Its outcome is the gate's verdict."""

    gate: Gate
    profile_name: str
    profile: Profile

    def runtest(self) -> None:
        """Judge the gate.

        Raises:
            GateNotPassed: it failed, or the profile requires it and it was not judged.
        """
        from validation.errors import UsageError

        try:
            with _as_before():
                record, page = self._judge()
        except UsageError as error:
            raise GateNotPassed(str(error)) from error
        (doc,) = record.stable.gates
        findings = [f"{finding.component}: {finding.message}" for finding in doc.findings[:10]]
        said = "\n".join([f"{doc.verdict}: {doc.summary}", *findings, f"report: {page}"])
        self.user_properties += [("decodegate_run", record.run.id), ("decodegate_verdict", doc.verdict.value)]
        self.add_report_section("call", "decodegate", said)
        if doc.verdict.value == "PASS":
            return
        if doc.verdict.value == "FAIL" or self.gate.name in self.profile.required:
            raise GateNotPassed(said)
        pytest.skip(f"{doc.verdict}: {doc.summary}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What the gate said, without a traceback; errors of the machinery with theirs."""
        if isinstance(excinfo.value, GateNotPassed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """How pytest names the item."""
        return self.path, None, f"decodegate {self.profile_name}: {self.gate.name}"

    def _judge(self) -> tuple[RunRecord, Path]:
        from validation.reports.write import write_reports
        from validation.run.environment import set_threads
        from validation.run.runner import Request, run
        from validation.targets.registry import load_target

        set_threads(None)
        seed = self.config.getoption("--decodegate-seed")
        command = ["decodegate", "run", "--profile", self.config.getoption(_PROFILE), "--gate", self.gate.name]
        request = Request(
            profile_name=self.profile_name,
            profile=self.profile,
            gates=[self.gate],
            selected=(self.gate.name,),
            seed=seed,
            command=(*command, "--seed", str(seed)),
        )
        target = load_target(self.profile.target.kind, self.profile.model.folder())
        folder, record = run(request, target, Path(self.config.getoption("--decodegate-out")))
        return record, write_reports(folder, record)


class GateNotPassed(Exception):
    """A gate failed, or was required and not judged. The text is what the gate said."""


def _chosen(config: pytest.Config) -> tuple[str, Profile, list[Gate]]:
    """Name and content of the profile, and its gates from the cheapest layer to the costliest."""
    from validation.errors import UsageError
    from validation.gates.registry import by_layer, load_gate
    from validation.profile import ModelSection, check_settings, load_profile

    try:
        name, profile = load_profile(config.getoption(_PROFILE))
        model = config.getoption("--decodegate-model")
        if model is not None:
            profile = profile.model_copy(update={"model": ModelSection(path=str(Path(model).resolve()))})
        gates = by_layer([load_gate(gate) for gate in profile.gates])
        check_settings(profile, gates)
    except UsageError as error:
        raise pytest.UsageError(f"decodegate: {error}") from error
    return name, profile, gates


@contextmanager
def _as_before() -> Iterator[None]:
    """Give the process's threads and random generators back as they were: other tests run in it."""
    import numpy
    import torch

    threads, python, state = torch.get_num_threads(), random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        numpy.random.set_state(state)
