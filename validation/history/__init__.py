"""Runs over time: kept in SQLite, their figures followed, steps found, and a baseline that moves only when told."""
