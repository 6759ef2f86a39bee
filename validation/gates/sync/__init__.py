"""Gate 3: every order of stores and steps of the collectives; the explorer itself is `validation.sync`."""
