"""How strong the evidence of a stress run is."""

from __future__ import annotations

from scipy.stats import beta

CONFIDENCE = 0.95


def upper_bound(failures: int, launches: int, confidence: float = CONFIDENCE) -> float:
    """Largest failure rate that `failures` in `launches` leave possible: Clopper and Pearson's one-sided upper bound.

    Without a failure it is close to 3 / launches at 95 %, and below it.
    """
    if failures >= launches:
        return 1.0
    return float(beta.ppf(confidence, failures + 1, launches - failures))
