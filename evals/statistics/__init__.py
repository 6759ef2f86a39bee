"""Statistics of paired comparisons: pure functions on arrays, seeded where they resample."""

from evals.statistics.bootstrap import Interval, bootstrap_mean, cluster_bootstrap
from evals.statistics.calibration import aa_rates
from evals.statistics.noninferiority import (
    Evidence,
    Outcome,
    decide,
    evidence,
    lower_bound,
    p_beyond,
    p_within,
    pooled,
    upper_bound,
)
from evals.statistics.paired import holm, mcnemar, mcnemar_worse, permutation_worse, pooled_permutation_worse
from evals.statistics.power import Chances, Noise, chances, designed, jump, minimum_detectable, noise, repeats_needed
from evals.statistics.sequential import critical_values, level_at, spent

__all__ = [
    "Chances",
    "Evidence",
    "Interval",
    "Noise",
    "Outcome",
    "aa_rates",
    "bootstrap_mean",
    "chances",
    "cluster_bootstrap",
    "critical_values",
    "decide",
    "designed",
    "evidence",
    "holm",
    "jump",
    "level_at",
    "lower_bound",
    "mcnemar",
    "mcnemar_worse",
    "minimum_detectable",
    "noise",
    "p_beyond",
    "p_within",
    "permutation_worse",
    "pooled",
    "pooled_permutation_worse",
    "repeats_needed",
    "spent",
    "upper_bound",
]
