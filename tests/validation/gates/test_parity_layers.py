"""The curve by layer: within the floor for a clean candidate, and out of it from the layer on that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_k3 import context_of, measured, small_target

from validation.faults.base import Fault, in_layer
from validation.faults.catalogue import FAULTS
from validation.gates.base import Plot
from validation.gates.parity.gate import ParityGate
from validation.gates.parity.judge import TYPICAL_MULTIPLE
from validation.gates.parity.layers import RESOLUTION, LayerCurve, curves, relative_differences
from validation.records.record import gate_doc
from validation.reports.plots import svg
from validation.targets.base import Capability
from validation.targets.builtin import BuiltinTarget
from validation.verdict import Verdict

CELL = {"kv_cache_dtype": "fp8", "tensor_parallel": [1], "batches": [2]}
SETTINGS: dict[str, Any] = {"prompt_length": 20, "decode_length": 4, "min_sequences": 8, "cells": [CELL]}
UNIT = "fp8-tp1-b2"


def layers_of(*faults: Fault) -> dict[str, Any]:
    layers: dict[str, Any] = measured(ParityGate(), context_of(SETTINGS, faults=faults))[UNIT]["layers"]
    return layers


def ratios(layers: dict[str, Any]) -> dict[str, float]:
    pairs = zip(layers["candidate"], layers["floor"], strict=True)
    return dict(zip(layers["boundaries"], (c / f for c, f in pairs), strict=True))


def test_a_clean_candidate_stays_by_the_floor_at_every_boundary() -> None:
    layers = layers_of()
    parts = ("attention_in", "mlp_in", "mlp_out")
    assert layers["boundaries"] == [f"layer.{i}.{part}" for i in range(3) for part in parts] + ["head.in"]
    assert layers["tokens"] == 8 * 4
    # The allowance of the gate's KL, which goes with the square, is the widest that any amplitude may have.
    assert max(ratios(layers).values()) < TYPICAL_MULTIPLE


@pytest.mark.parametrize("layer", [1, 2])
def test_a_fault_of_one_layer_shows_from_that_layer_on_and_not_before(layer: int) -> None:
    """Layers 1 and 2 have a recurrent state; what comes into the wrong one is as right as without a fault."""
    clean, broken = layers_of(), layers_of(in_layer(FAULTS["kda-delta-dropped"], layer))
    names = clean["boundaries"]
    first = names.index(f"layer.{layer}.mlp_in")
    assert broken["candidate"][:first] == clean["candidate"][:first]
    assert ratios(broken)[names[first]] > TYPICAL_MULTIPLE
    assert all(b > c for b, c in zip(broken["candidate"][first:], clean["candidate"][first:], strict=True))
    assert broken["floor"] == clean["floor"]


def test_the_curve_is_in_the_record_and_a_chart_with_units_and_n() -> None:
    gate = ParityGate()
    context = context_of(SETTINGS)
    results = measured(gate, context)
    judgement = gate.judge(results, context)
    assert judgement.metrics["layers"] == {UNIT: results[UNIT]["layers"]}
    [plot] = [plot for plot in judgement.plots if plot.title == "Divergence by layer"]
    assert list(plot.x) == ["0", "1", "2", "head.in"]
    assert plot.y_label == "relative RMS difference"
    assert f"Cell {UNIT}, n = 32 tokens" in plot.caption
    assert set(plot.series) == {
        f"{arm}, {part}" for arm in ("candidate", "floor") for part in ("into attention", "out of the layer")
    }
    told = results[UNIT]["layers"]
    into = [told["candidate"][told["boundaries"].index(name)] for name in ("layer.0.attention_in", "head.in")]
    assert [plot.series["candidate, into attention"][i] for i in (0, -1)] == into
    doc = gate_doc(gate, judgement, required=True, units=[])
    json.dumps(doc.model_dump(mode="json"), allow_nan=False)
    assert "out of the layer" in svg(next(p for p in doc.plots if p.title == plot.title), "x")


def test_the_chart_is_of_the_cell_that_is_furthest_out() -> None:
    context = context_of({**SETTINGS, "cells": [{**CELL, "batches": [2, 4]}]}, faults=(FAULTS["kda-delta-dropped"],))
    results = measured(ParityGate(), context)
    judgement = ParityGate().judge(results, context)
    worst = max(judgement.metrics["cells"].items(), key=lambda cell: cell[1]["typical_ratio"]["mean"])[0]
    assert f"Cell {worst}," in chart(judgement.plots).caption


def chart(plots: Any) -> Plot:
    [plot] = [plot for plot in plots if plot.title == "Divergence by layer"]
    return plot  # type: ignore[no-any-return]


def test_a_curve_decides_nothing() -> None:
    context = context_of(SETTINGS)
    results = measured(ParityGate(), context)
    results[UNIT]["layers"]["candidate"] = [1e3] * len(results[UNIT]["layers"]["candidate"])
    assert ParityGate().judge(results, context).verdict is Verdict.PASS


def test_a_target_that_cannot_read_between_layers_says_so_and_has_no_curve() -> None:
    class Closed(BuiltinTarget):
        capabilities = BuiltinTarget.capabilities - {Capability.READ_BOUNDARIES}

    target = Closed(small_target()._checkpoint, None)
    target.tokens = small_target().tokens  # type: ignore[method-assign]
    context = context_of(SETTINGS, target=target)
    results = measured(ParityGate(), context)
    judgement = ParityGate().judge(results, context)
    assert results[UNIT]["layers"] == {}
    assert "the curve by layer (what passes between layers cannot be read)" in judgement.summary
    assert not [plot for plot in judgement.plots if plot.title == "Divergence by layer"]


def test_differences_are_relative_and_what_is_not_finite_is_far_and_still_a_number() -> None:
    exact = {"a": torch.ones(2, 4), "b": torch.zeros(2, 4)}
    other = {"a": torch.tensor([[1.0] * 4, [1.5] * 4]), "b": torch.tensor([[0.0] * 4, [1.0, 0.0, 0.0, torch.nan]])}
    found = relative_differences(exact, other)
    assert found[0].tolist() == [0.0, 0.5]
    assert found[1, 0] == 0.0
    assert found[1, 1] == 2.0**100


def test_the_curve_is_a_geometric_mean_over_tokens() -> None:
    curve = LayerCurve()
    exact = {"a": torch.ones(2, 4)}
    curve.add(exact, {"a": torch.tensor([[1.5] * 4, [1.125] * 4])})
    curve.add({}, {})
    assert curve.tokens == 2
    expected = ((0.5 + RESOLUTION) * (0.125 + RESOLUTION)) ** 0.5
    # Two logarithms, a sum, a division and an exponential, each within some ULP of FP64.
    assert curve.typical() == pytest.approx([expected], rel=10 * 2.0**-52)
    assert curves(LayerCurve(), LayerCurve()) == {}
