"""Trainers that get stuck in the middle of a push, and a process of one, which is killed.

client = half_pushed(source, url, names=None)           # open, and moved bytes; nothing is finished
with killed_in_mid_push(checkpoint, url, "direct"):     # inside, a trainer process has sent half of the tensors

python trainer_vllm.py CHECKPOINT URL MODE      # opens a push, sends half, says so, and waits to be killed
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints_vllm import read_checkpoint

from weightsync.errors import WeightSyncError
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.sources import TensorSource

# Short, since tests wait for their end. Where the machine is too slow to open a push within one, the next is tried.
DEADLINES = (10.0, 30.0, 90.0)


def half_pushed(
    source: TensorSource,
    urls: str | list[str],
    names: list[str] | None = None,
    version: int | None = None,
    **options: Any,
) -> TrainerClient:
    """A client whose push has begun and has moved bytes.

    Args:
        source: What it pushes.
        urls: The engines.
        names: The tensors that it has sent; None means all.
        version: That it pushes; None means the next one.
        **options: Of the client.

    Raises:
        WeightSyncError: It could not, with the longest of `DEADLINES` neither.
    """
    for deadline in DEADLINES:
        client = TrainerClient(source, urls, deadline_seconds=deadline, **options)
        try:
            client.start(version=version)
            client.update(names)
        except WeightSyncError:
            client.close()
            if deadline == DEADLINES[-1]:
                raise
        else:
            return client
    raise AssertionError("no deadline is left")


@contextlib.contextmanager
def killed_in_mid_push(checkpoint: Path, url: str, mode: str) -> Iterator[None]:
    """Inside, a trainer process has sent half of a checkpoint; afterwards it is dead."""
    command = [sys.executable, __file__, str(checkpoint), url, mode]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = trainer.stdout.readline().strip()
        if line != "half sent":
            raise RuntimeError(f"the trainer said {line!r} and ended:\n{trainer.communicate(timeout=60)[1][-4000:]}")
        yield
    finally:
        trainer.kill()
        trainer.wait(60)


def main() -> None:
    """Sends every other tensor."""
    checkpoint, url, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    weights = dict(read_checkpoint(checkpoint))
    client = half_pushed(TensorSource(weights), url, list(weights)[::2], mode=mode)
    print("half sent", flush=True)
    time.sleep(600)
    client.close()


if __name__ == "__main__":
    main()
