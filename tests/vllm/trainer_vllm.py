"""A trainer process that dies in the middle of a push: opens it, sends some tensors, says so, and waits to be killed.

python trainer_vllm.py CHECKPOINT URL MODE DEADLINE_SECONDS
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from checkpoints_vllm import read_checkpoint


@contextlib.contextmanager
def killed_in_mid_push(checkpoint: Path, url: str, mode: str, deadline_seconds: float) -> Iterator[None]:
    """Inside, a trainer process has sent half of a checkpoint; afterwards it is dead."""
    command = [sys.executable, __file__, str(checkpoint), url, mode, str(deadline_seconds)]
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
    from weightsync.trainer.client import TrainerClient
    from weightsync.trainer.sources import TensorSource

    checkpoint, url, mode, deadline = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    weights = dict(read_checkpoint(checkpoint))
    client = TrainerClient(TensorSource(weights), url, mode=mode, deadline_seconds=deadline)
    client.start()
    client.update(list(weights)[::2])
    print("half sent", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
