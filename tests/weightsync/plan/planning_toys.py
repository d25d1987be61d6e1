"""Replays a plan with plain torch, so that its bytes can be compared with what the loaders themselves write."""

import torch

from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload
from weightsync.reachable import walk


def as_bytes(tensor):
    """All bytes of a tensor in logical order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bytes_view(storage, region):
    """A region of a storage as a tensor of bytes, one dim per dim of the region and one for the item."""
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return flat.as_strided((*region.shape, region.itemsize), (*region.strides, 1), region.offset)


def replay(plan, model, weights):
    """Executes a plan: recorded copies by strides alone, the other names by their loaders, in wire order."""
    live = {slot.path: slot.tensor for slot in walk(model)}
    wire = dict(weights)
    done = set()
    for name, how in plan.names.items():
        if name in done or how.treatment in ("skipped", "ignored"):
            continue
        if how.treatment == "copy":
            source = wire[name].contiguous().untyped_storage()
            for write in how.writes:
                target = live[plan.destinations[write.destination].path].untyped_storage()
                bytes_view(target, write.dest).copy_(bytes_view(source, write.source))
            continue
        group = [other for other in plan.manifest.by_name if other in (how.together or (name,))]
        done.update(group)
        plan.load(model, [(other, wire[other].clone()) for other in group])


def snapshot(model):
    """Identity, layout and bytes of everything that a model holds, and what its modules' dicts hold."""
    tensors = [
        (s.path, s.kind, id(s.tensor), s.tensor.data_ptr(), s.tensor.shape, s.tensor.stride(), s.tensor.dtype)
        for s in walk(model)
    ]
    contents = [as_bytes(slot.tensor).tolist() for slot in walk(model)]
    held = [{**vars(m), **m._parameters, **m._buffers, **m._modules} for m in model.modules()]
    for names in held:
        names.pop("_weightsync_state", None)  # this package's own notebook
    dicts = [{key: id(value) for key, value in names.items()} for names in held]
    attributes = [{key: id(value) for key, value in vars(p).items()} for p in model.parameters()]
    return tensors, contents, dicts, attributes


def randomised(model, seed=0):
    """Fills every tensor of a model with random bytes; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    for slot in walk(model):
        if slot.tensor.dtype in (torch.bool, torch.int64):
            continue  # maps and masks mean something
        size = slot.tensor.numel() * slot.tensor.element_size()
        noise = torch.randint(0, 120, (size,), dtype=torch.uint8, generator=generator)
        with torch.no_grad():
            slot.tensor.copy_(noise.view(slot.tensor.dtype).reshape(slot.tensor.shape))
    return model


def wire_tensor(shape, dtype=torch.float32, seed=1):
    """A tensor of random, finite values that no other seed gives."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def plan_for(model, weights, **options):
    """The plan for a checkpoint, checked to have left no trace on the model."""
    before = snapshot(model)
    plan = plan_reload(model, Manifest.from_tensors(weights), **options)
    assert snapshot(model) == before
    return plan


def assert_replays(make, weights, **options):
    """Plans for `make()`, and checks that replaying the plan gives the bytes that the loaders give; returns the plan.

    A deep copy would lose the loaders that hang on parameters, so the cold model is made anew.
    """
    model, cold = randomised(make()), randomised(make())
    plan = plan_for(model, weights, **options)
    wanted = [(name, tensor.clone()) for name, tensor in weights if plan.names[name].treatment != "ignored"]
    with torch.no_grad():
        if hasattr(cold, "load_weights"):
            cold.load_weights(iter(wanted))
        else:
            plan.load(cold, wanted)
    replay(plan, model, weights)
    expected = {slot.path: as_bytes(slot.tensor).tolist() for slot in walk(cold)}
    assert {slot.path: as_bytes(slot.tensor).tolist() for slot in walk(model)} == expected
    return plan


def treatments(plan):
    """Name -> treatment."""
    return {name: how.treatment for name, how in plan.names.items()}
