"""Gate 5: both arms asked the same questions; items, scorers and statistics are the package `evals`."""
