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


# Stand-ins


@pytest.mark.parametrize("fmt", ["sm100_mxfp8", "sm90_fp8", "sm100_bf16"])
def test_a_pass_with_meta_parameters_writes_nothing_even_where_a_weight_brings_its_scale(fmt):
    module = cold(fmt, "bf16", checkpoint(fmt, "bf16"))
    before = byte_image(module)
    for name, tensor in checkpoint(fmt, "bf16", seed=2).items():
        target = module.locate(name)
        stand_in = getattr(module, target.param).to("meta")
        assert module.weight_loader(stand_in, tensor, target.name, target.shard_id, target.expert_id, True) is True
    assert_same_bytes(byte_image(module), before)
    assert module.finish() == 0


# Scale shapes


DECLARED = [
    ("sm100_mxfp8", "block_fp8_ue8m0", "scale"),
    ("sm90_fp8", "block_fp8_ue8m0", "scale"),
    ("sm100_mxfp8", "mxfp8", "weight_scale"),
    ("sm100_mxfp4", "mxfp4_ct", "weight_scale"),
    ("sm100_mxfp4", "mxfp4_dsv4", "scale"),
    ("sm100_nvfp4", "nvfp4_modelopt", "weight_scale"),
]


@pytest.mark.parametrize(("fmt", "source", "suffix"), DECLARED)
@pytest.mark.parametrize("projection", ["gate_proj", "down_proj"])
def test_a_scale_of_another_shape_is_refused_even_if_it_tiles(fmt, source, suffix, projection):
    module = build(fmt, source, prefix="experts")
    data = Checkpoint(source, *sizes_of(fmt), range(2))
    name = f"{data.path(1, projection)}.{suffix}"
    rows, columns = data.tensors[name].shape
    before = byte_image(module)
    shapes = {(rows // 2, columns), (rows, columns // 2), (1, columns), (rows, 1), (1, 1), (2 * rows, columns)}
    for shape in shapes - {(rows, columns)}:
        if 0 in shape:
            continue
        scale = torch.full(shape, 0x31, dtype=torch.uint8)
        scale = scale.view(torch.float8_e4m3fn) if fmt == "sm100_nvfp4" else scale
        with pytest.raises(ValueError, match=r"does not match .*\((\d+), (\d+)\)"):
            module.load(name, scale)
    assert_same_bytes(byte_image(module), before)


@pytest.mark.parametrize("group", [(128, 128), (1, 64), (1, 128), (64, 32)])
def test_coarser_ue8m0_scales_are_repeated_exactly_if_they_are_declared(group):
    module, plain = build("sm100_mxfp8", "mxfp8", scale_group=group), build("sm100_mxfp8", "mxfp8")
    hidden, intermediate = sizes_of("sm100_mxfp8")
    for projection, rows, columns in (("up_proj", intermediate, hidden), ("down_proj", hidden, intermediate)):
        name = f"mlp.experts.1.{projection}.weight_scale"
        scale = torch.randint(1, 254, (rows // group[0], columns // group[1])).to(torch.uint8)
        whole = torch.kron(scale.int(), torch.ones(group[0], group[1] // 32, dtype=torch.int32)).to(torch.uint8)
        module.load(name, scale)
        plain.load(name, whole)
        with pytest.raises(ValueError, match="does not match"):
            module.load(name, whole)
    assert byte_image(module)["w13_weight_scale"].any()
    assert_same_bytes(byte_image(module), byte_image(plain))


@pytest.mark.parametrize(
    ("source", "group"),
    [
        ("block_fp8", (1, 32)),
        ("bf16", (1, 32)),
        ("mxfp8", (1, 16)),
        ("mxfp8", (0, 32)),
        ("mxfp8", (1, 48)),
        ("mxfp8", (1, 256)),
    ],
)
def test_a_scale_group_that_cannot_be_expanded_is_refused_when_built(source, group):
    with pytest.raises(ValueError, match="scale_group"):
        build("sm100_mxfp8", source, scale_group=group)


# Torn reloads


class Model(nn.Module):
    def __init__(self, fmt, source):
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = build(fmt, source)

    def load_weights(self, weights):
        for name, tensor in weights:
            target = self.mlp.experts.locate(name)
            param = self.get_parameter(target.name)
            param.weight_loader(param, tensor, target.name, target.shard_id, target.expert_id, return_success=True)

    def process_weights_after_loading(self):
        self.mlp.experts.finish()


def served(fmt, source, tensors):
    model = Model(fmt, source)
    weightsync.record_layouts(model)
    model.load_weights(tensors.items())
    model.process_weights_after_loading()
    return model


@pytest.mark.parametrize("end", ["finish", "abort"])
@pytest.mark.parametrize(("fmt", "source"), [("sm100_mxfp8", "block_fp8"), ("sm90_fp8", "block_fp8"), NVFP4])
def test_experts_of_a_torn_model_refuse_by_themselves_until_a_whole_load(fmt, source, end):
    first, second = checkpoint(fmt, source), checkpoint(fmt, source, seed=2)
    model = served(fmt, source, first)
    experts = model.mlp.experts
    session = weightsync.start_reload(model, mode="direct", rollback="none")
    session.load_weights([(name, tensor) for name, tensor in second.items() if name.endswith(".weight")])
    if end == "finish":
        with pytest.raises(Exception, match="missing|did not arrive"):
            session.finish()
    else:
        session.abort("enough")
    assert weightsync.reload_state(model) == "torn"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no complete load was finished"):
            experts(torch.zeros(1, experts.hidden), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        with pytest.raises(ValueError, match="9 of 9 shards are incomplete"):
            experts.finish()
    with weightsync.reload(model) as session:
        session.load_weights(second.items())
    assert_same_bytes(byte_image(model), byte_image(served(fmt, source, second)))
    forward(experts)


def test_experts_whose_bytes_came_back_serve_on():
    tensors = checkpoint("sm100_mxfp8", "block_fp8")
    model = served("sm100_mxfp8", "block_fp8", tensors)
    y = forward(model.mlp.experts)
    session = weightsync.start_reload(model, mode="direct", rollback="host")
    session.load_weights([(n, t) for n, t in checkpoint("sm100_mxfp8", "block_fp8", 2).items() if n.endswith("weight")])
    session.abort("enough")
    assert weightsync.reload_state(model) == "live"
    assert torch.equal(forward(model.mlp.experts), y)


# Copies


@pytest.mark.parametrize(("fmt", "source"), [("sm100_mxfp8", "block_fp8"), NVFP4])
def test_a_copy_loads_into_itself(fmt, source):
    module = cold(fmt, source, checkpoint(fmt, source))
    before = byte_image(module)
    other = copy.deepcopy(module)
    for name, param in module.named_parameters():
        twin = getattr(other, name)
        assert getattr(twin, "weight_loader_numel", None) == getattr(param, "weight_loader_numel", None), name
        assert hasattr(twin, "weight_loader") is hasattr(param, "weight_loader"), name
        assert not hasattr(twin, "weight_loader") or twin.weight_loader.__self__ is other, name
    update = checkpoint(fmt, source, seed=2)
    load(other, update)
    other.finish()
    assert_same_bytes(byte_image(other), byte_image(cold(fmt, source, update)))
    assert_same_bytes(byte_image(module), before)


# Values


def test_the_limit_of_requantisation_holds_only_where_it_is_done():
    name = "mlp.experts.1.down_proj.weight_scale_inv"
    for fmt in ("sm90_fp8", "sm100_mxfp8"):
        tensors = checkpoint(fmt, "block_fp8")
        scale = torch.full_like(tensors[name], 3e38)
        module = build(fmt, "block_fp8")
        load(module, tensors | {name: scale})
        if fmt == "sm90_fp8":
            module.finish()
            assert torch.equal(module.w2_weight_scale_inv[1], scale)
        else:
            with pytest.raises(ValueError, match=r"expert 1 \(slot 1\) w2 has a block scale .* above 2\*\*127"):
                module.finish()


def test_a_large_scale_does_not_hide_a_bad_one_beside_it():
    tensors = checkpoint("sm90_fp8", "block_fp8")
    name = "mlp.experts.1.down_proj.weight_scale_inv"
    for bad in (float("nan"), float("inf"), -1.0):
        scale = torch.full_like(tensors[name], 3e38)
        scale.view(-1)[-1] = bad
        module = build("sm90_fp8", "block_fp8")
        load(module, tensors | {name: scale})
        with pytest.raises(ValueError, match=r"1 unusable tensors: expert 1 \(slot 1\) w2: scale is negative, NaN"):
            module.finish()


def test_a_block_scale_of_minus_zero_is_a_zero_block():
    tensors = checkpoint(*NVFP4)
    name = "mlp.experts.1.up_proj.weight_scale"
    for code, accepted in ((0x80, True), (0x81, False), (0xFF, False), (0x7F, False), (0x7E, True)):
        scale = tensors[name].clone().view(torch.uint8)
        scale[0].fill_(code)
        module = build(*NVFP4)
        load(module, tensors | {name: scale.view(torch.float8_e4m3fn)})
        if accepted:
            module.finish()
            assert bool(module.expert_values(1).w3[0].any()) is (code != 0x80)
        else:
            with pytest.raises(ValueError, match=r"expert 1 \(slot 1\) w3: scale"):
                module.finish()


# Names and arguments


@pytest.mark.parametrize("index", ["01", "00", "\u0661", "1\u0661"])
def test_an_expert_index_is_written_one_way_only(index):
    module = build("sm100_bf16", "bf16")
    tensor = checkpoint("sm100_bf16", "bf16")["mlp.experts.1.up_proj.weight"]
    before = byte_image(module)
    for call in (lambda name: module.load(name, tensor), module.locate):
        with pytest.raises(ValueError, match="expert index"):
            call(f"mlp.experts.{index}.up_proj.weight")
    assert_same_bytes(byte_image(module), before)


def test_an_unknown_precision_is_refused_when_built():
    with pytest.raises(ValueError, match="unknown precision 'bogus'"):
        build("sm100_bf16", "bf16", precision="bogus")
