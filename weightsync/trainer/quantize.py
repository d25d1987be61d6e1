"""Quantises on the trainer's side, as tensors leave: BF16 weights to block FP8.

Block FP8 is what DeepSeek-V3 checkpoints hold: E4M3 with one float32 scale per 128x128 block, under the weight's name
with `_scale_inv` behind it. Only one tensor is held at a time, so a trainer needs no second copy of its weights.

    source = BlockFP8Source(ModuleSource(model), select=lambda name: ".experts." in name)
    TrainerClient(source, url).push()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from weightsync.errors import LayoutError
from weightsync.manifest import ParamMeta
from weightsync.trainer.sources import WeightSource

BLOCK = 128
E4M3_MAX = 448.0
SCALE_SUFFIX = "_scale_inv"


def quantize_block_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix to block FP8.

    Args:
        x: (N, K), bfloat16, float16 or float32, finite; the last blocks may be partial.

    Returns:
        float8_e4m3fn (N, K), and float32 (ceil(N / 128), ceil(K / 128)): `max |x| / 448` of each block, at least
        2**-126 so that it can divide. Neither aliases the input.

    Raises:
        LayoutError: No such matrix, or a value is not finite.
    """
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise LayoutError(f"block FP8 takes a float matrix, got {x.dtype} {list(x.shape)}")
    rows, cols = x.shape
    real = x.detach().float()
    if not bool(torch.isfinite(real).all()):
        raise LayoutError("a weight holds values that are not finite; block FP8 cannot represent them")
    padded = torch.nn.functional.pad(real, (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = (blocks.abs().amax((1, 3)) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    weight = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return weight.view(padded.shape)[:rows, :cols].contiguous(), scale


class BlockFP8Source(WeightSource):
    """Another source with some of its matrices quantised.

    Args:
        source: Where the weights come from.
        select: Whether to quantise a name; its tensor must be a matrix.
    """

    def __init__(self, source: WeightSource, select: Callable[[str], bool]) -> None:
        self._source, self._select = source, select
        self._seen: list[ParamMeta] | None = None
        self._metadata: list[ParamMeta] = []

    @property
    def metadata(self) -> list[ParamMeta]:
        """See `WeightSource.metadata`: a quantised weight is followed by its scale."""
        inner = self._source.metadata
        if inner is not self._seen:
            metadata = []
            for meta in inner:
                if not self._select(meta.name):
                    metadata.append(meta)
                    continue
                if len(meta.shape) != 2:
                    raise LayoutError(
                        f"{meta.name}: block FP8 takes a matrix, got {list(meta.shape)}", names=[meta.name]
                    )
                scale_shape = tuple(-(-size // BLOCK) for size in meta.shape)
                metadata.append(ParamMeta(meta.name, torch.float8_e4m3fn, meta.shape))
                metadata.append(ParamMeta(meta.name + SCALE_SUFFIX, torch.float32, scale_shape))
            self._seen = inner
            if metadata != self._metadata:
                self._metadata = metadata
        return self._metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.iter_full`."""
        for name, tensor in self._source.iter_full():
            if not self._select(name):
                yield name, tensor
                continue
            try:
                weight, scale = quantize_block_fp8(tensor)
            except LayoutError as error:
                raise LayoutError(f"{name}: {error}", names=[name]) from error
            yield name, weight
            yield name + SCALE_SUFFIX, scale
