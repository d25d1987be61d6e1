"""One MPI rank of the test in test_ep_group.py: brings up torch.distributed from MPI on CPU and sums the ranks.

Not a test file. Prints `rank/size sum MASTER_ADDR-set?` on success. `steal` makes the first attempt of rank 0 find its
port taken, as when somebody binds it between being drawn and being used.
"""

import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from megamoe_adapter import ep_group


def main(mode):
    from mpi4py import MPI

    thief = None
    if mode == "steal":
        draw, calls = ep_group._draw_address, []

        def draw_and_steal(mpi, timeout):
            nonlocal thief
            address, port = draw(mpi, timeout)
            calls.append(port)
            if MPI.COMM_WORLD.Get_rank() == 0 and len(calls) == 1:
                thief = socket.socket()
                thief.bind(("", int(port)))
                thief.listen()
            MPI.COMM_WORLD.Barrier()
            return address, port

        ep_group._draw_address = draw_and_steal
    group = None
    if mode == "resolve":
        group = ep_group.resolve_ep_group(2, backend="gloo", timeout=timedelta(seconds=60))
    else:
        started = ep_group.init_dist_from_mpi(backend="gloo", timeout=timedelta(seconds=60))
        assert started is True
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total, group=group)
    if mode == "steal":
        assert len(calls) == 2, calls
        assert os.environ["MASTER_PORT"] == calls[1]
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} sum {total.item():g}", flush=True)
    dist.destroy_process_group()
    if thief is not None:
        thief.close()


if __name__ == "__main__":
    main(sys.argv[1])
