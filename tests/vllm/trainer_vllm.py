"""A trainer process that dies in the middle of a push: opens it, sends some tensors, says so, and waits to be killed.

python trainer_vllm.py CHECKPOINT URL MODE DEADLINE_SECONDS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from checkpoints_vllm import read_checkpoint

from weightsync.trainer.client import TrainerClient
from weightsync.trainer.sources import TensorSource


def main() -> None:
    """Sends every other tensor."""
    checkpoint, url, mode, deadline = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    weights = dict(read_checkpoint(checkpoint))
    client = TrainerClient(TensorSource(weights), url, mode=mode, deadline_seconds=deadline)
    client.start()
    client.update(list(weights)[::2])
    print("half sent", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
