"""Which commit: `git bisect` in a worktree of its own, or Bayesian bisection where verdicts are noisy."""
