"""Experts of every format under weightsync's reload: planned, replayed, finished like a cold load, nothing moved."""

import pytest
import torch
from expert_checkpoints import PAIRS, Checkpoint, assert_same_bytes, byte_image, sizes_of
from torch import nn

import weightsync
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.shared_experts import SharedExpert
from weightsync.errors import CoverageError, WeightSyncError
from weightsync.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")
NUM_EXPERTS = 3
MODES = ("direct", "layerwise")


class Model(nn.Module):
    """One layer of experts beside a plain linear, loaded as an engine loads it."""

    def __init__(self, fmt, source, shared=None, **kwargs):
        super().__init__()
        hidden, intermediate = sizes_of(fmt)
        self.mlp = nn.Module()
        self.mlp.experts = MegaMoEExperts(
            NUM_EXPERTS, 2, hidden, intermediate, fmt=fmt, source=source, shared=shared, backend="reference",
            prefix="mlp.experts", **kwargs,
        )  # fmt: skip
        self.gate = nn.Parameter(torch.zeros(NUM_EXPERTS, hidden), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            target = self.mlp.experts.locate(name)
            if target is None:
                self.get_parameter(name).data.copy_(tensor)
                continue
            param = self.get_parameter(target.name)
            param.weight_loader(param, tensor, target.name, target.shard_id, target.expert_id, return_success=True)

    def process_weights_after_loading(self):
        self.mlp.experts.finish()


def checkpoint(fmt, source, seed, shared=None):
    data = Checkpoint(source, *sizes_of(fmt), range(NUM_EXPERTS), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = {**data.tensors, "gate": torch.randn(NUM_EXPERTS, sizes_of(fmt)[0], generator=generator)}
    if shared is not None:
        more = Checkpoint(shared.source, sizes_of(fmt)[0], shared.intermediate, ["shared"], seed=seed + 50)
        tensors |= more.tensors
    return tensors


def cold(fmt, source, tensors, shared=None, **kwargs):
    model = Model(fmt, source, shared, **kwargs)
    weightsync.record_layouts(model)
    model.load_weights(tensors.items())
    model.process_weights_after_loading()
    return model


def addresses(model):
    return {name: (p.data_ptr(), p.stride(), p.shape) for name, p in model.named_parameters()}


def reload(model, parts, mode, **kwargs):
    session = weightsync.start_reload(model, mode=mode, **kwargs)
    for part in parts:
        session.load_weights(part.items())
    return weightsync.finish_reload(model)


def split(tensors, suffixes):
    return {name: tensor for name, tensor in tensors.items() if name.endswith(suffixes)}


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
@pytest.mark.parametrize("mode", MODES)
def test_pushes_equal_cold_loads_and_move_nothing(fmt, source, mode):
    a, b = checkpoint(fmt, source, 1), checkpoint(fmt, source, 2)
    model = cold(fmt, source, a)
    before = addresses(model)
    for tensors in (b, a, b):
        reload(model, [tensors], mode)
        assert_same_bytes(byte_image(model), byte_image(cold(fmt, source, tensors)))
        assert addresses(model) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [("weight", "scale"), ("scale", "weight")])
@pytest.mark.parametrize(("fmt", "source"), [("sm100_mxfp8", "block_fp8"), ("sm90_fp8", "block_fp8")])
def test_weights_and_scales_in_separate_updates(fmt, source, mode, order):
    a, b = checkpoint(fmt, source, 1), checkpoint(fmt, source, 2)
    model = cold(fmt, source, a)
    parts = {"weight": split(b, (".weight", "gate")), "scale": split(b, "weight_scale_inv")}
    reload(model, [parts[part] for part in order], mode)
    assert_same_bytes(byte_image(model), byte_image(cold(fmt, source, b)))


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_update_and_a_fused_shared_expert(mode):
    fmt, source, shared = "sm100_mxfp8", "block_fp8", SharedExpert("block_fp8", 128)
    a, b = checkpoint(fmt, source, 1, shared), checkpoint(fmt, source, 2, shared)
    model = cold(fmt, source, a, shared)
    some = {name: t for name, t in b.items() if ".experts.1." in name or "shared" in name}
    reload(model, [some], mode, scope="partial")
    assert_same_bytes(byte_image(model), byte_image(cold(fmt, source, a | some, shared)))


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_takes_its_own_experts_and_replicas_from_a_full_push(mode):
    kwargs = {"ep_size": 2, "ep_rank": 1, "num_redundant_experts": 1}
    a, b = checkpoint("sm100_mxfp8", "block_fp8", 1), checkpoint("sm100_mxfp8", "block_fp8", 2)
    model = cold("sm100_mxfp8", "block_fp8", a, **kwargs)
    reload(model, [b], mode)
    assert_same_bytes(byte_image(model), byte_image(cold("sm100_mxfp8", "block_fp8", b, **kwargs)))
    assert model.mlp.experts.placement.logical_of_slot == (2, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_push_without_a_scale_is_refused_before_anything_changes(mode):
    a, b = checkpoint("sm100_mxfp8", "block_fp8", 1), checkpoint("sm100_mxfp8", "block_fp8", 2)
    model = cold("sm100_mxfp8", "block_fp8", a)
    del b["mlp.experts.1.up_proj.weight_scale_inv"]
    with pytest.raises(CoverageError, match=r"up_proj\.weight_scale_inv|w13_weight_scale_inv\[elements 6:8\]"):
        reload(model, [b], mode, manifest=Manifest.from_tensors(b.items()))
    assert weightsync.reload_state(model) == "live"
    assert_same_bytes(byte_image(model), byte_image(cold("sm100_mxfp8", "block_fp8", a)))


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_that_finish_finds_is_rolled_back_and_the_next_push_is_clean(mode):
    a, b = checkpoint("sm90_fp8", "block_fp8", 1), checkpoint("sm90_fp8", "block_fp8", 2)
    model = cold("sm90_fp8", "block_fp8", a)
    bad = dict(b)
    bad["mlp.experts.0.down_proj.weight_scale_inv"] = torch.full_like(b["mlp.experts.0.down_proj.weight_scale_inv"], -1)
    with pytest.raises((WeightSyncError, ValueError), match=r"expert 0 \(slot 0\) w2"):
        reload(model, [bad], mode, rollback="host")
    assert_same_bytes(byte_image(model), byte_image(cold("sm90_fp8", "block_fp8", a)))
    assert model.mlp.experts.finish() == 0, "nothing of the failed push is remembered"
    reload(model, [b], mode)
    assert_same_bytes(byte_image(model), byte_image(cold("sm90_fp8", "block_fp8", b)))
