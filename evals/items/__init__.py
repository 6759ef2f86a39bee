"""Generated items in the schemas of the real sets: AIME25-like, GPQA-Diamond-like, MRCR-like, and long chains."""
