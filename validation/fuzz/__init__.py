"""Random schedules for an engine: drawn from a seed, played through a target, shrunk to the least that fails."""
