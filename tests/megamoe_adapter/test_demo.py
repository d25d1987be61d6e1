"""The main job end to end: processes, real checkpoints, proof; a push that must not succeed; a trainer that dies."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import ClassVar

import httpx
import pytest
import torch
from rich.console import Console

import weightsync
from megamoe_adapter.demo import story
from megamoe_adapter.demo.checkpoint import CheckpointSpec, build_checkpoint, read_checkpoint
from megamoe_adapter.demo.display import Display, table
from megamoe_adapter.demo.engine import Engine
from megamoe_adapter.demo.story import CASES, DemoError, DemoResult, Run, run_demo
from megamoe_adapter.demo.trainer import Trainer
from megamoe_adapter.models.families import is_mtp_name
from weightsync.trainer.sources import TensorSource, WeightSource
from weightsync.verify import Fingerprint

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")

SMALL = CheckpointSpec(vocab=128, moe_intermediate=128)
FIELDS = {"case", "mode", "transport", "differing", "moved", "compared", "greedy_matching", "greedy_total", "seconds"}


class Silent:
    def __init__(self):
        self.moved, self.runs = [], []

    def stage(self, text):
        pass

    def data(self, sent_bytes, total_bytes):
        self.moved.append((sent_bytes, total_bytes))

    def verdict(self, run):
        self.runs.append(run)


# The main job.


def test_the_command_proves_every_case_and_prints_one_json_object(tmp_path):
    command = [sys.executable, "-m", "weightsync", "demo", "--json", "--mode", "direct", "--transport", "shm"]
    command += ["--workdir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"tensors", "bytes", "runs", "ok"}
    assert result["ok"] is True
    assert result["tensors"] > 200
    assert [run["case"] for run in result["runs"]] == [case.name for case in CASES]
    for run in result["runs"]:
        assert set(run) == FIELDS
        assert (run["mode"], run["transport"], run["differing"], run["moved"]) == ("direct", "shm", 0, 0)
        assert run["greedy_matching"] == run["greedy_total"] == 4
        assert run["compared"] > 20
    assert [path.name for path in tmp_path.iterdir()] == [CheckpointSpec().key]  # the run's own files are gone


class InProcess:
    """Stands for a `Child`: the same requests, answered in this process; events go out at once."""

    parts: ClassVar[dict] = {}

    def __init__(self, module, log, environment):
        self._events = []
        self._part = self.parts[module](lambda **event: self._events.append(event))
        self._answers = []

    def send(self, request, **arguments):
        self._answers.append(self._part.requests()[request](**arguments))

    def answer(self):
        return self._answers.pop(0)

    def ask(self, request, on_event=None, **arguments):
        self.send(request, **arguments)
        for event in self._events:
            on_event(event)
        self._events.clear()
        return self.answer()

    def close(self):
        self._part.close()


@pytest.fixture
def in_process(monkeypatch):
    parts = {story.ENGINE: lambda emit: Engine(), story.TRAINER: Trainer}
    monkeypatch.setattr(story, "Child", InProcess)
    monkeypatch.setattr(InProcess, "parts", parts)
    return parts


def test_layerwise_over_gloo_is_proved_as_well_and_tells_how_far_the_data_is(tmp_path, in_process):
    progress = Silent()
    result = run_demo(tmp_path, modes=["layerwise"], transports=["gloo"], progress=progress, spec=SMALL)
    assert result.ok
    assert progress.runs == list(result.runs)
    assert len(result.runs) == len(CASES)
    totals = {total for _, total in progress.moved}
    assert len(totals) == 2  # of the model and of the drafter
    assert {total for sent, total in progress.moved if sent == total} == totals
    json.loads(result.to_json())


class WrongScale(Trainer):
    """Saves one thing and sends another, in one scale of the drafter."""

    def train(self, num_steps, part, directory):
        size = super().train(num_steps, part, directory)
        name = "model.layers.3.mlp.experts.5.up_proj.weight_scale_inv"
        if part == "draft":
            self._wire[part][name] = self._wire[part][name] * 2
        return size


def test_a_wrong_scale_on_the_wire_is_seen_and_fails_the_demo(tmp_path, in_process, monkeypatch):
    in_process[story.TRAINER] = WrongScale
    monkeypatch.setattr(story, "CASES", [CASES[0], CASES[-1]])
    result = run_demo(tmp_path, modes=["direct"], transports=["shm"], progress=Silent(), spec=SMALL)
    full, draft = result.runs
    assert full.ok
    assert not draft.ok
    assert draft.differing == 2  # the raw block scale, and the packed scales made from it
    assert not result.ok


class Lazy(Engine):
    """Claims to have zeroed its experts."""

    def zero_experts(self, part):
        return 48


def test_experts_that_were_not_zeroed_make_the_demo_an_error(tmp_path, in_process):
    in_process[story.ENGINE] = lambda emit: Lazy()
    with pytest.raises(DemoError, match="proves nothing"):
        run_demo(tmp_path, modes=["direct"], transports=["shm"], progress=Silent(), spec=SMALL)


GOOD = Run("full", "direct", "shm", 0, 0, 60, 4, 4, 0.1)


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"differing": 1}, False),
        ({"moved": 1}, False),
        ({"compared": 0}, False),
        ({"greedy_matching": 3}, False),
        ({"greedy_matching": 0, "greedy_total": 0}, False),
    ],
)
def test_a_run_is_ok_only_if_everything_was_compared_and_is_equal(change, ok):
    from dataclasses import replace

    run = replace(GOOD, **change)
    assert run.ok is ok
    assert DemoResult(1, 1, (GOOD, run)).ok is ok
    assert not DemoResult(1, 1, ()).ok


def test_the_table_has_a_row_per_check_and_a_column_per_mode_and_transport():
    from dataclasses import replace

    runs = [replace(GOOD, case=c.name, mode=m, transport="gloo") for m in ("direct", "layerwise") for c in CASES]
    runs[0] = replace(runs[0], differing=7)
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115 - rich closes nothing
    console.print(table(DemoResult(212, 9 << 20, tuple(runs))))
    text = console.export_text()
    assert "NOT every push" in text
    assert text.count("│ differing") == len(CASES)
    assert "7 of 60" in text
    assert "layerwise" in text
    with Display(console) as display:
        display.stage("x")
        display.data(1, 2)
        display.verdict(runs[0])
    assert "FAILED" in console.export_text()


# What must be refused, and what must be survived.


class ServedEngine:
    """An engine that serves, and what it should have."""

    def __init__(self, tmp_path):
        self.checkpoint = build_checkpoint(SMALL, tmp_path)
        self.weights = {n: t for n, t in read_checkpoint(self.checkpoint) if not is_mtp_name(SMALL.config(), n)}
        self.engine = Engine()
        self.engine.load(str(self.checkpoint))
        self.cold = self.fingerprint()
        self.answers = self.engine.generate("model")
        self.url = self.engine.serve()
        self.version = 0

    def info(self):
        return httpx.get(f"{self.url}/weight_info", timeout=60, trust_env=False).json()

    def fingerprint(self):
        return Fingerprint.from_json(self.engine.fingerprint("model"))

    def push(self, source, **options):
        self.version += 1
        client = weightsync.TrainerClient(source, self.url, deadline_seconds=60, **options)
        try:
            return client.push(self.version)
        finally:
            client.close()

    def check_serves_the_checkpoint(self):
        diff = self.fingerprint().diff(self.cold)
        assert not diff.differing
        assert not diff.moved
        assert self.engine.generate("model") == self.answers
        assert self.info()["state"] == "live"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    served = ServedEngine(tmp_path_factory.mktemp("engine"))
    yield served
    served.engine.close()


EXPERT = "model.layers.2.mlp.experts.5.down_proj"


def without(weights, *names):
    return {name: tensor for name, tensor in weights.items() if name not in names}


class Doubled(TensorSource):
    """A source that names one tensor twice."""

    @property
    def metadata(self):
        return [*super().metadata, super().metadata[-1]]


# What a loader refuses is also missing where it should have gone: one error says both.
MISFIT = (weightsync.LayoutError, weightsync.CoverageError)

FAULTS = {
    "missing scale": (
        lambda w: TensorSource(without(w, f"{EXPERT}.weight_scale_inv")),
        weightsync.CoverageError,
        [f"{EXPERT}.weight_scale_inv"],
    ),
    "missing expert": (
        lambda w: TensorSource(without(w, f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv")),
        weightsync.CoverageError,
        [f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv"],
    ),
    "unknown name": (
        lambda w: TensorSource({**w, "model.layers.1.mlp.experts.8.up_proj.weight": w[f"{EXPERT}.weight"]}),
        weightsync.CoverageError,
        ["model.layers.1.mlp.experts.8.up_proj.weight"],
    ),
    "unknown module": (
        lambda w: TensorSource({**w, "model.adapter.weight": torch.zeros(2)}),
        weightsync.CoverageError,
        ["model.adapter.weight"],
    ),
    "wrong shape": (
        lambda w: TensorSource({**w, f"{EXPERT}.weight": w[f"{EXPERT}.weight"][:, :64].contiguous()}),
        MISFIT,
        [f"{EXPERT}.weight"],
    ),
    "wrong dtype": (
        lambda w: TensorSource({**w, f"{EXPERT}.weight": w[f"{EXPERT}.weight"].to(torch.bfloat16)}),
        MISFIT,
        [f"{EXPERT}.weight"],
    ),
    "wrong dtype of a norm": (
        lambda w: TensorSource({**w, "model.norm.weight": w["model.norm.weight"].float()}),
        MISFIT,
        ["model.norm.weight"],
    ),
    "duplicate": (Doubled, weightsync.ManifestError, ["model.norm.weight"]),
}


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_push_is_refused_by_name_and_the_engine_generates_as_before(engine, mode, fault):
    source_of, error, names = FAULTS[fault]
    weights = dict(sorted(engine.weights.items(), key=lambda item: item[0] == "model.norm.weight"))
    before = engine.info()["weight_version"]
    with pytest.raises(error) as caught:
        engine.push(source_of(weights), mode=mode, transport="shm")
    for name in names:
        assert name in str(caught.value)
    assert engine.info()["weight_version"] == before
    engine.check_serves_the_checkpoint()


TRAINER = """
    import sys, time
    from pathlib import Path
    import weightsync
    from megamoe_adapter.demo.checkpoint import read_checkpoint
    from weightsync.trainer.sources import TensorSource

    checkpoint, url, mode, transport, version = sys.argv[1:]
    tensors = dict(read_checkpoint(Path(checkpoint)))
    weights = {name: tensor.flip(0) for name, tensor in tensors.items() if ".layers.3." not in name}
    client = weightsync.TrainerClient(
        TensorSource(weights), url, mode=mode, transport=transport, bucket_bytes=65536, deadline_seconds=6
    )
    client.start(int(version))
    client.update([name for name in weights if not name.endswith("_scale_inv")])
    print("half", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_trainer_killed_in_mid_push_leaves_a_torn_engine_and_the_next_push_repairs_it(
    engine, tmp_path, mode, transport
):
    script = tmp_path / "dying_trainer.py"
    script.write_text(textwrap.dedent(TRAINER))
    engine.version += 1
    published = engine.info()["weight_version"]
    arguments = [str(engine.checkpoint), engine.url, mode, transport, str(engine.version)]
    trainer = subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout.readline() == "half\n"
        assert engine.info()["state"] == "loading"
    finally:
        trainer.kill()
        trainer.wait(timeout=30)
        trainer.stdout.close()

    with pytest.raises(weightsync.TornModelError):  # waits for the update to end, which the deadline brings about
        engine.engine.generate("model")
    info = engine.info()
    assert info["state"] == "torn"
    assert info["weight_version"] is None
    assert published is None or published < engine.version

    report = engine.push(TensorSource(engine.weights), mode=mode, transport=transport)
    assert engine.info()["weight_version"] == report.version == engine.version
    engine.check_serves_the_checkpoint()


class Truncated(WeightSource):
    """Declares everything and then fails half-way, as a trainer's gather might."""

    def __init__(self, weights):
        self._source = TensorSource(weights)

    @property
    def metadata(self):
        return self._source.metadata

    def iter_full(self):
        for index, (name, tensor) in enumerate(self._source.iter_full()):
            if index == 100:
                raise RuntimeError("out of memory")
            yield name, tensor


def test_a_source_that_fails_half_way_is_an_error_here_and_never_a_version_there(engine):
    before = engine.info()["weight_version"]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.push(Truncated(engine.weights), mode="direct", transport="gloo", bucket_bytes=65536)
    info = engine.info()
    assert (info["state"], info["weight_version"]) in [("torn", None), ("live", before)]
    engine.push(TensorSource(engine.weights), mode="direct", transport="gloo")
    engine.check_serves_the_checkpoint()
