"""Who owns what in decode_impl's engine: slots of one owner while it runs, and all given back when nothing is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from decode_impl.engine import Engine
from decode_impl.request import Request

CONTRACTS = (
    "null rows zero",
    "unowned rows unchanged",
    "slots of one owner",
    "slots given back once",
    "pages given back once",
    "drafts accepted as scripted",
)
"""What a played schedule counts breaches of."""


def misowned_slots(engine: Engine, requests: Sequence[Request]) -> int:
    """Owners too many of a slot, and slots that no request can have: null, or not the first of a request's columns."""
    states, deployment = engine.runner.states, engine.runner.deployment
    owned = Counter(request.slot for request in requests if request.running)
    allowed = set(range(states.columns, (deployment.max_batch + 1) * states.columns, states.columns))
    shared = sum(owners - 1 for owners in owned.values())
    columns = sum(not 0 <= request.column < states.columns for request in requests if request.running)
    return shared + len(owned.keys() - allowed) + columns


def not_given_back(engine: Engine) -> Mapping[str, int]:
    """Slots and pages lost, or free twice, once no request is left; cached prefixes still own theirs."""
    runner = engine.runner
    slots = abs(runner.deployment.max_batch - runner.states.free_slots)
    pages = abs(runner.deployment.pool_pages - len(engine.prefixes.pages) - runner.latents.free_pages)
    return {"slots given back once": slots, "pages given back once": pages}
