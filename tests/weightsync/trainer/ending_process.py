"""A side of a push that ends as soon as it has closed; not a test module.

python ending_process.py trainer URL TRANSPORT      # pushes, closes, ends
python ending_process.py engine                     # says its URL, serves until its stdin ends, closes, ends
"""

import sys

from push_toys import Toy


def trainer(url, transport):
    from weightsync.trainer.client import TrainerClient

    client = TrainerClient(Toy(5), url, transport=transport, deadline_seconds=60.0)
    client.push(1)
    client.close()


def engine():
    from weightsync.worker.receiver import Receiver
    from weightsync.worker.server import BackgroundServer

    receiver = Receiver(Toy(2))
    server = BackgroundServer(receiver)
    print(server.url, flush=True)
    sys.stdin.read()
    receiver.close()
    server.close()


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](*sys.argv[2:])
