"""Number formats, FP64 oracles, error metrics and bounds, and input families. Imports nothing else of the project."""

from numerics import added

__all__ = ["added"]
