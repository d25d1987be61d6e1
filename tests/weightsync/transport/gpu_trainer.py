"""A trainer process on a GPU that does what it is told, one line at a time; not a test module.

python gpu_trainer.py URL TRANSPORT DEVICE
push VERSION | step SEED | race SEED VERSION | scatter | memory | close | stall VERSION
"""

import json
import sys
import time

import torch
from torch import nn

from weightsync.trainer.client import TrainerClient
from weightsync.trainer.sources import ModuleSource, WeightSource

SHAPES = {"a": (512, 300), "b": (7,), "c": (1000, 1000), "d": (3, 5, 11)}
DTYPES = {"a": torch.float32, "b": torch.uint8, "c": torch.bfloat16, "d": torch.float8_e4m3fn}


def values(seed, device):
    """The same tensors in every process."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 50).to(DTYPES[name]).to(device)
        for name, shape in SHAPES.items()
    }


class GpuToy(nn.Module):
    """Four tensors of four dtypes, none of a round size."""

    supports_direct_reload = True

    def __init__(self, seed, device):
        super().__init__()
        for name, tensor in values(seed, device).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights):
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            mine[name].data.copy_(tensor)


class Stalling(WeightSource):
    """Waits for ever in the middle."""

    def __init__(self, module):
        self._inner = ModuleSource(module)

    @property
    def metadata(self):
        return self._inner.metadata

    def iter_full(self):
        for number, pair in enumerate(self._inner.iter_full()):
            if number == 2:
                print("mid", flush=True)
                time.sleep(60)
            yield pair


class Trainer:
    def __init__(self, url, transport, device):
        self.options = {"transport": transport, "deadline_seconds": 5.0, "bucket_bytes": 1 << 18}
        self.url, self.device = url, torch.device(device)
        torch.cuda.set_device(self.device)
        self.module = GpuToy(1, device)
        self.client = TrainerClient(self.module, url, **self.options)

    def step(self, seed):
        for name, tensor in values(int(seed), self.device).items():
            getattr(self.module, name).data.copy_(tensor)
        return {}

    def push(self, version):
        report = self.client.push(int(version))
        return {"transport": report.transport, "reason": report.reason, "copied": report.copied_bytes}

    def race(self, seed, version):
        """New values behind a long queue of work on a stream of its own, other values right after the push."""
        new, later = values(int(seed), self.device), values(99, self.device)
        work = torch.randn(4096, 4096, device=self.device)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                work = (work @ work).clamp(-1, 1)
            for name, tensor in new.items():
                getattr(self.module, name).data.copy_(tensor)
        answer = self.push(version)
        for name, tensor in later.items():
            getattr(self.module, name).data.copy_(tensor)
        torch.cuda.synchronize()
        return answer

    def scatter(self):
        """Puts one tensor into other memory, and gives its old memory back to the driver."""
        self.module.c.data = self.module.c.data.clone().add_(1)
        filler = torch.empty(64 << 20, dtype=torch.uint8, device=self.device)
        torch.cuda.empty_cache()
        del filler
        return {}

    def stall(self, version):
        TrainerClient(Stalling(self.module), self.url, **self.options).push(int(version))
        return {}

    def memory(self):
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        return {"allocated": torch.cuda.memory_allocated(), "free": free}

    def close(self):
        self.client.close()
        return {}


if __name__ == "__main__":
    trainer = Trainer(*sys.argv[1:])
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        try:
            answer = getattr(trainer, verb)(*arguments)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)
