"""Import of one object by its `module:attribute` path, so that a registry costs nothing until it is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from validation.errors import UsageError, describe
from validation.faults.base import Fault

FAULTS = "validation.faults.catalogue:FAULTS"
"""Where the catalogue of faults lives, as a dict from id to `Fault`."""


def load_object(path: str, what: str) -> Any:
    """The object at `module:attribute`; `what` names it in the error.

    Raises:
        UsageError: the module or the attribute cannot be imported here.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{what} cannot be loaded here: {describe(error)}") from error


def load_faults() -> Mapping[str, Fault]:
    """The catalogue of faults by id.

    Raises:
        UsageError: the catalogue cannot be imported here.
    """
    faults: Mapping[str, Fault] = load_object(FAULTS, "the catalogue of faults")
    return faults
