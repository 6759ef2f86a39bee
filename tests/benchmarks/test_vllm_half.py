"""vLLM's half, as far as it runs without vLLM: conversions that change nothing, copied epilogues, the probe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.vllm_reference import convert, engine, views
from benchmarks.vllm_reference.cases import build
from benchmarks.vllm_reference.compare import distance
from benchmarks.vllm_reference.ours import Variant, forced_decode, runner
from benchmarks.vllm_reference.probe import Probe
from benchmarks.vllm_reference.run_vllm import GRAPHS, MAIN, SHIPPED
from decode_impl.runner import Paths

PROMPT = 4


def test_mla_at_the_released_sizes_computes_the_same(tmp_path: Path) -> None:
    convert.convert(SHIPPED, tmp_path, experts=False, mla=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["qk_nope_head_dim"], config["kv_lora_rank"]) == (convert.NOPE, convert.LATENT)
    scale = convert.softmax_scale(json.loads((SHIPPED / "config.json").read_text()))
    assert scale == 128**-0.5
    sequences = build(sequences=2, length=12, answers=0).sequences
    on = runner(tmp_path, Variant(), 2, 12)
    ops = {name: rescaled(op, scale) if name.startswith("mla_attend") else op for name, op in on.paths.generic.items()}
    wide = runner(tmp_path, Variant(paths=Paths(ops, {})), 2, 12)
    narrow = forced_decode(runner(SHIPPED, Variant(), 2, 12), sequences, PROMPT)
    # Zeros change how long FP32 sums are cut up, and with it a last bit: still one rounding of the same model.
    assert distance(narrow, forced_decode(wide, sequences, PROMPT)).typical < 1e-6
    # Without the scale of the shipped model it is another model.
    assert distance(narrow, forced_decode(on, sequences, PROMPT)).typical > 1e-5


def test_a_checkpoint_with_dense_experts_has_no_quantisation(tmp_path: Path) -> None:
    convert.convert(SHIPPED, tmp_path, experts=True, mla=False)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "tokenizer.json").exists()


def test_the_shipped_files_are_tried_first_and_nothing_is_tried_twice() -> None:
    assert MAIN[0].files == "shipped"
    assert len({attempt.files for attempt in MAIN}) == len(MAIN)
    assert not GRAPHS.eager


def rescaled(op: object, scale: float) -> object:
    def wrapped(**arguments: object) -> object:
        return op(**{**arguments, "softmax_scale": scale})  # type: ignore[operator]

    return wrapped


def test_dense_experts_hold_the_numbers_that_mxfp4_stands_for() -> None:
    packed = torch.tensor([[0x21, 0x9F] * 8], dtype=torch.uint8)
    tensors = {
        "e.weight_packed": packed,
        "e.weight_scale": torch.tensor([[128]], dtype=torch.uint8),
        "n": torch.ones(1),
    }
    dense_ = convert.dense_experts(tensors)
    assert set(dense_) == {"e.weight", "n"}
    assert dense_["e.weight"][0, :4].tolist() == [1.0, 2.0, -12.0, -1.0]


def test_copied_epilogues_concatenate_and_write_live_slots_only() -> None:
    cache = torch.zeros(3, 4, 6)
    latent, rope = torch.arange(8.0).view(2, 4), torch.arange(4.0).view(2, 1, 2) + 10
    keys = engine._key_epilogue(torch.empty(0), torch.ones(2, 3, 5), rope, latent, cache, torch.tensor([6, -1]))
    assert keys.shape == (2, 3, 7)
    assert torch.equal(keys[1, 2], torch.tensor([1.0] * 5 + [12, 13]))
    assert torch.equal(cache[1, 2], torch.tensor([0.0, 1, 2, 3, 10, 11]))
    assert cache.count_nonzero() == 5
    query = engine._query_epilogue(
        torch.ones(2, 3, 4), torch.zeros(2, 3, 2), latent, rope[:, 0], cache, torch.tensor([8, 9])
    )
    assert query.shape == (2, 3, 6)
    assert torch.equal(cache[2, 1], torch.tensor([4.0, 5, 6, 7, 12, 13]))


def test_a_step_without_the_whole_vocabulary_is_refused() -> None:
    class Logprob:
        logprob = 1.5

    assert views.dense([{0: Logprob(), 1: Logprob()}], 2).tolist() == [[1.5, 1.5]]
    with pytest.raises(ValueError, match="all 3 are needed"):
        views.dense([{0: Logprob(), 1: Logprob()}], 3)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj_qkvgfab, self.o_proj = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        return self.o_proj(self.in_proj_qkvgfab(hidden_states))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(), nn.Linear(2, 2)

    def forward(self, positions: Tensor, hidden_states: Tensor | None, prefix_sum: Tensor, residual: Tensor) -> Tensor:
        return self.mlp(self.self_attn(hidden_states=prefix_sum, positions=positions))


class _Head(nn.Module):
    def forward(self, head: object, hidden: Tensor) -> Tensor:
        return hidden * 2


def test_the_probe_keeps_every_steps_rows_and_lets_go() -> None:
    model = nn.Module()
    model.model, model.logits_processor = nn.Module(), _Head()
    model.model.layers, model.model.norm = nn.ModuleList([_Layer()]), nn.Identity()
    probe = Probe(model)

    def step(rows: int) -> None:
        x = torch.ones(rows, 2)
        out = model.model.layers[0](positions=x, hidden_states=None, prefix_sum=x, residual=x[:, None])
        model.logits_processor(None, model.model.norm(out[-1:]))

    step(3)
    step(1)
    kept = probe.tensors(4)
    assert {n: len(t) for n, t in kept.items() if n.startswith("layers.0.")} == dict.fromkeys(
        (f"layers.0.{n}" for n in ("prefix", "blocks", "attn_in", "attn_out", "heads", "proj", "mlp_in", "mlp_out")), 4
    )
    assert {n: len(kept[n]) for n in ("final_mix", "head_in", "logits")} == {"final_mix": 2, "head_in": 2, "logits": 2}
    with pytest.raises(ValueError, match="too few rows"):
        probe.tensors(5)
    probe.close()
    step(1)
    assert len(probe.tensors(4)["logits"]) == 2
