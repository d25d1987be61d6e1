"""The main job, from checkpoint to proof, without a word about how it is shown.

Three processes: an engine that serves, a trainer that trains and pushes, and one that cold-loads what the trainer
saved. For every mode, transport and case:

    trainer   a few optimiser steps, experts quantised anew, checkpoint saved
    engine    every byte of the experts set to zero                   (only a real reload can bring them back)
    trainer   push
    verdict   engine == cold load of the saved checkpoint, tensor by tensor;  nothing moved;  same greedy tokens

    result = run_demo(Path(".demo"), modes=["direct"], transports=["shm"], progress=progress)
    result.ok, result.to_json()
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megamoe_adapter.demo.checkpoint import CheckpointSpec, build_checkpoint
from megamoe_adapter.demo.child import Child
from weightsync.verify import Fingerprint

ENGINE = "megamoe_adapter.demo.engine"
TRAINER = "megamoe_adapter.demo.trainer"
_STEPS_PER_PUSH = 2


@dataclass(frozen=True)
class Case:
    """One kind of push.

    Attributes:
        name: Its name in the JSON.
        title: Its name in the table.
        part: The target: "model" or "draft".
        split: What each update carries, in order: "all", "weights", "scales".
    """

    name: str
    title: str
    part: str = "model"
    split: tuple[str, ...] = ("all",)


CASES = (
    Case("full", "full push"),
    Case("second", "second push"),
    Case("weights_then_scales", "weights, then scales", split=("weights", "scales")),
    Case("scales_then_weights", "scales, then weights", split=("scales", "weights")),
    Case("draft", "MTP drafter", part="draft"),
)


@dataclass(frozen=True)
class Run:
    """The verdict on one push.

    Attributes:
        case: Name of the case.
        mode: "direct" or "layerwise".
        transport: "shm" or "gloo".
        differing: Tensors whose bytes or layout are not those of the cold load.
        moved: Tensors whose address is not what it was before the push.
        compared: Tensors compared.
        greedy_matching: Prompts answered with the same tokens as by the cold load.
        greedy_total: Prompts.
        seconds: From the trainer's call to the published version.
    """

    case: str
    mode: str
    transport: str
    differing: int
    moved: int
    compared: int
    greedy_matching: int
    greedy_total: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Everything compared, and all of it equal."""
        nothing_off = self.differing == 0 and self.moved == 0 and self.compared > 0
        return nothing_off and 0 < self.greedy_total == self.greedy_matching


@dataclass(frozen=True)
class DemoResult:
    """All verdicts.

    Attributes:
        tensors: Tensors of one full checkpoint.
        bytes: Bytes of one full checkpoint.
        runs: One per push.
    """

    tensors: int
    bytes: int
    runs: tuple[Run, ...]

    @property
    def ok(self) -> bool:
        """Whether every push was proved."""
        return bool(self.runs) and all(run.ok for run in self.runs)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({**dataclasses.asdict(self), "ok": self.ok})


class Progress(Protocol):
    """Whoever shows how far the demo is."""

    def stage(self, text: str) -> None:
        """A new stage has begun."""
        ...

    def data(self, sent_bytes: int, total_bytes: int) -> None:
        """So much of the current push has left the trainer."""
        ...

    def verdict(self, run: Run) -> None:
        """One push was judged."""
        ...


class DemoError(RuntimeError):
    """The demo could not test what it claims to test."""


def run_demo(
    workdir: Path,
    *,
    modes: Sequence[str],
    transports: Sequence[str],
    progress: Progress,
    spec: CheckpointSpec | None = None,
) -> DemoResult:
    """Runs every case in every mode over every transport.

    Args:
        workdir: Where the checkpoint is cached; what a run writes beside it is removed at its end.
        modes: Of "direct" and "layerwise".
        transports: Of "shm" and "gloo".
        progress: Is told what happens.
        spec: What the checkpoint is made from.

    Raises:
        ChildError: A process failed; the end of its log is in the message.
        DemoError: The experts were not zero before a push, so the push proves nothing.
    """
    progress.stage("building the checkpoint")
    checkpoint = build_checkpoint(spec or CheckpointSpec(), workdir)
    with tempfile.TemporaryDirectory(prefix="run-", dir=checkpoint.parent) as run_dir:
        progress.stage("starting engine, trainer and cold-load processes")
        with _Stage(checkpoint, Path(run_dir)) as stage:
            runs = []
            for mode in modes:
                for transport in transports:
                    for case in CASES:
                        progress.stage(f"{mode} over {transport}: {case.title}")
                        runs.append(stage.play(case, mode, transport, progress))
                        progress.verdict(runs[-1])
            return DemoResult(stage.num_tensors, stage.num_bytes, tuple(runs))


class _Stage:
    """The three processes and what they have in common."""

    def __init__(self, checkpoint: Path, run_dir: Path) -> None:
        self._checkpoint, self._run_dir = str(checkpoint), run_dir
        self._children: list[Child] = []
        self._version = 0
        self.num_tensors = self.num_bytes = 0

    def __enter__(self) -> _Stage:
        try:
            self._engine = self._start(ENGINE, "engine")
            self._cold = self._start(ENGINE, "cold")
            self._trainer = self._start(TRAINER, "trainer")
            for child in (self._engine, self._trainer):
                child.send("load", checkpoint=self._checkpoint)
            for child in (self._engine, self._trainer):
                child.answer()
            self._url = self._engine.ask("serve")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for child in reversed(self._children):
            child.close()

    def _start(self, module: str, name: str) -> Child:
        # Three processes share the machine, and more threads than cores only slow down tensors of this size.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        child = Child(module, log=self._run_dir / f"{name}.log", environment={"OMP_NUM_THREADS": threads})
        self._children.append(child)
        return child

    def play(self, case: Case, mode: str, transport: str, progress: Progress) -> Run:
        """Trains, zeroes, pushes, compares.

        Raises:
            DemoError: The experts were not all wrong before the push.
        """
        self._version += 1
        saved = str(self._run_dir / f"version-{self._version}")
        size = self._trainer.ask("train", num_steps=_STEPS_PER_PUSH, part=case.part, directory=saved)
        self.num_tensors, self.num_bytes = size["tensors"], size["bytes"]
        self._cold.send("load", checkpoint=saved)

        live = self._fingerprint(self._engine, case)
        num_zeroed = self._engine.ask("zero_experts", part=case.part)
        before = self._fingerprint(self._engine, case)
        num_changed = len(before.diff(live).differing)
        if not 0 < num_changed == num_zeroed:
            raise DemoError(f"{num_zeroed} expert tensors were to be zeroed, {num_changed} changed: it proves nothing")
        pushed = self._trainer.ask(
            "push",
            on_event=lambda event: progress.data(event["sent_bytes"], event["total_bytes"]),
            url=self._url,
            mode=mode,
            transport=transport,
            part=case.part,
            version=self._version,
            split=list(case.split),
        )
        after = self._fingerprint(self._engine, case)
        answers = self._engine.ask("generate", part=case.part)

        self._cold.answer()
        expected = self._fingerprint(self._cold, case)
        expected_answers = self._cold.ask("generate", part=case.part)
        if not live.diff(expected).differing:
            raise DemoError("the engine had the trainer's weights before the push: it proves nothing")
        diff = after.diff(expected)
        return Run(
            case=case.name,
            mode=mode,
            transport=transport,
            differing=len(diff.differing) + len(diff.added) + len(diff.removed),
            moved=len(after.diff(before).moved),
            compared=len(expected.rows),
            greedy_matching=sum(a == b for a, b in zip(answers, expected_answers, strict=True)),
            greedy_total=len(expected_answers),
            seconds=pushed["seconds"],
        )

    def _fingerprint(self, child: Child, case: Case) -> Fingerprint:
        return Fingerprint.from_json(child.ask("fingerprint", part=case.part))
