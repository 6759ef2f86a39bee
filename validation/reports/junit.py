"""`junit.xml`: a suite per gate, a case per unit, and one case `verdict` that carries the gate's conclusion."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from validation.records.record import FindingDoc, GateDoc, RunRecord
from validation.reports.text import visible, visible_line
from validation.verdict import Verdict

_TAGS = {Verdict.FAIL: "failure", Verdict.ERROR: "error", Verdict.INCONCLUSIVE: "error"}
"""JUnit knows no inconclusive outcome; it must not look green, and it is not the candidate's proven failure."""


def render(record: RunRecord) -> bytes:
    """The record as JUnit XML."""
    root = Xml.Element("testsuites", name="decodegate")
    for gate in record.stable.gates:
        root.append(_suite(gate, record))
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.3f}")
    Xml.indent(root)
    document: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _suite(gate: GateDoc, record: RunRecord) -> Xml.Element:
    seconds = record.run.seconds.get(gate.name, {})
    # A gate without a say may have findings, but must not turn a passing run red in a viewer.
    tag = _TAGS.get(gate.counts_as) if gate.counts_as is not None else None
    cases = []
    for unit in gate.units:
        findings = [finding for finding in gate.findings if finding.unit == unit]
        case = _case(gate.name, unit, seconds.get(unit, 0.0))
        if unit not in seconds:
            _add(case, "skipped", "not measured", "")
        elif findings:
            _outcome(case, tag, gate.verdict, findings)
        cases.append(case)
    cases.append(_verdict_case(gate, tag))
    suite = Xml.Element("testsuite", name=visible_line(gate.name), timestamp=record.run.created.rstrip("Z"))
    suite.set("tests", str(len(cases)))
    for key, child in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(child) is not None for case in cases)))
    suite.set("time", f"{sum(seconds.values()):.3f}")
    suite.append(_properties(record))
    suite.extend(cases)
    return suite


def _properties(record: RunRecord) -> Xml.Element:
    """What was judged, as viewers show it beside a suite; the form's order wants it before the cases."""
    stable = record.stable
    named = {
        "run": record.run.id,
        "profile": stable.profile.name,
        "seed": str(stable.seed),
        "decodegate": stable.decodegate,
        "commit": record.environment.git_commit or "unknown",
    }
    properties = Xml.Element("properties")
    for name, value in named.items():
        Xml.SubElement(properties, "property", name=f"decodegate.{name}", value=visible_line(value))
    return properties


def _verdict_case(gate: GateDoc, tag: str | None) -> Xml.Element:
    case = _case(gate.name, "verdict", 0.0)
    general = [finding for finding in gate.findings if finding.unit not in gate.units]
    if tag is not None:
        text = "\n".join([gate.summary, *(f"{finding.component}: {finding.message}" for finding in general)])
        message = gate.summary
        if gate.required and gate.verdict is Verdict.SKIPPED:
            message = f"required, but {gate.summary}"
        _add(case, tag, message, text, kind=gate.verdict)
    elif gate.verdict is not Verdict.PASS:
        _add(case, "skipped", f"{gate.verdict}: {gate.summary}", "")
    else:
        _note(case, [gate.summary, *(f"{finding.component}: {finding.message}" for finding in general)])
    return case


def _outcome(case: Xml.Element, tag: str | None, verdict: Verdict, findings: Sequence[FindingDoc]) -> None:
    lines = [f"{finding.component}: {finding.message}" for finding in findings]
    if tag is None:
        _note(case, lines)
    else:
        _add(case, tag, lines[0], "\n".join(lines), kind=verdict)


def _case(gate: str, name: str, seconds: float) -> Xml.Element:
    return Xml.Element("testcase", classname=visible_line(gate), name=visible_line(name), time=f"{seconds:.3f}")


def _add(case: Xml.Element, tag: str, message: str, text: str, kind: str = "") -> None:
    child = Xml.SubElement(case, tag, message=visible_line(message))
    if kind:
        child.set("type", kind)
    child.text = visible(text) or None


def _note(case: Xml.Element, lines: Sequence[str]) -> None:
    Xml.SubElement(case, "system-out").text = visible("\n".join(lines))
