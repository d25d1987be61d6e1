"""What the Triton kernels have to do, as functions of the device: run interpreted on a CPU and compiled on a GPU."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))  # random_plans stands beside the tests of the plan

from random_plans import assert_storages_equal, expected_storages, random_buffers, random_plan

from weightsync.kernels.digest import BLOCK_BYTES, digest_many
from weightsync.kernels.segment_copy import Backend, SegmentCopy
from weightsync.plan.regions import Region
from weightsync.plan.segments import compile_segments
from weightsync.plan.writes import Write

ALIGNMENTS = (0, 1, 2, 3, 4, 6, 8, 12, 15)


def storage_on(view: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of a view's whole storage, as uint8."""
    storage = view.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).to(device, copy=True)


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def check_random_plan(seed: int, device: str, backend: Backend) -> None:
    """Random view chains, splits and alignments copy the bytes that torch copies."""
    rng = random.Random(seed)
    writes, wires, views = random_plan(rng)
    expected = expected_storages(writes, wires, views)
    chunks, data = random_buffers(wires, rng)
    buffers = []
    for array in data:
        offset = rng.randrange(17)
        buffer = torch.zeros(len(array) + offset, dtype=torch.uint8)
        buffer[offset:] = torch.from_numpy(array)
        buffers.append(buffer.to(device)[offset:])
    storages = {key: storage_on(view, device) for key, view in views.items()}
    SegmentCopy(compile_segments(writes, chunks), storages, backend=backend).run(buffers)
    assert_storages_equal({key: storage.cpu().numpy() for key, storage in storages.items()}, expected)


def check_every_alignment_and_run_length(device: str, backend: Backend) -> None:
    """Runs of 1 to 40 bytes between any two alignments modulo 16, with bytes around them left alone."""
    source = random_bytes(4096, 1)
    writes = []
    expected = torch.full((64 * (len(ALIGNMENTS) ** 2 + 1),), 0xEE, dtype=torch.uint8)
    number = 0
    for at in ALIGNMENTS:
        for to in ALIGNMENTS:
            run = 1 + (at * 16 + to * 7) % 40
            start = number * 64 + 16 + to
            writes.append(Write("w", 0, Region(start, (run,), (1,), 1), Region(17 * at, (run,), (1,), 1)))
            expected[start : start + run] = source[17 * at : 17 * at + run]
            number += 1
    live = torch.full_like(expected, 0xEE).to(device)
    SegmentCopy(compile_segments(writes), {0: live}, backend=backend).run([source.to(device)])
    assert torch.equal(live.cpu(), expected)


def check_tiles_of_long_and_of_transposed_copies(device: str, backend: Backend) -> None:
    """Copies larger than one tile: a long odd run, the 8-row interleave, and a transposed matrix of 2-byte items."""
    long_run, matrix, halves = random_bytes(70_001, 2), random_bytes(2 * 300 * 200, 3), random_bytes(64 * 2048, 4)
    wires = {"run": long_run, "matrix": matrix.view(torch.int16).view(300, 200), "half": halves.view(64, 2048)}
    live = {0: torch.zeros(70_001 + 3, dtype=torch.uint8), 1: torch.zeros(200, 300, dtype=torch.int16),
            2: torch.zeros(128, 2048, dtype=torch.uint8)}  # fmt: skip
    targets = {"run": (0, live[0][3:]), "matrix": (1, live[1].t()), "half": (2, live[2].view(8, 2, 8, 2048)[:, 1])}
    sources = {"run": wires["run"], "matrix": wires["matrix"], "half": wires["half"].view(8, 8, 2048)}
    writes = [Write(name, targets[name][0], Region.of(targets[name][1]), Region.of(sources[name])) for name in wires]
    storages = {key: storage_on(tensor, device) for key, tensor in live.items()}
    SegmentCopy(compile_segments(writes), storages, backend=backend).run([w.to(device) for w in wires.values()])
    for name, (_, target) in targets.items():
        target.copy_(sources[name])
    for key, tensor in live.items():
        assert torch.equal(storages[key].cpu(), tensor.view(-1).view(torch.uint8)), f"destination {key}"


def check_sources_can_be_exchanged(device: str, backend: Backend) -> None:
    """The table reads whatever sources are bound last, at another alignment too."""
    live = torch.zeros(64, dtype=torch.uint8, device=device)
    region = Region.of(torch.zeros(64, dtype=torch.uint8))
    copy = SegmentCopy(compile_segments([Write("w", 0, region, region)]), {0: live}, backend=backend)
    for seed, offset in ((1, 0), (2, 3), (3, 8), (1, 0)):
        source = random_bytes(80, seed).to(device)[offset : offset + 64]
        copy.run([source])
        assert torch.equal(live, source)


def check_destinations_can_be_exchanged(device: str, backend: Backend) -> None:
    """The table writes to whatever storages are bound last, to each its part, and to none that were released."""
    wires = {str(key): random_bytes(48, key) for key in (3, 7)}
    writes = [Write(name, int(name), Region(5, (48,), (1,), 1), Region(0, (48,), (1,), 1)) for name in wires]
    sources = [wire.to(device) for wire in wires.values()]
    expected = {key: torch.cat([torch.zeros(5, dtype=torch.uint8), wires[str(key)]]) for key in (3, 7)}
    written: list[dict[int, torch.Tensor]] = []
    copy: SegmentCopy | None = None
    for _ in range(3):
        written.append({key: torch.zeros(53, dtype=torch.uint8, device=device) for key in (3, 7)})
        if copy is None:
            copy = SegmentCopy(compile_segments(writes), written[-1], backend=backend)
        else:
            copy.bind_destinations(written[-1])
        copy.run(sources)
        for key, storage in written[-1].items():
            assert torch.equal(storage.cpu(), expected[key])
            storage.zero_()
        copy.release_destinations()
    assert not any(storage.any() for storages in written for storage in storages.values())


def check_addresses_are_uploaded_only_when_they_change(device: str) -> None:
    """A push of the same mapped memory writes nothing to the table on the device."""
    region = Region.of(torch.zeros(64, dtype=torch.uint8))
    write = Write("w", 0, region, region)
    first, second = (random_bytes(64, seed).to(device) for seed in (1, 2))
    target = torch.zeros(64, dtype=torch.uint8, device=device)
    copy = SegmentCopy(compile_segments([write]), {0: target}, backend="triton")
    uploads: list[int] = []
    bases = copy._copies._bases  # type: ignore[union-attr]

    class Counting:
        """Stands for the addresses on the device; every write to them is counted."""

        device = bases.device

        def copy_(self, addresses: torch.Tensor, **options: bool) -> None:
            uploads.append(int(addresses[0]))
            bases.copy_(addresses, **options)

    for source, expected in ((first, 1), (first, 1), (second, 2), (second, 2), (first, 3)):
        copy._copies._bases = Counting()  # type: ignore[union-attr]
        copy.bind_sources([source])
        copy._copies._bases = bases  # type: ignore[union-attr]
        copy.launch()
        assert torch.equal(target, source)
        assert len(uploads) == expected


def digest_samples() -> list[torch.Tensor]:
    """Sizes around every edge of the digest, layouts, dtypes, alignments."""
    sizes = [
        0,
        1,
        3,
        4,
        5,
        4096,
        BLOCK_BYTES - 1,
        BLOCK_BYTES,
        BLOCK_BYTES + 4,
        9 * BLOCK_BYTES + 7,
        35 * BLOCK_BYTES + 8,
    ]
    samples = [random_bytes(size, size) for size in sizes]
    samples += [random_bytes(3 * BLOCK_BYTES + shift, shift)[shift:] for shift in (1, 2, 4, 8)]
    matrix = random_bytes(4 * 130 * 70, 9).view(torch.float32).view(130, 70)
    samples += [matrix.t(), matrix[:, ::3], matrix[5:, 3:17], torch.tensor(2.5), matrix.view(torch.float8_e4m3fn).t()]
    packed_scale = torch.empty_strided((3, 64, 5), (64 * 5, 1, 64), dtype=torch.int32)  # MN-major, as kernels want it
    samples.append(packed_scale.copy_(random_bytes(4 * 3 * 64 * 5, 8).view(torch.int32).view(3, 64, 5)))
    return samples


def check_digests_agree_with_numpy(device: str) -> None:
    samples = digest_samples()
    assert digest_many([s.to(device) for s in samples], backend="triton") == digest_many(samples, backend="torch")
    misaligned = [random_bytes(BLOCK_BYTES * 2 + 16, 1).to(device)[shift : shift + BLOCK_BYTES] for shift in range(16)]
    assert digest_many(misaligned, backend="triton") == digest_many([m.cpu() for m in misaligned], backend="torch")
