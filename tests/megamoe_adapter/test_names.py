"""Names: parsed in constant time, refused when they belong nowhere; and the package's own public names."""

import subprocess
import sys

import pytest

import megamoe_adapter
from megamoe_adapter.names import ALL_EXPERTS, ExpertNames, Target

BLOCK = {"raw_scales": True}


@pytest.mark.parametrize(
    ("source", "kwargs", "name", "expected"),
    [
        ("block_fp8", BLOCK, "model.layers.3.mlp.experts.7.gate_proj.weight",
         ("model.layers.3.mlp.experts", "w13_weight", "w1", 7)),
        ("block_fp8", BLOCK, "model.layers.3.mlp.experts.11.up_proj.weight_scale_inv",
         ("model.layers.3.mlp.experts", "w13_weight_scale_inv", "w3", 11)),
        ("block_fp8", BLOCK, "model.layers.45.mtp_block.mlp.experts.0.down_proj.weight_scale_inv",
         ("model.layers.45.mtp_block.mlp.experts", "w2_weight_scale_inv", "w2", 0)),
        ("mxfp4_dsv4", {}, "layers.0.ffn.experts.255.w2.scale", ("layers.0.ffn.experts", "w2_weight_scale", "w2", 255)),
        ("mxfp4_ct", {}, "experts.1.up_proj.weight_packed", ("experts", "w13_weight", "w3", 1)),
        ("block_fp8_ue8m0", BLOCK, "ffn.experts.1.w1.scale", ("ffn.experts", "w13_weight_scale_inv", "w1", 1)),
        ("nvfp4_modelopt", {}, "mlp.experts.2.down_proj.input_scale", ("mlp.experts", "w2_input_scale", "w2", 2)),
        ("bf16", {}, "mlp.experts.gate_up_proj", ("mlp.experts", "w13_weight", "w13", ALL_EXPERTS)),
        ("bf16", {}, "mlp.experts.down_proj", ("mlp.experts", "w2_weight", "w2", ALL_EXPERTS)),
        ("block_fp8", BLOCK, "mlp.experts.gate_up_proj_scale_inv",
         ("mlp.experts", "w13_weight_scale_inv", "w13", ALL_EXPERTS)),
        ("mxfp8", {}, "mlp.experts.down_proj.weight_scale", ("mlp.experts", "w2_weight_scale", "w2", ALL_EXPERTS)),
        ("bf16", {"shared_source": "bf16"}, "mlp.shared_experts.down_proj.weight",
         ("mlp.experts", "shared_l2_weight", "w2", ALL_EXPERTS)),
        ("mxfp4_dsv4", {"shared_source": "block_fp8_ue8m0"}, "layers.1.ffn.shared_experts.w3.scale",
         ("layers.1.ffn.experts", "shared_l1_weight_scale", "w3", ALL_EXPERTS)),
    ],
)  # fmt: skip
def test_every_kind_of_name(source, kwargs, name, expected):
    target = ExpertNames(source, **kwargs).locate(name)
    assert target == Target(*expected)
    assert target.name == f"{expected[0]}.{expected[1]}"


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.gate_proj.weight",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.experts",
        "mlp.experts.router.weight",
        "mlp.my_experts.7.gate_proj.weight",
    ],
)
def test_other_names_are_nobodys(name):
    assert ExpertNames("block_fp8", raw_scales=True).locate(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "mlp.experts.7.gate_proj.bias",
        "mlp.experts.7.gate_proj.weight_packed",
        "mlp.experts.7.fc1.weight",
        "mlp.experts.7.gate_proj.input_scale",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj.zero_point",
    ],
)
def test_an_experts_name_without_a_place_is_refused(name):
    with pytest.raises(ValueError, match=f"unexpected .*expert tensor {name}"):
        ExpertNames("block_fp8", raw_scales=True).locate(name)


def test_the_table_for_generic_loops_matches_no_shared_expert_and_no_other_expert():
    rows = ExpertNames("mxfp4_ct").mapping(12)
    for name in (
        "mlp.shared_experts.gate_proj.weight_packed",
        "mlp.experts.12.gate_proj.weight_packed",
        "mlp.gate.weight",
    ):
        assert not [row for row in rows if row[1] in name]
    hits = [row for row in rows if row[1] in "mlp.experts.11.gate_proj.weight_packed"]
    assert hits[0] == ("experts.w13_weight", "experts.11.gate_proj.weight_packed", 11, "w1")
    assert {row[2] for row in hits} == {11}


def test_public_names_are_sorted_lazy_and_there():
    assert megamoe_adapter.__all__ == sorted(megamoe_adapter.__all__)
    for name in megamoe_adapter.__all__:
        assert getattr(megamoe_adapter, name) is not None
        assert name in dir(megamoe_adapter)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megamoe_adapter.nothing


def test_importing_the_package_imports_no_kernel_and_no_optional_dependency():
    code = (
        "import sys, megamoe_adapter, megamoe_adapter.experts, megamoe_adapter.kernel, megamoe_adapter.ep_group, torch;"
        "assert not {'deep_gemm', 'vllm', 'mpi4py', 'transformers', 'triton.language'} & set(sys.modules);"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
