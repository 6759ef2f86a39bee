"""The parity gate's cells: which there are, the arms that each of them opens, and how one is measured."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from validation.gates.base import Context, Json, Unit
from validation.gates.parity.judge import alpha_of, leaves_open
from validation.gates.parity.measure import (
    STATE_KINDS,
    Arms,
    measure_parity,
    other_ranks,
    own_path_asked,
    windows,
)
from validation.gates.settings import Rule
from validation.targets.base import ArmConfig, Capability
from validation.targets.optional import open_floor

MOST_ROWS = 64
"""Rows of a specialised step: sequences of a batch, each with its drafts."""

DRAFTS = (0, 3, 4, 5, 6, 7)
"""Drafts of a cell: none, or as many as a specialised verify step may have."""


def drafts_rule() -> Rule:
    """How many drafts every verify step of a cell has; 0 for plain decode steps."""
    return lambda value: (
        None if type(value) is int and value in DRAFTS else f"one of {', '.join(map(str, DRAFTS))} is needed"
    )


def context_error(settings: Mapping[str, Json]) -> str | None:
    """Why a cell's contexts cannot be dealt out as it says, or None."""
    for cell in settings["cells"]:
        given, ranks = cell.get("context_parallel", 1), cell["tensor_parallel"]
        if given != 1 and ranks != [given]:
            return (
                f"context_parallel is {given} in a cell with tensor_parallel {ranks}; allowed are 1, and the one "
                "tensor_parallel of a cell that has no other"
            )
    return None


def sequences_error(settings: Mapping[str, Json]) -> str | None:
    """Why a second look cannot be what it says, or None."""
    least, most = settings["min_sequences"], settings.get("most_sequences")
    if most is not None and most <= least:
        return f"most_sequences is {most}, more than min_sequences ({least}) is needed; leave it out for a single look"
    return None


def rows_error(settings: Mapping[str, Json]) -> str | None:
    """Why a cell's steps would have more rows than the specialised path takes, or None."""
    for cell in settings["cells"]:
        rows = max(cell["batches"]) * (1 + cell.get("drafts", 0))
        if rows > MOST_ROWS:
            return (
                f"a batch of {max(cell['batches'])} with {cell['drafts']} drafts each is {rows} rows, a specialised "
                f"step has {MOST_ROWS} at most; give such a cell batches up to {MOST_ROWS // (1 + cell['drafts'])}"
            )
    return None


def cell_units(settings: Mapping[str, Json]) -> list[Unit]:
    """A unit per cache format, tensor and context parallelism, number of drafts and batch size."""
    return [
        Unit(
            f"{cell['kv_cache_dtype']}-tp{ranks}"
            + (f"-dcp{context}" if context > 1 else "")
            + f"-b{batch}"
            + (f"-d{drafts}" if drafts else ""),
            {
                "kv": cell["kv_cache_dtype"],
                "tp": ranks,
                "batch": batch,
                **({"dcp": context} if context > 1 else {}),
                **({"drafts": drafts} if drafts else {}),
            },
        )
        for cell in settings["cells"]
        for drafts, context in [(cell.get("drafts", 0), cell.get("context_parallel", 1))]
        for ranks in cell["tensor_parallel"]
        for batch in cell["batches"]
    ]


def cell_arms(context: Context, params: Mapping[str, Json]) -> tuple[ArmConfig, ArmConfig, ArmConfig]:
    """Baseline, candidate and floor of one cell; the floor is a baseline with another number of ranks, if it can be.

    Only the candidate's contexts are dealt out to ranks, so that it is held to a baseline which knows nothing of that.
    """
    ranks, batch = params["tp"], params["batch"]
    floor_ranks = other_ranks(ranks) if Capability.RANKS in context.target.capabilities else ranks
    length = context.settings["prompt_length"] + context.settings["decode_length"]

    def arm(config: ArmConfig, tensor_parallel: int, context_parallel: int = 1) -> ArmConfig:
        return replace(
            config,
            kv_cache_dtype=params["kv"],
            tensor_parallel=tensor_parallel,
            context_parallel=context_parallel,
            max_context=length,
            # The floor decodes a single sequence in company of a second.
            max_batch=max(batch, 2),
            # What passes between layers says where a difference begins. Verify steps do not tell.
            boundaries=Capability.READ_BOUNDARIES in context.target.capabilities and "drafts" not in params,
        )

    candidate = arm(context.candidate, ranks, params.get("dcp", 1))
    return arm(context.baseline, ranks), candidate, arm(context.baseline, floor_ranks)


def matrix_arms(context: Context) -> list[ArmConfig]:
    """The arms of all cells, those of several batch sizes at the largest.

    Raises:
        ValueError: cells with drafts, or with context parallelism, on a target that has none.
    """
    units = cell_units(context.settings)
    if any("dcp" in unit.params for unit in units) and Capability.CONTEXT_PARALLEL not in context.target.capabilities:
        raise ValueError(
            f"target {context.target.name!r} has no decode context parallelism; take the cells with context_parallel "
            "out of the profile"
        )
    if any("drafts" in unit.params for unit in units) and Capability.DRAFTS not in context.target.capabilities:
        raise ValueError(f"target {context.target.name!r} has no drafts; take the cells with drafts out of the profile")
    largest: dict[tuple[Json, ...], Unit] = {}
    for unit in units:
        key = tuple(value for name, value in unit.params.items() if name != "batch")
        if key not in largest or unit.params["batch"] > largest[key].params["batch"]:
            largest[key] = unit
    return [arm for unit in largest.values() for arm in cell_arms(context, unit.params)]


def measure_cell(unit: Unit, context: Context) -> dict[str, Json]:
    """Decode the unit's sequences in both arms and in the baseline's other composition."""
    batch, drafts = unit.params["batch"], unit.params.get("drafts", 0)
    prompt, decode = context.settings["prompt_length"], context.settings["decode_length"]
    least = context.settings["min_sequences"]
    count, most = (-(-n // batch) * batch for n in (least, context.settings.get("most_sequences", least)))
    seed = unit_seed(context.seed, unit.id)
    sequences = windows(context.target, max(count, most), prompt + decode, seed)
    alpha = alpha_of(len(cell_units(context.settings)), 2 if most > count else 1)
    configs = cell_arms(context, unit.params)
    baseline, candidate = (context.target.open(config) for config in configs[:2])
    arms = Arms(baseline, candidate, open_floor(context.target, configs[2]))
    readable: Sequence[str] = STATE_KINDS if Capability.READ_STATE in context.target.capabilities else ()
    measured = measure_parity(
        arms,
        sequences[:count],
        batch,
        prompt,
        readable,
        drafts,
        reserve=sequences[count:],
        undecided=lambda candidate, floor: leaves_open(candidate, floor, alpha, seed),
    )
    return {
        "own_path": own_path_asked(context.target, configs[0], configs[1]),
        **unit.params,
        "prompt": prompt,
        "floor_tp": configs[2].tensor_parallel,
        **measured,
    }


def unit_seed(seed: int, unit: str) -> int:
    """A seed of the unit's own."""
    return seed * 2**32 + zlib.crc32(unit.encode())
