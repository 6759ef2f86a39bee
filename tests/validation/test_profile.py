"""Profiles: those that ship are sound, and a profile sets everything that an arm has."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import decodegate_toy as toy
import pytest

from validation.errors import UsageError
from validation.gates.registry import GATES
from validation.profile import PROFILES, ArmSection, Profile, load_profile, profile_from, profile_names
from validation.targets.base import ArmConfig


def test_the_shipped_profiles_are_the_five() -> None:
    assert profile_names() == ["gpu", "nightly", "premerge", "signoff", "smoke"]


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_compares_the_two_backends_and_requires_every_gate_it_has(name: str) -> None:
    loaded, profile = load_profile(name)
    assert loaded == name
    assert profile.baseline.decode_backend == "auto"
    assert profile.candidate.decode_backend == "latency_specialized"
    assert sorted(profile.required) == sorted(profile.gates)
    assert set(profile.gates) <= set(GATES)
    assert profile.model.folder() is None
    assert profile_from(profile.content(), "itself") == profile


def test_a_profile_is_loaded_by_the_path_of_its_file() -> None:
    assert load_profile(str(PROFILES / "smoke.toml")) == load_profile("smoke")


def test_an_arm_table_has_the_fields_and_the_defaults_of_an_arm() -> None:
    not_a_profiles = {"name", "faults", "substitutions", "boundaries"}
    fields = {field.name for field in dataclasses.fields(ArmConfig)} - not_a_profiles
    assert set(ArmSection.model_fields) == fields, "a new field of ArmConfig needs one in ArmSection"
    assert ArmSection(decode_backend="auto").arm("x") == ArmConfig("x")


@pytest.mark.usefixtures("toys")
def test_all_problems_of_a_profile_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(toy.PROFILE.replace('"auto"', '"fast"').replace("required", "requires"))
    with pytest.raises(UsageError) as caught:
        load_profile(str(path))
    for part in ("baseline.decode_backend", "unknown key 'requires'", "'required' is missing", str(path)):
        assert part in str(caught.value)


@pytest.mark.usefixtures("toys")
def test_a_model_is_the_folder_that_a_profile_names() -> None:
    content = profile_toy().content()
    assert profile_from({**content, "model": {"path": "ckpt"}}, "p").model.folder() == Path("ckpt")


def profile_toy() -> Profile:
    return profile_from(tomllib.loads(toy.PROFILE), "toy")
