"""Profiles: which model, which two arms, which gates with which settings, and which of them must pass."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from validation.errors import UsageError, one_line
from validation.gates.base import Gate
from validation.gates.registry import GATES
from validation.records.jsonio import named
from validation.targets.base import ArmConfig
from validation.targets.registry import TARGETS

PROFILES = Path(__file__).parent / "profiles"
"""Folder of the profiles that come with decodegate, one `<name>.toml` each."""

DEFAULT_PROFILE = "premerge"
EMBEDDED = "embedded"
"""`model.path` of the model that ships in the package."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_Section):
    """`[model]`: a checkpoint's folder, or the embedded model."""

    path: str = EMBEDDED

    def folder(self) -> Path | None:
        """The checkpoint's folder; None for the embedded model."""
        return None if self.path == EMBEDDED else Path(self.path)


class TargetSection(_Section):
    """`[target]`: what kind of thing decodes, and what that kind wants to know besides."""

    kind: str
    options: dict[str, JsonValue] = {}


class ArmSection(_Section):
    """`[baseline]` and `[candidate]`: the fields of an `ArmConfig` that a profile sets."""

    decode_backend: Literal["auto", "latency_specialized"]
    kv_cache_dtype: Literal["bf16", "fp8"] = "bf16"
    state_dtype: Literal["f32", "bf16"] = "f32"
    tensor_parallel: int = Field(default=1, ge=1)
    context_parallel: int = Field(default=1, ge=1)
    max_batch: int = Field(default=64, ge=1)
    max_context: int = Field(default=1024, ge=1)
    drafts: int = Field(default=0, ge=0)
    draft_sampling: Literal["greedy", "sampled"] = "greedy"

    def arm(self, name: str) -> ArmConfig:
        """The arm of this name, without faults."""
        return ArmConfig(name=name, **self.model_dump())


class Profile(_Section):
    """A whole profile, as read from its file."""

    description: str
    model: ModelSection = ModelSection()
    target: TargetSection
    baseline: ArmSection
    candidate: ArmSection
    required: list[str] = Field(min_length=1)
    gates: dict[str, dict[str, JsonValue]] = Field(min_length=1)

    def content(self) -> dict[str, JsonValue]:
        """The profile as plain JSON, with its defaults filled in."""
        content: dict[str, JsonValue] = self.model_dump(mode="json")
        return content


def profile_names() -> list[str]:
    """Names of the profiles that come with decodegate."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_profile(name_or_file: str) -> tuple[str, Profile]:
    """The name and the content of a profile, given by name or as the path of a .toml file.

    Raises:
        UsageError: unknown name, unreadable or malformed file, unknown key, wrong type, unknown gate or target kind.
    """
    is_file = name_or_file.endswith(".toml") or "/" in name_or_file
    if not is_file and name_or_file not in profile_names():
        known = ", ".join(profile_names())
        raise UsageError(f"no profile is called {name_or_file!r}; profiles: {known}, or the path of a .toml file")
    path = Path(name_or_file) if is_file else PROFILES / f"{name_or_file}.toml"
    return path.stem, profile_from(_read(path), str(path))


def profile_from(content: Mapping[str, Any], where: str) -> Profile:
    """The profile with this content; `where` names its source in errors.

    Raises:
        UsageError: every unknown key, wrong type or unknown name in it, on one line.
    """
    try:
        profile = Profile.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_problem(dict(item)) for item in error.errors())
        raise UsageError(f"{where}: {problems}") from error
    problems = "; ".join([*_unknown_names(profile), *_same_arms(profile)])
    if problems:
        raise UsageError(f"{where}: {problems}")
    return profile


def check_settings(profile: Profile, gates: Sequence[Gate]) -> None:
    """Ask each gate about its settings.

    Raises:
        UsageError: what the gates object to, on one line.
    """
    objections = [
        f"[gates.{gate.name}]: {one_line(objection)}"
        for gate in gates
        if (objection := gate.settings_error(profile.gates[gate.name])) is not None
    ]
    if objections:
        raise UsageError("; ".join(objections))


def _read(path: Path) -> dict[str, Any]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"profile {str(path)!r} cannot be read: {error.strerror or one_line(error)}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: not valid TOML: nested too deeply") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        reason, _, place = one_line(error).rpartition(" (at ")
        found = re.fullmatch(r"line (\d+), column (\d+)\)", place)
        lines = text.rstrip().split("\n")
        line, column = (found[1], found[2]) if found else (len(lines), len(lines[-1]) + 1)
        raise UsageError(f"{path}:{line}:{column}: not valid TOML: {reason}") from error


def _same_arms(profile: Profile) -> list[str]:
    backend = profile.candidate.decode_backend
    elsewhere = profile.target.options and profile.target.kind != "builtin"
    if backend != profile.baseline.decode_backend or elsewhere:
        # What differs between two servers or engines is in the options; the target knows them.
        return []
    return [f"candidate.decode_backend: {backend!r}, like the baseline's; there is nothing to compare"]


def _unknown_names(profile: Profile) -> list[str]:
    problems = []
    if profile.target.kind not in TARGETS:
        problems.append(f"target.kind: no kind {profile.target.kind!r}; kinds: {', '.join(sorted(TARGETS))}")
    for name in profile.gates:
        if name not in GATES:
            problems.append(f"gates.{name}: no gate is called {name!r}; gates: {', '.join(sorted(GATES))}")
        try:
            if named(profile.gates[name]) != profile.gates[name]:
                problems.append(f"gates.{name}: numbers must be finite")
        except TypeError as error:
            problems.append(f"gates.{name}: {error}")
    for name in profile.required:
        if name not in profile.gates:
            problems.append(f"required: gate {name!r} has no [gates.{name}] table")
    return problems


def _problem(item: Mapping[str, Any]) -> str:
    """One complaint of pydantic in this project's words: where, what was given, what is allowed."""
    place = [str(part) for part in item["loc"]]
    where = ".".join(place)
    if item["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(place[:-1]))
        close = difflib.get_close_matches(place[-1], allowed, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"keys here: {', '.join(allowed)}"
        return f"unknown key {where!r}; {hint}"
    if item["type"] == "missing":
        return f"{where!r} is missing"
    return f"{where}: {item['msg'][0].lower()}{item['msg'][1:]}, not {one_line(repr(item['input']))[:60]}"


def _fields_at(place: Sequence[str]) -> list[str]:
    """Names of the fields of the section at this place."""
    model: type[BaseModel] = Profile
    for part in place:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
