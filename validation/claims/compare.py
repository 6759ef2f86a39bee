"""When a ratio of two figures says something about the implementation, and what stands in its way otherwise.

A ratio is formed only where nothing but the implementation differs. A condition that one source states and another
does not is a difference: nobody knows. Within one claim what is not stated is common, because the source says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from validation.claims.model import Conditions, Figure

_WORDS = {
    "gpu": "GPU",
    "gpus": "number of GPUs",
    "tensor_parallel": "tensor parallelism",
    "decode_context_parallel": "decode context parallelism",
    "batch": "batch",
    "speculation": "speculation",
    "acceptance": "acceptance",
    "prompt_tokens": "prompt length",
    "output_tokens": "output length",
    "kv_cache": "KV cache format",
    "recurrent_state": "recurrent state format",
    "weights": "weights",
    "workload": "workload",
    "clock": "what the clock covers",
}
_NOT_STATED = "not stated"


def confounders(a: Figure, b: Figure) -> list[str]:
    """Everything besides the implementation that differs, or that nobody can rule out, as `<what>: <a> and <b>`."""
    found = []
    if (a.metric, a.unit) != (b.metric, b.unit):
        found.append(f"metric: {a.metric} ({a.unit}) and {b.metric} ({b.unit})")
    if a.source != b.source:
        found.append(f"published in: {a.source} and {b.source} (runs of different commits or days)")
    one_claim = a.claim == b.claim
    for name in Conditions.model_fields:
        left, right = getattr(a.conditions, name), getattr(b.conditions, name)
        unknown = left is None and right is None
        if left != right or (unknown and not one_claim):
            said = f"stated by neither {a.claim} nor {b.claim}" if unknown else f"{_said(left)} and {_said(right)}"
            found.append(f"{_WORDS[name]}: {said}")
    return found


def ratio(a: Figure, b: Figure) -> float:
    """How much better `a` is than `b`; above 1 is better, whichever way the metric counts.

    Raises:
        ValueError: the two may not be compared.
    """
    problems = refusal(a, b)
    if problems:
        raise ValueError("; ".join(problems))
    return a.value / b.value if a.better == "higher" else b.value / a.value


def refusal(a: Figure, b: Figure) -> list[str]:
    """Why no ratio of the two is formed; empty where it is."""
    if a.name == b.name:
        return ["it is the same figure"]
    same = [f"implementation: both {a.implementation}"] if a.implementation == b.implementation else []
    return confounders(a, b) + same


def comparable(figure: Figure, known: Sequence[Figure]) -> list[Figure]:
    """The known figures that a ratio with this one may be formed of."""
    return [other for other in known if not refusal(figure, other)]


def stated(conditions: Conditions) -> str:
    """The conditions that are stated, as one phrase."""
    return ", ".join(f"{_WORDS[name]} {value}" for name, value in conditions.model_dump(exclude_none=True).items())


def _said(value: object) -> str:
    return _NOT_STATED if value is None else str(value)
