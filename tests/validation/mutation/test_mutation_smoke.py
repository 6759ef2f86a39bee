"""The smoke subset: one fault of every layer that a cheap gate sees, asked of one unit that sees it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from small_k3 import small_target

from validation.cli.app import main
from validation.faults.catalogue import FAULTS
from validation.gates.base import Context
from validation.gates.registry import load_gate
from validation.mutation.document import faults_page
from validation.mutation.plan import can_see, units_for
from validation.mutation.smoke import LEFT_OUT, LOOKS, SMOKE, OneLook, looks_of, used, with_settings
from validation.profile import load_profile
from validation.targets.base import ArmConfig

CHEAP = ("numerics", "parity", "sync")
SETTINGS = with_settings(load_profile(SMOKE)[1].gates)


def context(gate: str) -> Context:
    return Context(small_target(), ArmConfig("baseline"), ArmConfig("candidate"), 0, SETTINGS[gate])


def test_every_layer_that_a_cheap_gate_sees_has_one_fault() -> None:
    layers = {f.layer for f in FAULTS.values() if f.injectable and not f.equivalent and f.gate in CHEAP}
    counted = Counter(FAULTS[fault].layer for fault in LOOKS)
    assert counted.keys() == layers - set(LEFT_OUT)
    assert set(counted.values()) == {1}
    assert all(FAULTS[fault].injectable and not FAULTS[fault].equivalent for fault in LOOKS)


@pytest.mark.parametrize("gate", CHEAP)
def test_its_settings_are_the_gates_and_its_units_are_planned(gate: str) -> None:
    assert load_gate(gate).settings_error(SETTINGS[gate]) is None
    planned = {unit.id for unit in load_gate(gate).plan(context(gate))}
    assert set(used(LOOKS, gate)) <= planned


@pytest.mark.parametrize("fault", LOOKS)
def test_the_unit_that_is_asked_is_one_that_can_see_the_fault(fault: str) -> None:
    name, unit = LOOKS[fault]
    gate = load_gate(name)
    assert can_see(gate, FAULTS[fault])
    assert unit in [one.id for one in units_for(gate, context(name), FAULTS[fault])]


def test_a_gate_is_asked_about_its_own_faults_alone() -> None:
    looks = looks_of(["sync"])
    assert {gate for gate, _ in looks.values()} == {"sync"}
    one = OneLook({"sync": SETTINGS["sync"], "numerics": SETTINGS["numerics"]}, small_target(), looks=LOOKS)
    said = one._asked(load_gate("numerics"), FAULTS["sync-shared-epoch"], context("numerics"))
    assert said == {"says": "cannot see it", "units": 0}


def test_it_is_green_on_a_healthy_build_and_prints_its_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["mutate", "--profile", SMOKE, "--gate", "sync", "--out", str(tmp_path), "--workers", "1"]
    assert main(command) == 0
    assert "sync: 1 of 1 (100%)" in capsys.readouterr().out


def test_a_fault_that_is_named_is_asked_as_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["mutate", "--profile", SMOKE, "--fault", "sync-relaxed-flag", "--gate", "sync", "--out", str(tmp_path)]
    assert main([*command, "--workers", "1"]) == 0
    assert "sync: 1 of 1 (100%)" in capsys.readouterr().out


def test_the_help_and_the_page_say_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutate", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "one fault of every layer that numerics, parity or sync sees" in told
    assert "one fault of every layer that the gates numerics, parity or sync see" in " ".join(faults_page({}).split())
