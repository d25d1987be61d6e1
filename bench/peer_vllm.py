"""vLLM's side of the comparison, run by an interpreter that has vLLM 0.33.0.

Reload: `record_metadata_for_reloading`, `initialize_layerwise_reload` and `finalize_layerwise_reload`, vLLM's own code,
around the toy's own `load_weights`; the first load ends with vLLM's own `process_weights_after_loading`. The order of
the calls is the one of vLLM's worker and its weight-transfer engines. vLLM has no abort: after a failure its worker
marks the session as over and leaves the model as it is, and so does this file.

    .venv-vllm033/bin/python bench/peer_vllm.py > outcomes.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from rows_peer import ALL_ROWS
from torch import nn
from toys_peer import Host, Weights, run_row
from vllm import __version__ as vllm_version
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.utils import process_weights_after_loading

# What the reload code and the loader read of a model config.
MODEL_CONFIG = SimpleNamespace(dtype=torch.float32, quantization=None, word_embeddings_untied_by_checkpoint=False)


class VllmReload:
    """vLLM's layerwise reload."""

    host = Host(quant_base=QuantizeMethodBase, attention_base=AttentionLayerBase)
    refusals = (Exception,)  # it has no error classes of its own

    def cold_load(self, model: nn.Module, weights: Weights) -> None:
        record_metadata_for_reloading(model)
        model.load_weights(weights)
        process_weights_after_loading(model, MODEL_CONFIG, torch.device("cpu"))

    def start(self, model: nn.Module, declared: Weights, partial: bool, max_held_bytes: int | None) -> None:
        initialize_layerwise_reload(model)  # it cannot be told what is coming, nor what to keep

    def load(self, model: nn.Module, weights: Weights) -> None:
        model.load_weights(weights)

    def finish(self, model: nn.Module) -> None:
        finalize_layerwise_reload(model, MODEL_CONFIG)

    def abort(self, model: nn.Module) -> None:
        """There is none."""

    def held_bytes(self, model: nn.Module) -> int:
        held = {
            id(value): value.nbytes
            for module in model.modules()
            for _, bound in get_layerwise_info(module).loaded_weights
            for key, value in bound.arguments.items()
            if key != "param" and isinstance(value, torch.Tensor)
        }
        return sum(held.values())


def main() -> None:
    logging.disable(logging.WARNING)
    outcomes = {row.id: asdict(run_row(row, VllmReload())) for row in ALL_ROWS}
    json.dump({"vllm": vllm_version, "torch": torch.__version__, "outcomes": outcomes}, sys.stdout)


if __name__ == "__main__":
    main()
