"""The comparison with vLLM: equals come out as equal, a fault as different, ties as ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.vllm_reference import contracts, report
from benchmarks.vllm_reference.cases import Cases, build, questions, read, write
from benchmarks.vllm_reference.compare import (
    TIE,
    answer_verdict,
    compare_view,
    distance,
    pair_answers,
)
from benchmarks.vllm_reference.diverge import divergence, hidden_states
from benchmarks.vllm_reference.explain import BF16_ROUNDING, explain, relative_rms
from benchmarks.vllm_reference.ours import Variant, answer, decode_all, forced_decode, prefill, runner
from benchmarks.vllm_reference.outputs import Answer, Outputs, compositions, load, save
from benchmarks.vllm_reference.run_vllm import SHIPPED
from benchmarks.vllm_reference.stand_in import faulty, seen
from decode_impl.engine import Engine

PROMPT = 4


@pytest.fixture(scope="module")
def cases() -> Cases:
    made = build(sequences=4, length=20, answers=0)
    return Cases(made.seed, PROMPT, made.eos, made.sequences, questions(1)[:1])


def logits(cases: Cases, variant: Variant) -> Tensor:
    on = runner(SHIPPED, variant, len(cases.sequences), cases.length)
    return forced_decode(on, cases.sequences, PROMPT)


@pytest.fixture(scope="module")
def ours(cases: Cases) -> Mapping[str, Tensor]:
    return {"1": logits(cases, Variant()), "2": logits(cases, Variant(2)), "4": logits(cases, Variant(4))}


def compared(ours: Mapping[str, Tensor], theirs: Tensor) -> str:
    return str(compare_view({"first": ours["1"]}, {"first": theirs}, {"ours, 2 ranks": ours["2"]})["verdict"])


def test_another_valid_rounding_is_not_beyond_the_floor(ours: Mapping[str, Tensor]) -> None:
    assert compared(ours, ours["4"]) in ("within", "undecided")
    assert compared(ours, ours["2"]) == "within"


def test_a_fault_is_beyond_the_floor(cases: Cases, ours: Mapping[str, Tensor]) -> None:
    broken = Variant(backend="latency_specialized", paths=faulty("kda-delta-dropped"))
    assert compared(ours, logits(cases, broken)) == "beyond"


def test_the_widest_floor_decides(ours: Mapping[str, Tensor]) -> None:
    noisy = ours["1"] + torch.randn(ours["1"].shape, generator=torch.Generator().manual_seed(1))
    found = compare_view({"first": ours["1"]}, {"first": ours["4"], "second": noisy}, {"ours, 2 ranks": ours["2"]})
    assert found["widest"] == "theirs, another composition"


def test_logits_that_are_not_finite_are_refused(ours: Mapping[str, Tensor]) -> None:
    broken = ours["1"].clone()
    broken[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        distance(ours["1"], broken)


def given(tokens: list[int], margin: float) -> Answer:
    return Answer(tokens, [[t, t + 1] for t in tokens], [margin] * len(tokens))


def test_answers_that_part_at_a_tie_count_as_equal_up_to_ties() -> None:
    tied = pair_answers("aime", given([1, 2, 3], 4.0), given([1, 5], TIE))
    assert (tied.first_difference, tied.chosen, tied.tied) == (1, (2, 5), True)
    assert answer_verdict([tied, pair_answers("aime", given([1], 0.0), given([1], 0.0))]) == "equal up to ties"


def test_answers_that_part_elsewhere_are_counted() -> None:
    wild = pair_answers("gpqa", given([1, 2], 4.0), given([1, 3], 2 * TIE))
    assert not wild.tied
    assert answer_verdict([wild]).startswith("1 of 1")


def test_an_answer_that_goes_on_longer_parts_where_the_other_ends() -> None:
    assert pair_answers("mrcr", given([1, 2], 4.0), given([1], 4.0)).first_difference == 1


def test_prefill_rows_follow_the_same_tokens_as_decode_rows(cases: Cases, ours: Mapping[str, Tensor]) -> None:
    on = runner(SHIPPED, Variant(), len(cases.sequences), cases.length)
    rows = prefill(on, cases.sequences)[:, PROMPT:]
    assert rows.shape == ours["1"].shape
    assert compared(ours, rows) != "beyond"


def test_our_answers_are_those_of_the_engine(cases: Cases) -> None:
    question = replace(cases.questions[0], limit=12)
    context = len(question.prompt) + question.limit
    engine_ = Engine(runner(SHIPPED, Variant(), 1, context))
    engine_.add("0", question.prompt, question.limit, stop_tokens=[cases.eos])
    engine_.run()
    mine = answer(runner(SHIPPED, Variant(), 1, context), [question], cases.eos)[0]
    assert mine.tokens == engine_.request("0").output
    assert len(mine.margin) == len(mine.tokens)
    assert [best[0] for best in mine.best] == mine.tokens


def test_cases_and_outputs_come_back_as_written(cases: Cases, tmp_path: Path) -> None:
    write(cases, tmp_path / "cases.json")
    assert read(tmp_path / "cases.json") == cases
    outputs = Outputs({"a": 1}, {"decode": {"first": torch.full((1, 2, 3), 0.1)}}, {"first": [given([1], 0.5)]})
    outputs.views["decode"]["second"] = torch.full((1, 2, 3), 0.5)
    save(tmp_path / "out", outputs, "decode")
    back = load(tmp_path / "out")
    assert back.answers == outputs.answers
    assert all(torch.equal(back.views["decode"][n], t) for n, t in outputs.views["decode"].items())


def test_a_file_that_is_no_cases_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json: not a cases file"):
        read(tmp_path / "x.json")


def test_the_second_composition_batches_every_sequence_once_and_one_alone() -> None:
    groups = compositions(24)["second"]
    assert sorted(i for group in groups for i in group) == list(range(24))
    assert sum(len(group) == 1 for group in groups) == 1


def test_ops_on_their_own_inputs_differ_by_the_last_bits_only(cases: Cases) -> None:
    rows = explain(SHIPPED, seen(SHIPPED, cases.sequences[0], PROMPT), PROMPT)
    assert {row.op for row in rows} >= {"kda_step", "mla (projection to gated values)", "route and experts", "lm_head"}
    # Another number of rows gives a matrix product another order of sums: a last bit here and there, far from a
    # rounding at another place.
    assert max(row.roundings for row in rows) < 0.3


def test_a_wrong_op_is_named(cases: Cases) -> None:
    kept = seen(SHIPPED, cases.sequences[0], PROMPT)
    kept["layers.5.latent_sum"] = kept["layers.5.latent_sum"].roll(1, 0)
    rows = {(row.op, row.layer): row.roundings for row in explain(SHIPPED, kept, PROMPT)}
    assert max(rows, key=lambda key: rows[key])[1] == 5
    assert rows["route and experts", 5] > 100 > rows["route and experts", 4]


def test_hidden_states_part_where_the_first_rounding_differs(cases: Cases) -> None:
    sequence = cases.sequences[0]
    ours, again = (hidden_states(SHIPPED, sequence, PROMPT, ranks) for ranks in (1, 2))
    places = divergence(seen(SHIPPED, sequence, PROMPT), ours, again, PROMPT)
    assert places[0] == ("layers.0.attn_in", 0.0, 0.0)
    assert all(theirs == 0 for _, theirs, _ in places)
    assert all(floor > 0 for _, _, floor in places[1:])


def test_vllms_roundings_stay_within_a_few_roundings_of_our_ops(cases: Cases) -> None:
    kept = seen(SHIPPED, cases.sequences[0], PROMPT)
    for dense_experts in (False, True):
        rows = explain(SHIPPED, kept, PROMPT, contracts.operations(dense_experts))
        changed = [row for row in rows if row.op in ("route and experts", "mla (projection to gated values)")]
        assert all(row.roundings < 8 for row in changed)
        assert any(row.roundings > 0.3 for row in changed)


def test_one_bf16_rounding_is_the_unit() -> None:
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(3)) + 1
    assert relative_rms(x, x.bfloat16().float()) == pytest.approx(BF16_ROUNDING, rel=0.1)


def test_every_part_of_the_report_renders(cases: Cases) -> None:
    outputs = decode_all(SHIPPED, Cases(1, PROMPT, cases.eos, cases.sequences[:2], []), Variant(), with_answers=False)
    views = outputs.views["decode"]
    lines = [*report.view_table("decode", compare_view(views, views, {"again": views["second"]}))]
    lines += report.answers_table([pair_answers("aime", given([1], 4.0), given([2], 4.0))])
    lines += report.about_table("What ran", {"a": {"b": ["c|d"]}}, {"layers": "lost"})
    lines += report.contract_table()
    text = "\n".join(lines)
    assert "1 of 1 answers part away from a tie" in text
    assert "c/d" in text
    assert "**failed**: layers: lost" in text
