"""The model that ships with the package."""

from __future__ import annotations

from pathlib import Path

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "k3-mini"
"""Folder of the embedded checkpoint; its MODEL_CARD.md says how it was made."""

EMBEDDED_DRAFTER = EMBEDDED_MODEL / "drafter"
"""Folder of its drafter."""
