"""Every weight format the adapter knows, and how a checkpoint gets into it.

Three tables, nothing else decides: `FORMATS` (what a kernel reads), `SOURCES` (what a checkpoint holds) and
`CONVERSIONS` (which source may become which format, and whether that rounds). A pair that is not in `CONVERSIONS` is
refused with the reason and the nearest supported choice. A format is named by the caller, never guessed from a shape.

                 source     bf16      block_fp8    block_fp8_ue8m0  mxfp8   mxfp4_ct  mxfp4_dsv4  nvfp4_modelopt
    format
    sm100_bf16              copy      -            -                -       -         -           -
    sm100_mxfp8             quantise  requantise   expand           copy    -         -           -
    sm100_mxfp4             -         -            -                -       copy      copy        -
    sm100_nvfp4             -         -            -                -       -         -           copy
    sm90_fp8                quantise  copy         expand           -       -         -           -

    copy, expand: exact, always.  requantise: exact if every block scale is a power of two, else rounds (about 2.5 %
    relative L2).  quantise: rounds once, from the BF16 master.

    fmt = FORMATS["sm100_mxfp8"]
    fmt.scale.group                                   # (1, 32)
    conversion("block_fp8", "sm100_mxfp8")            # Conversion.REQUANTISE
    conversion("nvfp4_ct", "sm100_mxfp4")             # NotImplementedError: ... would be lossy; nearest: ...

Source: parameter names, dtypes and scale groups as vLLM 0.33 and DeepGEMM (upstream and the sgl wheels) read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

INTERLEAVE_ROWS = 8  # gate and up alternate in runs of this many rows, in every supported format


class ScaleStorage(StrEnum):
    """Where a kernel expects the scales of a weight."""

    PACKED = "packed"  # four 8-bit scales per int32 word, MN-major, rows permuted (layout.py draws it)
    BLOCK = "block"  # one float32 per block, K contiguous, gate blocks before up blocks, as the checkpoint has them


@dataclass(frozen=True, slots=True)
class ScaleFormat:
    """The block scales of a format.

    Attributes:
        dtype: Of one scale value. UE8M0 byte `b` is `2**(b - 127)`.
        group: Rows and columns (in weight values, not bytes) that share one scale.
        storage: How the kernel wants them laid out.
    """

    dtype: torch.dtype
    group: tuple[int, int]
    storage: ScaleStorage


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """What one kernel build asks of a shape.

    Attributes:
        hidden_multiple: `hidden` must be a multiple of this.
        intermediate_multiple: `intermediate` must be a multiple of this.
        max_intermediate: Largest `intermediate`; None if unlimited.
        why: The rule's origin, for the message.
    """

    hidden_multiple: int
    intermediate_multiple: int
    max_intermediate: int | None
    why: str


# Keyed by the DeepGEMM release whose rules apply; None is the layout itself, all that the plain torch forward needs.
SM100_LIMITS: dict[str | None, ShapeLimits] = {
    None: ShapeLimits(
        128, 128, None, "one packed scale word spans 128 columns, scale rows are permuted in blocks of 128"
    ),
    "2026-06": ShapeLimits(512, 512, None, "DeepGEMM 2026-06 wants TMA-aligned scale rows of both weights"),
    "2026-10": ShapeLimits(256, 128, None, "DeepGEMM 2026-10 tiles N by 128 over two CTAs"),
}
# The Hopper kernel's rules are the same in every wheel that runs it, so they hold whatever version is named.
_SM90 = ShapeLimits(
    512, 256, 4096, "the SM90 kernel tiles hidden by 512 and intermediate by 256, in at most 64 tiles of 64"
)
SM90_LIMITS: dict[str | None, ShapeLimits] = dict.fromkeys(SM100_LIMITS, _SM90)


@dataclass(frozen=True, slots=True)
class Format:
    """One row of the feature matrix: what a MegaMoE kernel reads.

    Attributes:
        name: Key in `FORMATS`.
        arch: `"sm100"` (SM100 and SM103, one family) or `"sm90"`.
        kernel: DeepGEMM entry point.
        mma_type: What the symmetric buffer and the kernel are told.
        weight_dtype: Storage dtype of both weights.
        values_per_element: Weight values per stored element: 2 for E2M1 (low nibble = even column), else 1.
        scale: The block scales; None where the format has none.
        has_global_scales: Whether each expert also has float32 scales of its own (NVFP4).
        recipe: The kernel's `recipe` argument; None where it takes none.
        input_dtype: What tokens are staged as: `"e4m3+ue8m0_1x32"`, `"e4m3+f32_1x128"`, `"e2m1+e4m3_1x16"` or `"bf16"`.
        shared_precisions: Precisions in which a shared expert may be fused; empty if the kernel fuses none.
        activations: Activation names that the kernel computes.
        limits: Shape limits by DeepGEMM release.
    """

    name: str
    arch: str
    kernel: str
    mma_type: str
    weight_dtype: torch.dtype
    values_per_element: int
    scale: ScaleFormat | None
    has_global_scales: bool
    recipe: tuple[int, int, int] | None
    input_dtype: str
    shared_precisions: tuple[str, ...]
    activations: tuple[str, ...]
    limits: dict[str | None, ShapeLimits]


_UE8M0_1X32 = ScaleFormat(torch.float8_e8m0fnu, (1, 32), ScaleStorage.PACKED)
_MX_ACTIVATIONS = ("swiglu", "situ")

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format(
            name="sm100_mxfp4", arch="sm100", kernel="fp8_fp4_mega_moe", mma_type="fp8xfp4",
            weight_dtype=torch.int8, values_per_element=2, scale=_UE8M0_1X32, has_global_scales=False,
            recipe=(1, 1, 32), input_dtype="e4m3+ue8m0_1x32", shared_precisions=("sm100_mxfp8",),
            activations=_MX_ACTIVATIONS, limits=SM100_LIMITS,
        ),
        Format(
            name="sm100_mxfp8", arch="sm100", kernel="fp8_fp4_mega_moe", mma_type="fp8xfp8",
            weight_dtype=torch.float8_e4m3fn, values_per_element=1, scale=_UE8M0_1X32, has_global_scales=False,
            recipe=(1, 1, 32), input_dtype="e4m3+ue8m0_1x32", shared_precisions=("sm100_mxfp8",),
            activations=_MX_ACTIVATIONS, limits=SM100_LIMITS,
        ),
        Format(
            name="sm100_bf16", arch="sm100", kernel="bf16_mega_moe", mma_type="bf16xbf16",
            weight_dtype=torch.bfloat16, values_per_element=1, scale=None, has_global_scales=False,
            recipe=None, input_dtype="bf16", shared_precisions=("sm100_bf16",),
            activations=("swiglu",), limits=SM100_LIMITS,
        ),
        Format(
            name="sm100_nvfp4", arch="sm100", kernel="nvfp4_mega_moe", mma_type="nvfp4",
            weight_dtype=torch.int8, values_per_element=2,
            scale=ScaleFormat(torch.float8_e4m3fn, (1, 16), ScaleStorage.PACKED), has_global_scales=True,
            recipe=(1, 1, 16), input_dtype="e2m1+e4m3_1x16", shared_precisions=("sm100_mxfp8", "sm100_bf16"),
            activations=("swiglu",), limits=SM100_LIMITS,
        ),
        Format(
            name="sm90_fp8", arch="sm90", kernel="fp8_mega_moe", mma_type="fp8xfp8",
            weight_dtype=torch.float8_e4m3fn, values_per_element=1,
            scale=ScaleFormat(torch.float32, (128, 128), ScaleStorage.BLOCK), has_global_scales=False,
            recipe=(128, 128, 128), input_dtype="e4m3+f32_1x128", shared_precisions=(),
            activations=("swiglu",), limits=SM90_LIMITS,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """One way in which a checkpoint stores an expert projection.

    Attributes:
        name: Key in `SOURCES`.
        weight_suffix: Last part of the weight's name.
        weight_dtypes: Storage dtypes accepted for the weight. 4-bit values stand two to a byte, even column low.
        values_per_element: Weight values per stored element.
        scale_suffix: Last part of the scale's name; None where there is none.
        scale_dtypes: Dtypes accepted for the scale. `uint8` holds UE8M0 bytes and is never converted by value.
        scale_group: Rows and columns per scale.
        global_suffixes: Per-expert float32 scalars that come along (NVFP4).
    """

    name: str
    weight_suffix: str
    weight_dtypes: tuple[torch.dtype, ...]
    values_per_element: int
    scale_suffix: str | None = None
    scale_dtypes: tuple[torch.dtype, ...] = ()
    scale_group: tuple[int, int] | None = None
    global_suffixes: tuple[str, ...] = ()


_E4M3 = (torch.float8_e4m3fn,)
_BYTES = (torch.uint8, torch.int8)
_UE8M0 = (torch.float8_e8m0fnu, torch.uint8)

SOURCES: dict[str, Source] = {
    row.name: row
    for row in (
        Source("bf16", "weight", (torch.bfloat16,), 1),
        Source("block_fp8", "weight", _E4M3, 1, "weight_scale_inv", (torch.float32,), (128, 128)),
        Source("block_fp8_ue8m0", "weight", _E4M3, 1, "scale", _UE8M0, (128, 128)),
        Source("mxfp8", "weight", _E4M3, 1, "weight_scale", _UE8M0, (1, 32)),
        Source("mxfp4_ct", "weight_packed", _BYTES, 2, "weight_scale", _UE8M0, (1, 32)),
        Source("mxfp4_dsv4", "weight", _BYTES, 2, "scale", _UE8M0, (1, 32)),
        Source(
            "nvfp4_modelopt", "weight", _BYTES, 2, "weight_scale", _E4M3, (1, 16), ("weight_scale_2", "input_scale")
        ),
    )
}


class Conversion(StrEnum):
    """What turns a checkpoint source into a kernel format."""

    COPY = "copy"  # the same bytes in another order
    EXPAND = "expand"  # the same values: coarser UE8M0 scales repeated, or widened to float32
    REQUANTISE = "requantise"  # E4M3 with float32 128x128 scales -> E4M3 with UE8M0 1x32; exact for power-of-two scales
    QUANTISE = "quantise"  # BF16 -> FP8, one rounding


CONVERSIONS: dict[tuple[str, str], Conversion] = {
    ("bf16", "sm100_bf16"): Conversion.COPY,
    ("bf16", "sm100_mxfp8"): Conversion.QUANTISE,
    ("bf16", "sm90_fp8"): Conversion.QUANTISE,
    ("block_fp8", "sm100_mxfp8"): Conversion.REQUANTISE,
    ("block_fp8", "sm90_fp8"): Conversion.COPY,
    ("block_fp8_ue8m0", "sm100_mxfp8"): Conversion.EXPAND,
    ("block_fp8_ue8m0", "sm90_fp8"): Conversion.EXPAND,
    ("mxfp8", "sm100_mxfp8"): Conversion.COPY,
    ("mxfp4_ct", "sm100_mxfp4"): Conversion.COPY,
    ("mxfp4_dsv4", "sm100_mxfp4"): Conversion.COPY,
    ("nvfp4_modelopt", "sm100_nvfp4"): Conversion.COPY,
}

# Sources that are understood and refused, whatever the format: name -> (reason, nearest supported choice).
REFUSED_SOURCES: dict[str, tuple[str, str]] = {
    "nvfp4_ct": (
        "compressed-tensors NVFP4 (E4M3 scales per 1x16, reciprocal globals) has no exact form in E2M1 with UE8M0 per "
        "1x32, so converting it would be lossy",
        "export the checkpoint as mxfp4_ct (mxfp4-pack-quantized), or with ModelOpt as nvfp4_modelopt",
    ),
    "fp8_per_tensor": (
        "one scale per tensor or per channel is not a block scale that any MegaMoE kernel reads",
        "block_fp8 (float32 128x128) or mxfp8 (UE8M0 1x32)",
    ),
    "int4": ("integer weights would have to be rounded again to E2M1 or E4M3", "mxfp4_ct"),
}


def conversion(source: str, fmt: str) -> Conversion:
    """How `source` (a key of `SOURCES`) becomes `fmt` (a key of `FORMATS`).

    Raises:
        NotImplementedError: The pair is not supported; says why and what is.
        ValueError: A name is in none of the tables.
    """
    if fmt not in FORMATS:
        raise ValueError(f"unknown MegaMoE format {fmt!r}; known: {', '.join(FORMATS)}")
    if source in REFUSED_SOURCES:
        reason, nearest = REFUSED_SOURCES[source]
        raise NotImplementedError(
            f"{source} cannot be loaded into {fmt}: {reason}; nearest supported choice: {nearest}"
        )
    if source not in SOURCES:
        known = ", ".join((*SOURCES, *REFUSED_SOURCES))
        raise ValueError(f"unknown checkpoint source {source!r}; known: {known}")
    found = CONVERSIONS.get((source, fmt))
    if found is None:
        formats = [f for s, f in CONVERSIONS if s == source]
        sources = [s for s, f in CONVERSIONS if f == fmt]
        raise NotImplementedError(
            f"{source} cannot be loaded into {fmt} without rounding its values again; "
            f"nearest supported choice: {source} into {' or '.join(formats)}, or {' or '.join(sources)} into {fmt}"
        )
    return found
