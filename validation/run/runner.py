"""The runner: orders gates, hands their units out, keeps every result as it comes, and writes the record as it goes."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from validation.errors import RunInterrupted, UsageError, describe, one_line
from validation.faults.base import Fault
from validation.gates.base import Context, Gate, GateResult, Unit
from validation.gates.registry import GATES, by_layer
from validation.profile import Profile, check_settings
from validation.records.jsonio import unpacked
from validation.records.record import (
    ArmUse,
    GateDoc,
    ProfileDoc,
    RunInfo,
    RunRecord,
    Stable,
    TargetDoc,
    UnitResult,
    added,
    arm_doc,
    fault_doc,
    gate_doc,
)
from validation.records.samples import write_samples
from validation.records.storage import RunFolder, new_run_id
from validation.run.environment import environment
from validation.run.executor import Executor, Failed, InProcess
from validation.run.identity import differences, unit_identity
from validation.run.judging import counts_as, fail_closed, missing, plan_error, run_verdict, stopper
from validation.run.progress import Progress, Silent
from validation.run.version import code_version
from validation.targets.base import ArmConfig, Capability, Target, TargetError
from validation.targets.optional import Keeping
from validation.verdict import Verdict, exit_code


@dataclass(frozen=True)
class Request:
    """What to judge. `gates` are the gates to run; `selected` names them when they were chosen one by one.

    Without a choice, the profile says which gates are required; with one, every chosen gate is required.
    """

    profile_name: str
    profile: Profile
    gates: Sequence[Gate]
    selected: tuple[str, ...] | None = None
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    keep_going: bool = False
    bisect: bool = False
    command: tuple[str, ...] = ()

    def required(self, gate: Gate) -> bool:
        """Whether this gate must pass."""
        return gate.name in (self.profile.required if self.selected is None else self.selected)


def run(
    request: Request,
    target: Target,
    out: Path,
    *,
    resume: str | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> tuple[RunFolder, RunRecord]:
    """Run the gates and keep everything in `<out>/<id>/`; with `resume`, finish that earlier run instead.

    An error inside a gate becomes that gate's ERROR verdict. Reports are not written here.

    Raises:
        UsageError: settings, arms or faults that cannot be; a run folder that cannot be written; a run that cannot be
            resumed because something it depends on has changed.
        RunInterrupted: after KeyboardInterrupt, with everything measured so far kept.
    """
    check_settings(request.profile, request.gates)
    context = _context(request, target)
    _open_arms(request, context)
    created = datetime.now(UTC)
    folder = RunFolder.find(out, resume) if resume is not None else RunFolder.create(out, new_run_id(created))
    with folder.lock():
        if isinstance(target, Keeping):
            target.keep_in(folder.file("target"))
        record = _first_record(request, context, folder.run_id, created)
        if resume is not None:
            record = _continued(record, folder.read_record())
        work = _Work(request, context, folder, record, progress or Silent(), executor or InProcess())
        folder.log(f"run {folder.run_id}: {'resumed' if resume else 'started'}")
        try:
            return folder, work.finish()
        except KeyboardInterrupt:
            folder.write_record(work.record)
            folder.log("interrupted")
            where = "" if str(out) == "runs" else f" --out {shlex.quote(str(out))}"
            raise RunInterrupted(f"interrupted; go on with: decodegate run --resume {folder.run_id}{where}") from None


@dataclass
class _Work:
    """One run in progress; `record` is what `record.json` says or is about to say."""

    request: Request
    context: Context
    folder: RunFolder
    record: RunRecord
    progress: Progress
    executor: Executor
    counters: dict[str, ArmUse] = field(default_factory=dict)

    def finish(self) -> RunRecord:
        """Run every gate that may run, then conclude."""
        self.folder.write_record(self.record)
        for gate in by_layer(list(self.request.gates)):
            doc, seconds = self._gate(gate)
            self._keep(doc, seconds)
            self.progress.gate_finished(doc, sum(seconds.values()))
        verdict = run_verdict(self.record.stable.gates)
        code = exit_code(verdict, bisect=self.request.bisect)
        info = self.record.run.model_copy(update={"finished": _text(datetime.now(UTC)), "exit_code": code})
        stable = self.record.stable.model_copy(update={"verdict": verdict})
        self.record = self.record.model_copy(update={"status": "finished", "run": info, "stable": stable})
        self.folder.write_record(self.record)
        self.folder.log(f"{verdict}, exit code {code}")
        return self.record

    def _keep(self, doc: GateDoc, seconds: dict[str, float]) -> None:
        stable, info = self.record.stable, self.record.run
        skipped = {doc.name: doc.summary} if doc.verdict is Verdict.SKIPPED else {}
        update = {
            "gates": [*stable.gates, doc],
            "counters": self.counters,
            "not_judged": {**stable.not_judged, **skipped},
        }
        self.record = self.record.model_copy(
            update={
                "stable": stable.model_copy(update=update),
                "run": info.model_copy(update={"seconds": {**info.seconds, doc.name: seconds}}),
            }
        )
        self.folder.write_record(self.record)
        self.folder.log(f"gate {doc.name}: {doc.verdict}: {one_line(doc.summary)}")

    def _gate(self, gate: Gate) -> tuple[GateDoc, dict[str, float]]:
        """The gate's part of the record, and the seconds of each of its units."""
        context = replace(self.context, settings=self.request.profile.gates[gate.name])
        blocker = stopper(self.record.stable.gates, gate, keep_going=self.request.keep_going)
        if blocker is not None:
            reason = f"not run: layer {blocker.layer} failed ({blocker.name}: {blocker.verdict})"
            return self._doc(gate, _result(gate, Verdict.SKIPPED, reason), [], stopped_by=blocker.verdict), {}
        lack = missing(gate, context.target)
        if lack is not None:
            return self._doc(gate, _result(gate, Verdict.SKIPPED, lack), []), {}
        try:
            units = list(gate.plan(context))
        except Exception as error:
            return self._doc(gate, self._error(gate, "plan", error), []), {}
        flaw = plan_error(units)
        if flaw is not None:
            return self._doc(gate, _result(gate, Verdict.ERROR, flaw), []), {}
        results, failure = self._measure(gate, units, context)
        seconds = {name: result.seconds for name, result in results.items()}
        if failure is not None:
            self.folder.log(f"gate {gate.name}, unit {failure.unit.id}:\n{failure.traceback}")
            reason = f"unit {failure.unit.id}: {failure.error}"
            return self._doc(gate, _result(gate, Verdict.ERROR, reason), units), seconds
        return self._judge(gate, units, results, context), seconds

    def _measure(
        self, gate: Gate, units: Sequence[Unit], context: Context
    ) -> tuple[dict[str, UnitResult], Failed | None]:
        """Results of the units by id in the order of the plan, kept ones first used; and the first failure."""
        identities = {unit.id: unit_identity(gate, unit, context, self.record.stable) for unit in units}
        found: dict[str, UnitResult] = {}
        for unit in units:
            kept = self.folder.read_unit(gate.name, unit.id, identities[unit.id])
            if kept is not None:
                found[unit.id] = kept
        self.progress.gate_started(gate.name, len(units), len(found))
        failure = None
        for outcome in self.executor.measure(gate, [unit for unit in units if unit.id not in found], context):
            if isinstance(outcome, Failed):
                failure = outcome
                break
            result = UnitResult(
                gate=gate.name,
                unit=outcome.unit.id,
                identity=identities[outcome.unit.id],
                result=outcome.result,
                arms=outcome.arms,
                seconds=outcome.seconds,
            )
            self.folder.write_unit(result)
            found[outcome.unit.id] = result
            self.progress.unit_done(gate.name, outcome.unit.id)
        return {unit.id: found[unit.id] for unit in units if unit.id in found}, failure

    def _judge(self, gate: Gate, units: list[Unit], results: dict[str, UnitResult], context: Context) -> GateDoc:
        write_samples(self.folder, gate.name, units, results)
        arms: dict[str, ArmUse] = {}
        for result in results.values():
            arms = added(arms, result.arms)
        self.counters = added(self.counters, arms)
        measured: dict[str, Any] = {name: unpacked(result.result) for name, result in results.items()}
        try:
            lost = [unit.id for unit in units if unit.id not in measured]
            if lost:
                raise RuntimeError(f"the executor lost {len(lost)} units, the first is {lost[0]}")
            judged = fail_closed(gate.judge(measured, context), arms, context)
            return self._doc(gate, judged, units)
        except Exception as error:
            return self._doc(gate, self._error(gate, "judge", error), units)

    def _error(self, gate: Gate, step: str, error: Exception) -> GateResult:
        self.folder.log(f"gate {gate.name}, {step}:\n{traceback.format_exc()}")
        return _result(gate, Verdict.ERROR, f"{step}: {describe(error)}")

    def _doc(self, gate: Gate, result: GateResult, units: Sequence[Unit], stopped_by: Verdict | None = None) -> GateDoc:
        required = self.request.required(gate)
        doc = gate_doc(gate, result, required=required, units=[unit.id for unit in units])
        say = counts_as(result.verdict, required=required, stopped_by=stopped_by)
        return doc.model_copy(update={"counts_as": say})


def _result(gate: Gate, verdict: Verdict, summary: str) -> GateResult:
    return GateResult(gate=gate.name, verdict=verdict, summary=summary)


def _context(request: Request, target: Target) -> Context:
    if request.faults and Capability.INJECT_FAULT not in target.capabilities:
        raise UsageError(f"target {target.name!r} lacks the capability 'inject a fault'; run without --fault")
    candidate = replace(request.profile.candidate.arm("candidate"), faults=request.faults)
    baseline = request.profile.baseline.arm("baseline")
    return Context(target=target, baseline=baseline, candidate=candidate, seed=request.seed, settings={})


def _open_arms(request: Request, context: Context) -> None:
    """Refuse what the target cannot open before anything is measured: both arms, and every variant of a gate."""
    arms = dict.fromkeys((context.baseline, context.candidate))
    for gate in request.gates:
        if missing(gate, context.target) is not None:
            continue
        try:
            planned = gate.arms(replace(context, settings=request.profile.gates[gate.name]))
        except ValueError as error:
            raise UsageError(f"gate {gate.name} cannot run: {one_line(error)}") from error
        arms |= dict.fromkeys(planned)
    for arm in arms:
        _open(context.target, arm)


def _open(target: Target, arm: ArmConfig) -> None:
    try:
        target.open(arm)
    except TargetError as error:
        raise UsageError(f"the {arm.name} arm cannot be opened: {one_line(error)}") from error


def _first_record(request: Request, context: Context, run_id: str, created: datetime) -> RunRecord:
    target = context.target
    absent = {name: "not in this profile" for name in sorted(GATES) if name not in request.profile.gates}
    chosen = {gate.name for gate in request.gates}
    unchosen = {name: "not selected by --gate" for name in sorted(request.profile.gates) if name not in chosen}
    return RunRecord(
        run=RunInfo(id=run_id, created=_text(created), command=list(request.command)),
        environment=environment(),
        stable=Stable(
            decodegate=code_version(),
            seed=request.seed,
            profile=ProfileDoc(name=request.profile_name, content=request.profile.content()),
            selected=None if request.selected is None else sorted(request.selected),
            keep_going=request.keep_going,
            target=TargetDoc(
                kind=request.profile.target.kind, name=target.name, fingerprint=dict(target.fingerprint())
            ),
            arms={arm.name: arm_doc(arm) for arm in (context.baseline, context.candidate)},
            faults=[fault_doc(fault) for fault in request.faults],
            not_judged={**absent, **unchosen},
        ),
    )


def _continued(record: RunRecord, earlier: RunRecord) -> RunRecord:
    """The record of a resumed run: it keeps its birth and its command, and starts its gates anew from kept units.

    Raises:
        UsageError: something that the results depend on is no longer what it was.
    """
    changes = differences(earlier, record)
    if changes:
        raise UsageError(f"run {record.run.id!r} cannot be resumed: {'; '.join(changes)}; start a new run")
    info = record.run.model_copy(update={"created": earlier.run.created, "command": earlier.run.command})
    return record.model_copy(update={"run": info})


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
