"""An arm of the target `vllm`: decodes in vLLM's engine, logits through files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from validation.records.jsonio import digest
from validation.targets.base import OWN_PATH, ArmConfig, Counters, ForcedStep, TargetError
from validation.targets.optional import ForcedWork
from validation.targets.text import Answer, Ask
from validation.targets.vllm_process import VllmEngines, VllmProcess

UNSHOWN = "vLLM shows no specialised decode"
"""Why steps of an arm that asked for its own path count as fallbacks."""


class VllmArm:
    """An arm of the target `vllm`. What it decoded for others to be compared with lies in files."""

    def __init__(self, config: ArmConfig, engines: VllmEngines, engine: dict[str, Any]) -> None:
        self.config = config
        self._engines, self._engine = engines, engine
        self._steps: dict[str, int] = {}
        self._fallbacks: dict[str, int] = {}

    def expect(self, work: Sequence[ForcedWork]) -> None:
        """Do all of these decodes now, while the engine is open."""
        for sequences, prompt_length in work:
            self._decoded(sequences, prompt_length)

    def forced_decode(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> VllmForcedDecode:
        """Prefill the prompts, then decode the rest teacher-forced; vLLM's scheduler batches them."""
        file, path = self._decoded(sequences, prompt_length)
        return VllmForcedDecode(file, path, prompt_length)

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Continue every prompt. State norms and drafts are not seen from outside."""
        process = self._engines.process(self._engine)
        asked = [
            {name: list(v) if isinstance(v := getattr(ask, name), tuple) else v for name in Ask.__dataclass_fields__}
            for ask in asks
        ]
        answers = process.call("answer", asks=asked)["answers"]
        self._count(max((len(answer["tokens"]) for answer in answers), default=0), process)
        return [
            Answer(
                tokens=tuple(answer["tokens"]),
                finish=answer["finish"] if answer["finish"] in ("stop", "length") else "error",
                error="" if answer["finish"] in ("stop", "length") else f"vLLM ended it: {answer['finish']}",
                entropies=tuple(answer["entropies"]) or (float("nan"),) * len(answer["tokens"]),
                verify_steps=[],
                state_norms={},
            )
            for answer in answers
        ]

    def counters(self) -> Counters:
        """Decode steps; those of an arm whose own path vLLM does not show are fallbacks."""
        return Counters(dict(self._steps), dict(self._fallbacks))

    def ops(self) -> frozenset[str]:
        """None: ops run inside vLLM alone."""
        return frozenset()

    def run_op(self, op: str, case: Any, in_place: bool = False) -> NoReturn:
        """Not possible here."""
        raise TargetError("vLLM runs no single op")

    def generate(self, schedule: Any) -> NoReturn:
        """Not possible here."""
        raise TargetError("vLLM's scheduler plays no given schedule")

    def _decoded(self, sequences: Sequence[Sequence[int]], prompt_length: int) -> tuple[Path, str]:
        """File of logits f32 [steps, n, V] of a decode, and the path it took; decoded once."""
        work = [[list(tokens) for tokens in sequences], prompt_length]
        file = self._engines.scratch(f"{digest([self._engine, work])}.npy")
        process = self._engines.process(self._engine) if not file.exists() else None
        if process is not None:
            partial = file.with_suffix(".partial.npy")
            process.call("forced", sequences=work[0], prompt_length=prompt_length, file=str(partial))
            partial.rename(file)
            file.with_suffix(".path").write_text(self._path(process), encoding="ascii")
        path = file.with_suffix(".path").read_text(encoding="ascii")
        self._add(len(sequences[0]) - prompt_length, path)
        return file, path

    def _path(self, process: VllmProcess) -> str:
        return OWN_PATH if process.about["specialized"] else "generic"

    def _count(self, steps: int, process: VllmProcess) -> None:
        self._add(steps, self._path(process))

    def _add(self, steps: int, path: str) -> None:
        self._steps[path] = self._steps.get(path, 0) + steps
        if self.config.decode_backend == "latency_specialized" and path != OWN_PATH:
            self._fallbacks[UNSHOWN] = self._fallbacks.get(UNSHOWN, 0) + steps


class VllmForcedDecode:
    """A decode that has been done; its logits are read step by step."""

    def __init__(self, file: Path, path: str, prompt_length: int) -> None:
        self._file, self._path, self._first = file, path, prompt_length

    def __iter__(self) -> Iterator[ForcedStep]:
        steps = np.load(self._file, mmap_mode="r")
        for i, rows in enumerate(steps):
            count = len(rows)
            logits = torch.from_numpy(np.array(rows))
            yield ForcedStep(logits, tuple(range(count)), (self._first + i,) * count, self._path)

    def state(self, sequence: int) -> dict[str, Tensor]:
        """Not possible here."""
        raise TargetError("vLLM's caches are not read")

    def close(self) -> None:
        """Nothing is held."""
