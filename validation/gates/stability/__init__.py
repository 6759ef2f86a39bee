"""Gate 4: long answers of both arms, paired by prompt."""
