"""Sign-off: a policy applied to run records, one document, and a signed statement over every evidence file."""
