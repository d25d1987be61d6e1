"""A trainer process pushes new weights into a live engine process, over shared memory.

    python examples/two_processes.py

This file is both: run with the argument "engine" it is the engine.

Prints:
    version 1 is live: 4 tensors, 576 bytes
    version 2 is live: 4 tensors, 576 bytes
    refused, missing: 2.bias
    the engine serves version 2, its answer is the trainer's: True
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from torch import nn

import weightsync


class Policy(nn.Sequential):
    """What both sides build; only the engine needs `load_weights`."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


OBSERVATION = torch.linspace(-1, 1, 8)


def serve_policy() -> None:
    """The engine: serves until its stdin ends, then says what the policy answers."""
    from weightsync.worker.server import BackgroundServer

    policy = Policy(seed=0)
    receiver = weightsync.Receiver(policy)
    with BackgroundServer(receiver) as server:
        print(server.url, flush=True)
        sys.stdin.read()
        with receiver.serving(), torch.no_grad():  # never sees half an update
            print(json.dumps([receiver.version, *policy(OBSERVATION).tolist()]))
    receiver.close()


def main() -> None:
    command = [sys.executable, __file__, "engine"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        url = engine.stdout.readline().strip()
        policy = Policy(seed=1)
        client = weightsync.TrainerClient(policy, url, transport="shm", mode="direct", deadline_seconds=20)
        for version in (1, 2):
            with torch.no_grad():  # stands for an optimiser step
                for parameter in policy.parameters():
                    parameter.mul_(0.5)
            report = client.push(version)
            print(f"version {report.version} is live: {report.tensors} tensors, {report.bytes} bytes")
        client.close()

        incomplete = {name: tensor for name, tensor in policy.state_dict().items() if name != "2.bias"}
        try:
            weightsync.TrainerClient(weightsync.TensorSource(incomplete), url, transport="shm").push(version=3)
        except weightsync.CoverageError as error:
            print("refused, missing:", *error.missing)

        answer, _ = engine.communicate(timeout=20)
        version, *values = json.loads(answer)
        with torch.no_grad():
            print(
                f"the engine serves version {version}, its answer is the trainer's:",
                values == policy(OBSERVATION).tolist(),
            )


if __name__ == "__main__":
    serve_policy() if sys.argv[1:] == ["engine"] else main()
