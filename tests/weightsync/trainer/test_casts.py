"""Whether a push may change a tensor's dtype is the trainer's word, from the client to the loader."""

import pytest
import torch
from push_toys import Toy

from weightsync import control
from weightsync.errors import LayoutError, ProtocolError
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.sources import ModuleSource, TensorSource
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer


def narrowed(module, name):
    """The module's tensors, one of them in bfloat16."""
    tensors = dict(ModuleSource(module).iter_full())
    return {key: tensor.bfloat16() if key == name else tensor.clone() for key, tensor in tensors.items()}


@pytest.mark.parametrize("transport", ["memory", "shared_memory", "gloo"])
@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_another_dtype_is_refused_unless_casts_are_allowed_and_then_the_loader_casts(mode, transport):
    engine, trainer = Toy(1.0), Toy(2.0)
    name = next(name for name, parameter in trainer.named_parameters() if parameter.dtype == torch.float32)
    sent = narrowed(trainer, name)
    with BackgroundServer(Receiver(engine) if transport != "memory" else Receiver(Toy(3.0))) as server:
        endpoint = Receiver(engine) if transport == "memory" else server.url
        options = {"transport": transport, "mode": mode}
        before = engine.state_dict()[name].clone()
        with TrainerClient(TensorSource(sent), endpoint, **options) as client, pytest.raises(LayoutError, match=name):
            client.push()
        assert torch.equal(engine.state_dict()[name], before)
        with TrainerClient(TensorSource(sent), endpoint, casts="allow", **options) as client:
            for factor in (1.0, 2.0):
                sent[name].mul_(factor)
                report = client.push()
                assert torch.equal(engine.state_dict()[name], sent[name].float())
                assert report.interpreted["model"] >= 1
    for key, tensor in sent.items():
        assert torch.equal(engine.state_dict()[key], tensor.to(engine.state_dict()[key].dtype)), key


def test_another_word_is_refused_by_both_sides():
    with pytest.raises(ValueError, match="casts must be one of refuse, allow, got 'maybe'"):
        TrainerClient(Toy(), Receiver(Toy()), casts="maybe")
    receiver, calls = Receiver(Toy()), []

    class Listens:
        def call(self, route, body, deadline_seconds):
            calls.append((route, body))
            return receiver.call(route, body, deadline_seconds)

        def close(self):
            pass

    with TrainerClient(Toy(), Listens()) as client:
        client.push()
    hello = next(body["init_info"] for route, body in calls if route == control.INIT)
    assert hello["casts"] == "refuse"
    with pytest.raises(ProtocolError, match="casts must be one of refuse, allow, got 'maybe'"):
        receiver.call(control.INIT, {"init_info": {**hello, "casts": "maybe"}}, 5)
