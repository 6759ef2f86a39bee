"""The training model: chunked delta rule, quantisation in the loop, tokenizer and export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from decode_impl.config import read_config
from decode_impl.presets import K3_MINI
from decode_impl.training.delta_rule import chunked_delta_rule, unit_lower_inverse
from decode_impl.training.export import export_tensors, write_checkpoint
from decode_impl.training.model import K3Text, Precision
from decode_impl.training.quantise import fake_e4m3, fake_mxfp4
from decode_impl.training.restore import restore
from decode_impl.training.structure import effective_rank, final_state
from decode_impl.training.tokenizer import SPECIALS, build_tokenizer
from numerics.formats import e4m3_decode, e4m3_encode, mxfp4_dequantise, mxfp4_quantise

TINY = replace(
    K3_MINI,
    hidden_size=64,
    num_hidden_layers=4,
    full_attention_layers=(3,),
    kda_heads=2,
    kda_head_dim=32,
    mla_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    intermediate_size=64,
    num_experts=4,
    experts_per_token=2,
    latent_size=32,
    moe_intermediate_size=32,
    attn_res_block_size=2,
)
EXACT = Precision(torch.float32, mxfp4_experts=False)


def token_loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The delta rule as docs/ops.md writes it, one token at a time."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], q.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp().unsqueeze(-2)
        u = (v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])) * beta[:, t].unsqueeze(-1)
        state = state + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)


def delta_case(decay: str, dtype: torch.dtype, length: int = 96) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    q, k, v, l = (torch.randn(2, length, 2, 16, generator=generator, dtype=dtype) for _ in range(4))
    if decay == "equal keys":
        k = k[:, :1].expand_as(k)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    l = {"at the bound": torch.full_like(l, -5.0), "mixed": -5 * torch.sigmoid(3 * l)}.get(decay, -1e-3 * l.abs())
    return [
        q,
        k.contiguous(),
        v,
        l,
        torch.sigmoid(torch.randn(2, length, 2, generator=generator, dtype=dtype)),
    ]


@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("decay", ["at the bound", "mixed", "slow", "equal keys"])
def test_chunked_delta_rule_is_the_token_loop(decay: str, chunk: int) -> None:
    case = delta_case(decay, torch.float32)
    expected = token_loop(*(x.double() for x in case))
    assert (chunked_delta_rule(*case, chunk=chunk).double() - expected).abs().max() < 2e-6
    case = [x.double() for x in case]
    assert (chunked_delta_rule(*case, chunk=chunk) - expected).abs().max() < 1e-13


@pytest.mark.parametrize("decay", ["at the bound", "mixed", "slow"])
def test_gradients_of_the_chunked_delta_rule_are_those_of_the_token_loop(decay: str) -> None:
    leaves = [x.double().requires_grad_() for x in delta_case(decay, torch.float64)]
    seed = torch.randn(2, 96, 2, 16, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    got = torch.autograd.grad((chunked_delta_rule(*leaves) * seed).sum(), leaves)
    expected = torch.autograd.grad((token_loop(*leaves) * seed).sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-11


def test_unit_lower_inverse_inverts() -> None:
    below = torch.randn(5, 32, 32, dtype=torch.float64).tril(-1) / 4
    assert torch.allclose(unit_lower_inverse(below) @ (torch.eye(32) + below), torch.eye(32, dtype=torch.float64))


def test_fake_quantisation_is_the_stored_format_with_an_identity_gradient() -> None:
    w = torch.randn(64, 96) * torch.logspace(-6, 6, 64)[:, None]
    w[0], w[1, :32] = 0, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)
    w.requires_grad_()
    assert torch.equal(fake_mxfp4(w), mxfp4_dequantise(*mxfp4_quantise(w.detach())))
    assert torch.equal(torch.autograd.grad(fake_mxfp4(w).sum(), w)[0], torch.ones_like(w))
    x, scale = torch.randn(1000) * 100, torch.tensor(0.37)
    assert torch.equal(fake_e4m3(x, scale), e4m3_decode(e4m3_encode(x * scale.reciprocal())) * scale)


def test_every_parameter_gets_a_finite_gradient() -> None:
    torch.manual_seed(0)
    model = K3Text(TINY)
    tokens = torch.randint(0, 256, (2, 45))
    for precision in (EXACT, Precision(fp8_rows=0.5)):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens, precision).float().flatten(0, 1), tokens.flatten()).backward()
        for name, parameter in model.named_parameters():
            if name not in (
                "layers.0.attention_mix.norm",
                "layers.0.attention_mix.proj",
            ):  # nothing to mix there
                assert parameter.grad is not None, name
                assert parameter.grad.isfinite().all(), name


def test_logits_depend_on_the_past_only() -> None:
    torch.manual_seed(0)
    model = K3Text(TINY).eval()
    tokens = torch.randint(0, 256, (1, 70))
    with torch.no_grad():
        whole, prefix = model(tokens, EXACT), model(tokens[:, :41], EXACT)
    assert (whole[:, :41] - prefix).abs().max() < 1e-4


def test_balancing_lowers_the_bias_of_used_experts() -> None:
    torch.manual_seed(0)
    model = K3Text(TINY)
    model(torch.randint(0, 256, (2, 32)), EXACT)
    moe = model.moe_layers()[0]
    used = moe.load.clone()
    moe.balance(0.01)
    assert moe.e_score_correction_bias[used.argmax()] < moe.e_score_correction_bias[used.argmin()]
    assert moe.load.sum() == 0


def test_export_has_upstream_names_and_the_config_reads_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = K3Text(TINY)
    size = write_checkpoint(model, tmp_path, "# card\n")
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert read_config(tmp_path) == replace(TINY, name=tmp_path.name)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        shapes = {name: (file.get_tensor(name).dtype, list(file.get_tensor(name).shape)) for name in list(file.keys())}
    u8, f32, b16 = torch.uint8, torch.float32, torch.bfloat16
    assert shapes["model.layers.0.self_attn.A_log"] == (f32, [1, 1, 2, 1])
    assert shapes["model.layers.0.self_attn.k_conv1d.weight"] == (b16, [64, 1, 4])
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (b16, [64, 64])
    assert shapes["model.layers.1.block_sparse_moe.experts.3.w2.weight_packed"] == (u8, [32, 16])
    assert shapes["model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"] == (u8, [32, 1])
    assert shapes["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"] == (b16, [96, 64])
    assert shapes["model.layers.3.self_attn.k_scale"] == (f32, [])
    assert shapes["model.output_attn_res_proj.weight"] == (b16, [1, 64])


def test_exported_pieces_are_the_models_weights() -> None:
    torch.manual_seed(0)
    model = K3Text(TINY)
    tensors, kda = export_tensors(model), model.layers[1].self_attn
    assert torch.equal(tensors["model.layers.1.self_attn.g_proj.weight"], kda.in_proj[192:256].bfloat16())
    assert torch.equal(tensors["model.layers.1.self_attn.b_proj.weight"], kda.in_proj[-2:].bfloat16())
    name = "model.layers.1.block_sparse_moe.experts.2.w3."
    w3 = mxfp4_dequantise(tensors[name + "weight_packed"], tensors[name + "weight_scale"])
    assert torch.equal(w3, fake_mxfp4(model.layers[1].mlp.w13)[2, 32:])


def test_a_restored_model_is_the_exported_one() -> None:
    torch.manual_seed(0)
    model = K3Text(TINY)
    model.layers[1].mlp.e_score_correction_bias += torch.arange(4) / 100
    tensors = export_tensors(model)
    again = restore(TINY, tensors)
    assert export_tensors(again).keys() == tensors.keys()
    tokens = torch.randint(0, 256, (1, 40))
    with torch.no_grad():
        assert torch.equal(model(tokens), again(tokens))


def test_the_final_state_is_that_of_the_delta_rule() -> None:
    q, k, v, l, beta = delta_case("mixed", torch.float64)
    state = final_state(k[0], v[0], l[0], beta[0])
    assert torch.allclose(torch.einsum("hvk,hk->hv", state, q[0, -1]), token_loop(q, k, v, l, beta)[0, -1])
    assert torch.allclose(effective_rank(torch.eye(16)), torch.tensor(16.0))


@pytest.mark.parametrize(
    "text", ["", "plain", "tabs\t\n\r\x00\x7f", "Größe 日本語 🙂", "".join(map(chr, range(0x250)))]
)
def test_tokenizer_returns_any_text(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_specials_are_single_tokens_after_the_bytes() -> None:
    tokenizer = build_tokenizer()
    assert [tokenizer.encode(name).ids for name in SPECIALS] == [[256 + i] for i in range(len(SPECIALS))]
    assert tokenizer.get_vocab_size() == 320
