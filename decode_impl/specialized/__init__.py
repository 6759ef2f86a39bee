"""The specialised decode path (`latency_specialized`): planner, refusals, the kernels' contract and its emulation."""
