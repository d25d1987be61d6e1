"""Where every weight and scale of an expert stands in DeepGEMM MegaMoE kernel layout.

Two forms of the same facts: index maps with inverses (plain integers, for proofs and for reading one address), and
strided views (for moving data). Every view lists one checkpoint shard *in checkpoint order*, so loading is always

    view.copy_(shard.view(view.shape))          # only splits dims, so it never copies the source

and reading back is `view.reshape(shard.shape)`. A view aliases the live tensor and works on the meta device.

    w13 = torch.empty(num_experts, 2 * intermediate, hidden, dtype=torch.float8_e4m3fn)
    scale = allocate_scale(num_experts, 2 * intermediate, hidden // 128)
    dst = w13_weight_rows(w13, expert, GATE)
    dst.copy_(gate.view(dst.shape))
    write_packed_scales(scale, expert, GATE, gate_scale_bytes)

Legend: E local experts; N kernel rows; K columns; I `intermediate`; H `hidden`; W int32 words per row of packed scales.
w13 is (E, 2I, H) = gate (w1) and up (w3) interleaved; w2 is (E, H, I) = down, its rows untouched. Weights are K-major.

w13 rows, runs of 8 of gate and up alternating:

    [gate 0..7 | up 0..7 | gate 8..15 | up 8..15 | ... ]        n = 16 (r // 8) + 8 half + r % 8

Packed scales, int32: the scale of K group g is byte g % 4 (little endian) of word g // 4. Words are MN-major, so that
one TMA load takes the same word of 128 rows; those 128 rows stand in the order tensor memory wants (UTCCP): row 32j + i
of a block at 4i + j, that is 0, 32, 64, 96, 1, 33, 65, 97, ...

    logical (E, N, W)  strides (N W, 1, N)      word 0: [row' 0 | row' 1 | ... | row' N-1]   word 1: [ ... ]   ...

Block scales (SM90), float32 per 128x128: (E, 2I/128, H/128) = gate block rows, then up block rows; never interleaved.

Source: DeepGEMM's weight transforms for MegaMoE and vLLM 0.33's direct loaders; tests/golden holds their output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe_adapter.formats import FORMATS, INTERLEAVE_ROWS, Conversion, Format, ScaleStorage, conversion

GATE = 0  # w1
UP = 1  # w3
HALF_OF_SHARD = {"w1": GATE, "w3": UP}

UTCCP_ROWS = 128
SCALES_PER_WORD = 4
BLOCK = 128  # rows and columns per float32 block scale


# Index maps. Every one is a bijection; `x_inverse(x(...)) == (...)`.


def w13_row(half: int, row: int) -> int:
    """Kernel row of row `row` of gate (`half` 0) or up (`half` 1)."""
    return 16 * (row // 8) + 8 * half + row % 8


def w13_row_inverse(kernel_row: int) -> tuple[int, int]:
    """`(half, row)` of a kernel row of w13."""
    return kernel_row // 8 % 2, 8 * (kernel_row // 16) + kernel_row % 8


def utccp_row(kernel_row: int) -> int:
    """Row of the packed scale tensor that holds the scales of a kernel row."""
    return 128 * (kernel_row // 128) + 4 * (kernel_row % 32) + kernel_row % 128 // 32


def utccp_row_inverse(scale_row: int) -> int:
    """Kernel row whose scales stand in a row of the packed scale tensor."""
    return 128 * (scale_row // 128) + 32 * (scale_row % 4) + scale_row % 128 // 4


def w13_scale_row(half: int, row: int) -> int:
    """Row of the packed w13 scales for row `row` of gate or up; equals `utccp_row(w13_row(half, row))`."""
    return 128 * (row // 64) + 64 * (row // 8 % 2) + 32 * half + 4 * (row % 8) + row % 64 // 16


def w13_scale_row_inverse(scale_row: int) -> tuple[int, int]:
    """`(half, row)` of a row of the packed w13 scales."""
    block, t = divmod(scale_row, 128)
    return t // 32 % 2, 64 * block + 16 * (t % 4) + 8 * (t // 64) + t // 4 % 8


def w2_scale_row(row: int) -> int:
    """Row of the packed w2 scales for row `row` of down."""
    return utccp_row(row)


def w2_scale_row_inverse(scale_row: int) -> int:
    """Row of down whose scales stand in a row of the packed w2 scales."""
    return utccp_row_inverse(scale_row)


def scale_byte_offset(expert: int, scale_row: int, group: int, num_rows: int, num_words: int) -> int:
    """Byte offset, in a packed scale tensor (E, `num_rows`, `num_words`), of the scale of K group `group`."""
    word, byte = divmod(group, SCALES_PER_WORD)
    return 4 * ((expert * num_words + word) * num_rows + scale_row) + byte


def scale_byte_offset_inverse(offset: int, num_rows: int, num_words: int) -> tuple[int, int, int]:
    """`(expert, scale_row, group)` of a byte offset in a packed scale tensor."""
    index, byte = divmod(offset, 4)
    index, scale_row = divmod(index, num_rows)
    expert, word = divmod(index, num_words)
    return expert, scale_row, SCALES_PER_WORD * word + byte


# Strided views, each in checkpoint order.


def w13_weight_rows(w13_ENK: torch.Tensor, expert: int, half: int) -> torch.Tensor:
    """Gate or up of one expert inside w13.

    Args:
        w13_ENK: (E, 2I, K), any dtype; K in stored elements. For a fused shared expert, `w13.unsqueeze(0)`.
        expert: Local slot.
        half: `GATE` or `UP`.

    Returns:
        View (I/8, 8, K) that lists rows 0..I-1; aliases `w13_ENK`.
    """
    rows_NK = w13_ENK[expert]
    return rows_NK.view(-1, 2, INTERLEAVE_ROWS, rows_NK.shape[-1])[:, _half(half)]


def w2_weight_rows(w2_ENK: torch.Tensor, expert: int) -> torch.Tensor:
    """Down of one expert: view (N, K) of `w2_ENK` (E, N, K)."""
    return w2_ENK[expert]


def block_scale_rows(scale_ENK: torch.Tensor, expert: int, half: int | None) -> torch.Tensor:
    """The float32 block scales of one shard: gate or up block rows of w13's, or with `half` None all of w2's.

    Args:
        scale_ENK: (E, block rows, block columns).
        expert: Local slot.
        half: `GATE`, `UP`, or None for w2.

    Returns:
        View (block rows of the shard, block columns).
    """
    scale_NK = scale_ENK[expert]
    return scale_NK if half is None else scale_NK.view(2, -1, scale_NK.shape[-1])[_half(half)]


def allocate_scale(
    num_experts: int, rows: int, packed_k: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """A zeroed packed scale tensor: logical (E, N, W) int32, strides (N W, 1, N).

    Args:
        num_experts: E.
        rows: N kernel rows, a multiple of 128 (which also keeps every row of the storage TMA-aligned).
        packed_k: W words per row, one per four K groups.
        device: Where; torch's default if None.

    Raises:
        ValueError: `rows` is not a multiple of 128.
    """
    if rows % UTCCP_ROWS:
        raise ValueError(f"packed scales need rows in blocks of {UTCCP_ROWS}, got {rows}")
    return torch.zeros(num_experts, packed_k, rows, dtype=torch.int32, device=device).transpose(-1, -2)


def restore_scale_strides(scale_ENW: torch.Tensor) -> torch.Tensor:
    """The same storage as a packed scale tensor with its proper strides, checked.

    Torch ignores the stride of a dim of size 1: `clone`, `to` and `empty_like` may turn the strides (N, 1, N) of a
    tensor with W = 1 into (N, 1, 1), which the kernel's TMA descriptor rejects. The bytes are the same, so the strides
    can be put back without a copy.

    Args:
        scale_ENW: (E, N, W) int32.

    Returns:
        An alias with strides (N W, 1, N).

    Raises:
        ValueError: The tensor is not int32 (E, N, W) with N a multiple of 128, or its bytes are not MN-major.
    """
    if scale_ENW.ndim != 3 or scale_ENW.dtype != torch.int32 or scale_ENW.shape[1] % UTCCP_ROWS:
        raise ValueError(
            f"packed scales must be int32 (E, N, W) with N a multiple of {UTCCP_ROWS}, "
            f"got {scale_ENW.dtype} {tuple(scale_ENW.shape)}"
        )
    _, rows, words = scale_ENW.shape
    stride = (rows * words, 1, rows)
    for size, have, want in zip(scale_ENW.shape, scale_ENW.stride(), stride, strict=True):
        if size > 1 and have != want:
            raise ValueError(
                f"packed scales must be MN-major: strides {stride}, got {scale_ENW.stride()} for shape "
                f"{tuple(scale_ENW.shape)}; allocate them with allocate_scale and write in place"
            )
    return scale_ENW if scale_ENW.stride() == stride else scale_ENW.as_strided(scale_ENW.shape, stride)


def w13_scale_view(scale_ENW: torch.Tensor, expert: int, half: int) -> torch.Tensor:
    """The packed scale bytes of gate or up of one expert.

    With r = 64b + 16j + 8q + m the row of the scales is 128b + 64q + 32 half + 4m + j, so checkpoint order (b, j, q, m)
    is a permutation of the storage's (b, q, half, m, j).

    Args:
        scale_ENW: (E, 2I, W) int32, MN-major.
        expert: Local slot.
        half: `GATE` or `UP`.

    Returns:
        uint8 view (I/64, 4, 2, 8, W, 4): rows 0..I-1, then K groups; aliases `scale_ENW`.
    """
    blocks = _scale_bytes(scale_ENW, expert).view(scale_ENW.shape[-1], -1, 2, 2, 8, 4, 4)  # (W, b, q, half, m, j, byte)
    return blocks[:, :, :, _half(half)].permute(1, 4, 2, 3, 0, 5)


def w2_scale_view(scale_ENW: torch.Tensor, expert: int) -> torch.Tensor:
    """The packed scale bytes of down of one expert.

    Args:
        scale_ENW: (E, N, W) int32, MN-major.
        expert: Local slot.

    Returns:
        uint8 view (N/128, 4, 32, W, 4): rows 0..N-1, then K groups; aliases `scale_ENW`.
    """
    blocks = _scale_bytes(scale_ENW, expert).view(scale_ENW.shape[-1], -1, 32, 4, 4)  # (W, b, i, j, byte)
    return blocks.permute(1, 3, 2, 0, 4)


def scale_view(scale_ENW: torch.Tensor, expert: int, half: int | None) -> torch.Tensor:
    """`w13_scale_view`, or with `half` None `w2_scale_view`."""
    return w2_scale_view(scale_ENW, expert) if half is None else w13_scale_view(scale_ENW, expert, half)


def weight_view(weight_ENK: torch.Tensor, expert: int, half: int | None) -> torch.Tensor:
    """`w13_weight_rows`, or with `half` None `w2_weight_rows`."""
    return w2_weight_rows(weight_ENK, expert) if half is None else w13_weight_rows(weight_ENK, expert, half)


def write_packed_scales(scale_ENW: torch.Tensor, expert: int, half: int | None, scale_bytes: torch.Tensor) -> None:
    """Writes one shard's scale bytes into the packed tensor, in place.

    Args:
        scale_ENW: (E, N, W) int32, MN-major.
        expert: Local slot.
        half: `GATE`, `UP`, or None for w2.
        scale_bytes: (rows of the shard, 4W), one byte per scale: uint8, float8_e8m0fnu or float8_e4m3fn. The bytes are
            stored, never the values.

    Raises:
        ValueError: Not a one-byte dtype, or a shape that is not (rows, 4W).
    """
    dst = scale_view(scale_ENW, expert, half)
    expected = (_rows_of(dst), dst.shape[-2] * SCALES_PER_WORD)
    if scale_bytes.dtype.itemsize != 1 or tuple(scale_bytes.shape) != expected:
        raise ValueError(
            f"scale bytes must be a one-byte dtype of shape {expected}, "
            f"got {scale_bytes.dtype} {tuple(scale_bytes.shape)}"
        )
    dst.copy_(scale_bytes.view(torch.uint8).view(dst.shape))


def read_packed_scales(scale_ENW: torch.Tensor, expert: int, half: int | None) -> torch.Tensor:
    """One shard's scale bytes in checkpoint order: uint8 (rows, 4W). A copy; inverse of `write_packed_scales`."""
    src = scale_view(scale_ENW, expert, half)
    return src.reshape(_rows_of(src), src.shape[-2] * SCALES_PER_WORD)


# Shapes.


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides and dtype of one tensor that the experts own.

    Attributes:
        shape: Logical shape.
        stride: In elements.
        dtype: Storage dtype.
        loaded: False for a tensor that no checkpoint tensor is written to (derived scales).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    loaded: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes; every layout here is dense."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def kernel_tensors(
    fmt: Format | str, source: str, num_experts: int, hidden: int, intermediate: int
) -> dict[str, TensorSpec]:
    """Every tensor that `num_experts` experts own, by name.

    Args:
        fmt: The kernel format.
        source: Checkpoint source (a key of `formats.SOURCES`); a requantised one also stages its block scales.
        num_experts: Local slots E.
        hidden: H.
        intermediate: I.

    Returns:
        `w13_weight`, `w2_weight`; `*_weight_scale` (packed) or `*_weight_scale_inv` (float32 blocks), or both where the
        first is derived from the second; `*_weight_scale_2` and `w2_input_scale` for NVFP4.

    Raises:
        NotImplementedError, ValueError: As `formats.conversion` and `check_shapes`.
    """
    fmt = FORMATS[fmt] if isinstance(fmt, str) else fmt
    kind = conversion(source, fmt.name)
    check_shapes(fmt, hidden, intermediate)
    specs: dict[str, TensorSpec] = {}
    for name, rows, cols in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
        specs[f"{name}_weight"] = _dense((num_experts, rows, cols // fmt.values_per_element), fmt.weight_dtype)
        if fmt.scale is not None and fmt.scale.storage is ScaleStorage.PACKED:
            words = cols // (fmt.scale.group[1] * SCALES_PER_WORD)
            stride = (rows * words, 1, rows)
            derived = kind in (Conversion.REQUANTISE, Conversion.QUANTISE)
            specs[f"{name}_weight_scale"] = TensorSpec((num_experts, rows, words), stride, torch.int32, not derived)
        if kind is Conversion.REQUANTISE or (fmt.scale is not None and fmt.scale.storage is ScaleStorage.BLOCK):
            loaded = kind is not Conversion.QUANTISE
            specs[f"{name}_weight_scale_inv"] = _dense(
                (num_experts, rows // BLOCK, cols // BLOCK), torch.float32, loaded
            )
        if fmt.has_global_scales:
            specs[f"{name}_weight_scale_2"] = _dense((num_experts,), torch.float32)
    if fmt.has_global_scales:
        specs["w2_input_scale"] = _dense((num_experts,), torch.float32)
    return specs


def check_shapes(fmt: Format | str, hidden: int, intermediate: int, deep_gemm_version: str | None = None) -> None:
    """Checks a layer's sizes against the format's limits.

    Args:
        fmt: The kernel format.
        hidden: H.
        intermediate: I of one expert; for a fused shared expert of size s, check s as well.
        deep_gemm_version: `"2026-06"` or `"2026-10"`, the release whose rules apply; None for the layout alone, which
            is what the plain torch forward needs.

    Raises:
        ValueError: A limit does not hold; names every one that fails. Or the version is unknown.
    """
    fmt = FORMATS[fmt] if isinstance(fmt, str) else fmt
    if deep_gemm_version not in fmt.limits:
        known = ", ".join(repr(version) for version in fmt.limits)
        raise ValueError(f"unknown DeepGEMM release {deep_gemm_version!r}; shape limits are known for {known}")
    limits = fmt.limits[deep_gemm_version]
    broken = []
    if hidden <= 0 or hidden % limits.hidden_multiple:
        broken.append(f"hidden % {limits.hidden_multiple} == 0, got hidden {hidden}")
    if intermediate <= 0 or intermediate % limits.intermediate_multiple:
        broken.append(f"intermediate % {limits.intermediate_multiple} == 0, got intermediate {intermediate}")
    if limits.max_intermediate is not None and intermediate > limits.max_intermediate:
        broken.append(f"intermediate <= {limits.max_intermediate}, got intermediate {intermediate}")
    if broken:
        raise ValueError(f"{fmt.name} needs {' and '.join(broken)} ({limits.why})")


def _half(half: int) -> int:
    if half not in (GATE, UP):
        raise ValueError(f"half must be GATE (0) or UP (1), got {half!r}")
    return half


def _scale_bytes(scale_ENW: torch.Tensor, expert: int) -> torch.Tensor:
    """(W, 4N) uint8 view of one expert's storage."""
    return restore_scale_strides(scale_ENW).transpose(-1, -2)[expert].view(torch.uint8)


def _rows_of(view: torch.Tensor) -> int:
    """Checkpoint rows that a scale view lists: all dims but the last two."""
    return view.shape[:-2].numel()


def _dense(shape: tuple[int, ...], dtype: torch.dtype, loaded: bool = True) -> TensorSpec:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorSpec(shape, tuple(strides), dtype, loaded)
