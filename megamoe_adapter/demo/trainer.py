"""The trainer process of the demo: trains, saves what it has, pushes it.

python -m megamoe_adapter.demo.trainer        # then one request per line, see `Trainer`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

import weightsync
from megamoe_adapter.demo.checkpoint import load_config, read_checkpoint, save_checkpoint
from megamoe_adapter.demo.child import ParentLink
from megamoe_adapter.demo.master import MasterModel, Part
from weightsync.trainer.sources import TensorSource

SCALE_SUFFIX = "_scale_inv"
_DEADLINE_SECONDS = 30.0


class Trainer:
    """What the trainer process does.

    Args:
        emit: Sends an event to whoever waits for the answer.
    """

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._client: weightsync.TrainerClient | None = None
        self._joined: tuple[str, ...] = ()

    def requests(self) -> dict[str, Callable[..., object]]:
        """Its requests by name."""
        return {"load": self.load, "train": self.train, "push": self.push}

    def load(self, checkpoint: str) -> None:
        """Takes a checkpoint as master weights."""
        directory = Path(checkpoint)
        self._config = load_config(directory)
        self._master = MasterModel(self._config)
        self._master.load(read_checkpoint(directory))
        # What is on the wire: the dicts stay, their tensors are replaced after each training.
        self._wire: dict[Part, dict[str, torch.Tensor]] = {"model": {}, "draft": {}}
        for part, tensors in self._wire.items():
            tensors.update(self._master.named_weights(part))

    def train(self, num_steps: int, part: Part, directory: str) -> dict[str, object]:
        """Trains one part, quantises its experts anew, saves the whole checkpoint; returns its size and the losses."""
        losses = self._master.train_steps(num_steps, part)
        self._wire[part].update(self._master.named_weights(part))
        weights = {name: tensor for tensors in self._wire.values() for name, tensor in tensors.items()}
        save_checkpoint(Path(directory), self._config, weights.items())
        return {
            "losses": losses,
            "tensors": len(weights),
            "bytes": sum(tensor.nbytes for tensor in weights.values()),
        }

    def push(
        self, url: str, mode: str, transport: str, part: Part, version: int, split: list[str]
    ) -> dict[str, object]:
        """Pushes one part, in one update per entry of `split` ("all", "weights", "scales"); returns seconds and bytes.

        The connection of the last push is used again if nothing but version and split differ.
        """
        client = self._join(url, mode, transport, part)
        names = list(self._wire[part])
        chosen = {
            "all": None,
            "weights": [name for name in names if not name.endswith(SCALE_SUFFIX)],
            "scales": [name for name in names if name.endswith(SCALE_SUFFIX)],
        }
        begin = time.perf_counter()
        client.start(version)
        for update in split:
            client.update(chosen[update])
        report = client.finish()
        return {"seconds": time.perf_counter() - begin, "bytes": report.bytes}

    def close(self) -> None:
        """Leaves the engine, if it had joined one."""
        if self._client is not None:
            self._client.close()
        self._client, self._joined = None, ()

    def _join(self, url: str, mode: str, transport: str, part: Part) -> weightsync.TrainerClient:
        if self._client is None or self._joined != (url, mode, transport, part):
            self.close()
            self._client = weightsync.TrainerClient(
                TensorSource(self._wire[part]),
                url,
                transport=transport,
                mode=mode,
                target=part,
                deadline_seconds=_DEADLINE_SECONDS,
                progress=lambda done, total: self._emit(sent_bytes=done, total_bytes=total),
            )
            self._joined = (url, mode, transport, part)
        return self._client


def main() -> None:
    """Answers requests until stdin ends."""
    link = ParentLink()
    trainer = Trainer(link.emit)
    try:
        link.answer_requests(trainer.requests())
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
