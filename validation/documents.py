"""Files that people write (policies, deployments, claims): read as TOML or YAML, checked against a pydantic model.

Every objection is one line that names the file and the place. YAML is read without tags, aliases and repeated keys:
the first could run code, the second grow without bound, the third hide a value.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from validation.errors import UsageError, one_line
from validation.files import read_limited

LARGEST_DOCUMENT = 2**20
"""Bytes; a policy or deployment of a person has a few thousand."""

_Model = TypeVar("_Model", bound=BaseModel)


class Section(BaseModel):
    """A table of such a file: no unknown keys, finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True)


def load(path: Path, model: type[_Model], what: str) -> _Model:
    """The content of a `.toml`, `.yaml` or `.yml` file as a `model`; `what` names its kind in errors.

    Raises:
        UsageError: unreadable, malformed, or not what the model allows; every objection on one line.
    """
    return checked(read_mapping(path, what), model, str(path))


def checked(content: Mapping[str, Any], model: type[_Model], where: str) -> _Model:
    """The content as a `model`; `where` names its source in errors.

    Raises:
        UsageError: every unknown key, wrong type or value, on one line.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_problem(dict(item), model) for item in error.errors()[:10])
        raise UsageError(f"{where}: {problems}") from error
    except RecursionError as error:
        raise UsageError(f"{where}: nested too deeply") from error


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The top-level table of a TOML or YAML file.

    Raises:
        UsageError: unreadable, another kind of file, not UTF-8, malformed, or no table at the top.
    """
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise UsageError(f"{what} {str(path)!r}: a .toml, .yaml or .yml file is needed")
    data, toml = read_limited(path, LARGEST_DOCUMENT, what), path.suffix == ".toml"
    try:
        text = data.decode("utf-8")
        content = tomllib.loads(text) if toml else yaml.load(text, _PlainLoader)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UsageError(f"{path}: not valid {'TOML' if toml else 'YAML'}: {_grammar_problem(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"{path}: a table of named values is needed, not {type(content).__name__}")
    return content


class _PlainLoader(yaml.SafeLoader):
    """YAML without tags, aliases and repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.constructor.ConstructorError(None, None, "tags are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key.value for key, _ in node.value if isinstance(key.value, str)):
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", node.start_mark)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _grammar_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return one_line(getattr(error, "problem", None) or error) + place


def _problem(item: Mapping[str, Any], model: type[BaseModel]) -> str:
    """One complaint of pydantic in this project's words: where, what was given, what is allowed."""
    place = [str(part) for part in item["loc"]]
    where = ".".join(place)
    if item["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(item["loc"][:-1], model))
        close = difflib.get_close_matches(place[-1], allowed, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"keys here: {', '.join(allowed)}"
        return one_line(f"unknown key {where!r}; {hint}")
    if item["type"] == "missing":
        return one_line(f"{where!r} is missing")
    said = re.sub("^Value error, ", "", item["msg"])
    if item["type"] == "value_error":
        return one_line(f"{where}: {said}" if where else said)
    return one_line(f"{where}: {said[0].lower()}{said[1:]}, not {_given(item['input'])}")


def _given(value: object) -> str:
    """A value as it was given, cut short."""
    try:
        return one_line(repr(value))[:60]
    except ValueError:
        return "a number of more digits than Python prints"


def _fields_at(place: Sequence[Any], model: type[BaseModel]) -> list[str]:
    """Names of the fields of the section at this place."""
    here: Any = model
    for part in place:
        if isinstance(part, int):
            continue
        field = here.model_fields.get(part)
        inner = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        sections = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not sections:
            return []
        here = sections[0]
    return list(here.model_fields)
