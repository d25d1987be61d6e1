"""Random plans for property tests: view chains on wire tensors, strided destinations, splits over buffers.

Everything follows from one seeded `random.Random`, so that a failing seed is a reproduction.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch

from weightsync.plan.regions import Region
from weightsync.plan.writes import Write
from weightsync.transport.buckets import Chunk

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


def filled(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def random_view(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A chain of view operations, as weight loaders use them."""
    for _ in range(rng.randrange(5)):
        choice = rng.choice(["narrow", "step", "transpose", "split", "expand", "select"])
        dim = rng.randrange(tensor.dim()) if tensor.dim() else None
        if dim is None or tensor.numel() == 0:
            break
        size = tensor.shape[dim]
        if choice == "narrow":
            start = rng.randrange(size)
            tensor = tensor.narrow(dim, start, rng.randint(1, size - start))
        elif choice == "step":
            tensor = tensor[(slice(None),) * dim + (slice(rng.randrange(size), None, rng.randint(1, 3)),)]
        elif choice == "transpose":
            tensor = tensor.transpose(dim, rng.randrange(tensor.dim()))
        elif choice == "split" and size % 2 == 0:
            tensor = tensor.unflatten(dim, (2, size // 2) if rng.random() < 0.5 else (size // 2, 2))
        elif choice == "expand" and tensor.dim() < 6:
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 2, *tensor.shape[dim:])
        elif choice == "select" and tensor.dim() > 1:
            tensor = tensor.select(dim, rng.randrange(size))
    return tensor


def random_destination(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """A view of `shape` into a larger storage, with permuted, padded or stepped dims."""
    order = list(range(len(shape)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    steps = [rng.choice([1, 1, 2]) for _ in order]
    pads = [rng.choice([0, 0, 1, 3]) for _ in order]
    base_shape = [shape[d] * steps[d] + pads[d] for d in order]
    lead = rng.randrange(3)
    base = torch.zeros(lead + int(np.prod(base_shape, dtype=int)) + rng.randrange(3), dtype=torch.uint8)
    base = base.repeat_interleave(dtype.itemsize).view(dtype)
    view = base[lead : lead + int(np.prod(base_shape, dtype=int))].view(base_shape)
    view = view[tuple(slice(rng.randint(0, pads[d]) if steps[d] == 1 else 0, None, steps[d]) for d in order)]
    view = view[tuple(slice(0, shape[d]) for d in order)]
    return view.permute([order.index(d) for d in range(len(shape))]) if shape else view


def random_plan(rng: random.Random) -> tuple[list[Write], dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    """Writes, wire tensors by name, and destination views; each write owns its storage."""
    writes, wires, views = [], {}, {}
    for number in range(rng.randint(1, 4)):
        dtype = rng.choice(DTYPES)
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randrange(5)))
        wire = filled(int(np.prod(shape, dtype=int)) * dtype.itemsize, rng.randrange(2**32)).view(dtype).reshape(shape)
        wires[f"w{number}"] = wire
        for _ in range(rng.randint(1, 2)):
            source = random_view(wire.reshape(-1).view(torch.uint8) if rng.random() < 0.2 else wire, rng)
            view = random_destination(tuple(source.shape), source.dtype, rng)
            views[len(views)] = view
            writes.append(Write(f"w{number}", len(views) - 1, Region.of(view), Region.of(source)))
    return writes, wires, views


def random_buffers(wires: dict[str, torch.Tensor], rng: random.Random) -> tuple[list[list[Chunk]], list[np.ndarray]]:
    """Every wire tensor cut at random bytes and spread over buffers at random offsets."""
    pieces = []
    for name, wire in wires.items():
        cuts = sorted({0, wire.nbytes, *(rng.randint(0, wire.nbytes) for _ in range(rng.randrange(4)))})
        pieces += [(name, start, stop - start) for start, stop in itertools.pairwise(cuts)]
    rng.shuffle(pieces)
    buffers: list[list[Chunk]] = [[] for _ in range(rng.randint(1, 3))]
    used = [0] * len(buffers)
    for name, start, num_bytes in pieces:
        buffer = rng.randrange(len(buffers))
        used[buffer] += rng.randrange(5)
        buffers[buffer].append(Chunk(name, start, num_bytes, used[buffer]))
        used[buffer] += num_bytes
    data = [np.zeros(size, np.uint8) for size in used]
    for chunks, buffer_bytes in zip(buffers, data, strict=True):
        for chunk in chunks:
            part = as_bytes(wires[chunk.name])[chunk.start : chunk.start + chunk.num_bytes]
            buffer_bytes[chunk.offset : chunk.offset + chunk.num_bytes] = part
    return buffers, data


def storage_bytes(view: torch.Tensor) -> np.ndarray:
    storage = view.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()


def expected_storages(writes, wires, views) -> dict[int, np.ndarray]:
    expected = {key: torch.from_numpy(storage_bytes(view).copy()) for key, view in views.items()}
    for write in writes:
        item = write.dest.itemsize
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item]
        units = [tuple(stride // item for stride in region.strides) for region in (write.dest, write.source)]
        target = (
            expected[write.destination].view(dtype).as_strided(write.dest.shape, units[0], write.dest.offset // item)
        )
        flat = torch.from_numpy(as_bytes(wires[write.name])).view(dtype)
        target.copy_(flat.as_strided(write.source.shape, units[1], write.source.offset // item))
    return {key: tensor.numpy() for key, tensor in expected.items()}


def assert_storages_equal(got: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> None:
    for key, array in expected.items():
        np.testing.assert_array_equal(got[key], array, err_msg=f"destination {key}")
