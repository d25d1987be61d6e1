"""The process group over which experts are parallel, resolved once when a layer is built.

Why: the kernel's symmetric memory is tied to one process group, and every rank has to pick the same one. Started by
torchrun or Ray, `torch.distributed` is up already; under a plain `mpirun` it is not, and this module brings it up
from MPI, all ranks taking the same branch. It never calls `new_group`: layers are built in different orders on
different ranks, and a collective there would hang.

    torch.distributed up? --no--> MPI with more than one rank? --yes--> init_process_group from MPI
            | yes                               | no
            v                                   v
    mapping.moe_ep_group_pg, else the world group if ep_size is its size       RuntimeError

Use:

    group = resolve_ep_group(ep_size=8, mapping=mapping)
    init_dist_from_mpi(backend="gloo")          # on its own, on CPU
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
MAX_ADDRESS_BYTES = 256
DEFAULT_TIMEOUT = timedelta(minutes=5)

Result = TypeVar("Result")


def resolve_ep_group(
    ep_size: int, *, mapping: Any = None, backend: str = "nccl", timeout: timedelta = DEFAULT_TIMEOUT
) -> dist.ProcessGroup:
    """The group of the `ep_size` ranks that share one layer's experts.

    Args:
        ep_size: Ranks that the experts are spread over.
        mapping: Optional object whose `moe_ep_group_pg` is the group (TensorRT-LLM's Mapping); an object that lacks
            it, or raises NotImplementedError for it, is passed over.
        backend: Used only if `torch.distributed` has to be brought up from MPI.
        timeout: Deadline of bringing it up.

    Raises:
        RuntimeError: `torch.distributed` is not up and MPI cannot bring it up, or no group of `ep_size` ranks is known.
    """
    if not dist.is_initialized():
        init_dist_from_mpi(backend=backend, timeout=timeout)
    if not dist.is_initialized():
        raise RuntimeError(
            "MegaMoE experts need torch.distributed before they are built: start with torchrun, mpirun (with "
            "mpi4py installed: "
            "pip install 'weightsync[mpi]') or Ray, or call torch.distributed.init_process_group first"
        )
    try:
        group = mapping.moe_ep_group_pg
    except (AttributeError, NotImplementedError):
        group = None
    if group is not None:
        if group.size() != ep_size:
            raise RuntimeError(f"mapping.moe_ep_group_pg has {group.size()} ranks, expected ep_size {ep_size}")
        return group  # type: ignore[no-any-return]
    if dist.get_world_size() != ep_size:
        raise RuntimeError(
            f"cannot resolve the expert-parallel group: ep_size is {ep_size}, the world has {dist.get_world_size()} "
            "ranks, and "
            "the mapping names no group; pass a mapping whose moe_ep_group_pg is that group"
        )
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed is initialised but has no world group")
    return world


def init_dist_from_mpi(*, mpi: Any = None, backend: str = "nccl", timeout: timedelta = DEFAULT_TIMEOUT) -> bool:
    """Brings up `torch.distributed` over the ranks of MPI_COMM_WORLD; collective over them.

    Variables that are already set (Slurm, Ray, torchrun) survive. When the rendezvous port is taken by somebody else
    between being drawn and being bound, all ranks draw a new one together and try once more.

    Args:
        mpi: The module `mpi4py.MPI`; imported when None.
        backend: "nccl" (the rank's GPU is set as its device) or "gloo".
        timeout: Deadline of each wait; a wait for the others' attempt is twice as long.

    Returns:
        Whether `torch.distributed` is up because of this call. False without mpi4py or with a single rank.

    Raises:
        RuntimeError: The second attempt failed too, or another rank did not answer in time.

    Source: TensorRT-LLM's MEGAMOE_DEEPGEMM backend, MPI fallback.
    """
    mpi = _import_mpi() if mpi is None else mpi
    if mpi is None or mpi.COMM_WORLD.Get_size() <= 1:
        return False
    world = mpi.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    # Decided together: one rank with an incomplete environment would else wait alone for an address.
    incomplete = any(name not in os.environ for name in RENDEZVOUS_VARIABLES)
    if _any_rank(mpi, incomplete, timeout):
        address, port = _draw_address(mpi, timeout)
        for name, value in zip(RENDEZVOUS_VARIABLES, (address, port, str(rank), str(world_size)), strict=True):
            os.environ.setdefault(name, value)
    device = _device_of_rank(mpi, rank) if backend == "nccl" else None
    error = _start(mpi, backend, device, timeout)
    if error is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = _draw_address(mpi, timeout)
        error = _start(mpi, backend, device, timeout)
    if error is not None:
        raise error
    return True


def local_rank_of(mpi: Any, rank: int, num_devices: int) -> int:
    """This rank's index among the ranks of its host.

    Args:
        mpi: The module `mpi4py.MPI`.
        rank: Rank in the world, the last resort.
        num_devices: Devices of this host.
    """
    try:
        local = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
        try:
            return int(local.Get_rank())
        finally:
            local.Free()
    except (mpi.Exception, NotImplementedError, AttributeError):
        for name in LOCAL_RANK_VARIABLES:
            if name in os.environ:
                return int(os.environ[name])
    return rank % max(num_devices, 1)


def _import_mpi() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI")
    except ImportError:
        return None


def _device_of_rank(mpi: Any, rank: int) -> torch.device:
    num_devices = torch.cuda.device_count()
    if not num_devices:
        raise RuntimeError("backend 'nccl' needs a CUDA device on every rank, found none; pass backend='gloo' on CPU")
    return torch.device("cuda", local_rank_of(mpi, rank, num_devices) % num_devices)


def _start(mpi: Any, backend: str, device: torch.device | None, timeout: timedelta) -> RuntimeError | None:
    """One attempt of all ranks, ending alike on all of them: None, or an error on every rank and no process group.

    Rank 0 binds before the others connect: a client that reaches somebody else's port would wait without a deadline.
    """
    rank, world_size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    store: Any = None
    error = None
    if rank == 0:
        store, error = _attempt(lambda: _open_store(True, world_size, timeout))
    if _any_rank(mpi, error is not None, 2 * timeout):
        return error or RuntimeError(f"rank 0 could not bind the rendezvous address {address}")

    def join() -> None:
        found = store if store is not None else _open_store(False, world_size, timeout)
        _init(backend, found, rank, world_size, device, timeout)

    _, error = _attempt(join)
    if _any_rank(mpi, error is not None, 2 * timeout):
        if dist.is_initialized():
            dist.destroy_process_group()
        return error or RuntimeError(f"another rank could not join the process group at {address}")
    return None


def _open_store(is_master: bool, world_size: int, timeout: timedelta) -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, world_size, is_master, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]


def _init(
    backend: str, store: Any, rank: int, world_size: int, device: torch.device | None, timeout: timedelta
) -> None:
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device, timeout=timeout)


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, RuntimeError | None]:
    try:
        return action(), None
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are among them
        return None, error


def _draw_address(mpi: Any, timeout: timedelta) -> tuple[str, str]:
    """Host and free port of rank 0, the same on all ranks."""
    buffer = np.zeros(MAX_ADDRESS_BYTES, dtype=np.uint8)
    if mpi.COMM_WORLD.Get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        text = f"{socket.gethostbyname(socket.gethostname())} {port}".encode()
        buffer[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    _wait(mpi.COMM_WORLD.Ibcast(buffer, root=0), "the rendezvous address of rank 0", timeout)
    address, port_text = buffer.tobytes().rstrip(b"\0").decode().split()
    return address, port_text


def _any_rank(mpi: Any, condition: bool, timeout: timedelta) -> bool:
    """Whether `condition` holds on any rank; the same answer on all of them."""
    mine, anyone = np.array([int(condition)], dtype=np.int32), np.zeros(1, dtype=np.int32)
    _wait(mpi.COMM_WORLD.Iallreduce(mine, anyone, op=mpi.MAX), "the other ranks' answer", timeout)
    return bool(anyone[0])


def _wait(request: Any, what: str, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    while not request.Test():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {timeout.total_seconds():g} s for {what} over MPI: a rank is missing or stuck")
        time.sleep(0.001)
