"""What keeps experts from serving bytes that were never made final: scalars, moved slots, torn reloads, copies."""

import copy

import pytest
import torch
from expert_checkpoints import Checkpoint, assert_same_bytes, byte_image, sizes_of
from torch import nn

import weightsync
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.shared_experts import SharedExpert

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")
NUM_EXPERTS = 3
NVFP4 = ("sm100_nvfp4", "nvfp4_modelopt")
DERIVED = ("l1_alpha", "l2_alpha", "l2_activation_scale")


def build(fmt, source, **kwargs):
    kwargs = {"backend": "reference", "prefix": "mlp.experts", **kwargs}
    return MegaMoEExperts(NUM_EXPERTS, 1, *sizes_of(fmt), fmt=fmt, source=source, **kwargs)


def checkpoint(fmt, source, seed=1):
    return Checkpoint(source, *sizes_of(fmt), range(NUM_EXPERTS), seed=seed).tensors


def load(module, tensors):
    for name, tensor in tensors.items():
        assert module.load(name, tensor) is True, name


def cold(fmt, source, tensors, **kwargs):
    module = build(fmt, source, **kwargs)
    load(module, tensors)
    module.finish()
    return module


def forward(module):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, module.hidden, generator=generator).bfloat16()
    return module(x, torch.tensor([[0], [1], [2]]), torch.ones(3, 1))


def derived_of(module):
    return {name: (getattr(module, name).data_ptr(), getattr(module, name).tolist()) for name in DERIVED}


# NVFP4's scalars


def test_a_new_scalar_keeps_forward_shut_until_a_finish_accepts_it_and_the_derived_ones_stay():
    tensors = checkpoint(*NVFP4)
    module = cold(*NVFP4, tensors)
    y, before, values = forward(module), derived_of(module), module.expert_values(0)
    module.load("mlp.experts.0.gate_proj.weight_scale_2", torch.tensor(50.0))
    with pytest.raises(RuntimeError, match="new weights arrived"):
        forward(module)
    with pytest.raises(ValueError, match="weight_scale_2 arrived without"):
        module.finish()
    with pytest.raises(RuntimeError, match="new weights arrived"):
        forward(module)
    assert derived_of(module) == before
    assert module.expert_values(0).l1_alpha == values.l1_alpha == before["l1_alpha"][1][0]
    load(module, {name: tensor for name, tensor in tensors.items() if ".experts.0." in name})
    module.finish()
    assert torch.equal(forward(module), y)


def test_scalars_are_derived_only_once_every_shard_was_judged():
    hidden, intermediate = sizes_of(NVFP4[0])
    fused = SharedExpert("block_fp8", intermediate)

    def shared(seed):
        return Checkpoint("block_fp8", hidden, intermediate, ["shared"], seed=seed).tensors

    module = cold(*NVFP4, checkpoint(*NVFP4) | shared(5), shared=fused)
    assert module.shared_fused
    before = byte_image(module)
    update = checkpoint(*NVFP4, seed=2) | shared(6)
    bad = "mlp.shared_experts.down_proj.weight_scale_inv"
    load(module, update | {bad: torch.full_like(update[bad], -1.0)})
    with pytest.raises(ValueError, match="shared expert w2"):
        module.finish()
    for name in DERIVED:
        assert torch.equal(byte_image(module)[name], before[name]), name


def test_the_derived_scalars_follow_experts_that_were_moved():
    tensors = checkpoint(*NVFP4)
    module = cold(*NVFP4, tensors)
    plain, order = cold(*NVFP4, tensors), [2, 0, 1]
    addresses = {name: pointer for name, (pointer, _) in derived_of(module).items()}
    for view in module.get_expert_weights():
        view.copy_(view[order].clone())
    module.set_placement(order)
    assert torch.equal(module.l1_alpha, plain.l1_alpha[order])
    assert torch.equal(module.l2_alpha, plain.l2_alpha[order])
    assert {name: pointer for name, (pointer, _) in derived_of(module).items()} == addresses
    load(plain, tensors)
    plain.set_placement(order)  # with scalars that no finish has judged yet
    load(plain, tensors)
    plain.finish()
    assert_same_bytes(byte_image(module), byte_image(plain))
