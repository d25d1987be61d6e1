"""Resolving the expert-parallel group: the order of choices, and MPI with real processes and with a double."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from megamoe_adapter import ep_group
from megamoe_adapter.ep_group import RENDEZVOUS_VARIABLES, init_dist_from_mpi, local_rank_of, resolve_ep_group

HERE = Path(__file__).parent
LONG = timedelta(seconds=60)


@pytest.fixture
def no_rendezvous(monkeypatch):
    for name in (*RENDEZVOUS_VARIABLES, *ep_group.LOCAL_RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    yield
    for name in RENDEZVOUS_VARIABLES:  # set by the code under test
        os.environ.pop(name, None)


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# The order of choices


def test_the_mappings_own_group_comes_first(world_of_one):
    group = SimpleNamespace(size=lambda: 4)
    assert resolve_ep_group(4, mapping=SimpleNamespace(moe_ep_group_pg=group)) is group
    with pytest.raises(RuntimeError, match="has 4 ranks, expected ep_size 2"):
        resolve_ep_group(2, mapping=SimpleNamespace(moe_ep_group_pg=group))


def test_a_mapping_without_a_group_falls_back_to_the_world(world_of_one):
    class Unimplemented:
        @property
        def moe_ep_group_pg(self):
            raise NotImplementedError

    for mapping in (None, object(), Unimplemented()):
        assert resolve_ep_group(1, mapping=mapping) is world_of_one


def test_a_world_of_another_size_is_not_guessed_at(world_of_one):
    with pytest.raises(RuntimeError, match="cannot resolve .* ep_size is 8, the world has 1 ranks"):
        resolve_ep_group(8)


def test_without_torch_distributed_and_mpi_it_says_how_to_start(monkeypatch):
    monkeypatch.setattr(ep_group, "_import_mpi", lambda: None)
    with pytest.raises(RuntimeError, match="start with torchrun, mpirun .* or Ray"):
        resolve_ep_group(1)
    assert not dist.is_initialized()


def test_no_new_group_is_ever_made(monkeypatch, world_of_one):
    monkeypatch.setattr(dist, "new_group", lambda *a, **k: pytest.fail("new_group is not collective-safe here"))
    resolve_ep_group(1)


# MPI, real processes


needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py: apt-get install libopenmpi-dev openmpi-bin; pip install mpi4py",
)


def mpirun(mode, **env):
    clean = {k: v for k, v in os.environ.items() if k not in RENDEZVOUS_VARIABLES and not k.startswith("OMPI_")}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), **env}
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        HERE / "mpi_rank.py",
        mode,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, env=clean)


@needs_mpi
@pytest.mark.parametrize("mode", ["init", "resolve", "steal"])
def test_two_real_mpi_ranks_form_a_group(mode):
    done = mpirun(mode)
    assert done.returncode == 0, done.stderr[-2000:]
    # Both ranks write to one pipe, so a line's end may come after the other rank's line.
    assert [done.stdout.count(f"rank {rank} of 2 sum 3") for rank in (0, 1)] == [1, 1], done.stdout


# MPI, a double: threads as ranks


class DoubleMPI:
    """What ep_group.py uses of mpi4py.MPI, for one rank of a world of threads."""

    COMM_TYPE_SHARED = "shared"
    MAX = "max"
    Exception = type("MPIException", (RuntimeError,), {})

    def __init__(self, world, rank):
        self.COMM_WORLD = DoubleComm(world, rank)


class DoubleComm:
    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.step = 0

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.world.size

    def Ibcast(self, buffer, root):
        return DoubleRequest(self, buffer, lambda parts: parts[root], buffer)

    def Iallreduce(self, mine, result, op):
        assert op == DoubleMPI.MAX
        return DoubleRequest(self, mine, lambda parts: np.max(list(parts.values()), axis=0), result)

    def Split_type(self, kind):
        assert kind == DoubleMPI.COMM_TYPE_SHARED
        if self.world.split_fails:
            raise DoubleMPI.Exception("no shared memory")
        return SimpleNamespace(Get_rank=lambda: self.rank % 4, Free=lambda: None)


class DoubleRequest:
    def __init__(self, comm, mine, combine, result):
        self.parts = comm.world.parts.setdefault(comm.step, {})
        self.parts[comm.rank] = mine.copy()
        self.size, self.combine, self.result = comm.world.size, combine, result
        comm.step += 1

    def Test(self):
        if len(self.parts) < self.size:
            return False
        self.result[:] = self.combine(self.parts)
        return True


def world_of(size, *, split_fails=False):
    return SimpleNamespace(size=size, parts={}, split_fails=split_fails)


def run_ranks(world, inits, monkeypatch, backend="gloo", binds=None):
    """Runs `init_dist_from_mpi` on every rank of a double's world.

    `inits[rank]` stands for the start of the rank's process group, `binds` for rank 0's store.
    """
    local = threading.local()
    binds = binds or Init()
    monkeypatch.setattr(ep_group, "_init", lambda *args: inits[local.rank](*args))
    monkeypatch.setattr(ep_group, "_open_store", lambda is_master, *_: binds("store") if is_master else None)
    outcomes = {}

    def rank(index):
        local.rank = index
        try:
            outcomes[index] = init_dist_from_mpi(mpi=DoubleMPI(world, index), backend=backend, timeout=LONG)
        except RuntimeError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(world.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return outcomes


class Init:
    """Records each start with the environment it saw; fails the first `failures` times."""

    def __init__(self, failures=0):
        self.failures = failures
        self.seen = []

    def __call__(self, backend, store=None, rank=None, world_size=None, device=None, timeout=None):
        self.seen.append((backend, rank, world_size, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
        if len(self.seen) <= self.failures:
            raise RuntimeError("address already in use")
        return "store"


def test_all_ranks_take_rank_zeros_address(monkeypatch, no_rendezvous):
    inits = [Init(), Init(), Init()]
    assert run_ranks(world_of(3), inits, monkeypatch) == {0: True, 1: True, 2: True}
    assert [init.seen[0][:3] for init in inits] == [("gloo", 0, 3), ("gloo", 1, 3), ("gloo", 2, 3)]
    assert len({init.seen[0][3:] for init in inits}) == 1
    assert int(inits[0].seen[0][4]) > 0


def test_an_environment_that_is_set_already_survives(monkeypatch, no_rendezvous):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4321")
    inits = [Init(), Init()]
    assert run_ranks(world_of(2), inits, monkeypatch) == {0: True, 1: True}
    assert {init.seen[0][3:] for init in inits} == {("10.0.0.1", "4321")}


def test_a_complete_environment_needs_no_address_from_rank_zero(monkeypatch, no_rendezvous):
    for name, value in zip(RENDEZVOUS_VARIABLES, ("10.0.0.1", "4321", "0", "2"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ep_group, "_draw_address", lambda *a: pytest.fail("no address is needed"))
    assert run_ranks(world_of(2), [Init(), Init()], monkeypatch) == {0: True, 1: True}


@pytest.fixture
def two_ports(monkeypatch):
    """Rank 0 draws port 1111, then 2222; the other ranks hear the same."""
    lock, drawn = threading.Lock(), {}

    def draw(mpi, timeout):
        with lock:
            step = mpi.COMM_WORLD.step
            mpi.COMM_WORLD.step += 1
            return drawn.setdefault(step, ("host", "2222" if drawn else "1111"))

    monkeypatch.setattr(ep_group, "_draw_address", draw)


def test_a_stolen_port_makes_every_rank_try_once_more_with_a_new_one(monkeypatch, no_rendezvous, two_ports):
    inits, binds = [Init(), Init()], Init(1)
    assert run_ranks(world_of(2), inits, monkeypatch, binds=binds) == {0: True, 1: True}
    assert [seen[4] for seen in binds.seen] == ["1111", "2222"]
    assert [[seen[4] for seen in init.seen] for init in inits] == [["2222"], ["2222"]], "nobody joined the stolen port"


@pytest.mark.parametrize("failing", [(1, 0), (0, 1), (1, 1)])
def test_a_rank_that_cannot_join_makes_every_rank_try_once_more(monkeypatch, no_rendezvous, two_ports, failing):
    inits = [Init(failures) for failures in failing]
    assert run_ranks(world_of(2), inits, monkeypatch) == {0: True, 1: True}
    assert [[seen[4] for seen in init.seen] for init in inits] == [["1111", "2222"]] * 2


def test_a_second_failure_is_an_error_on_every_rank(monkeypatch, no_rendezvous):
    outcomes = run_ranks(world_of(2), [Init(), Init()], monkeypatch, binds=Init(2))
    assert "address already in use" in str(outcomes[0])
    assert "rank 0 could not bind the rendezvous address" in str(outcomes[1])
    outcomes = run_ranks(world_of(2), [Init(), Init(2)], monkeypatch)
    assert "another rank could not join" in str(outcomes[0])
    assert "address already in use" in str(outcomes[1])


def test_a_rank_that_never_answers_ends_the_wait(monkeypatch, no_rendezvous):
    monkeypatch.setattr(ep_group, "_init", lambda *a: pytest.fail("not reached"))
    with pytest.raises(RuntimeError, match=r"waited 0.2 s for .* over MPI: a rank is missing or stuck"):
        init_dist_from_mpi(mpi=DoubleMPI(world_of(2), 0), backend="gloo", timeout=timedelta(seconds=0.2))


def test_a_single_rank_or_no_mpi_starts_nothing(monkeypatch):
    assert init_dist_from_mpi(mpi=DoubleMPI(world_of(1), 0)) is False
    monkeypatch.setattr(ep_group, "_import_mpi", lambda: None)
    assert init_dist_from_mpi() is False


def test_nccl_without_a_gpu_says_so(monkeypatch, no_rendezvous):
    monkeypatch.setattr(ep_group.torch.cuda, "device_count", lambda: 0)
    outcomes = run_ranks(world_of(2), [Init(), Init()], monkeypatch, backend="nccl")
    assert all("needs a CUDA device on every rank" in str(outcome) for outcome in outcomes.values())


def test_the_local_rank_is_asked_of_mpi_then_of_the_launcher_then_computed(monkeypatch, no_rendezvous):
    assert local_rank_of(DoubleMPI(world_of(8), 6), 6, 4) == 2
    broken = DoubleMPI(world_of(8, split_fails=True), 6)
    assert local_rank_of(broken, 6, 4) == 2
    assert local_rank_of(broken, 6, 0) == 0
    monkeypatch.setenv("MV2_COMM_WORLD_LOCAL_RANK", "5")
    assert local_rank_of(broken, 6, 4) == 5
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    assert local_rank_of(broken, 6, 4) == 3
