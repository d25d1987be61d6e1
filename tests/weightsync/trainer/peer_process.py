"""Another process of a push, for tests that kill or stop it; not a test module.

python peer_process.py trainer URL TRANSPORT DEADLINE PAUSE_AT      # pushes; says "mid" and waits at that tensor
python peer_process.py engine PAUSE_AT                              # serves; says its URL, says "mid" at that bucket
"""

import sys
import time

from push_toys import Toy

PATIENCE = 60.0


def say(words):
    print(words, flush=True)


def trainer(url, transport, deadline, pause_at):
    from weightsync.trainer.client import TrainerClient
    from weightsync.trainer.sources import ModuleSource, WeightSource

    class Pausing(WeightSource):
        inner = ModuleSource(Toy(5))

        @property
        def metadata(self):
            return self.inner.metadata

        def iter_full(self):
            for number, pair in enumerate(self.inner.iter_full()):
                if number == int(pause_at):
                    say("mid")
                    time.sleep(PATIENCE)
                yield pair

    client = TrainerClient(Pausing(), url, transport=transport, deadline_seconds=float(deadline), bucket_bytes=512)
    if int(pause_at) < 0:
        client.start(1)
        say("mid")
        time.sleep(PATIENCE)
    try:
        client.push(1)
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        sys.exit(3)
    say("pushed")


def engine(pause_at):
    from weightsync.worker import push
    from weightsync.worker.receiver import Receiver
    from weightsync.worker.server import BackgroundServer

    real, count = push.Push.load, [0]

    def load(self, target, filled):
        count[0] += 1
        if count[0] == int(pause_at):
            say("mid")
            time.sleep(PATIENCE)
        real(self, target, filled)

    push.Push.load = load
    say(BackgroundServer(Receiver(Toy(2))).url)
    time.sleep(PATIENCE)


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](*sys.argv[2:])
