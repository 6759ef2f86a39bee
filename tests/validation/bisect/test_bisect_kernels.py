"""`bisect kernels` names the ops and layers that carry a failure, in few runs, and says when there are none."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from four_layers import faulty, question, search, write_four_layers

from validation.bisect.kernels import Search, confirm
from validation.cli.app import main
from validation.delta_debugging import most_runs_of_single
from validation.faults.base import ENGINE, Fault, Ops
from validation.verdict import Verdict

SINGLE = (
    ("attn-res-out-norm-dropped", "attn_res", 0),
    ("attn-res-tap-prefix", "attn_res", 4),
    ("projection-half-written", "projection", 1),
    ("kda-delta-dropped", "kda_step", 0),
    ("kda-conv-reversed", "kda_step", 2),
    ("kda-conv-shifted", "kda_step", 0),
    ("kda-readout-stale", "kda_step", 2),
    ("mla-fp8-scale-not-written", "mla_query", 1),
    ("mla-record-order", "mla_query", 3),
    ("mla-scale-null", "mla_attend", 1),
    ("mla-scale-twice", "mla_attend", 3),
    ("mla-gate-dropped", "mla_value", 3),
    ("reduce-stale-rank", "output_mix", 1),
    ("reduce-stale-slice", "all_reduce", 0),
    ("moe-front-rows-shifted", "moe_front", 1),
    ("moe-one-expert-short", "route", 2),
    ("moe-gate-up-swapped", "experts", 2),
    ("moe-nibbles-swapped", "experts", 3),
    ("moe-shared-gate-up-swapped", "shared_expert", 1),
    ("moe-shared-dropped", "moe_tail", 3),
)
"""Fault, op and layer; layer 4 is the head. Every op that decodes, with faults that one layer's parity shows."""

DOUBLE = (
    (("kda-conv-reversed", "kda_step", 2), ("moe-nibbles-swapped", "experts", 3)),
    (("mla-scale-null", "mla_attend", 1), ("mla-scale-twice", "mla_attend", 3)),
    (("moe-gate-up-swapped", "experts", 2), ("kda-readout-stale", "kda_step", 2)),
    (("kda-delta-dropped", "kda_step", 0), ("attn-res-tap-prefix", "attn_res", 4)),
    (("moe-front-rows-shifted", "moe_front", 1), ("moe-shared-dropped", "moe_tail", 3)),
)
"""Faults of two layers, of one op in two layers, and of two ops in one layer."""


@pytest.mark.parametrize(("fault", "op", "layer"), SINGLE, ids=[f"{fault}@{layer}" for fault, _, layer in SINGLE])
def test_a_single_fault_is_named_by_op_and_layer_in_2_log2_n_runs(fault: str, op: str, layer: int) -> None:
    found = search(f"{fault}@{layer}").find()
    assert (found.verdict, found.complete) == (Verdict.FAIL, True), found.summary
    assert found.sets == [[(op, layer)]]
    assert len(found.runs) <= 2 * math.ceil(math.log2(len(found.places))) + 3


@pytest.mark.parametrize("faults", DOUBLE, ids=["+".join(f"{f}@{n}" for f, _, n in pair) for pair in DOUBLE])
def test_two_faults_are_both_named_by_op_and_layer(faults: tuple[tuple[str, str, int], ...]) -> None:
    found = search(*(f"{fault}@{layer}" for fault, _, layer in faults)).find()
    assert (found.verdict, found.complete) == (Verdict.FAIL, True), found.summary
    assert sorted(place for one in found.sets for place in one) == sorted((op, layer) for _, op, layer in faults)


def test_a_healthy_candidate_leaves_nothing_to_bisect_after_one_run() -> None:
    found = search().find()
    assert found.verdict is Verdict.PASS
    assert found.summary.startswith("nothing to bisect: the candidate is healthy here")
    assert len(found.runs) == 1


def short_lengths(parts: Ops) -> Ops:
    """A layout of steps in which no decode row sees its own token."""
    build = parts["build_batch"]

    def shorter(*arguments: Any, **options: Any) -> Any:
        batch = build(*arguments, **options)
        return replace(batch, lengths=(batch.lengths - 1).clamp_min(0))

    return {"build_batch": shorter}


SHORT_LENGTHS = Fault("short-lengths", "", "build_batch", (), (ENGINE,), short_lengths)


def test_a_failure_that_is_in_no_op_is_said_to_be_around_them() -> None:
    asked = question()
    asked.candidate = replace(asked.candidate, faults=(SHORT_LENGTHS,))
    found = Search(asked, 100).find()
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "in no op" in found.summary
    assert len(found.runs) == 2


def test_a_spent_budget_says_that_the_search_is_incomplete() -> None:
    found = search("kda-conv-reversed@2", most=4).find()
    assert (found.verdict, found.complete) == (Verdict.INCONCLUSIVE, False)
    assert "no run is left" in found.summary


def test_a_found_set_is_confirmed_and_a_wrong_one_is_not() -> None:
    assert confirm(search("kda-conv-reversed@2"), [[("kda_step", 2)]])[0] is Verdict.FAIL
    verdict, why = confirm(search("kda-conv-reversed@2"), [[("kda_step", 0)]])
    assert verdict is Verdict.INCONCLUSIVE
    assert "set 1 alone does not fail" in why
    assert "it still fails without them" in why
    assert confirm(search(), [[("kda_step", 2)]])[0] is Verdict.PASS


def test_the_command_leaves_a_replay_file_that_asks_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bisect",
        "kernels",
        "--model",
        str(write_four_layers(tmp_path / "model")),
        "--out",
        str(tmp_path / "runs"),
    ]
    words += ["--cell", "fp8-tp1-b16", "--sequences", "16", "--prompt", "1", "--decode", "3"]
    assert main([*words, "--fault", "moe-gate-up-swapped@3"]) == 1
    assert "FAIL: experts in layer 3: with the baseline's op there the candidate passes" in capsys.readouterr().out
    [file] = (tmp_path / "runs").glob("*/kernels.json")
    doc = json.loads(file.read_bytes())
    assert [doc["places"][i] for one in doc["sets"] for i in one] == [{"op": "experts", "layer": 3}]
    assert len(doc["runs"]) <= most_runs_of_single(len(doc["places"]))
    assert main(["bisect", "kernels", "--replay", str(file)]) == 1
    assert "FAIL: confirmed" in capsys.readouterr().out
    assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cell", "fp8-tp1"], "no cell is called 'fp8-tp1'"),
        (["--fault", "no-such-fault@1"], "no fault is called 'no-such-fault'"),
        (["--fault", "kda-conv-shifted@x"], "'x' is not a layer"),
        (["--fault", "kda-conv-shifted@-1"], "'-1' is not a layer"),
        (["--fault", "kda-conv-shifted@99"], "there is no layer 99: the model has layers 0 to 7, and 8 is its head"),
        (["--fault", "batch-table-cut@3"], "is one of the engine, which has no layers"),
        (["--prompt", "90000"], "max_context is 90012, the model's max_position_embeddings is 8192"),
        (["--replay", "/no/such/file"], "cannot be read"),
        (["--replay", __file__], "is not a replay file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", "kernels", "--out", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_fault_in_a_layer_where_its_op_does_not_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'kda_step' does not run there; here it runs in layers 0, 2"):
        search("kda-conv-shifted@1")


def test_a_fault_of_one_layer_leaves_the_others_alone() -> None:
    everywhere, one = (question(name).ask().metrics for name in ("moe-gate-up-swapped", "moe-gate-up-swapped@3"))
    cell = "fp8-tp1-b16"
    assert 0 < one["cells"][cell]["kl"] < everywhere["cells"][cell]["kl"]
    healed = question("moe-gate-up-swapped@3").ask([("experts", 3)])
    assert healed.verdict is Verdict.PASS
    assert question("moe-gate-up-swapped@3").ask([("experts", 2)]).verdict is Verdict.FAIL


def test_a_fault_of_one_layer_pickles_as_its_name() -> None:
    [fault] = faulty("moe-gate-up-swapped@3")
    twin = pickle.loads(pickle.dumps(fault))
    assert (twin.id, twin.only_in) == ("moe-gate-up-swapped@3", 3)
