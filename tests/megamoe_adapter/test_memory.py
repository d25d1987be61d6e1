"""Memory of loading: no second copy of a weight is kept or made in passing, no storage has two owners."""

import gc
import weakref

import pytest
import torch
from expert_checkpoints import PAIRS, Checkpoint, sizes_of
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.formats import FORMATS
from megamoe_adapter.layout import kernel_tensors
from megamoe_adapter.shared_experts import SharedExpert
from weightsync.reachable import walk

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")
NUM_EXPERTS = 3
COPIED = [pair for pair in PAIRS if pair[1] != "bf16" or pair[0] == "sm100_bf16"]


def build(fmt, source, **kwargs):
    return MegaMoEExperts(NUM_EXPERTS, 2, *sizes_of(fmt), fmt=fmt, source=source, backend="reference", **kwargs)


def checkpoint(fmt, source):
    return Checkpoint(source, *sizes_of(fmt), range(NUM_EXPERTS)).tensors


def live_bytes():
    """Bytes of every storage that Python can reach, each once. No collection first: nothing here may need one."""
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def storages_of(module):
    return {slot.tensor.untyped_storage()._cdata: slot.tensor.untyped_storage().nbytes() for slot in walk(module)}


@pytest.mark.parametrize(
    ("fmt", "source"),
    [
        ("sm100_bf16", "bf16"),
        ("sm100_mxfp8", "block_fp8"),
        ("sm100_mxfp8", "bf16"),
        ("sm100_mxfp4", "mxfp4_ct"),
        ("sm100_nvfp4", "nvfp4_modelopt"),
        ("sm90_fp8", "block_fp8"),
    ],
)
def test_a_layer_holds_the_kernel_tensors_and_nothing_else(fmt, source):
    gc.collect()  # what earlier tests left
    before = live_bytes()
    module = build(fmt, source)
    for _ in range(2):
        tensors = checkpoint(fmt, source)
        sources = [weakref.ref(tensor) for tensor in tensors.values()]
        for name, tensor in tensors.items():
            module.load(name, tensor)
        module.finish()
        del tensors, tensor
        assert not [ref for ref in sources if ref() is not None], "a source tensor is still alive"
        owned = sum(param.nbytes for param in module.parameters())
        assert live_bytes() - before == owned == sum(storages_of(module).values())
    specs = kernel_tensors(FORMATS[fmt], source, NUM_EXPERTS, *sizes_of(fmt))
    tables = sum(p.nbytes for n, p in module.named_parameters() if n.endswith(("scale_2", "input_scale", "alpha")))
    tables += 4 if fmt == "sm100_nvfp4" else 0  # l2_activation_scale
    kernel = sum(spec.num_bytes for name, spec in specs.items() if not name.endswith(("scale_2", "input_scale")))
    assert owned == kernel + tables


def test_a_second_copy_would_be_counted():
    gc.collect()
    before = live_bytes()
    module = build("sm90_fp8", "block_fp8")
    module._t_l1 = module.w13_weight.data.clone()  # what adapters that transform after loading keep
    owned = sum(param.nbytes for param in module.parameters())
    assert live_bytes() - before == owned + module.w13_weight.nbytes
    assert sum(storages_of(module).values()) == owned + module.w13_weight.nbytes


class Allocations(TorchDispatchMode):
    """The largest new storage that any op makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {item.untyped_storage()._cdata for item in args if isinstance(item, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in known:
                self.largest = max(self.largest, item.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("fmt", "source"), COPIED)
def test_loading_a_weight_allocates_nothing(fmt, source):
    module = build(fmt, source)
    for name, tensor in checkpoint(fmt, source).items():
        with Allocations() as made:
            module.load(name, tensor)
        if source == "block_fp8_ue8m0" and name.endswith("scale"):
            assert 0 < made.largest <= 4 * tensor.numel() * 128 * 4, "expanded scales, no more"
        else:
            assert made.largest == 0, name


def test_loading_may_use_a_slice_of_a_larger_tensor_without_copying_it():
    data = checkpoint("sm90_fp8", "block_fp8")
    weight = data["mlp.experts.0.up_proj.weight"]
    wide = torch.zeros(weight.shape[0], 3 * weight.shape[1], dtype=torch.uint8).view(weight.dtype)
    middle = wide[:, weight.shape[1] : 2 * weight.shape[1]]
    middle.copy_(weight)
    module, other = build("sm90_fp8", "block_fp8"), build("sm90_fp8", "block_fp8")
    with Allocations() as made:
        module.load("mlp.experts.0.up_proj.weight", middle)
    other.load("mlp.experts.0.up_proj.weight", weight)
    assert made.largest == 0
    assert torch.equal(module.w13_weight.data.view(torch.uint8), other.w13_weight.data.view(torch.uint8))


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_no_parameter_shares_its_storage_with_another_or_with_a_source(fmt, source):
    shared = SharedExpert("block_fp8", 128) if fmt in ("sm100_mxfp8", "sm100_mxfp4") else None
    module = build(fmt, source, shared=shared)
    tensors = checkpoint(fmt, source)
    for name, tensor in tensors.items():
        module.load(name, tensor)
    owned = [param.untyped_storage()._cdata for param in module.parameters()]
    assert len(set(owned)) == len(owned)
    assert not set(owned) & {tensor.untyped_storage()._cdata for tensor in tensors.values()}
    # What a kernel is given aliases the parameters, whole: freeing "the raw weights" would free what it reads.
    for pair in module.kernel_weights():
        for tensor in pair if isinstance(pair, tuple) else (pair,):
            assert tensor.untyped_storage()._cdata in owned
    # So a source that is freed, or written again by its owner, cannot reach the live bytes.
    before = [param.detach().clone() for param in module.parameters()]
    for tensor in tensors.values():
        tensor.view(-1).view(torch.uint8).fill_(0x11)
    for param, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(param.detach().flatten(), old.flatten()) or param.dtype == torch.float8_e4m3fn
        raw, kept = (t.detach().contiguous().flatten().view(torch.uint8) for t in (param, old))
        assert torch.equal(raw, kept)
