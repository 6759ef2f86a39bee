"""The number formats on a GPU."""

from __future__ import annotations

import torch

from numerics.formats import bf16, e4m3_decode, e4m3_encode, e8m0_decode, mxfp4_dequantise, mxfp4_quantise


def test_a_gpu_gives_the_same_bits_as_a_cpu_for_every_value() -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[~x.isnan()]
    moderate = x[x.abs() <= 1e30]
    w = moderate[: len(moderate) // 32 * 32].view(-1, 32)
    packed, scale = mxfp4_quantise(w)
    on_gpu = mxfp4_quantise(w.cuda())
    assert torch.equal(on_gpu[0].cpu(), packed)
    assert torch.equal(on_gpu[1].cpu(), scale)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        wide = x.to(dtype)
        assert torch.equal(e4m3_encode(wide.cuda()).cpu(), e4m3_encode(wide))
        assert torch.equal(bf16(wide.cuda()).cpu().view(torch.int16), bf16(wide).view(torch.int16))
        codes = torch.arange(127, dtype=torch.uint8)
        assert torch.equal(e4m3_decode(codes.cuda(), dtype).cpu(), e4m3_decode(codes, dtype))
        assert torch.equal(e8m0_decode(codes.cuda(), dtype).cpu(), e8m0_decode(codes, dtype))
        assert torch.equal(
            mxfp4_dequantise(packed.cuda(), scale.cuda(), dtype).cpu(), mxfp4_dequantise(packed, scale, dtype)
        )
