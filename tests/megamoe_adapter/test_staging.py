"""Staged activations: rounding bounds, bit rules, ties, and where a shared expert's scales stand."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from deep_gemm_doubles import align

from megamoe_adapter import staging
from megamoe_adapter.activation import MegaMoEActivation
from megamoe_adapter.staging import (
    decode_e2m1,
    dequantize_fp8,
    dequantize_mxfp8,
    dequantize_nvfp4,
    encode_e2m1,
    quantize_tokens_fp8,
    quantize_tokens_mxfp8,
    quantize_tokens_nvfp4,
    shared_scale_rows,
)


def tokens(rows=16, columns=256):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, rows)[:, None]


def test_mxfp8_exponents_are_rounded_up_so_that_nothing_saturates():
    x = tokens()
    q, exponents = quantize_tokens_mxfp8(x)
    assert (q.dtype, exponents.dtype, tuple(exponents.shape)) == (torch.float8_e4m3fn, torch.uint8, (16, 8))
    for t in range(16):
        for g in range(8):
            amax = max(x[t, 32 * g : 32 * (g + 1)].abs().max().item(), 1e-4)
            assert exponents[t, g].item() == 127 + math.ceil(math.log2(amax / 448))
    error = (dequantize_mxfp8(q, exponents) - x).abs()
    assert (error <= x.abs() / 16 + x.abs().view(16, 8, 32).amax(-1).repeat_interleave(32, -1) * 2.0**-17).all()


def test_fp8_scales_are_amax_over_448_per_128_columns():
    x = tokens()
    q, scale = quantize_tokens_fp8(x)
    assert torch.equal(scale, x.view(16, 2, 128).abs().amax(-1) / 448)
    assert q.float().abs().view(16, 2, 128).amax(-1).eq(448).all()
    assert ((dequantize_fp8(q, scale) - x).norm(dim=-1) / x.norm(dim=-1)).max() < 0.03


@pytest.mark.parametrize("quantize", [quantize_tokens_mxfp8, quantize_tokens_fp8, quantize_tokens_nvfp4])
def test_zero_tokens_and_zero_values_are_legal(quantize):
    assert all(part.shape[0] == 0 for part in quantize(torch.zeros(0, 128).bfloat16()))
    for part in quantize(torch.zeros(2, 128).bfloat16()):
        assert part.float().isfinite().all()
    assert not quantize(torch.zeros(2, 128).bfloat16())[0].float().any()


def test_nvfp4_uses_a_scale_per_token_and_per_16_columns():
    x = tokens()
    packed, scale, per_token = quantize_tokens_nvfp4(x)
    assert (packed.dtype, tuple(packed.shape), scale.dtype, tuple(scale.shape)) == (
        torch.uint8, (16, 128), torch.float8_e4m3fn, (16, 16),
    )  # fmt: skip
    assert torch.allclose(per_token, x.abs().amax(-1) / 2688)
    value = dequantize_nvfp4(packed, scale) * per_token[:, None]
    assert ((value - x).norm(dim=-1) / x.norm(dim=-1)).max() < 0.13
    fixed = quantize_tokens_nvfp4(x, torch.full((16,), 2.0))
    assert torch.equal(fixed[2], torch.full((16,), 2.0))


def test_e2m1_rounds_to_nearest_with_ties_to_the_even_code():
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    around = sorted(m + d for m in midpoints for d in (-1e-3, 0.0, 1e-3))
    values = torch.tensor([*around, 0.0, 6.0, 7.0, 100.0])
    values = torch.cat([values, -values])
    codes = values.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
    assert decode_e2m1(encode_e2m1(values)).tolist() == codes.astype(np.float32).tolist()


def test_the_low_nibble_is_the_even_column():
    assert encode_e2m1(torch.tensor([0.5, 6.0, -1.0, 0.0])).tolist() == [0x71, 0x0A]
    assert decode_e2m1(torch.tensor([0x71, 0x0A], dtype=torch.uint8)).tolist() == [0.5, 6.0, -1.0, 0.0]
    every = torch.arange(256).to(torch.uint8)
    assert torch.equal(encode_e2m1(decode_e2m1(every).where(decode_e2m1(every) != 0, 0.0)) & 0x77, every & 0x77)


@pytest.mark.parametrize("block_m", [8, 16, 64, 96, 128, 192, 240])
def test_shared_rows_are_distinct_and_stay_on_their_tiles_page(block_m):
    rows = shared_scale_rows(500, block_m, "cpu")
    page = align(block_m, 128)
    assert len(set(rows.tolist())) == 500
    for token, row in enumerate(rows.tolist()):
        b, m = divmod(token, block_m)
        assert row // page == b
        assert row == b * page + 128 * (m // 128) + 4 * (m % 32) + (m % 128) // 32


def test_staging_reads_no_value():
    """What a CUDA graph captures may not wait for the GPU; on the meta device a read is an error."""
    x = torch.empty(4, 256, device="meta")
    for quantize in (quantize_tokens_mxfp8, quantize_tokens_fp8, quantize_tokens_nvfp4):
        assert all(part.is_meta for part in quantize(x))
    assert shared_scale_rows(4, 8, "meta").is_meta
    assert staging.MXFP8_GROUP == 32


# The activation between the GEMMs


def test_swiglu_with_clamp_alpha_and_beta():
    gate, up = torch.tensor([-3.0, 1.0, 5.0]), torch.tensor([-9.0, 1.0, 9.0])
    g, u = torch.tensor([-3.0, 1.0, 2.0]), torch.tensor([-2.0, 1.0, 2.0])
    expected = g * torch.sigmoid(1.7 * g) * (u + 0.5)
    assert torch.allclose(MegaMoEActivation(clamp=2.0, alpha=1.7, beta=0.5)(gate, up), expected)
    assert torch.allclose(MegaMoEActivation()(gate, up), torch.nn.functional.silu(gate) * up)


def test_situ():
    gate, up = torch.randn(5), torch.randn(5)
    bounded = 2 * torch.tanh(gate / 2) * torch.sigmoid(gate)
    assert torch.allclose(MegaMoEActivation("situ", alpha=2.0, beta=3.0)(gate, up), bounded * 3 * torch.tanh(up / 3))
    assert torch.allclose(MegaMoEActivation("situ", alpha=2.0)(gate, up), bounded * up)


def test_defaults_are_left_out_of_a_kernel_call():
    assert MegaMoEActivation(clamp=7.0).kernel_kwargs() == {"activation_clamp": 7.0}
    assert MegaMoEActivation("situ", alpha=2.0, beta=1.0).kernel_kwargs() == {
        "activation_clamp": None, "activation": "situ", "activation_alpha": 2.0, "activation_beta": 1.0,
    }  # fmt: skip


def test_a_limit_is_one_scalar():
    assert MegaMoEActivation.from_limit(None).clamp is None
    assert MegaMoEActivation.from_limit(float("inf")).clamp is None
    assert MegaMoEActivation.from_limit(10).clamp == 10.0
    assert MegaMoEActivation.from_limit(torch.tensor([10.0])).clamp == 10.0
    with pytest.raises(ValueError, match=r"a swiglu_limit per expert \(shape \(8,\)\) is not supported"):
        MegaMoEActivation.from_limit(torch.ones(8))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "gelu"}, "unknown MegaMoE activation 'gelu'"),
        ({"alpha": float("nan")}, "must be finite"),
        ({"beta": float("inf")}, "must be finite"),
        ({"clamp": -1.0}, "clamp must be None or >= 0"),
        ({"clamp": float("nan")}, "clamp must be None or >= 0"),
        ({"name": "situ", "clamp": 1.0}, "situ takes no clamp"),
        ({"name": "situ", "alpha": 0.0}, "situ takes no clamp"),
        ({"name": "situ", "beta": -1.0}, "situ takes no clamp"),
    ],
)
def test_activations_that_no_kernel_has_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        MegaMoEActivation(**kwargs)
