"""How a run goes: gates in order, units over processes, what a result is worth, and what it depends on."""
