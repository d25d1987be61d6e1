"""A digest names the logical bytes: equal for equal bytes however they lie, different for every accident tried."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import check_digests_agree_with_numpy, digest_samples, random_bytes

from weightsync.errors import LayoutError
from weightsync.kernels import digest as digest_module
from weightsync.kernels.digest import BLOCK_BYTES, block_keys, digest, digest_many

MASK = 2**64 - 1


def mix(x: int) -> int:
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD & MASK
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ (x >> 33)


def signed(x: int) -> int:
    x &= 2**32 - 1
    return x - 2**32 if x >= 2**31 else x


def digest_by_definition(data: bytes) -> str:
    """The definition in the module's docstring, in Python's own integers."""
    keys = block_keys().tolist()
    lanes = []
    for lane, gamma in enumerate((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)):
        total = 0
        for block in range(-(-len(data) // BLOCK_BYTES)):
            padded = data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
            words = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, BLOCK_BYTES, 4)]
            pairs = zip(words[:1024], keys[lane][0], words[1024:], keys[lane][1], strict=True)
            h = sum(signed(a + key_a) * signed(b + key_b) for a, key_a, b, key_b in pairs)
            total += mix((h + (block + 1) * gamma) & MASK)
        lanes.append(mix((total + (len(data) + 1) * gamma) & MASK))
    return "".join(f"{lane:016x}" for lane in lanes)


def test_the_digest_is_what_its_definition_says():
    for size in (0, 1, 7, BLOCK_BYTES, 2 * BLOCK_BYTES + 5):
        data = random_bytes(size, size)
        assert digest(data) == digest_by_definition(data.numpy().tobytes())


def test_golden_values_do_not_change_between_versions():
    """Both sides of a push compare digests, perhaps of two versions of this package."""
    data = torch.arange(3 * BLOCK_BYTES + 10, dtype=torch.int64).to(torch.uint8)
    assert digest(torch.zeros(0)) == GOLDEN_EMPTY
    assert digest(data) == GOLDEN_COUNTING


GOLDEN_EMPTY = "9ca066f1a4ab2eeaf24c4ff5f1592379"
GOLDEN_COUNTING = "6a5aae46069986de539e293cd9a4a856"


def test_layout_and_dtype_do_not_matter_but_logical_order_does():
    for sample in digest_samples():
        plain = sample.contiguous().clone()
        assert digest(sample) == digest(plain) == digest(plain.view(-1).view(torch.uint8))
    matrix = random_bytes(64 * 64, 3).view(64, 64)
    assert digest(matrix) != digest(matrix.t())


def test_many_give_what_each_gives_alone():
    samples = digest_samples()
    assert digest_many(samples) == [digest(sample) for sample in samples]
    assert digest_many(samples[::-1]) == digest_many(samples)[::-1]
    assert digest_many([]) == []


@pytest.mark.parametrize("limit", [1, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_pieces_of_any_size_give_the_same_value(monkeypatch, limit):
    data = random_bytes(40 * BLOCK_BYTES, 5)
    by_slice = [data.view(slices, 8, -1).transpose(1, 2) for slices in (10, 40, 80, 320)]  # 4, 1, 1/2, 1/8 blocks each
    samples = [*digest_samples(), *by_slice, data.view(80, -1)[:, 1::3], random_bytes(999, 6)[::2]]
    expected = [digest(sample.contiguous()) for sample in samples]
    monkeypatch.setattr(digest_module, "MAX_STAGED_BYTES", max(limit, BLOCK_BYTES))
    assert digest_many(samples) == expected


def test_ends_of_many_tensors_share_an_operation_without_mixing():
    sizes = [BLOCK_BYTES - 1] * 70 + [1, 5, BLOCK_BYTES + 3, 0, 100] * 40
    tensors = [random_bytes(size, number) for number, size in enumerate(sizes)]
    assert digest_many(tensors) == [digest(tensor) for tensor in tensors]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3 * BLOCK_BYTES))
def test_every_flipped_bit_is_seen(seed, size):
    data = random_bytes(size, seed)
    rng = np.random.default_rng(seed)
    changed = data.clone()
    changed[rng.integers(size)] ^= 1 << rng.integers(8)
    assert digest(changed) != digest(data)


def accidents(data: torch.Tensor) -> dict[str, torch.Tensor]:
    """What goes wrong with weights: `data` is float32 of (64, 512), 16 blocks."""

    def edit(change) -> torch.Tensor:
        copy = data.clone()
        change(copy)
        return copy

    def swap(a: slice, b: slice):
        def change(t: torch.Tensor) -> None:
            t[a], t[b] = t[b].clone(), t[a].clone()

        return change

    return {
        "two signs flipped": edit(lambda t: t[3, 4:6].neg_()),
        "two signs flipped far apart": edit(lambda t: t[::37, 4].neg_()),
        "every sign flipped": -data,
        "rows swapped in a block": edit(swap(slice(0, 1), slice(2, 3))),
        "halves of a block swapped": edit(swap(slice(0, 2), slice(2, 4))),
        "blocks swapped": edit(swap(slice(0, 4), slice(4, 8))),
        "gate and up swapped": edit(swap(slice(0, 32), slice(32, 64))),
        "one block lost": edit(lambda t: t[8:12].zero_()),
        "shifted by one element": data.view(-1).roll(1).view(64, 512),
        "added to one, taken from another": edit(lambda t: t.view(torch.int32)[0, :2].add_(torch.tensor([1, -1]))),
        "a row twice": edit(lambda t: t[5].copy_(t[6])),
        "zeros appended": torch.cat([data.view(-1), torch.zeros(4)]),
        "cut": data.view(-1)[:-1],
    }


def test_every_accident_is_seen_in_both_lanes():
    data = random_bytes(64 * 512 * 4, 7).view(torch.float32).view(64, 512)
    constant = torch.full((64, 512), 0.02)
    constant[::3] = 0.01
    for base in (data, constant + torch.arange(64)[:, None]):
        good = digest(base)
        for name, bad in accidents(base).items():
            got = digest(bad)
            assert got[:16] != good[:16], name
            assert got[16:] != good[16:], name


def test_zeros_of_different_sizes_differ():
    sizes = [0, 1, 2, 4, BLOCK_BYTES, BLOCK_BYTES + 4, 2 * BLOCK_BYTES]
    assert len(set(digest_many([torch.zeros(size, dtype=torch.uint8) for size in sizes]))) == len(sizes)


def test_a_tensor_without_bytes_is_refused():
    with pytest.raises(LayoutError, match="tensor 1 of 2"):
        digest_many([torch.zeros(1), torch.zeros(1, device="meta")])
    with pytest.raises(LayoutError, match="sparse"):
        digest(torch.zeros(2, 2).to_sparse())


def test_a_parameter_and_a_lazily_negated_tensor_are_read_by_value():
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    assert digest(parameter) == digest(parameter.detach().clone())
    negated = torch.randn(8, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    assert digest(negated) == digest(negated.clone().resolve_neg())


@pytest.mark.gpu
def test_the_gpu_gives_the_value_of_the_cpu():
    check_digests_agree_with_numpy("cuda")


@pytest.mark.gpu
def test_the_gpu_without_triton_gives_the_value_of_the_cpu():
    samples = digest_samples()
    assert digest_many([sample.cuda() for sample in samples], backend="torch") == digest_many(samples)


@pytest.mark.gpu
def test_aligned_contiguous_tensors_are_read_in_place():
    tensor = random_bytes(16 << 20, 1).cuda()
    digest(tensor)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    digest(tensor)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
