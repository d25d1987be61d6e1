"""A small but real checkpoint: sharded safetensors, `config.json`, an index, block-FP8 experts, an MTP layer.

It has what the checkpoints of the GLM and DeepSeek-V3 families have, in their names and formats; only the sizes are
small, and multiples of 128 so that the kernels' layouts hold.

    DIR/config.json                       transformers config with quantization_config
    DIR/model-00001-of-00003.safetensors  model.layers.1.mlp.experts.0.gate_proj.weight            E4M3 (I, H)
                                          model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv  f32 (I/128, H/128)
    DIR/model.safetensors.index.json      {"metadata": {"total_size": bytes}, "weight_map": {name: file}}

    directory = build_checkpoint(CheckpointSpec(), Path("~/.cache/weightsync-demo"))     # made once, then found
    for name, tensor in read_checkpoint(directory): ...
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"
BLOCK = 128

# Part of the cache key: a checkpoint written by older code is not found again.
_FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """What the checkpoint is made from; equal specs give equal bytes.

    Attributes:
        model_type: "glm4_moe" or "deepseek_v3".
        hidden: Hidden size.
        moe_intermediate: Intermediate size of one expert, and of the shared expert.
        num_layers: Decoder layers; the first is dense. The MTP layer comes on top.
        num_experts: Routed experts per MoE layer.
        num_topk: Experts per token.
        vocab: Vocabulary size.
        shard_bytes: Most bytes per safetensors file.
        seed: Of the random weights.
    """

    model_type: str = "glm4_moe"
    hidden: int = 256
    moe_intermediate: int = 256
    num_layers: int = 3
    num_experts: int = 8
    num_topk: int = 2
    vocab: int = 512
    shard_bytes: int = 2 << 20
    seed: int = 0

    @property
    def key(self) -> str:
        """Name of the cached folder: a hash of every field."""
        text = json.dumps([_FORMAT_VERSION, dataclasses.asdict(self)], sort_keys=True)
        return f"{self.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def config(self) -> Any:
        """The transformers config, `quantization_config` included.

        Raises:
            ValueError: A size is not a multiple of 128.
        """
        for field in ("hidden", "moe_intermediate"):
            if getattr(self, field) % BLOCK:
                raise ValueError(f"{field} must be a multiple of {BLOCK}, got {getattr(self, field)}")
        from transformers import AutoConfig

        attention: dict[str, dict[str, Any]] = {
            "glm4_moe": {"num_key_value_heads": 2, "head_dim": 64, "use_qk_norm": True},
            "deepseek_v3": {
                "num_key_value_heads": 4,
                "q_lora_rank": 64,
                "kv_lora_rank": 64,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 32,
                "v_head_dim": 32,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "moe_layer_freq": 1,
            },
        }
        return AutoConfig.for_model(
            self.model_type,
            architectures=[{"glm4_moe": "Glm4MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}[self.model_type]],
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            moe_intermediate_size=self.moe_intermediate,
            num_hidden_layers=self.num_layers,
            num_attention_heads=4,
            first_k_dense_replace=1,
            n_routed_experts=self.num_experts,
            n_shared_experts=1,
            num_experts_per_tok=self.num_topk,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            num_nextn_predict_layers=1,
            max_position_embeddings=512,
            initializer_range=0.05,
            dtype="bfloat16",
            quantization_config={
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": _not_quantised(self.num_layers),
            },
            **attention[self.model_type],
        )


def _not_quantised(num_layers: int) -> list[str]:
    """Modules that stay bfloat16: all but the routed and shared experts."""
    layers = [f"model.layers.{layer}" for layer in range(num_layers + 1)]
    return [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp",
        *(f"{layer}.self_attn" for layer in layers),
        *(f"{layer}.mlp.gate" for layer in layers[1:]),
        *(f"{layers[-1]}.{part}" for part in ("embed_tokens", "eh_proj", "shared_head.head")),
    ]


def build_checkpoint(spec: CheckpointSpec, workdir: Path) -> Path:
    """Writes the checkpoint of `spec` under `workdir`, or finds it there; returns its folder.

    Safe against another process that builds the same one: the folder appears whole, by a rename, or not at all.
    """
    directory = workdir.expanduser().absolute() / spec.key
    if directory.is_dir():
        return directory
    from megamoe_adapter.demo.master import MasterModel

    config = spec.config()
    master = MasterModel(config)
    master.initialise(spec.seed)
    save_checkpoint(directory, config, master.named_weights(), shard_bytes=spec.shard_bytes)
    return directory


def save_checkpoint(
    directory: Path, config: Any, weights: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int = 2 << 20
) -> None:
    """Writes a checkpoint folder in one step; if the folder exists by then, what is there stays.

    Args:
        directory: The folder to make; its parents are made too.
        config: A transformers config.
        weights: `(checkpoint name, tensor)`.
        shard_bytes: Most bytes per file; a larger tensor has a file of its own.
    """
    from safetensors.torch import save_file

    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        shards: list[dict[str, torch.Tensor]] = [{}]
        used = total = 0
        for name, tensor in weights:
            if shards[-1] and used + tensor.nbytes > shard_bytes:
                shards.append({})
                used = 0
            shards[-1][name] = tensor.contiguous()
            used += tensor.nbytes
            total += tensor.nbytes
        weight_map = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file(shard, staging / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (staging / INDEX).write_text(json.dumps(index, indent=2))
        config.save_pretrained(staging)
        staging.chmod(0o755)  # mkdtemp makes it private
        try:
            os.rename(staging, directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_checkpoint(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields `(name, tensor)` of every tensor, file by file."""
    from safetensors import safe_open

    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    for file in sorted(set(weight_map.values())):
        with safe_open(directory / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                yield name, shard.get_tensor(name)


def load_config(directory: Path) -> Any:
    """The transformers config of a checkpoint folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory)
