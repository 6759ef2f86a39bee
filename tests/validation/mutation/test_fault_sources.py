"""Every public report of a wrong kernel, cache or layout that a CPU can rebuild has a fault that numerics or parity
should see, or says why not."""

from __future__ import annotations

import pytest

from validation.faults.base import Fault
from validation.faults.catalogue import FAULTS
from validation.faults.reports import REPORTS
from validation.mutation.document import faults_page

KERNELS = [
    "M01", "M02", "M03", "M04", "M05", "M06", "M07", "M08", "M09", "M11", "M12", "M14",
    "M15", "M16", "M17", "M18", "M20", "M21", "M22", "M23", "M24", "M26", "M27", "M28",
    "M29", "M30", "M31", "M32", "M33", "M34", "M35", "M36", "M37", "M39", "M40", "M41",
    "M42", "M44", "M45", "M46", "M47", "M49", "M50", "M51", "M52", "M53", "M54", "M55",
    "M57", "M58", "M59",
]  # fmt: skip
"""Reports of kernels: KDA, MLA, router and experts, attention residuals, compilers."""

STATE = [
    "M61", "M62", "M63", "M66", "M67", "M68", "M71", "M72", "M73", "M74", "M76", "M77",
    "M78", "M79", "M81", "M82", "M83", "M84", "M86", "M87", "M88", "M89", "M90", "M91",
    "M93", "M95", "M96",
]  # fmt: skip
"""Reports of state, caches and wiring."""

NOT_HERE = {"M52", "M93", "M96"}
"""No component here has what the report is about; the catalogue says so with the reason."""


def own(report: str) -> list[Fault]:
    return [fault for fault in FAULTS.values() if report in fault.sources]


@pytest.mark.parametrize("report", [*KERNELS, *STATE])
def test_every_report_has_a_fault_that_can_be_put_in_or_a_reason_why_not(report: str) -> None:
    faults = own(report)
    assert faults
    if report in NOT_HERE:
        assert all(fault.not_applicable for fault in faults)
        return
    put_in = [fault for fault in faults if fault.injectable]
    gates = {fault.gate for fault in put_in}
    assert gates & ({"numerics", "parity"})


def test_what_is_not_here_is_told_with_its_reason_in_the_page() -> None:
    page = faults_page(FAULTS)
    for report in sorted(NOT_HERE):
        assert all(f"*Not applicable*: {fault.not_applicable[:20]}" in page for fault in own(report))


def test_no_fault_waits_for_a_component_without_saying_for_which() -> None:
    for fault in FAULTS.values():
        assert fault.injectable or fault.component


def test_every_source_of_a_fault_is_a_report_that_the_page_lists() -> None:
    named = {source.removeprefix("kind of ") for fault in FAULTS.values() for source in fault.sources}
    assert {name for name in named if name[:1] == "M" and name[1:].isdigit()} <= REPORTS.keys()
