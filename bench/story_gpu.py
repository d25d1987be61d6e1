"""The whole story on one GPU: a captured CUDA graph of a fused MoE layer, and new weights pushed underneath it.

The engine holds a layer of block-FP8 experts in Hopper MegaMoE layout, runs the fused kernel, and captures a CUDA graph
of it. A trainer process on the same GPU pushes new weights by zero-copy IPC: direct and layerwise, three pushes in a
row, and weights and scales in separate updates in both orders. After each push the *same* graph is replayed. It must
give, bit for bit, what a cold load of the same checkpoint gives; no parameter or buffer may differ or have moved.

The fused kernel itself is held against the plain torch reference without activation rounding (relative L2 below 6%),
and a layer whose gate and up rows are not interleaved must fail that same check.

    python bench/story_gpu.py                    # the small shape and GLM-5.3-Flash's layer
    python bench/story_gpu.py --record           # and a line per shape in bench/results/story_gpu.jsonl

Needs a Hopper GPU, sgl-deep-gemm and nvcc; see megamoe_adapter/kernel.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # on a GPU machine the packages may not be installed

from bench.expert_model import ExpertModel, Sizes, checkpoint
from bench.push_gpu import Trainer, median
from megamoe_adapter.kernel import release_buffers
from weightsync import Receiver, fingerprint
from weightsync.worker.server import BackgroundServer

RESULTS = Path(__file__).parent / "results" / "story_gpu.jsonl"
DEVICE = "cuda:0"
NUM_TOKENS = 200
MAX_RELATIVE_L2 = 0.06
SHAPES = {
    "small": Sizes(num_layers=1, num_experts=16, hidden=2048, intermediate=1024, top_k=4),
    "GLM-5.3-Flash layer": Sizes(num_layers=1, num_experts=288, hidden=4096, intermediate=2048, top_k=8),
}


class Tokens:
    """Static inputs of the layer: what a captured graph reads."""

    def __init__(self, sizes: Sizes) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(7)
        self.x = torch.randn(NUM_TOKENS, sizes.hidden, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        scores = torch.rand(NUM_TOKENS, sizes.num_experts, device=DEVICE, generator=generator)
        weights, self.ids = scores.topk(sizes.top_k, dim=-1)
        self.weights = weights / weights.sum(-1, keepdim=True)

    def run(self, model: ExpertModel) -> torch.Tensor:
        """The layer's experts over these tokens."""
        return model.layers[0].experts(self.x, self.ids, self.weights)


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 distance."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def reference(model: ExpertModel, tokens: Tokens) -> torch.Tensor:
    """The same layer in plain torch, activations not rounded."""
    experts = model.layers[0].experts
    experts.backend, experts.precision = "reference", "exact"
    try:
        return tokens.run(model)
    finally:
        experts.backend, experts.precision = "kernel", "kernel"


def kernel_errors(model: ExpertModel, tokens: Tokens, sizes: Sizes) -> tuple[float, float]:
    """Relative L2 of the fused kernel, right, and with w13 in checkpoint order instead of interleaved."""
    want = reference(model, tokens)
    right = relative_l2(tokens.run(model), want)
    w13 = model.layers[0].experts.w13_weight.data.view(torch.uint8)
    kept = w13.clone()
    pairs = kept.view(sizes.num_experts, sizes.intermediate // 8, 2, 8, sizes.hidden)
    w13.copy_(pairs.transpose(1, 2).reshape(w13.shape))
    wrong = relative_l2(tokens.run(model), want)
    w13.copy_(kept)
    return right, wrong


def story(name: str, sizes: Sizes) -> dict[str, object]:
    """One shape, from cold load to the last push; SystemExit says what does not hold."""
    tokens = Tokens(sizes)
    model = ExpertModel(sizes, "sm90_fp8", DEVICE)
    model.layers[0].experts.backend = "kernel"
    model.cold_load(checkpoint(sizes, 1, DEVICE))
    tokens.run(model)  # compiles, allocates the symmetric buffer
    right, wrong = kernel_errors(model, tokens, sizes)
    print(f"{name}: fused kernel against reference: relative L2 {right:.4f}; wrong layout {wrong:.4f}", flush=True)
    if not right < MAX_RELATIVE_L2 < wrong:
        raise SystemExit(f"{name}: the fused kernel's error {right:.4f} (wrong layout {wrong:.4f}) is out of bounds")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tokens.run(model)
    before = fingerprint(model)
    link = Trainer(DEVICE, sizes)
    num_bytes, num_tensors = link.ask("weights", 1)
    cold = ExpertModel(sizes, "sm90_fp8", DEVICE)
    cold.layers[0].experts.backend = "kernel"
    pushes, seconds, version = [], {"direct": [], "layerwise": []}, 0
    with BackgroundServer(Receiver(model)) as server:
        for mode in ("direct", "layerwise"):
            link.ask("connect", {"url": server.url, "transport": "ipc", "mode": mode, "deadline_seconds": 120.0})
            for kind in ("push", "push", "push", "scales first", "weights first"):
                version += 1
                seed = 100 + version
                link.ask("weights", seed)
                if kind == "push":
                    seconds[mode].append(link.ask("push", version)[0])
                else:
                    link.ask("split push", (version, kind == "scales first"))
                graph.replay()
                torch.cuda.synchronize()
                cold.cold_load(checkpoint(sizes, seed, DEVICE))
                want = tokens.run(cold)
                now = fingerprint(model)
                pushes.append(
                    {
                        "mode": mode,
                        "kind": kind,
                        "bitwise": torch.equal(y.view(torch.int16), want.view(torch.int16)),
                        "differing": len(now.diff(fingerprint(cold)).differing),
                        "moved": len(now.diff(before).moved),
                    }
                )
                print(f"{name}: {pushes[-1]}", flush=True)
            link.ask("close")
    link.stop()
    bad = [push for push in pushes if not push["bitwise"] or push["differing"] or push["moved"]]
    if bad:
        raise SystemExit(f"{name}: {bad}")
    return {
        "case": name,
        "bytes": num_bytes,
        "tensors": num_tensors,
        "relative_l2": right,
        "relative_l2_wrong_layout": wrong,
        "direct_seconds": median(seconds["direct"]),
        "layerwise_seconds": median(seconds["layerwise"]),
        "pushes": pushes,
        "hardware": torch.cuda.get_device_name(DEVICE),
        "date": datetime.date.today().isoformat(),
        "command": "python bench/story_gpu.py " + " ".join(sys.argv[1:]),
    }


def main() -> None:
    """Runs the shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a Hopper GPU; scripts/demo tells the same story on a CPU")
    torch.cuda.set_device(DEVICE)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device(DEVICE))
    results = []
    for name in args.shapes:
        results.append(story(name, SHAPES[name]))
        torch.cuda.empty_cache()
    if args.record:
        with RESULTS.open("a") as out:
            out.writelines(json.dumps(result) + "\n" for result in results)
    release_buffers()
    dist.destroy_process_group()
    print("the same graph gave the cold load's bits after every push", flush=True)


if __name__ == "__main__":
    main()
