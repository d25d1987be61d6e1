"""vLLM's side of `reload_cpu.py`: its layerwise reload of the synthetic MoE, timed in its own interpreter.

.venv-vllm033/bin/python bench/peer_reload_cpu.py "small tensors" 5 > result.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from synthetic_moe import CASES, AllocatedBytes, SyntheticMoE, checkpoint, expected_equal, seconds_of
from vllm import __version__ as vllm_version
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

MODEL_CONFIG = SimpleNamespace(dtype=torch.float32, quantization=None)


def main() -> None:
    """Times the reload and prints one JSON object."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    shape, repeats = CASES[sys.argv[1]], int(sys.argv[2])
    model = SyntheticMoE(shape)
    record_metadata_for_reloading(model)
    model.load_weights(checkpoint(shape, seed=0))
    weights = checkpoint(shape, seed=1)

    @torch.no_grad()
    def reload() -> None:
        initialize_layerwise_reload(model)
        model.load_weights(weights)
        finalize_layerwise_reload(model, MODEL_CONFIG)

    seconds = seconds_of(reload, repeats)
    expected_equal(model, weights, shape)
    with AllocatedBytes().ignore([*model.parameters(), *(tensor for _, tensor in weights)]) as allocated:
        reload()
    json.dump(
        {"seconds": seconds, "extra_bytes": allocated.peak, "vllm": vllm_version, "torch": torch.__version__},
        sys.stdout,
    )


if __name__ == "__main__":
    main()
