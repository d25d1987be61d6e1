"""Loading experts: right bytes in kernel layout whatever the order, names and split; a dry run marks nothing."""

import random
from pathlib import Path

import pytest
import torch
from expert_checkpoints import PAIRS, Checkpoint, assert_same_bytes, byte_image, bytes_of, relative_l2, sizes_of
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe_adapter.activation import MegaMoEActivation
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.formats import CONVERSIONS
from megamoe_adapter.names import ALL_EXPERTS

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")
NUM_EXPERTS = 3
GOLDEN = Path(__file__).parents[1] / "golden"


def build(fmt, source, **kwargs):
    hidden, intermediate = sizes_of(fmt)
    kwargs = {"backend": "reference", "prefix": "layers.0.mlp.experts", **kwargs}
    return MegaMoEExperts(NUM_EXPERTS, 2, hidden, intermediate, fmt=fmt, source=source, **kwargs)


def checkpoint(fmt, source, **kwargs):
    return Checkpoint(source, *sizes_of(fmt), range(NUM_EXPERTS), **kwargs)


def load(module, tensors):
    for name, tensor in tensors.items():
        assert module.load(name, tensor) is True, name
    return module


def finished(fmt, source, tensors, **kwargs):
    module = load(build(fmt, source, **kwargs), tensors)
    module.finish()
    return module


def test_the_pairs_tested_here_are_all_there_are():
    assert set(PAIRS) == {(fmt, source) for source, fmt in CONVERSIONS}


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_loaded_values_are_the_checkpoints(fmt, source):
    data = checkpoint(fmt, source)
    module = finished(fmt, source, data.tensors)
    for expert in range(NUM_EXPERTS):
        got = module.expert_values(expert)
        factors = {"w1": got.l1_alpha, "w3": got.l1_alpha, "w2": got.l2_alpha}
        for shard, factor in factors.items():
            error = relative_l2(getattr(got, shard) * factor, data.values[expert][shard])
            assert error <= max(PAIRS[fmt, source], 1e-6), (expert, shard)


@pytest.mark.parametrize("kind", ["general", "pow2"])
def test_block_fp8_into_mxfp8_gives_the_bytes_of_others_code(kind):
    golden = load_file(GOLDEN / "layout.safetensors") | load_file(GOLDEN / "requant.safetensors")
    module = MegaMoEExperts(2, 1, 256, 128, fmt="sm100_mxfp8", source="block_fp8", backend="reference")
    for expert in range(2):
        for projection in ("up_proj", "down_proj", "gate_proj"):
            path = f"experts.{expert}.{projection}"
            weight = golden[f"{kind}.{path}.weight"].view(torch.float8_e4m3fn)
            load(
                module,
                {f"{path}.weight": weight, f"{path}.weight_scale_inv": golden[f"{kind}.{path}.weight_scale_inv"]},
            )
    module.finish()
    for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
        expected = golden[f"sm100_mxfp8.{kind}.{name}"].contiguous().flatten().view(torch.uint8)
        assert torch.equal(byte_image(module)[name], expected), name


@pytest.mark.parametrize(
    ("fmt", "source", "key"), [("sm100_bf16", "bf16", "bf16"), ("sm100_mxfp4", "mxfp4_ct", "mxfp4")]
)
def test_copied_formats_give_the_bytes_of_others_code(fmt, source, key):
    golden = load_file(GOLDEN / "layout.safetensors")
    module = MegaMoEExperts(2, 1, 256, 128, fmt=fmt, source=source, backend="reference")
    for expert in range(2):
        for projection in ("down_proj", "up_proj", "gate_proj"):
            if key == "bf16":
                tensors = {"weight": golden[f"bf16.{projection}"][expert]}
            else:
                names = ("weight_packed", "weight_scale")
                tensors = {name: golden[f"{key}.{projection}.{name}"][expert] for name in names}
            load(module, {f"experts.{expert}.{projection}.{name}": tensor for name, tensor in tensors.items()})
    module.finish()
    for name, image in byte_image(module).items():
        assert torch.equal(image, golden[f"{fmt}.{name}"].contiguous().flatten().view(torch.uint8)), name


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_any_order_of_arrival_gives_the_same_bytes_at_the_same_addresses(fmt, source):
    data = checkpoint(fmt, source)
    expected = byte_image(finished(fmt, source, data.tensors))
    module = build(fmt, source)
    addresses = {name: (p.data_ptr(), p.stride()) for name, p in module.named_parameters()}
    for seed in range(2):
        names = list(data.tensors)
        random.Random(seed).shuffle(names)
        load(module, {name: data.tensors[name] for name in names})
        module.finish()
        assert_same_bytes(byte_image(module), expected)
    assert {name: (p.data_ptr(), p.stride()) for name, p in module.named_parameters()} == addresses


def fused(data):
    """The same checkpoint with one 3-D tensor per projection pair, as transformers 5 packs it."""
    tensors = {}
    suffixes = {name.rpartition(".")[2] for name in data.tensors}
    for suffix in suffixes:
        parts = {
            p: [data.tensors[f"{data.path(e, p)}.{suffix}"] for e in range(NUM_EXPERTS)]
            for p in ("gate_proj", "up_proj", "down_proj")
        }
        view = torch.uint8 if parts["gate_proj"][0].dtype.itemsize == 1 else parts["gate_proj"][0].dtype
        dtype = parts["gate_proj"][0].dtype
        if parts["gate_proj"][0].dim() == 0:
            both = torch.stack([torch.stack(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)])
        else:
            both = torch.stack(
                [
                    torch.cat([g.view(view), u.view(view)])
                    for g, u in zip(parts["gate_proj"], parts["up_proj"], strict=True)
                ]
            ).view(dtype)
        down = torch.stack([d.view(view) for d in parts["down_proj"]]).view(dtype)
        end = "" if suffix in ("weight", "weight_packed") else f".{suffix}"
        tensors[f"mlp.experts.gate_up_proj{end}"] = both
        tensors[f"mlp.experts.down_proj{end}"] = down
    return tensors


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_fused_names_give_the_same_bytes_as_names_per_expert(fmt, source):
    data = checkpoint(fmt, source)
    tensors = fused(data)
    assert tensors["mlp.experts.gate_up_proj"].dim() == 3
    assert_same_bytes(byte_image(finished(fmt, source, tensors)), byte_image(finished(fmt, source, data.tensors)))


def test_a_fused_scale_may_carry_transformers_own_name():
    data = checkpoint("sm100_mxfp8", "block_fp8")
    renamed = {name.replace(".weight_scale_inv", "_scale_inv"): tensor for name, tensor in fused(data).items()}
    assert "mlp.experts.gate_up_proj_scale_inv" in renamed
    expected = byte_image(finished("sm100_mxfp8", "block_fp8", data.tensors))
    assert_same_bytes(byte_image(finished("sm100_mxfp8", "block_fp8", renamed)), expected)


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_vllms_generic_loop_reaches_the_same_bytes(fmt, source):
    data = checkpoint(fmt, source)
    module = build(fmt, source)
    params = {f"mlp.experts.{name}": param for name, param in module.named_parameters()}
    projections = ("w1", "w2", "w3") if source == "mxfp4_dsv4" else ("gate_proj", "down_proj", "up_proj")
    mapping = module.expert_params_mapping(projections=projections)
    for name, tensor in data.tensors.items():
        for prefix, fragment, expert, shard in mapping:
            if fragment in name:
                mapped = name.replace(fragment, prefix)
                param = params[mapped]
                assert param.weight_loader(param, tensor, mapped, shard_id=shard, expert_id=expert, return_success=True)
                break
        else:
            raise AssertionError(f"{name} matches nothing")
    module.finish()
    assert_same_bytes(byte_image(module), byte_image(finished(fmt, source, data.tensors)))


# Experts over ranks


@pytest.mark.parametrize(
    ("fmt", "source"), [("sm100_mxfp8", "block_fp8"), ("sm90_fp8", "block_fp8"), ("sm100_mxfp4", "mxfp4_ct")]
)
def test_a_rank_holds_its_slice_of_the_whole(fmt, source):
    hidden, intermediate = sizes_of(fmt)
    data = Checkpoint(source, hidden, intermediate, range(4))

    def make(**kwargs):
        return MegaMoEExperts(4, 2, hidden, intermediate, fmt=fmt, source=source, backend="reference", **kwargs)

    whole = load(make(), data.tensors)
    whole.finish()
    for rank in range(2):
        module = make(ep_size=2, ep_rank=rank)
        for name, tensor in data.tensors.items():
            expert = int(name.split(".")[2])
            assert module.load(name, tensor) is (expert // 2 == rank)
        module.finish()
        for name, param in module.named_parameters():
            part = getattr(whole, name)[2 * rank : 2 * rank + 2]
            assert torch.equal(bytes_of(param), bytes_of(part)), name


def test_every_local_slot_of_a_redundant_expert_is_filled():
    data = checkpoint("sm100_mxfp8", "block_fp8")
    plain = finished("sm100_mxfp8", "block_fp8", data.tensors)
    module = finished("sm100_mxfp8", "block_fp8", data.tensors, num_redundant_experts=2)
    assert module.placement.logical_of_slot == (0, 1, 2, 0, 1)
    for slot, expert in enumerate(module.placement.logical_of_slot):
        for name, param in plain.named_parameters():
            assert torch.equal(bytes_of(getattr(module, name)[slot]), bytes_of(param[expert])), (slot, name)


def test_loads_follow_experts_that_were_moved():
    data = checkpoint("sm100_mxfp8", "block_fp8")
    module = build("sm100_mxfp8", "block_fp8")
    module.set_placement([2, 0, 1])
    load(module, data.tensors)
    module.finish()
    plain = finished("sm100_mxfp8", "block_fp8", data.tensors)
    for slot, expert in enumerate((2, 0, 1)):
        assert torch.equal(module.expert_values(slot).w1, plain.expert_values(expert).w1)


def test_expert_weights_for_moving_are_views_of_every_per_slot_byte():
    module = finished("sm100_mxfp8", "block_fp8", checkpoint("sm100_mxfp8", "block_fp8").tensors)
    views = module.get_expert_weights()
    params = list(module.parameters())
    assert {view.data_ptr() for view in views} == {param.data_ptr() for param in params}
    assert sum(view.nbytes for view in views) == sum(param.nbytes for param in params)
    first, second = module.expert_values(0).w2, module.expert_values(1).w2
    for view in views:
        view[[0, 1]] = view[[1, 0]].clone()
    assert torch.equal(module.expert_values(0).w2, second)
    assert torch.equal(module.expert_values(1).w2, first)


# Dry runs and replays


class Recorder(TorchDispatchMode):
    """Notes every op that is not a view, and executes no copy."""

    VIEWS = (
        "view",
        "select",
        "slice",
        "alias",
        "detach",
        "permute",
        "transpose",
        "as_strided",
        "unsqueeze",
        "unflatten",
    )

    def __init__(self):
        super().__init__()
        self.copies = []
        self.others = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            self.copies.append(args[:2])
            return args[0]
        if name not in self.VIEWS and name not in ("_reshape_alias", "_unsafe_view"):
            self.others.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fmt", "source"), [pair for pair in PAIRS if pair[1] != "bf16" or pair[0] == "sm100_bf16"])
def test_a_dry_run_sees_one_strided_copy_per_tensor_and_marks_nothing(fmt, source):
    data = checkpoint(fmt, source)
    module = build(fmt, source)
    before = byte_image(module)
    live = {param.untyped_storage()._cdata for param in module.parameters()}
    for name, tensor in data.tensors.items():
        meta = tensor.to("meta")
        with Recorder() as recorder:
            assert module.load(name, meta) is True
        ((destination, origin),) = recorder.copies
        assert destination.untyped_storage()._cdata in live
        assert destination.numel() == origin.numel()
        assert destination.dtype == origin.dtype
        if source != "block_fp8_ue8m0" or not name.endswith("scale"):  # coarser scales are repeated first
            assert recorder.others == []
            assert origin.untyped_storage()._cdata == meta.untyped_storage()._cdata
    assert module.arrivals.fresh_weights == module.arrivals.fresh_scales == 0
    assert module.globals is None or module.globals.fresh == 0
    assert_same_bytes(byte_image(module), before)


@pytest.mark.parametrize("fmt", ["sm100_mxfp8", "sm90_fp8"])
def test_a_dry_run_of_bf16_that_is_quantised_on_arrival_sees_both_copies_and_reads_no_value(fmt):
    module = build(fmt, "bf16")
    rows, columns = module.intermediate, module.hidden
    with Recorder() as recorder:
        module.load("experts.1.up_proj.weight", torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"))
    live = {param.untyped_storage()._cdata for name, param in module.named_parameters() if name.startswith("w13")}
    assert {destination.untyped_storage()._cdata for destination, _ in recorder.copies} == live
    assert not {"_local_scalar_dense", "equal", "is_nonzero"} & set(recorder.others)
    assert module.arrivals.fresh_weights == 0


def test_loading_into_meta_parameters_marks_nothing():
    data = checkpoint("sm100_mxfp8", "block_fp8")
    module = build("sm100_mxfp8", "block_fp8")
    for name, tensor in data.tensors.items():
        target = module.locate(name)
        param = getattr(module, target.param)
        stand_in = param.to("meta")
        assert param.weight_loader(stand_in, tensor, target.name, target.shard_id, target.expert_id, True) is True
    assert module.arrivals.fresh_weights == module.arrivals.fresh_scales == 0
    with pytest.raises(ValueError, match=r"9 of 9 shards are incomplete"):
        module.finish()


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
@pytest.mark.parametrize("packed", [False, True])
def test_replayed_calls_mark_what_the_loader_would_have(fmt, source, packed):
    data = checkpoint(fmt, source)
    tensors = fused(data) if packed else data.tensors
    loaded, replayed = load(build(fmt, source), tensors), build(fmt, source)
    targets = [replayed.locate(name) for name in tensors]
    replayed.weights_replayed([(target.name, target.shard_id, target.expert_id) for target in targets])
    assert vars(replayed.arrivals) == vars(loaded.arrivals)
    assert replayed.globals is None or vars(replayed.globals) == vars(loaded.globals)


def test_the_same_replay_again_marks_again_and_a_moved_placement_is_followed():
    module = build("sm90_fp8", "block_fp8", ep_size=3, ep_rank=0)
    calls = (("experts.w2_weight", "w2", 0), ("experts.w2_weight_scale_inv", "w2", 0), ("experts.w2_weight", "w2", 2))
    for _ in range(2):
        module.weights_replayed(calls)
        marked = module.arrivals.fresh_weights
        assert marked == module.arrivals.bit(0, "w2")
        module.discard_arrivals()
        assert module.arrivals.fresh_weights == module.arrivals.fresh_scales == 0
    module.set_placement([2, 1, 0])
    module.weights_replayed(calls)
    assert module.arrivals.fresh_weights == module.arrivals.bit(0, "w2")
    assert module.arrivals.fresh_scales == 0, "expert 0 lives on another rank now"


def test_a_replayed_name_that_no_parameter_has_is_refused():
    with pytest.raises(ValueError, match="w13_bias maps to nothing"):
        build("sm90_fp8", "block_fp8").weights_replayed([("mlp.experts.w13_bias", "w1", 0)])


# What a module promises


def test_derived_scales_count_no_elements_and_have_no_loader():
    module = build("sm100_mxfp8", "block_fp8")
    derived = {name for name, param in module.named_parameters() if getattr(param, "weight_loader_numel", None) == 0}
    assert derived == {"w13_weight_scale", "w2_weight_scale"}
    assert all(hasattr(param, "weight_loader") is (name not in derived) for name, param in module.named_parameters())
    assert module.supports_direct_reload is True
    for fmt, source in PAIRS:
        if (fmt, source) not in (("sm100_mxfp8", "block_fp8"), ("sm100_nvfp4", "nvfp4_modelopt")):
            assert not any(hasattr(p, "weight_loader_numel") for p in build(fmt, source).parameters()), (fmt, source)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("weight", lambda t: t[:-8], r"w1 weight shape \(120, 256\) does not match the kernel shard \(128, 256\)"),
        ("weight", lambda t: t.T, r"does not match the kernel shard"),
        ("weight", lambda t: t.view(torch.uint8), r"dtype torch.uint8, expected torch.float8_e4m3fn"),
        ("weight", lambda t: t.bfloat16(), r"dtype torch.bfloat16"),
        ("weight_scale_inv", lambda t: t.bfloat16(), r"dtype torch.bfloat16, expected torch.float32"),
        ("weight_scale_inv", lambda t: t[:, :1], r"scale shape \(1, 1\)"),
        ("weight_scale_inv", lambda t: t.expand(2, -1), r"scale shape \(2, 2\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_and_changes_nothing(suffix, change, message):
    data = checkpoint("sm100_mxfp8", "block_fp8")
    module = build("sm100_mxfp8", "block_fp8")
    before = byte_image(module)
    name = f"{data.path(1, 'gate_proj')}.{suffix}"
    with pytest.raises(ValueError, match=message):
        module.load(name, change(data.tensors[name]))
    assert_same_bytes(byte_image(module), before)
    assert module.arrivals.fresh_weights == module.arrivals.fresh_scales == 0


def test_ue8m0_scales_are_never_converted_by_value():
    module = build("sm100_mxfp8", "mxfp8")
    scale = torch.full((128, 8), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    module.load("experts.0.gate_proj.weight_scale", scale)
    words = module.w13_weight_scale[0]
    assert set(words.flatten().tolist()) == {0, 0x78787878}


@pytest.mark.parametrize("owner", ["experts", "mlp.experts", "layers.0.mlp.experts", "model.layers.0.mlp.experts"])
def test_load_takes_a_name_with_fewer_or_more_leading_parts_than_the_prefix(owner):
    module = build("sm100_mxfp8", "block_fp8", prefix="layers.0.mlp.experts")
    weight = torch.ones(128, 256).to(torch.float8_e4m3fn)
    assert module.load(f"{owner}.0.gate_proj.weight", weight) is True


@pytest.mark.parametrize("name", [
    "layers.1.mlp.experts.0.gate_proj.weight", "model.layers.10.mlp.experts.0.gate_proj.weight",
    "xlayers.0.mlp.experts.0.gate_proj.weight", "layers.1.mlp.experts.0.gate_proj.weight_packed",
    "mtp.layers.1.mlp.experts.gate_up_proj",
])  # fmt: skip
def test_load_leaves_another_modules_tensors_alone(name):
    module = build("sm100_mxfp8", "block_fp8", prefix="layers.0.mlp.experts")
    before = [param.data.flatten().view(torch.uint8).clone() for param in module.parameters()]
    assert module.load(name, torch.ones(128, 256).to(torch.float8_e4m3fn)) is None
    after = [param.data.flatten().view(torch.uint8) for param in module.parameters()]
    assert all(map(torch.equal, before, after))


def test_names_and_shards_that_do_not_exist_are_refused():
    module = build("sm100_mxfp8", "block_fp8")
    weight = torch.zeros(128, 256, dtype=torch.float8_e4m3fn)
    assert module.load("mlp.gate.weight", weight) is None
    with pytest.raises(ValueError, match="unexpected expert tensor mlp.experts.0.gate_proj.bias"):
        module.load("mlp.experts.0.gate_proj.bias", weight)
    with pytest.raises(ValueError, match="unsupported expert shard id 'w4'"):
        module.weight_loader(module.w13_weight, weight, "experts.w13_weight", "w4", 0)
    with pytest.raises(ValueError, match="there are 3 logical experts"):
        module.load("mlp.experts.3.gate_proj.weight", weight)
    with pytest.raises(ValueError, match="maps to nothing"):
        module.weight_loader(module.w13_weight, weight, "experts.w13_weight_scale", "w1", 0)
    with pytest.raises(ValueError, match="fused expert tensor must be"):
        module.weight_loader(module.w13_weight, weight, "experts.w13_weight", "w1", ALL_EXPERTS)
    assert module.weight_loader(module.w13_weight, weight, "experts.w2_weight", "w1", 0, return_success=True) is False
    assert module.weight_loader(module.w13_weight, weight, "experts.w2_weight", "w1", 0) is None


def test_what_a_kernel_cannot_do_is_refused_when_built():
    for fmt, source in (("sm90_fp8", "block_fp8"), ("sm100_bf16", "bf16"), ("sm100_nvfp4", "nvfp4_modelopt")):
        with pytest.raises(NotImplementedError, match="not 'situ'"):
            build(fmt, source, activation=MegaMoEActivation("situ"))
    build("sm100_mxfp4", "mxfp4_ct", activation=MegaMoEActivation("situ"))
    with pytest.raises(NotImplementedError, match="no activation alpha or beta"):
        build("sm90_fp8", "block_fp8", activation=MegaMoEActivation(alpha=1.7))
    with pytest.raises(NotImplementedError, match="lossy"):
        build("sm100_nvfp4", "nvfp4_ct")
    with pytest.raises(ValueError, match="hidden % 512"):
        MegaMoEExperts(2, 1, 256, 128, fmt="sm90_fp8", source="block_fp8")
    with pytest.raises(ValueError, match="unknown backend"):
        build("sm90_fp8", "block_fp8", backend="fast")


def test_forward_refuses_unfinished_weights_and_misfit_input():
    data = checkpoint("sm100_mxfp8", "block_fp8")
    module = load(build("sm100_mxfp8", "block_fp8", max_num_tokens=4), data.tensors)
    x, ids, weights = torch.zeros(2, 256).bfloat16(), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="no complete load was finished"):
        module(x, ids, weights)
    module.finish()
    assert module(x, ids, weights).shape == (2, 256)
    with pytest.raises(ValueError, match="x must be"):
        module(x[:, :128], ids, weights)
    with pytest.raises(ValueError, match="topk_ids and topk_weights must be"):
        module(x, ids[:, :1], weights)
    with pytest.raises(ValueError, match="got 5 tokens, but the symmetric buffer was sized for 4"):
        module(torch.zeros(5, 256), torch.zeros(5, 2), torch.zeros(5, 2))
    load(module, data.of_expert(0))
    with pytest.raises(RuntimeError, match="new weights arrived"):
        module(x, ids, weights)
    with pytest.raises(RuntimeError, match="runs on a GPU"):
        finished("sm100_mxfp8", "block_fp8", data.tensors, backend="kernel")(x, ids, weights)


def test_present_weights_can_be_accepted_for_a_dummy_start():
    module = build("sm100_bf16", "bf16")
    module.accept_present_weights()
    assert module.finish() == 0
    assert module(torch.ones(1, 256), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)).abs().max() == 0
