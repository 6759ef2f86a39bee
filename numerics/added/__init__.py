"""Ops that were added: every file of this folder registers one (docs/extending.md), and is found by itself.

The package `numerics` loads them all before anything else of it can be imported, so that no order of imports leaves an
op out and no table has to name them.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    try:
        importlib.import_module(f"{__name__}.{_file.name}")
    except Exception as error:
        raise ImportError(f"numerics/added/{_file.name}.py fails: {type(error).__name__}: {error}") from error
