"""One rank of a trainer whose weights are sharded over three; not a test module.

python lockstep_rank.py RANK FILE URL VERSION...    # one push per version given, each outcome as a line of JSON
"""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from push_toys import Toy

from weightsync.manifest import ParamMeta
from weightsync.trainer.lockstep import LockstepClient
from weightsync.trainer.sources import WeightSource


class Sharded(WeightSource):
    """Each tensor is the sum of what the ranks hold, gathered when its turn comes."""

    def __init__(self):
        self.whole = dict(Toy(8).named_parameters())
        self.gathers = 0
        self._metadata = [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.whole.items()]

    @property
    def metadata(self):
        return self._metadata

    def iter_full(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for name, tensor in self.whole.items():
            raw = tensor.detach().reshape(-1).view(torch.uint8)
            part = raw.clone() if self.gathers % world == rank else torch.zeros_like(raw)
            dist.all_reduce(part)
            self.gathers += 1
            yield name, part.view(tensor.dtype).view(tensor.shape)


def main(rank, file, url, versions):
    store = dist.FileStore(file, 3)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=3, timeout=timedelta(seconds=60))
    source = Sharded()
    client = LockstepClient(source, url, deadline_seconds=60, bucket_bytes=512, transport="gloo")
    for version in versions:
        try:
            outcome = {"version": client.push(int(version)).version}
        except Exception as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({**outcome, "gathers": source.gathers}), flush=True)
    client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
