"""Scorers: from a response to a grade, in bounded time whatever the response holds."""
