"""The engine models against the stock transformers models of the same checkpoints; their loaders against bad input."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megamoe_adapter.demo.checkpoint import CheckpointSpec, build_checkpoint, load_config, read_checkpoint
from megamoe_adapter.demo.master import MasterModel
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.models.causal_lm import MegaMoEDrafter, MegaMoEForCausalLM, draft_greedy, generate_greedy
from megamoe_adapter.models.families import FAMILIES, is_mtp_name
from megamoe_adapter.models.loading import cold_load
from megamoe_adapter.models.moe_block import ExpertOptions, dequantised

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")

EXACT = ExpertOptions(backend="reference", precision="exact")
# Relative L2 against the stock model in float32 over the dequantised weights. sm90 keeps the checkpoint's FP8 and
# scales, so only bfloat16 rounding is left; sm100 rounds every expert weight once more, to MXFP8. A token whose router
# is nearly undecided may go to another expert after rounding, so of a whole model's tokens the median counts.
BLOCK_TOLERANCE = {"sm90_fp8": 0.01, "sm100_mxfp8": 0.08}
LOGITS_TOLERANCE = {"sm90_fp8": 0.03, "sm100_mxfp8": 0.08}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request, tmp_path_factory):
    # sm90 wants hidden % 512 == 0 and intermediate % 256 == 0.
    spec = CheckpointSpec(request.param, hidden=512, moe_intermediate=256, num_layers=3, num_experts=8, vocab=256)
    return build_checkpoint(spec, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def weights(checkpoint):
    return dict(read_checkpoint(checkpoint))


@pytest.fixture(scope="module")
def stock(checkpoint, weights):
    master = MasterModel(load_config(checkpoint))
    master.load(weights.items())
    return master


def engine(checkpoint, weights, **options):
    config, options = load_config(checkpoint), dataclasses.replace(EXACT, **options)
    model, draft = MegaMoEForCausalLM(config, options), MegaMoEDrafter(config, options)
    cold_load(model, weights.items())
    cold_load(draft, weights.items())
    return model, draft


def relative_l2(value, reference):
    """Of each token."""
    return (value.float() - reference).norm(dim=-1) / reference.norm(dim=-1)


TOKENS = torch.arange(48).view(4, 12) * 5 % 256


@pytest.mark.parametrize("fmt", sorted(LOGITS_TOLERANCE))
@torch.no_grad()
def test_engine_forward_equals_the_stock_model_within_the_stated_tolerance(checkpoint, weights, stock, fmt):
    model, draft = engine(checkpoint, weights, fmt=fmt)
    logits, hidden = model(TOKENS)
    reference = stock.model(input_ids=TOKENS, use_cache=False).logits
    assert relative_l2(logits, reference).median() < LOGITS_TOLERANCE[fmt]

    reference_hidden = stock.model.model(input_ids=TOKENS, use_cache=False).last_hidden_state
    drafted = draft(hidden[:, :-1], TOKENS[:, 1:])
    reference = stock.drafter(reference_hidden[:, :-1], TOKENS[:, 1:])
    assert relative_l2(drafted, reference).median() < LOGITS_TOLERANCE[fmt]


@pytest.mark.parametrize("fmt", sorted(BLOCK_TOLERANCE))
@torch.no_grad()
def test_moe_block_equals_the_stock_block_for_every_token(checkpoint, weights, stock, fmt):
    model, draft = engine(checkpoint, weights, fmt=fmt)
    x = torch.randn(2, 24, 512, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    pairs = [(layer.mlp, other.mlp) for layer, other in zip(model.model.layers, stock.model.model.layers, strict=True)]
    pairs = [*pairs[1:], (draft.mtp_block.mlp, stock.drafter.mtp_block.mlp)]
    for block, reference in pairs:
        assert relative_l2(block(x), reference(x.float())).max() < BLOCK_TOLERANCE[fmt]


@torch.no_grad()
def test_the_tolerance_notices_swapped_experts_and_halves(checkpoint, weights, stock):
    x = torch.randn(2, 24, 512, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    reference = stock.model.model.layers[1].mlp(x.float())
    prefix = "model.layers.1.mlp.experts"
    for a, b in ((f"{prefix}.0.up_proj", f"{prefix}.0.gate_proj"), (f"{prefix}.2.down_proj", f"{prefix}.3.down_proj")):
        wrong = dict(weights)
        for suffix in ("weight", "weight_scale_inv"):
            wrong[f"{a}.{suffix}"], wrong[f"{b}.{suffix}"] = weights[f"{b}.{suffix}"], weights[f"{a}.{suffix}"]
        model, _ = engine(checkpoint, wrong)
        assert relative_l2(model.model.layers[1].mlp(x), reference).max() > 5 * BLOCK_TOLERANCE["sm100_mxfp8"]


def test_greedy_generation_depends_on_the_prompt_alone(checkpoint, weights):
    model, draft = engine(checkpoint, weights, precision="kernel")
    prompts = TOKENS[:, :4]
    together = generate_greedy(model, prompts, 3)
    assert together.shape == (4, 3)
    assert torch.equal(generate_greedy(model, prompts, 3), together)
    assert draft_greedy(model, draft, torch.cat([prompts, together], 1)).shape == (4, 6)


def test_each_model_takes_its_own_names_and_no_name_is_left(checkpoint, weights):
    model, draft = engine(checkpoint, weights)
    config = load_config(checkpoint)
    for name, tensor in weights.items():
        taken = [bool(target.load_weights([(name, tensor)])) for target in (model, draft)]
        assert taken == [not is_mtp_name(config, name), is_mtp_name(config, name)], name


def test_order_of_the_tensors_does_not_matter(checkpoint, weights):
    config = load_config(checkpoint)
    generator = torch.Generator().manual_seed(3)
    expected = engine(checkpoint, weights)
    names = list(weights)
    for order in (names[::-1], [names[i] for i in torch.randperm(len(names), generator=generator)]):
        for cls, reference in zip((MegaMoEForCausalLM, MegaMoEDrafter), expected, strict=True):
            model = cls(config, EXACT)
            cold_load(model, ((name, weights[name]) for name in order))
            other = reference.state_dict()
            for path, value in model.state_dict().items():
                assert torch.equal(as_bytes(value), as_bytes(other[path])), path


def as_bytes(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def test_the_models_hook_is_what_finishes_the_experts_and_a_second_run_changes_nothing(checkpoint, weights):
    model = MegaMoEForCausalLM(load_config(checkpoint), EXACT)
    model.load_weights(weights.items())
    with pytest.raises(RuntimeError, match="process_weights_after_loading"):
        model(TOKENS)
    model.process_weights_after_loading()
    before = {path: as_bytes(tensor) for path, tensor in model.state_dict().items()}
    model.process_weights_after_loading()
    assert all(torch.equal(as_bytes(tensor), before[path]) for path, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight_scale_inv", "expert 3.*w3"),
        ("model.layers.2.mlp.experts.0.down_proj.weight", "expert 0.*w2"),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight_scale_inv", "shared"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.layers.2.mlp.gate.e_score_correction_bias", "e_score_correction_bias"),
    ],
)
def test_a_cold_load_names_what_is_missing(checkpoint, weights, name, match):
    without = {other: tensor for other, tensor in weights.items() if other != name}
    with pytest.raises(ValueError, match=match):
        cold_load(MegaMoEForCausalLM(load_config(checkpoint), EXACT), without.items())


def test_loaders_refuse_names_shapes_and_dtypes_that_do_not_fit(checkpoint, weights):
    model = MegaMoEForCausalLM(load_config(checkpoint), EXACT)
    norm, expert = weights["model.norm.weight"], weights["model.layers.1.mlp.experts.0.up_proj.weight"]
    with pytest.raises(KeyError, match="no_such_layer"):
        model.load_weights([("model.no_such_layer.weight", norm)])
    with pytest.raises(ValueError, match="shape|unexpected|_proj"):
        model.load_weights([("model.layers.1.mlp.experts.0.side_proj.weight", expert)])
    with pytest.raises(ValueError, match=r"model.norm.weight.*\[?\(?256"):
        model.load_weights([("model.norm.weight", norm[:256])])
    with pytest.raises(ValueError, match="model.norm.weight.*float32"):
        model.load_weights([("model.norm.weight", norm.float())])
    with pytest.raises(ValueError, match="shape"):
        model.load_weights([("model.layers.1.mlp.experts.0.up_proj.weight", expert[:, :128])])


def test_the_shared_expert_stays_beside_the_kernel_that_cannot_fuse_it(checkpoint, weights):
    for fmt, fused in (("sm100_mxfp8", True), ("sm90_fp8", False)):
        model, _ = engine(checkpoint, weights, fmt=fmt)
        blocks = [m for m in model.modules() if isinstance(m, MegaMoEExperts)]
        assert len(blocks) == 2
        assert {block.shared_fused for block in blocks} == {fused}
        assert any("shared_experts.gate_proj" in path for path, _ in model.named_parameters()) is not fused


def test_unknown_families_and_several_mtp_layers_are_refused(checkpoint):
    config = load_config(checkpoint)
    config.num_nextn_predict_layers = 2
    with pytest.raises(NotImplementedError, match="is 2"):
        MegaMoEDrafter(config)
    config.model_type = "llama"
    with pytest.raises(NotImplementedError, match="deepseek_v3, glm4_moe"):
        MegaMoEForCausalLM(config)


def test_dequantised_multiplies_each_block_by_its_scale():
    weight = torch.ones(130, 129).to(torch.float8_e4m3fn)
    value = dequantised(weight, torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    assert value[0, 0] == 1
    assert value[127, 128] == 2
    assert value[128, 127] == 4
    assert value[129, 128] == 8
