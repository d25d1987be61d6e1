"""Trainers of several ranks: the same passes, and the same end of a push, on all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from push_toys import Toy, state_bytes

from weightsync.errors import LayoutError
from weightsync.worker import push
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer

SCRIPT = Path(__file__).with_name("lockstep_rank.py")


def test_three_ranks_gather_in_step_whether_a_push_succeeds_is_refused_or_fails_in_the_middle(monkeypatch, tmp_path):
    engine = Toy(2)
    receiver = Receiver(engine)
    real, versions = push.Push.load, []

    def failing(self, target, filled):
        versions.append(self.version)
        if self.version == 7 and versions.count(7) == 3:
            raise LayoutError("the engine failed in the middle", names=["big"])
        real(self, target, filled)

    monkeypatch.setattr(push.Push, "load", failing)
    with BackgroundServer(receiver) as server:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(tmp_path / "ranks"), server.url, "5", "4", "7", "8"],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(3)
        ]
        try:
            outputs = [[json.loads(line) for line in rank.communicate(timeout=150)[0].splitlines()] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert outputs[0] == outputs[1] == outputs[2]
    tensors = len(list(engine.parameters()))
    good, old, broken, again = outputs[0]
    assert good == {"version": 5, "gathers": tensors}
    assert old["error"] == "ReloadError"
    assert "version 4 is not newer" in old["message"]
    assert old["gathers"] == tensors, "a refused push gathers nothing"
    assert broken["error"] == "LayoutError"
    assert "the engine failed in the middle" in broken["message"]
    assert broken["gathers"] == 2 * tensors, "every rank goes through with the pass"
    assert again == {"version": 8, "gathers": 3 * tensors}
    assert state_bytes(engine) == state_bytes(Toy(8))
