"""Doubles of DeepGEMM builds that compute the layer from what a launch was really given. Not a test file.

Each has the signatures of one real build, so that a wrong keyword is a TypeError here too, and works out its output
from the staged tokens, the routing in the symmetric buffer and the kernel tensors, with its own decoding of their
layout.
"""

from __future__ import annotations

import types

import torch
from expert_checkpoints import decode_fp4


def align(x, y):
    return -(-x // y) * y


class Buffer:
    def __init__(self, group, num_experts, max_tokens, top_k, hidden, intermediate, alignment, *, x, x_sf):
        self.group, self.num_experts, self.num_topk = group, num_experts, top_k
        self.num_max_tokens_per_rank = align(max_tokens, alignment)
        rows = self.num_max_tokens_per_rank
        self.hidden, self.intermediate = hidden, intermediate
        self.x = torch.zeros(rows, *x[0], dtype=x[1])
        self.x_sf = None if x_sf is None else torch.zeros(rows, *x_sf[0], dtype=x_sf[1])
        self.topk_idx = torch.full((rows, top_k), -7)
        self.topk_weights = torch.full((rows, top_k), float("nan"))
        self.destroyed = False

    def destroy(self):
        self.destroyed = True


def rows_of(w13, half):
    """Gate (0) or up (1) rows of one expert's interleaved weight, row by row."""
    size = w13.shape[0] // 2
    return torch.stack([w13[16 * (r // 8) + 8 * half + r % 8] for r in range(size)])


def scale_row(kernel_row):
    return 128 * (kernel_row // 128) + 4 * (kernel_row % 32) + kernel_row % 128 // 32


def unpack_scales(packed):
    """(N, W) int32 words -> (N, 4W) bytes, rows in kernel order."""
    rows = torch.stack([packed[scale_row(n)] for n in range(packed.shape[0])])
    return torch.stack([(rows >> shift) & 0xFF for shift in (0, 8, 16, 24)], -1).flatten(1)


def swiglu(gate, up, clamp):
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate / (1 + torch.exp(-gate)) * up


def routed(y, buffer, tokens, expert_of, clamp):
    """Adds each token's experts; no rounding in between."""
    for t in range(y.shape[0]):
        for k in range(buffer.num_topk):
            expert, weight = int(buffer.topk_idx[t, k]), float(buffer.topk_weights[t, k])
            if expert >= 0:
                gate, up, down = expert_of(expert)
                y[t] += (down @ (swiglu(gate @ tokens[t], up @ tokens[t], clamp) * weight)).to(y.dtype)
            else:
                assert weight == 0.0


def sgl_sm90():
    """sgl-deep-gemm 0.1.4 on a Hopper GPU."""
    module = types.ModuleType("deep_gemm")

    def get_symm_buffer_for_mega_moe(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden,
        use_fp8_dispatch=None, mma_type="fp8xfp4", activation="swiglu",
    ):  # fmt: skip
        assert mma_type.split("x")[0] == "fp8"
        assert activation == "swiglu"
        return Buffer(
            group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, 384,
            x=((hidden,), torch.float8_e4m3fn), x_sf=((hidden // 128,), torch.float32),
        )  # fmt: skip

    def fp8_mega_moe(
        y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats=None, recipe=(128, 128, 128),
        activation="swiglu", activation_clamp=None, fast_math=True,
    ):  # fmt: skip
        assert recipe == (128, 128, 128)
        (l1, l1_sf), (l2, l2_sf) = l1_weights, l2_weights
        assert all(t.is_contiguous() for t in (l1, l1_sf, l2, l2_sf))
        size = sym_buffer.intermediate
        tokens = sym_buffer.x.float() * torch.kron(sym_buffer.x_sf, torch.ones(1, 128))

        def expert_of(e):
            ones = torch.ones(128, 128)
            gate = rows_of(l1[e].float(), 0) * torch.kron(l1_sf[e, : size // 128], ones)
            up = rows_of(l1[e].float(), 1) * torch.kron(l1_sf[e, size // 128 :], ones)
            return gate, up, l2[e].float() * torch.kron(l2_sf[e], ones)

        y.zero_()
        routed(y, sym_buffer, tokens, expert_of, activation_clamp)

    module.get_symm_buffer_for_mega_moe = get_symm_buffer_for_mega_moe
    module.fp8_mega_moe = fp8_mega_moe
    return module


def vendored_sm100(block_m=64):
    """The copy in vLLM 0.33: fp8_fp4, bf16 and nvfp4, shared experts fused."""
    module = types.ModuleType("vllm.third_party.deep_gemm")

    def get_symm_buffer_for_mega_moe(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden,
        num_shared_experts=0, use_fp8_dispatch=None, mma_type="fp8xfp4", activation="swiglu",
    ):  # fmt: skip
        is_bf16 = mma_type == "bf16xbf16"
        buffer = Buffer(
            group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, 1920,
            x=((hidden,), torch.bfloat16 if is_bf16 else torch.float8_e4m3fn),
            x_sf=None if is_bf16 else ((hidden // 128,), torch.int32),
        )  # fmt: skip
        buffer.num_shared_experts = num_shared_experts
        buffer.shared_l1_acts_sf = torch.full((hidden // 128, 4096), -1, dtype=torch.int32).T
        return buffer

    def get_block_m_for_mega_moe(num_ranks, num_experts, num_max_tokens_per_rank, num_tokens, num_topk, mma_type):
        assert num_max_tokens_per_rank % 1920 == 0
        return block_m

    def mx_tokens(buffer, n):
        words = buffer.x_sf[:n]
        exponents = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], -1).flatten(1)
        return buffer.x[:n].float() * torch.kron(2.0 ** (exponents.float() - 127), torch.ones(1, 32))

    def mx_weight(weight, packed):
        values = weight.float() if weight.dtype == torch.float8_e4m3fn else decode_fp4(weight.view(torch.uint8))
        exponents = unpack_scales(packed)
        assert packed.stride(0) == 1
        assert packed.stride(1) == packed.shape[0]
        return values * torch.kron(2.0 ** (exponents.float() - 127), torch.ones(1, 32))

    def mx_expert(l1, l2, e=None):
        pick = (lambda t: t) if e is None else (lambda t: t[e])
        w13 = mx_weight(pick(l1[0]), pick(l1[1]))
        return rows_of(w13, 0), rows_of(w13, 1), mx_weight(pick(l2[0]), pick(l2[1]))

    def fp8_fp4_mega_moe(
        y, l1_weights, l2_weights, sym_buffer, shared_l1_weights=None, shared_l2_weights=None,
        cumulative_local_expert_recv_stats=None, recipe=(1, 1, 32), activation="swiglu", activation_clamp=None,
        fast_math=True, activation_alpha=1.0, activation_beta=0.0,
    ):  # fmt: skip
        assert recipe == (1, 1, 32)
        n = y.shape[0]
        tokens = mx_tokens(sym_buffer, n)
        y.zero_()
        routed(y, sym_buffer, tokens, lambda e: mx_expert(l1_weights, l2_weights, e), activation_clamp)
        assert (shared_l1_weights is not None) == (sym_buffer.num_shared_experts > 0)
        if shared_l1_weights is not None:
            gate, up, down = mx_expert(shared_l1_weights, shared_l2_weights)
            for t in range(n):
                m = t % block_m
                row = t // block_m * align(block_m, 128) + m // 128 * 128 + m % 32 * 4 + m % 128 // 32
                assert torch.equal(sym_buffer.shared_l1_acts_sf[row], sym_buffer.x_sf[t]), "scales of the shared tokens"
                y[t] += (down @ swiglu(gate @ tokens[t], up @ tokens[t], activation_clamp)).to(y.dtype)

    def bf16_mega_moe(
        y, l1_weights, l2_weights, sym_buffer, shared_l1_weights=None, shared_l2_weights=None,
        cumulative_local_expert_recv_stats=None, activation="swiglu", activation_clamp=None, fast_math=True,
        activation_alpha=1.0, activation_beta=0.0, post_expert_norm_gamma=None, post_expert_norm_eps=0.0,
    ):  # fmt: skip
        assert isinstance(l1_weights, torch.Tensor)
        y.zero_()

        def expert_of(e):
            return rows_of(l1_weights[e].float(), 0), rows_of(l1_weights[e].float(), 1), l2_weights[e].float()

        routed(y, sym_buffer, sym_buffer.x.float(), expert_of, activation_clamp)

    def nvfp4_symm_buffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, num_shared_experts=0,
        base=None, shared_dtype=torch.float8_e4m3fn,
    ):  # fmt: skip
        buffer = Buffer(
            group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, 1920,
            x=((hidden // 2,), torch.int8), x_sf=((hidden // 64,), torch.int32),
        )  # fmt: skip
        rows = buffer.num_max_tokens_per_rank
        buffer.x_scales = torch.zeros(rows)
        buffer.num_shared_experts, buffer.shared_dtype = num_shared_experts, shared_dtype
        buffer.shared_l1_acts = torch.zeros(rows, hidden, dtype=shared_dtype)
        buffer.shared_l1_acts_sf = torch.full((hidden // 128, 4096), -1, dtype=torch.int32).T
        return buffer

    def e4m3_words(words):
        raw = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], -1).flatten(1)
        return raw.to(torch.uint8).view(torch.float8_e4m3fn).float()

    def nvfp4_mega_moe(
        y, l1_weights, l2_weights, sym_buffer, shared_l1_weights=None, shared_l2_weights=None,
        cumulative_local_expert_recv_stats=None, activation_clamp=None, fast_math=True, activation_alpha=1.0,
        activation_beta=0.0, l1_alpha=None, l2_alpha=None, l2_activation_scale=1.0, use_x_scales=False,
        activation="swiglu",
    ):  # fmt: skip
        assert use_x_scales
        n = y.shape[0]
        block = torch.kron(e4m3_words(sym_buffer.x_sf[:n]), torch.ones(1, 16))
        tokens = decode_fp4(sym_buffer.x[:n].view(torch.uint8)) * block * sym_buffer.x_scales[:n, None]

        def weight(w, packed):
            scales = unpack_scales(packed).to(torch.uint8).view(torch.float8_e4m3fn).float()
            return decode_fp4(w.view(torch.uint8)) * torch.kron(scales, torch.ones(1, 16))

        def expert_of(e):
            w13 = weight(l1_weights[0][e], l1_weights[1][e]) * l1_alpha[e]
            down = weight(l2_weights[0][e], l2_weights[1][e]) * l2_alpha[e] / l2_activation_scale
            return rows_of(w13, 0), rows_of(w13, 1), down

        y.zero_()
        routed(y, sym_buffer, tokens, expert_of, activation_clamp)
        if shared_l1_weights is not None:
            gate, up, down = (
                rows_of(shared_l1_weights.float(), 0),
                rows_of(shared_l1_weights.float(), 1),
                shared_l2_weights,
            )
            for t in range(n):
                x = sym_buffer.shared_l1_acts[t].float()
                y[t] += (down.float() @ swiglu(gate @ x, up @ x, activation_clamp)).to(y.dtype)

    module.get_symm_buffer_for_mega_moe = get_symm_buffer_for_mega_moe
    module.get_block_m_for_mega_moe = get_block_m_for_mega_moe
    module.fp8_fp4_mega_moe = fp8_fp4_mega_moe
    module.bf16_mega_moe = bf16_mega_moe
    module.NVFP4SymmBuffer = nvfp4_symm_buffer
    module.nvfp4_mega_moe = nvfp4_mega_moe
    module.get_block_m_for_nvfp4_mega_moe = lambda *a: block_m
    return module


def upstream_without_shared():
    """A DeepGEMM of June 2026: no shared experts, other shape limits."""
    module = types.ModuleType("deep_gemm")

    def get_symm_buffer_for_mega_moe(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden,
        use_fp8_dispatch=None, mma_type="fp8xfp4", activation="swiglu",
    ):  # fmt: skip
        raise AssertionError("shapes are checked before")

    def fp8_fp4_mega_moe(
        y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats=None, recipe=(1, 1, 32),
        activation="swiglu", activation_clamp=None, fast_math=True,
    ):  # fmt: skip
        raise AssertionError("not reached")

    module.get_symm_buffer_for_mega_moe = get_symm_buffer_for_mega_moe
    module.fp8_fp4_mega_moe = fp8_fp4_mega_moe
    module.__version__ = "2.6.0"
    return module
