"""From a checkpoint's `quantization_config` and a GPU family to the format that experts are built in.

Why: the same file may be loadable into one format, into none, or into two of which one rounds; deciding that from
shapes or dtypes as tensors arrive is too late and sometimes wrong. The decision is made from the config alone, for
the experts of one layer, and says why. What cannot be loaded without loss is refused with the nearest supported choice.

    quantization_config                                  source            SM100          SM90
    none, or these experts are ignored                   bf16              sm100_bf16     (sm90_fp8, rounds: on request)
    fp8, weight_block_size [128, 128]                    block_fp8         sm100_mxfp8    sm90_fp8
    fp8, experts in fp4 (DeepSeek-V4)                    mxfp4_dsv4        sm100_mxfp4    -
    mxfp8                                                mxfp8             sm100_mxfp8    -
    compressed-tensors, mxfp4-pack-quantized             mxfp4_ct          sm100_mxfp4    -
    compressed-tensors, nvfp4-pack-quantized             refused: lossy
    modelopt, NVFP4                                      nvfp4_modelopt    sm100_nvfp4    -

Use:

    choice = select_format(config.quantization_config, "model.layers.3.mlp.experts", arch="sm100")
    experts = MegaMoEExperts(..., fmt=choice.fmt, source=choice.source)

Names are the checkpoint's: an MTP layer is looked up under the name it has there, not the one a model gives it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megamoe_adapter.formats import CONVERSIONS, FORMATS, REFUSED_SOURCES, Conversion, conversion
from weightsync.errors import shown

GATED_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
BLOCK_SIZE = [128, 128]
ARCH_OF_MAJOR = {9: "sm90", 10: "sm100"}  # compute capability 10.0 and 10.3 are one family
COMPRESSED_FORMATS = {
    "mxfp4-pack-quantized": "mxfp4_ct",
    "nvfp4-pack-quantized": "nvfp4_ct",
    "pack-quantized": "int4",
    "int-quantized": "int4",
    "float-quantized": "fp8_per_tensor",
    "dense": "bf16",
}


@dataclass(frozen=True, slots=True)
class Selection:
    """What experts are built as.

    Attributes:
        fmt: Key of `FORMATS`.
        source: Key of `SOURCES`.
        reason: For the log.
    """

    fmt: str
    source: str
    reason: str


def select_format(
    quantization_config: Mapping[str, Any] | None,
    prefix: str,
    *,
    arch: str,
    projections: Sequence[str] = GATED_PROJECTIONS,
    expert_dtype: str | None = None,
    allow_rounding: bool = False,
) -> Selection:
    """Chooses the format of one layer's experts.

    Args:
        quantization_config: Of the checkpoint's config.json; None if it has none.
        prefix: Checkpoint path of the experts.
        arch: "sm100" or "sm90", see `arch_of`.
        projections: The checkpoint's names of the projections.
        expert_dtype: "fp4" where the model config says so (DeepSeek-V4), beside an fp8 `quantization_config`.
        allow_rounding: Whether BF16 experts may be quantised where the GPU family has no BF16 kernel.

    Raises:
        NotImplementedError: No format takes these experts without loss; says why and what would do.
        ValueError: The projections of an expert are stored in different ways, or the arch is unknown.
    """
    archs = sorted({fmt.arch for fmt in FORMATS.values()})
    if arch not in archs:
        raise ValueError(f"unknown arch {arch!r}; known: {', '.join(archs)}")
    source, why = source_of(quantization_config, prefix, projections=projections, expert_dtype=expert_dtype)
    if source in REFUSED_SOURCES:
        conversion(source, next(name for name, fmt in FORMATS.items() if fmt.arch == arch))  # raises, with the reason
    reachable = {fmt: how for (s, fmt), how in CONVERSIONS.items() if s == source and FORMATS[fmt].arch == arch}
    exact = [fmt for fmt, how in reachable.items() if how is not Conversion.QUANTISE]
    if exact:
        return Selection(exact[0], source, f"{why}; {reachable[exact[0]]} into {exact[0]}")
    if reachable and allow_rounding:
        fmt = next(iter(reachable))
        return Selection(fmt, source, f"{why}; quantised into {fmt}, one rounding, as allowed")
    others = [fmt for (s, fmt) in CONVERSIONS if s == source]
    hint = f"; allow_rounding would quantise into {next(iter(reachable))}" if reachable else ""
    raise NotImplementedError(
        f"{prefix}: {source} experts ({why}) have no exact MegaMoE format on {arch.upper()}; "
        f"formats for them: {', '.join(others)}{hint}"
    )


def source_of(
    quantization_config: Mapping[str, Any] | None,
    prefix: str,
    *,
    projections: Sequence[str] = GATED_PROJECTIONS,
    expert_dtype: str | None = None,
) -> tuple[str, str]:
    """How a checkpoint stores the experts of one layer: a key of `SOURCES` or `REFUSED_SOURCES`, and where that is
    said.

    Raises:
        NotImplementedError: The config names a method that is not known here.
        ValueError: The projections differ.
    """
    if not quantization_config:
        return "bf16", "no quantization_config"
    method = str(quantization_config.get("quant_method", "")).lower()
    names = [f"{prefix}.0.{projection}" for projection in projections]
    found = {name: _source_of_linear(quantization_config, method, name, expert_dtype) for name in names}
    if len(set(found.values())) > 1:
        parts = [f"{name}: {source}" for name, source in found.items()]
        raise ValueError(f"all MoE projections of a layer must be stored alike; got {shown(parts)}")
    source = next(iter(found.values()))
    return source, f"quantization_config is {method}" if source != "bf16" else f"{method} leaves these experts out"


def arch_of(device: torch.device) -> str:
    """The GPU family of a device: "sm90", or "sm100" for SM100 and SM103.

    Raises:
        NotImplementedError: No MegaMoE kernel exists for the device.
    """
    if device.type != "cuda":
        raise NotImplementedError(
            f"MegaMoE kernels run on SM90 and SM100 GPUs, not on {device}; pass the arch to lay out for"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major not in ARCH_OF_MAJOR:
        raise NotImplementedError(f"MegaMoE kernels run on SM90 and SM100 GPUs, this one is SM{major}{minor}")
    return ARCH_OF_MAJOR[major]


def _source_of_linear(config: Mapping[str, Any], method: str, name: str, expert_dtype: str | None) -> str:
    if method == "compressed-tensors":
        return _compressed_source(config, name)
    if _is_ignored(name, config.get("modules_to_not_convert") or config.get("exclude_modules") or config.get("ignore")):
        return "bf16"
    if method == "fp8":
        if expert_dtype == "fp4":
            return "mxfp4_dsv4"
        block = config.get("weight_block_size")
        if block is None:
            return "fp8_per_tensor"
        if list(block) != BLOCK_SIZE:
            raise NotImplementedError(
                f"{name}: FP8 blocks of {list(block)} have no MegaMoE format; requantise to {BLOCK_SIZE}"
            )
        return "block_fp8"
    if method == "mxfp8":
        return "mxfp8"
    if method.startswith("modelopt"):
        algorithm = str(config.get("quant_algo", config.get("quantization", {}).get("quant_algo", ""))).upper()
        if algorithm == "NVFP4":
            return "nvfp4_modelopt"
        raise NotImplementedError(f"{name}: ModelOpt quant_algo {algorithm!r} has no MegaMoE format; NVFP4 has")
    raise NotImplementedError(
        f"{name}: quant_method {method!r} is not known; supported: fp8 with 128x128 blocks, mxfp8, compressed-tensors "
        "mxfp4-pack-quantized, modelopt NVFP4, or none"
    )


def _compressed_source(config: Mapping[str, Any], name: str) -> str:
    """compressed-tensors: an ignored layer is BF16; a group's own format overrides the config's."""
    if _is_ignored(name, config.get("ignore")):
        return "bf16"
    storage = config.get("format")
    for group in config.get("config_groups", {}).values():
        if any(_matches(name, target) for target in group.get("targets", ())):
            storage = group.get("format") or storage
            break
    source = COMPRESSED_FORMATS.get(str(storage))
    if source is None:
        raise NotImplementedError(
            f"{name}: compressed-tensors format {storage!r} has no MegaMoE format; supported: mxfp4-pack-quantized"
        )
    return source


def _matches(name: str, target: str) -> bool:
    """Whether a compressed-tensors target covers a layer: a class name, a name, or "re:" and a pattern."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == "Linear" or name == target or name.startswith(f"{target}.")


def _is_ignored(name: str, patterns: Sequence[str] | None) -> bool:
    """Whether a layer is left unquantised: a path, a part of one, a glob or "re:" and a pattern."""
    for pattern in patterns or ():
        if pattern.startswith("re:"):
            if re.match(pattern.removeprefix("re:"), name):
                return True
            continue
        glob = ".*".join(re.escape(part) for part in pattern.split("*"))
        if re.search(rf"(^|\.){glob}($|\.)", name):
            return True
    return False
