"""The explorer: right protocols are clean in every order, every wrong one is caught with a trace that fits a page."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from decode_impl.parallel.table import PROTOCOL
from validation.faults.sync import LAYER
from validation.sync import scenarios
from validation.sync.controls import CONTROLS
from validation.sync.explore import Explored, Explorer
from validation.sync.exploring import SHORT_TRACE, first_violation, scenarios_of, walked
from validation.sync.faulty import with_fault
from validation.sync.machine import Machine
from validation.sync.replays import trace_document, trace_from
from validation.sync.scenario import Collective, Scenario
from validation.sync.sentinels import checked
from validation.sync.trace import replayed, trace_of

SENTINELS = ("sync-sentinel-after-cast", "sync-sentinel-kept")
EXPLORED = [fault.id for fault in LAYER.faults if fault.id not in SENTINELS]


def exhausted(scenario: Scenario, parts: Any = PROTOCOL, *, reduced: bool = True) -> Explored:
    return Explorer(scenario.system(parts), reduce=reduced).exhaust()


def small(*calls: Collective, ranks: int = 2, **options: Any) -> Scenario:
    return Scenario("small", ranks, calls, **options)


ONE, TWO = Collective("one_shot"), Collective("two_shot", pieces=2)
PLACE, FLAGLESS = Collective("in_place"), Collective("mail_without_flags")


@pytest.mark.parametrize("group", ["launches", "collectives-2", "stalls-2", "collectives-3"])
def test_every_protocol_is_clean_in_every_order(group: str) -> None:
    for scenario in scenarios_of(group, PROTOCOL):
        if scenario.name == "pieces-3":
            continue  # ten seconds: the gate runs it
        result = exhausted(scenario)
        assert (result.violation, result.complete) == (None, True), scenario.name
        assert result.states > 1, scenario.name


def test_random_walks_of_eight_ranks_are_clean() -> None:
    entries = walked(PROTOCOL, 8, walks=1, seed=3, faults=[])["scenarios"]
    assert {name: entry["violation"] for name, entry in entries.items()} == dict.fromkeys(entries)


@pytest.mark.parametrize("fault", EXPLORED)
def test_every_fault_of_a_protocol_is_caught_with_a_trace_of_at_most_30_events(fault: str) -> None:
    found = first_violation(with_fault(PROTOCOL, fault), ranks=(2,))
    assert found is not None
    scenario, trace, _ = found
    assert len(trace.events) <= SHORT_TRACE == 30
    again = replayed(scenario.system(with_fault(PROTOCOL, fault)), trace.actions)
    assert again is not None
    assert again.violation == trace.violation


@pytest.mark.parametrize("fault", SENTINELS)
def test_payload_that_is_taken_for_the_sentinel_is_found(fault: str) -> None:
    assert checked(PROTOCOL) | {"checked": 0} == {"checked": 0, "sentinels": 0, "lost": 0, "changed": 0, "example": ""}
    broken = checked(with_fault(PROTOCOL, fault))
    assert broken["sentinels"] > 0
    assert "0x80000000" in broken["example"] or "-1.4013e-45" in broken["example"]


def test_there_is_a_control_for_every_protocol_that_the_gate_names() -> None:
    broken = {control.variant for control in CONTROLS}
    assert broken >= {
        "missing barrier",
        "flag before data",
        "equality wait on a baked epoch",
        "shared counter across shapes",
        "re-arm at the wrong time",
        "no exit barrier",
        "wrong parity on odd layers",
    }
    assert {control.fault for control in CONTROLS} <= {fault.id for fault in LAYER.faults}


SMALL = [
    small(ONE, ONE, epoch=2),
    small(TWO, ONE),
    small(PLACE, PLACE),
    small(FLAGLESS, FLAGLESS),
    small(ONE, ranks=3),
    small(ONE, ONE, timeouts=True, stop=(0, 4)),
]


@pytest.mark.parametrize("fault", ["", *(control.fault for control in CONTROLS if control.stress)])
@pytest.mark.parametrize("scenario", SMALL, ids=lambda s: "-".join(str(c.program) for c in s.calls) + f"-{s.ranks}")
def test_the_reduction_hides_nothing(scenario: Scenario, fault: str) -> None:
    parts = with_fault(PROTOCOL, fault) if fault else PROTOCOL
    reduced, full = exhausted(scenario, parts), exhausted(scenario, parts, reduced=False)
    assert (reduced.violation is None) == (full.violation is None)
    assert reduced.states <= full.states


def test_stores_are_seen_late_and_out_of_order() -> None:
    """A flag without release overtakes its data in some order, a flag with release in none."""
    relaxed = exhausted(small(ONE), with_fault(PROTOCOL, "sync-relaxed-flag"))
    assert relaxed.violation is not None
    assert relaxed.violation.invariant == "no stale read"
    landed = [action for action in relaxed.actions if action.what == "land"]
    assert landed
    assert exhausted(small(ONE)).violation is None


def test_words_of_two_bits_are_too_few_for_the_protocols_and_three_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = (ONE, ONE, ONE, ONE)
    assert exhausted(small(*calls)).violation is None
    monkeypatch.setattr("validation.sync.scenario.WORD_BITS", 2)
    assert exhausted(small(*calls)).violation is not None


def test_a_dead_rank_ends_the_call_on_every_other_rank_and_a_wait_without_a_limit_hangs() -> None:
    for scenario in scenarios.stalls(PROTOCOL, 2):
        assert exhausted(scenario).violation is None
    hanging = exhausted(small(ONE, timeouts=True, stop=(0, 0)), with_fault(PROTOCOL, "sync-unbounded-wait"))
    assert hanging.violation is not None
    assert hanging.violation.invariant == "every wait ends"
    assert "agent 1 waits for ever for agent 0 (slot 1, epoch 1, call 0)" in hanging.violation.message


def test_exploration_that_was_cut_off_says_so() -> None:
    result = Explorer(small(ONE, ONE).system(PROTOCOL), most_states=5).exhaust()
    assert (result.complete, result.violation) == (False, None)


def test_a_trace_says_what_landed_late_and_is_the_same_from_its_file() -> None:
    parts = with_fault(PROTOCOL, "sync-no-exit-barrier")
    scenario = small(PLACE, PLACE)
    trace = trace_of(scenario.system(parts), exhausted(scenario, parts).actions)
    document = trace_document(scenario, trace, ["sync-no-exit-barrier"])
    read, actions, faults = trace_from(json.loads(json.dumps(document)))
    assert (read, tuple(actions), faults) == (scenario, trace.actions, ["sync-no-exit-barrier"])
    assert any("lands in input" in event.text for event in trace.events)
    assert "no overwrite before the last read" in str(trace)


def test_a_trace_does_not_break_what_has_been_repaired() -> None:
    parts, scenario = with_fault(PROTOCOL, "sync-no-exit-barrier"), small(PLACE, PLACE)
    trace = trace_of(scenario.system(parts), exhausted(scenario, parts).actions)
    assert replayed(scenario.system(PROTOCOL), trace.actions) is None


def test_actions_that_are_not_possible_are_no_trace() -> None:
    system = small(ONE).system(PROTOCOL)
    machine = Machine(system)
    first = next(machine.actions(machine.start()))
    assert replayed(system, [first, first]) is None
    with pytest.raises(ValueError, match="break no invariant"):
        trace_of(system, [first])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scenario": 3}, "a scenario has the keys"),
        ({"actions": [["jump", 0, 0]]}, "an action is"),
        ({"faults": "all"}, "faults is a list of ids"),
    ],
)
def test_a_trace_of_another_form_is_refused(change: dict[str, Any], message: str) -> None:
    parts, scenario = with_fault(PROTOCOL, "sync-flag-before-data"), small(ONE)
    trace = trace_of(scenario.system(parts), exhausted(scenario, parts).actions)
    document = json.loads(json.dumps(trace_document(scenario, trace, []))) | change
    with pytest.raises(ValueError, match=message):
        trace_from(document)


def test_ranks_that_decide_otherwise_stop_together() -> None:
    scenario = scenarios.disagreement(2)
    assert exhausted(scenario).violation is None
    alone = replace(scenario, calls=(*scenario.calls[:2], scenario.calls[3]))
    assert exhausted(alone).violation is not None
