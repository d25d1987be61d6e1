"""Checkpoint names of expert tensors, and the parameter, shard and expert that each belongs to.

Why: a model with 58 layers of 256 experts has 90,000 expert names; looking each up in a table of 768 rows costs a
minute per push. A name is parsed instead, in constant time. The table that vLLM's generic model loops expect is made
from the same rules.

    mlp.experts.7.gate_proj.weight_scale_inv   ->  w13_weight_scale_inv         shard "w1"   expert 7
    ffn.experts.7.w2.scale                     ->  w2_weight_scale              shard "w2"   expert 7
    mlp.experts.gate_up_proj                   ->  w13_weight                   shard "w13"  ALL_EXPERTS  (fused, 3-D)
    mlp.shared_experts.up_proj.weight          ->  shared_l1_weight             shard "w3"   ALL_EXPERTS

Use:

    names = ExpertNames("block_fp8")
    target = names.locate("model.layers.3.mlp.experts.7.gate_proj.weight_scale_inv")
    target.module, target.param       # "model.layers.3.mlp.experts", "w13_weight_scale_inv"
    target.shard_id, target.expert_id  # "w1", 7
    names.locate("model.layers.3.mlp.gate.weight")                    # None: not an expert tensor
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from megamoe_adapter.formats import SOURCES, Source

ALL_EXPERTS = -1
SHARDS = ("w1", "w2", "w3")
FUSED_SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}
# DeepSeek and GLM say gate/up/down, DeepSeek-V4 and Kimi say w1/w3/w2; both mean the same everywhere.
PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "w1": "w1", "w2": "w2", "w3": "w3"}
FUSED_PROJECTIONS = {"gate_up_proj": "w13", "down_proj": "w2"}

_ROUTED = re.compile(r"(?P<module>.*\bexperts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.(?P<suffix>\w+)")
_FUSED = re.compile(r"(?P<module>.*\bexperts)\.(?P<projection>gate_up_proj|down_proj)[._]?(?P<suffix>\w*)")
_SHARED = re.compile(r"(?P<module>.*\bshared_experts?)\.(?P<projection>\w+)\.(?P<suffix>\w+)")
# Names that only fused checkpoints use for a scale (transformers' FP8Experts).
_FUSED_SCALES = ("scale_inv", "scale", "weight_scale_inv", "weight_scale")


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor belongs.

    Attributes:
        module: Path of the `MegaMoEExperts` in the model.
        param: Name of the parameter in that module.
        shard_id: "w1", "w2", "w3", or "w13" for a tensor that holds gate and up.
        expert_id: Logical expert, or `ALL_EXPERTS` for a fused or a shared-expert tensor.
    """

    module: str
    param: str
    shard_id: str
    expert_id: int

    @property
    def name(self) -> str:
        """The mapped name that a `weight_loader` is given."""
        return f"{self.module}.{self.param}"


def parameter_kind(source: Source, suffix: str, *, raw_scales: bool) -> str | None:
    """The part of a parameter's name after "w13_" for a checkpoint suffix.

    Args:
        source: How the checkpoint stores a projection.
        suffix: Last part of the checkpoint name, or of the mapped name.
        raw_scales: Whether block scales are kept as float32 (`weight_scale_inv`) rather than packed (`weight_scale`).

    Returns:
        "weight", "weight_scale", "weight_scale_inv", one of the global names, or None for a suffix this source does
        not have.
    """
    scale = "weight_scale_inv" if raw_scales else "weight_scale"
    if suffix in (source.weight_suffix, "weight"):
        return "weight"
    if source.scale_suffix is not None and suffix in (source.scale_suffix, scale):
        return scale
    return suffix if suffix in source.global_suffixes else None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The naming rules of one checkpoint.

    Attributes:
        source: Key of `SOURCES` for the routed experts.
        raw_scales: Whether their scales stay float32, see `parameter_kind`.
        shared_source: Key of `SOURCES` for a fused shared expert; None if the shared expert is not fused, and its
            names are then somebody else's.
        shared_raw_scales: As `raw_scales`, for the shared expert.
    """

    source: str
    raw_scales: bool = False
    shared_source: str | None = None
    shared_raw_scales: bool = False
    _routed: Source = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_routed", SOURCES[self.source])

    def locate(self, name: str) -> Target | None:
        """The target of a checkpoint name.

        Returns:
            None for a name that is not of these experts.

        Raises:
            ValueError: An expert's name with a projection or suffix that its source does not have, or with another
                spelling of its index ("01"): loading it nowhere would be silent.
        """
        if (match := _SHARED.fullmatch(name)) is not None:
            return self._locate_shared(name, match)
        if (match := _ROUTED.fullmatch(name)) is not None:
            shard = PROJECTIONS.get(match["projection"])
            kind = parameter_kind(self._routed, match["suffix"], raw_scales=self.raw_scales)
            if shard is None or kind is None:
                raise ValueError(f"unexpected expert tensor {name}: {self._expected()}")
            return Target(match["module"], f"{_routed_prefix(shard)}_{kind}", shard, _expert_index(name, match))
        if (match := _FUSED.fullmatch(name)) is not None:
            suffix = match["suffix"] or "weight"
            if suffix in _FUSED_SCALES and self._routed.scale_suffix is not None:
                suffix = self._routed.scale_suffix
            kind = parameter_kind(self._routed, suffix, raw_scales=self.raw_scales)
            if kind is None:
                raise ValueError(f"unexpected fused expert tensor {name}: {self._expected()}")
            shard = FUSED_PROJECTIONS[match["projection"]]
            return Target(match["module"], f"{shard}_{kind}", shard, ALL_EXPERTS)
        return None

    def module_of(self, name: str) -> str | None:
        """Path of the experts that a checkpoint name is of, whatever its source; None if it is not an expert's."""
        if (match := _SHARED.fullmatch(name)) is not None:
            return None if self.shared_source is None else _experts_beside(match["module"])
        match = _ROUTED.fullmatch(name) or _FUSED.fullmatch(name)
        return None if match is None else match["module"]

    def mapping(
        self,
        num_experts: int,
        *,
        module: str = "experts",
        projections: Sequence[str] = ("gate_proj", "down_proj", "up_proj"),
    ) -> list[tuple[str, str, int, str]]:
        """vLLM's table for the routed experts: (parameter prefix, name fragment, expert, shard), first match wins.

        A model's loop does `name.replace(fragment, prefix)`. Suffixes that differ from the parameter's own get a row of
        their own, before the general one.

        Args:
            num_experts: Logical experts.
            module: What the experts are called inside their block.
            projections: The checkpoint's names of the three projections, each a key of `PROJECTIONS`.
        """
        special = [self._routed.weight_suffix, *([self._routed.scale_suffix] if self._routed.scale_suffix else [])]
        rows: list[tuple[str, str, int, str]] = []
        for expert in range(num_experts):
            for projection in projections:
                shard = PROJECTIONS[projection]
                fragment, prefix = f"{module}.{expert}.{projection}.", f"{module}.{_routed_prefix(shard)}_"
                for suffix in special:
                    kind = parameter_kind(self._routed, suffix, raw_scales=self.raw_scales)
                    if kind is not None and kind != suffix:
                        rows.append((prefix + kind, fragment + suffix, expert, shard))
                rows.append((prefix, fragment, expert, shard))
        return rows

    def _locate_shared(self, name: str, match: re.Match[str]) -> Target | None:
        if self.shared_source is None:
            return None
        shard = {**PROJECTIONS, "gate_up_proj": "w13"}.get(match["projection"])
        kind = parameter_kind(SOURCES[self.shared_source], match["suffix"], raw_scales=self.shared_raw_scales)
        if shard is None or kind is None:
            raise ValueError(f"unexpected shared-expert tensor {name}: the fused shared expert is {self.shared_source}")
        module = _experts_beside(match["module"])
        return Target(module, f"shared_{'l2' if shard == 'w2' else 'l1'}_{kind}", shard, ALL_EXPERTS)

    def _expected(self) -> str:
        suffixes = (self._routed.weight_suffix, self._routed.scale_suffix, *self._routed.global_suffixes)
        return (
            f"source {self.source} has projections {', '.join(PROJECTIONS)} "
            f"with suffixes {', '.join(suffix for suffix in suffixes if suffix)}"
        )


def is_same_path(path: str, other: str) -> bool:
    """Whether two module paths agree as far as both reach: one is the other, or ends with it after a dot."""
    return f".{path}".endswith(f".{other}") or f".{other}".endswith(f".{path}")


def _expert_index(name: str, match: re.Match[str]) -> int:
    """The index as a number, if it is spelt as checkpoints do; two names for one expert would be loaded twice."""
    index = int(match["expert"])
    if str(index) != match["expert"]:
        raise ValueError(f"unexpected expert tensor {name}: the expert index {match['expert']!r} must read '{index}'")
    return index


def _experts_beside(shared: str) -> str:
    return re.sub(r"\bshared_experts?$", "experts", shared)


def _routed_prefix(shard: str) -> str:
    return "w2" if shard == "w2" else "w13"
