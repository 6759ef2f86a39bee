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
    data = read_limited(path, LARGEST_DOCUMENT, what)
    try:
        text = data.decode("utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _PlainLoader)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {one_line(error)}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{path}: not valid YAML: {_yaml_problem(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"{path}: a table of named values is needed, not {type(content).__name__}")
    return content


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases and repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = [key for key in keys if isinstance(key, str) and keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]!r} is there twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _yaml_problem(error: Exception) -> str:
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
    return one_line(f"{where}: {said[0].lower()}{said[1:]}, not {one_line(repr(item['input']))[:60]}")


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
