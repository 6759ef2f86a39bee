"""Ops by layer, from outside: to break or replace an op in one layer, and to read what passes between layers.

Ops do not say which layer calls them. Every layer begins with `attn_res`, called with that layer's own norm weight,
so a table whose `attn_res` looks at that weight knows the layer of every op that follows in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from decode_impl.ops import OUTPUTS, OpTable
from decode_impl.runner import GENERIC, SPECIALIZED, Paths
from decode_impl.weights import ModelWeights
from validation.faults.base import ENGINE
from validation.targets.base import ArmConfig, TargetError

_NOTED: Mapping[str, tuple[str, int | None]] = {
    "attn_res": ("attention_in", 1),
    "output_mix": ("mlp_in", 1),
    "all_reduce": ("mlp_out", None),
    "moe_tail": ("mlp_out", None),
}
"""Op -> the name of its output as a boundary, and which output that is. All of them are joined over ranks."""


class Layers:
    """The layer that is running in one arm, and the boundaries of the step so far; the head is the last layer's next.

    `noted` has `layer.<i>.attention_in`, `layer.<i>.mlp_in`, `layer.<i>.mlp_out` and `head.in`, each [rows, H].
    """

    def __init__(self, weights: ModelWeights) -> None:
        residuals = [*(layer.attention_residual for layer in weights.layers), weights.final_residual]
        # Keys by identity stay true only while the weights live.
        self._weights = weights
        self._of = {id(residual.norm): index for index, residual in enumerate(residuals)}
        self.head = len(weights.layers)
        self.current: int | None = None
        self.noted: dict[str, Tensor] = {}

    def applied(self, paths: Paths, config: ArmConfig, baseline: OpTable) -> Paths:
        """The paths with what the configuration wants of single layers; the same paths if it wants nothing.

        A fault of one layer sees the ops as all-layer faults left them. Where an op is substituted, no fault is left.

        Raises:
            TargetError: a layer or an op that does not exist, or a fault that is not one of an op.
        """
        self._check(config)
        if not (config.boundaries or config.substitutions or any(f.only_in is not None for f in config.faults)):
            return paths
        tables = {GENERIC: paths.generic, SPECIALIZED: paths.specialized}
        return Paths(*(self._followed(self._table(name, tables[name], config, baseline), config) for name in tables))

    def _check(self, config: ArmConfig) -> None:
        limited = [fault for fault in config.faults if fault.only_in is not None]
        wrong = [
            f"fault {fault.id} is one of the engine, which has no layers" for fault in limited if ENGINE in fault.paths
        ]
        wrong += [f"there is no op {op!r} to substitute" for op, _ in config.substitutions if op not in OUTPUTS]
        asked = {*(fault.only_in for fault in limited), *(layer for _, layer in config.substitutions)}
        wrong += [
            f"there is no layer {layer}: the model has layers 0 to {self.head - 1}, and {self.head} is its head"
            for layer in sorted(layer for layer in asked if layer is not None and not 0 <= layer <= self.head)
        ]
        if wrong:
            raise TargetError("; ".join(dict.fromkeys(wrong)))

    def _table(self, path: str, usual: OpTable, config: ArmConfig, baseline: OpTable) -> OpTable:
        """One path's table with the tables of single layers put in."""
        tables: dict[int, OpTable] = {}
        for fault in config.faults:
            if fault.only_in is not None and path in fault.paths:
                table = tables.get(fault.only_in, usual)
                tables[fault.only_in] = {**table, **fault.mutate(table)}
        for op, layer in config.substitutions:
            tables[layer] = {**tables.get(layer, usual), op: baseline[op]}
        return {op: self._by_layer(op, usual, tables) for op in usual}

    def _by_layer(self, op: str, usual: OpTable, tables: Mapping[int, OpTable]) -> Callable[..., Any]:
        special = {layer: table[op] for layer, table in tables.items() if table[op] is not usual[op]}
        if not special:
            return usual[op]

        def op_of_the_layer(**arguments: Any) -> Any:
            running = usual[op] if self.current is None else special.get(self.current, usual[op])
            return running(**arguments)

        return op_of_the_layer

    def _followed(self, table: OpTable, config: ArmConfig) -> OpTable:
        if config.boundaries:
            table = {**table, **{op: self._noting(table[op], *_NOTED[op]) for op in _NOTED}}
        attn_res = table["attn_res"]

        def attn_res_that_tells(*, norm_weight: Tensor, **arguments: Any) -> Any:
            self.current = self._of.get(id(norm_weight))
            return attn_res(norm_weight=norm_weight, **arguments)

        return {**table, "attn_res": attn_res_that_tells}

    def _noting(self, op: Callable[..., Any], part: str, output: int | None) -> Callable[..., Any]:
        def op_that_notes(**arguments: Any) -> Any:
            result = op(**arguments)
            name = "head.in" if self.current == self.head else f"layer.{self.current}.{part}"
            self.noted[name] = result if output is None else result[output]
            return result

        return op_that_notes
