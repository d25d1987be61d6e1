"""Format selection: every known quantisation config, and why the others are refused."""

import pytest
import torch

from megamoe_adapter import selection
from megamoe_adapter.selection import arch_of, select_format, source_of

PREFIX = "model.layers.3.mlp.experts"
BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}
NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


@pytest.mark.parametrize(
    ("config", "arch", "kwargs", "fmt", "source"),
    [
        (None, "sm100", {}, "sm100_bf16", "bf16"),
        ({}, "sm100", {}, "sm100_bf16", "bf16"),
        (None, "sm90", {"allow_rounding": True}, "sm90_fp8", "bf16"),
        (BLOCK_FP8, "sm100", {}, "sm100_mxfp8", "block_fp8"),
        (BLOCK_FP8, "sm90", {}, "sm90_fp8", "block_fp8"),
        (BLOCK_FP8, "sm100", {"expert_dtype": "fp4"}, "sm100_mxfp4", "mxfp4_dsv4"),
        ({"quant_method": "mxfp8"}, "sm100", {}, "sm100_mxfp8", "mxfp8"),
        (MXFP4, "sm100", {}, "sm100_mxfp4", "mxfp4_ct"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "sm100", {}, "sm100_nvfp4", "nvfp4_modelopt"),
        ({"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "nvfp4"}}, "sm100", {}, "sm100_nvfp4",
         "nvfp4_modelopt"),
    ],
)  # fmt: skip
def test_known_configs(config, arch, kwargs, fmt, source):
    choice = select_format(config, PREFIX, arch=arch, **kwargs)
    assert (choice.fmt, choice.source) == (fmt, source)
    assert choice.reason


@pytest.mark.parametrize(
    ("config", "arch", "message"),
    [
        (NVFP4, "sm100", "lossy.*nearest supported choice: .*mxfp4_ct"),
        (NVFP4, "sm90", "lossy"),
        ({"quant_method": "fp8"}, "sm100", "fp8_per_tensor .* not a block scale"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "sm100", r"blocks of \[64, 64\]"),
        ({"quant_method": "awq"}, "sm100", "quant_method 'awq' is not known"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "sm100", "quant_algo 'FP8'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "sm100", "format 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "sm100", "int4"),
        (MXFP4, "sm90", "mxfp4_ct experts .* no exact MegaMoE format on SM90; formats for them: sm100_mxfp4"),
        (None, "sm90", "no exact MegaMoE format on SM90.*allow_rounding would quantise into sm90_fp8"),
    ],
)
def test_what_would_lose_something_is_refused_with_the_reason(config, arch, message):
    with pytest.raises(NotImplementedError, match=message):
        select_format(config, PREFIX, arch=arch)


@pytest.mark.parametrize(
    "ignored",
    [PREFIX, "model.layers.3.mlp", f"{PREFIX}.*", "re:.*layers.3.*", "model.layers.*.mlp.experts", "layers.3"],
)
@pytest.mark.parametrize(
    ("config", "key"), [(BLOCK_FP8, "modules_to_not_convert"), (MXFP4, "ignore"), (NVFP4, "ignore")]
)
def test_experts_that_are_left_out_of_the_quantisation_are_bf16(config, key, ignored):
    choice = select_format({**config, key: ["lm_head", ignored]}, PREFIX, arch="sm100")
    assert (choice.fmt, choice.source) == ("sm100_bf16", "bf16")


@pytest.mark.parametrize(
    "ignored", ["model.layers.33.mlp", "layers.3.mlp.expert", "re:layers.3", "gate", "mlp.experts.1"]
)
def test_patterns_match_whole_parts_of_a_path(ignored):
    choice = select_format({**BLOCK_FP8, "modules_to_not_convert": [ignored]}, PREFIX, arch="sm100")
    assert choice.source == "block_fp8"


def test_a_groups_own_format_overrides_the_configs():
    groups = {
        "experts": {"targets": [r"re:.*experts\..*"], "format": "mxfp4-pack-quantized"},
        "rest": {"targets": ["Linear"], "format": "float-quantized"},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    assert source_of(config, PREFIX)[0] == "mxfp4_ct"
    assert source_of(config, "model.layers.3.self_attn")[0] == "fp8_per_tensor"


def test_projections_that_are_stored_differently_are_refused():
    config = {**MXFP4, "ignore": [r"re:.*down_proj"]}
    with pytest.raises(ValueError, match="all MoE projections of a layer must be stored alike"):
        select_format(config, PREFIX, arch="sm100")


def test_unknown_archs_and_devices_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="unknown arch 'sm120'"):
        select_format(None, PREFIX, arch="sm120")
    with pytest.raises(NotImplementedError, match="not on cpu"):
        arch_of(torch.device("cpu"))
    for capability, arch in (((9, 0), "sm90"), ((10, 0), "sm100"), ((10, 3), "sm100")):
        monkeypatch.setattr(selection.torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert arch_of(torch.device("cuda", 0)) == arch
    monkeypatch.setattr(selection.torch.cuda, "get_device_capability", lambda device: (12, 0))
    with pytest.raises(NotImplementedError, match="this one is SM120"):
        arch_of(torch.device("cuda", 0))
