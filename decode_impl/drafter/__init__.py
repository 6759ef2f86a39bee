"""A block drafter in the manner of DSpark: guesses the next few tokens in one pass, for the target to verify."""
