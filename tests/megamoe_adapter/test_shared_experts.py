"""The shared expert: one decision, its reason logged, and a fused one laid out like a routed one."""

import logging

import pytest
import torch
from expert_checkpoints import Checkpoint, assert_same_bytes, byte_image, bytes_of, relative_l2, sizes_of

from megamoe_adapter import weights
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.formats import FORMATS
from megamoe_adapter.shared_experts import SharedExpert, decide_shared

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")


@pytest.mark.parametrize(
    ("fmt", "source", "fused_as"),
    [
        ("sm100_mxfp8", "block_fp8", "sm100_mxfp8"),
        ("sm100_mxfp8", "mxfp8", "sm100_mxfp8"),
        ("sm100_mxfp4", "block_fp8_ue8m0", "sm100_mxfp8"),
        ("sm100_mxfp4", "block_fp8", "sm100_mxfp8"),
        ("sm100_nvfp4", "block_fp8", "sm100_mxfp8"),
        ("sm100_nvfp4", "bf16", "sm100_bf16"),
        ("sm100_bf16", "bf16", "sm100_bf16"),
        ("sm100_mxfp8", "bf16", None),
        ("sm100_mxfp4", "bf16", None),
        ("sm100_mxfp4", "mxfp4_ct", None),
        ("sm100_bf16", "block_fp8", None),
        ("sm90_fp8", "block_fp8", None),
    ],
)
def test_fused_only_where_nothing_is_rounded_to_fit(fmt, source, fused_as):
    decision = decide_shared(FORMATS[fmt], SharedExpert(source, 256), intermediate=128)
    assert (decision.fused, decision.format) == (fused_as is not None, fused_as)


def test_each_reason_to_keep_it_apart_is_said():
    fmt = FORMATS["sm100_mxfp8"]

    def reason(shared, **kwargs):
        decision = decide_shared(fmt, shared, intermediate=128, **kwargs)
        assert not decision.fused
        return decision.reason

    assert "no shared expert" in reason(None)
    assert "split by tensor parallelism" in reason(SharedExpert("block_fp8", 256, sharded=True))
    assert "192 is not a multiple of a routed expert's 128" in reason(SharedExpert("block_fp8", 192))
    assert "0 is not a multiple" in reason(SharedExpert("block_fp8", 0))
    assert "reaches only by rounding" in reason(SharedExpert("bf16", 128))
    assert reason(SharedExpert("block_fp8", 128), kernel_refusal="too old") == "too old"
    decision = decide_shared(FORMATS["sm90_fp8"], SharedExpert("block_fp8", 128), intermediate=128)
    assert decision.reason == "fp8_mega_moe fuses no shared expert"
    with pytest.raises(ValueError, match="unknown shared-expert source 'fp7'"):
        decide_shared(fmt, SharedExpert("fp7", 128), intermediate=128)


def build(fmt="sm100_mxfp8", source="block_fp8", shared=None, **kwargs):
    hidden, intermediate = sizes_of(fmt)
    return MegaMoEExperts(
        2, 1, hidden, intermediate, fmt=fmt, source=source, shared=shared, backend="reference", **kwargs
    )


def test_the_reason_is_logged_once_for_all_layers(caplog):
    weights.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="megamoe_adapter.weights"):
        for layer in range(3):
            build(shared=SharedExpert("block_fp8", 128), prefix=f"layers.{layer}.mlp.experts")
    messages = [record.message for record in caplog.records if "shared expert" in record.message]
    assert messages == ["MegaMoE shared expert fused: True (block_fp8 fused as sm100_mxfp8)"]


def test_a_fused_shared_expert_has_the_layout_of_one_routed_expert():
    data = Checkpoint("block_fp8", 256, 128, range(2))
    module = build(shared=SharedExpert("block_fp8", 128))
    for name, tensor in data.tensors.items():
        module.load(name, tensor)
        if ".experts.1." in name:
            assert module.load(name.replace("experts.1", "shared_experts"), tensor) is True
    module.finish()
    for routed, shared in (("w13", "shared_l1"), ("w2", "shared_l2")):
        for kind in ("weight", "weight_scale", "weight_scale_inv"):
            one, other = getattr(module, f"{routed}_{kind}")[1], getattr(module, f"{shared}_{kind}")
            assert other.dim() == 2
            assert torch.equal(bytes_of(one), bytes_of(other)), (shared, kind)
            assert other.stride() == one.stride() or 1 in other.shape
    derived = {name for name, p in module.named_parameters() if getattr(p, "weight_loader_numel", None) == 0}
    assert {"shared_l1_weight_scale", "shared_l2_weight_scale"} <= derived


def test_several_shared_experts_are_one_wide_one():
    data = Checkpoint("block_fp8", 256, 384, ["shared"])
    module = build(shared=SharedExpert("block_fp8", 384))
    for name, tensor in data.tensors.items():
        assert module.load(name, tensor) is True
    module.accept_present_weights()
    assert tuple(module.shared_l1_weight.shape) == (768, 256)
    assert tuple(module.shared_l2_weight.shape) == (256, 384)


def test_gate_and_up_in_one_tensor_give_the_same_bytes():
    data = Checkpoint("block_fp8", 256, 128, ["shared"])
    apart, together = (build(shared=SharedExpert("block_fp8", 128)) for _ in range(2))
    for name, tensor in data.tensors.items():
        apart.load(name, tensor)
        if "down_proj" in name:
            together.load(name, tensor)
    for suffix in ("weight", "weight_scale_inv"):
        parts = [data.tensors[f"mlp.shared_experts.{p}.{suffix}"] for p in ("gate_proj", "up_proj")]
        raw = torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
        assert together.load(f"mlp.shared_experts.gate_up_proj.{suffix}", raw) is True
    assert_same_bytes(byte_image(together), byte_image(apart))
    assert vars(together.arrivals) == vars(apart.arrivals)


def test_an_unfused_shared_expert_keeps_its_own_names():
    module = build("sm90_fp8", shared=SharedExpert("block_fp8", 256))
    assert module.load("mlp.shared_experts.gate_proj.weight", torch.zeros(1)) is None
    assert not [name for name, _ in module.named_parameters() if name.startswith("shared")]
    with pytest.raises(ValueError, match="has no fused shared expert"):
        module.kernel_weights(shared=True)


def test_a_name_that_a_fused_shared_expert_does_not_have_is_refused():
    module = build(shared=SharedExpert("block_fp8", 128))
    with pytest.raises(ValueError, match="unexpected shared-expert tensor mlp.shared_experts.gate_proj.bias"):
        module.load("mlp.shared_experts.gate_proj.bias", torch.zeros(1))


def test_a_shared_mlp_beside_a_fused_one_is_refused_and_beside_none_is_added():
    data = Checkpoint("block_fp8", 512, 256, range(2))
    x = torch.randn(3, 512).bfloat16()
    ids, scores = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    apart = build("sm90_fp8", shared=SharedExpert("block_fp8", 256))
    for name, tensor in data.tensors.items():
        apart.load(name, tensor)
    apart.finish()
    added = apart(x, ids, scores, shared_experts=torch.nn.Identity())
    assert relative_l2(added, apart(x, ids, scores).float() + x.float()) < 0.01
    fused = build(shared=SharedExpert("block_fp8", 128))
    with pytest.raises(ValueError, match="fuses the shared expert into MegaMoE"):
        fused(x[:, :256], ids, scores, shared_experts=torch.nn.Identity())
