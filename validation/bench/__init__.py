"""Speed of both arms, measured in one process on the same inputs: what `decodegate bench` runs.

Nothing here judges correctness and no gate may import it; synthetic acceptance exists only here.
"""
