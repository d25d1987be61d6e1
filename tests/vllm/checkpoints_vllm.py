"""Tiny checkpoints of real architectures with random weights, made by transformers and read by vLLM.

Sizes are the smallest that vLLM's CPU kernels take: heads of 32, for multi-head latent attention a latent of 512 and
64 rotary dims. Values are large enough that two checkpoints generate different tokens.

`llama_int8` is quantised (INT8 weights, a scale per channel, activations per token): a form that vLLM runs on a CPU.
`deepseek_mtp` is `deepseek_v3` with a layer for multi-token prediction, which vLLM loads as a draft model.

    path = make_checkpoint("glm4_moe", "a", folder)      # a folder with config.json and model.safetensors
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

VOCAB = 128
MAX_TOKENS = 1 << 19  # of a Llama's request: more than any machine generates while a test waits for something else
SEEDS = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 32}
_LLAMA = {**_COMMON, **_GROUPED, "num_hidden_layers": 2, "max_position_embeddings": MAX_TOKENS}
_ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
# Tensors that vLLM keeps in float32; a push sends them so, since nothing is cast on the way.
FLOAT32 = {
    "glm4_moe": ("mlp.gate.weight", "e_score_correction_bias"),
    "deepseek_v3": ("e_score_correction_bias",),
}
# Name -> (transformers' config class, model class, settings).
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_LLAMA, "tie_word_embeddings": False},
    ),
    "llama_tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_LLAMA, "tie_word_embeddings": True},
    ),
    "llama_int8": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_LLAMA, "tie_word_embeddings": False},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**_COMMON, **_GROUPED, **_ROUTED, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_COMMON,
            **_ROUTED,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **_COMMON,
            **_GROUPED,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
}


# What compressed-tensors writes into config.json for INT8 weights per channel and activations per token.
_INT8_VALUES = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8_VALUES, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8_VALUES, "strategy": "token", "dynamic": True},
        }
    },
}


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Inside, no other process is at work on `target`."""
    with target.with_name(f"{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_checkpoint(architecture: str, which: str, folder: Path) -> Path:
    """Writes a checkpoint, once, whatever number of processes ask for it.

    Args:
        architecture: A key of `ARCHITECTURES`, or "deepseek_mtp".
        which: A key of `SEEDS`; another one is another checkpoint of the same shapes.
        folder: Parent of the folder that is made.

    Returns:
        The checkpoint's folder.
    """
    target = folder / f"{architecture}-{which}"
    with locked(target):
        if not (target / "made").exists():
            if architecture == "deepseek_mtp":
                _add_prediction_layer(make_checkpoint("deepseek_v3", which, folder), target, SEEDS[which])
            else:
                _make(architecture, SEEDS[which], target)
            (target / "made").touch()
    return target


def _make(architecture: str, seed: int, target: Path) -> None:
    import transformers

    config_class, model_class, settings = ARCHITECTURES[architecture]
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config).to(torch.bfloat16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(FLOAT32.get(architecture, ())):
            tensor.data = tensor.data.float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name:
                spread = 0.3 if tensor.dim() > 1 else 0.1
                values = torch.randn(tensor.shape, generator=generator) * spread
                tensor.copy_(values + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(target)
    settings_file = target / "config.json"
    written = json.loads(settings_file.read_text())
    if architecture == "deepseek_v3":
        written["topk_method"] = "noaux_tc"  # transformers implies it, vLLM reads it
    if architecture == "llama_int8":
        written["quantization_config"] = INT8
        _quantize(target / "model.safetensors")
    settings_file.write_text(json.dumps(written, indent=1))


def _add_prediction_layer(plain: Path, target: Path, seed: int) -> None:
    """Writes a checkpoint again with a prediction layer behind the last one: like it, and with copies of the ends."""
    from safetensors.torch import save_file

    target.mkdir(exist_ok=True)
    settings = json.loads((plain / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(settings, indent=1))
    weights = dict(read_checkpoint(plain))
    number = int(settings["num_hidden_layers"])
    last, new = f"model.layers.{number - 1}.", f"model.layers.{number}."
    generator = torch.Generator().manual_seed(100 + seed)

    def drawn(like: torch.Tensor, name: str) -> torch.Tensor:
        values = torch.randn(like.shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0)
        return values.to(like.dtype)

    added = {new + name.removeprefix(last): drawn(t, name) for name, t in weights.items() if name.startswith(last)}
    norm = weights["model.norm.weight"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{new}{name}.weight"] = drawn(norm, name)
    added[f"{new}eh_proj.weight"] = drawn(torch.empty(len(norm), 2 * len(norm), dtype=norm.dtype), "eh_proj")
    added[f"{new}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    added[f"{new}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | added, target / "model.safetensors")


def _quantize(file: Path) -> None:
    """Rewrites a file's projections as INT8 with one scale per output channel."""
    from safetensors.torch import load_file, save_file

    quantized = {}
    for name, tensor in load_file(file).items():
        if name.endswith("proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            quantized[name] = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
            quantized[f"{name}_scale"] = scale
        else:
            quantized[name] = tensor
    save_file(quantized, file)


def read_checkpoint(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a checkpoint, by name, in the file's order."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 (not a dict)
