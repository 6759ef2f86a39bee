"""Gate 1: each op against an exact reference.

`gate` plans and judges; `units` and `dims` say on what, `measure` how, `judge` by which rule.
"""
