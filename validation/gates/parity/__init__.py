"""Gate 2: both arms on one text in lockstep.

`cells` are teacher-forced; `schedules`, `fuzz` and what they ask put requests in company; `judge` decides.
"""
