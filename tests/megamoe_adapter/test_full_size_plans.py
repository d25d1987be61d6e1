"""Full-size manifests of DeepSeek-V3 and GLM-5.3-Flash, planned on the meta device: counts, bytes, work and memory.

Counts and bytes are worked out by hand here. One rank of eight, as on a host of eight GPUs, plans every name of the
checkpoint. The whole engine is planned with 1, 2 and 4 MoE layers: tensors, bytes, lines of Python that run and memory
that is held grow by the same amount with each layer, which makes the full size a matter of arithmetic. Seconds are
bench/scaling.py's, not a test's.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter

import pytest

from bench.full_size import CONFIGS, build, checkpoint
from weightsync.errors import CoverageError
from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload
from weightsync.plan.segments import compile_segments

MODELS = sorted(CONFIGS)
NUM_EXPERTS = {"deepseek_v3": 256, "glm_5_3_flash": 288}
NUM_MOE_LAYERS = {"deepseek_v3": 58, "glm_5_3_flash": 42}
TENSORS_PER_EXPERT = 6  # gate, up, down, each a weight and its block scales


def linear(rows, columns):
    """Bytes of a block-FP8 linear layer: a byte per weight, a float32 per block of 128 x 128, broken blocks too."""
    return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)


def swiglu(hidden, intermediate):
    return 2 * linear(intermediate, hidden) + linear(hidden, intermediate)


# Bytes and tensors of the parts, from the published shapes: (bytes, tensors).
HIDDEN = {"deepseek_v3": 7168, "glm_5_3_flash": 4096}
VOCAB = {"deepseek_v3": 129280, "glm_5_3_flash": 154880}
EXPERT_BYTES = {name: swiglu(hidden, 2048) for name, hidden in HIDDEN.items()}
DEEPSEEK_MLA = (
    linear(1536, 7168) + linear(128 * 192, 1536) + linear(512 + 64, 7168) + linear(128 * 256, 512)
    + linear(7168, 128 * 128) + 2 * (1536 + 512),
    5 * 2 + 2,
)  # fmt: skip
GLM_KDA = (
    3 * linear(8192, 4096) + linear(4096, 8192)  # q, k, v, o
    + 2 * (linear(128, 4096) + linear(8192, 128))  # forget gate and output gate, low rank
    + 2 * 64 * 4096 + 4 * 3 * 8192 * 4 + 4 * 8192 + 4 * 64 + 2 * 128,  # b_proj, conv1d, dt_bias, A_log, o_norm
    8 * 2 + 5,
)  # fmt: skip
GLM_MLA = (
    linear(1536, 4096) + linear(64 * 256, 1536) + linear(512, 4096) + linear(64 * 512, 512) + linear(4096, 64 * 256)
    + 2 * (1536 + 512)
    + linear(32 * 128, 1536) + linear(128, 4096)  # the indexer: wq_b, wk,
    + 2 * (2 * 128 + 32 * 4096 + 16 * 128 + 128 * 4096),  # k_norm, weights_proj, k-pool compression
    5 * 2 + 2 + 2 * 2 + 5,
)  # fmt: skip
GLM_HYPER = (2 * (2 * 24 * 4 * 4096 + 4 * 24 + 4 * 3), 6)


def by_hand(name, target="model", num_moe_layers=None):
    """(bytes, tensors) of a target."""
    hidden, vocab = HIDDEN[name], VOCAB[name]
    num_moe = NUM_MOE_LAYERS[name] if num_moe_layers is None else num_moe_layers
    num_layers = 3 + num_moe
    norm, embedding = (2 * hidden, 1), (2 * vocab * hidden, 1)
    router = (4 * NUM_EXPERTS[name] * (hidden + 1), 2)
    experts = ((NUM_EXPERTS[name] + 1) * EXPERT_BYTES[name], (NUM_EXPERTS[name] + 1) * TENSORS_PER_EXPERT)
    dense = (swiglu(hidden, {"deepseek_v3": 18432, "glm_5_3_flash": 12288}[name]), TENSORS_PER_EXPERT)
    if name == "deepseek_v3":
        attention, last = [(num_layers, DEEPSEEK_MLA)], DEEPSEEK_MLA
        around = norm, norm
    else:
        attention, last = [(num_layers - num_layers // 4, GLM_KDA), (num_layers // 4, GLM_MLA)], GLM_MLA
        around = norm, norm, GLM_HYPER
    if target == "draft":  # enorm, hnorm, shared_head.norm; embed_tokens, shared_head.head; eh_proj
        parts = [(1, last), *((1, part) for part in around), (1, router), (1, experts)]
        parts += [(3, norm), (2, embedding), (1, (2 * hidden * 2 * hidden, 1))]
    else:
        parts = [*attention, *((num_layers, part) for part in around), (num_moe, router), (num_moe, experts)]
        parts += [(3, dense), (2, embedding), (1, norm)]
    return sum(n * part[0] for n, part in parts), sum(n * part[1] for n, part in parts)


def engine(name, num_moe_layers=None, target="model", **options):
    config = CONFIGS[name]() if num_moe_layers is None else CONFIGS[name](num_moe_layers)
    model = build(config, target, **options)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    return model, checkpoint(config, model)


def expert_of(name):
    """(layer and projection, expert) of a routed expert's tensor; None for any other."""
    before, found, after = name.partition(".mlp.experts.")
    number, _, rest = after.partition(".")
    return (f"{before} {rest}", int(number)) if found else None


def test_deepseek_v3_has_the_tensors_parameters_and_bytes_that_were_published():
    (bytes_, tensors), (draft_bytes, draft_tensors) = by_hand("deepseek_v3"), by_hand("deepseek_v3", "draft")
    assert tensors + draft_tensors == 91_991
    # 163 safetensors files of 688,586,727,753 bytes, headers and all, hold the router in bfloat16.
    tensor_bytes = bytes_ + draft_bytes - 59 * 2 * 256 * 7168
    assert 100 < (688_586_727_753 - tensor_bytes) / 91_991 < 150  # a header's entry: name, dtype, shape, two offsets
    manifest = engine("deepseek_v3")[1]
    parameters = sum(entry.num_elements for entry in manifest if not entry.name.endswith("weight_scale_inv"))
    assert round(parameters / 1e9, 3) == 671.026


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_of_eight_plans_every_name_of_the_full_size_checkpoint(name):
    model, manifest = engine(name, ep_size=8, ep_rank=3)
    assert (manifest.num_bytes, len(manifest)) == by_hand(name)

    plan = plan_reload(model, manifest)
    owned = NUM_EXPERTS[name] // 8
    num_foreign = NUM_MOE_LAYERS[name] * (NUM_EXPERTS[name] - owned) * TENSORS_PER_EXPERT
    foreign_bytes = num_foreign // TENSORS_PER_EXPERT * EXPERT_BYTES[name]
    assert Counter(entry.treatment for entry in plan.names.values()) == {
        "copy": len(manifest) - num_foreign,
        "skipped": num_foreign,
    }
    first = 3 * owned
    skipped = {expert_of(entry)[1] for entry in plan.skipped}
    assert skipped == set(range(NUM_EXPERTS[name])) - set(range(first, first + owned))

    live = sum(parameter.nbytes for parameter in model.parameters())
    assert plan.coverage.written_bytes == live == manifest.num_bytes - foreign_bytes
    found = plan.coverage
    assert (found.missing, found.duplicated, found.padding, found.derived) == ((), (), (), ())
    table = compile_segments(plan.writes)
    assert len(table) == len(plan.writes) == len(manifest) - num_foreign  # one strided copy for each tensor
    assert table.num_bytes == live


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_a_whole_engine_of_a_few_layers_takes_every_tensor_and_every_byte(name, mode):
    for num_layers in (1, 2, 4) if mode == "direct" else (1,):
        model, manifest = engine(name, num_layers)
        plan = plan_reload(model, manifest, mode=mode)
        assert (manifest.num_bytes, len(manifest)) == by_hand(name, num_moe_layers=num_layers)
        assert plan.coverage.written_bytes == manifest.num_bytes
        assert len(plan.writes) == len(compile_segments(plan.writes)) == len(manifest)
        assert (plan.skipped, plan.interpreted) == ((), ())
        assert set(plan.modules.values()) == {mode}


@pytest.mark.parametrize(("name", "ep_size", "redundant"), [
    ("deepseek_v3", 8, 0), ("deepseek_v3", 64, 0), ("glm_5_3_flash", 8, 0), ("glm_5_3_flash", 32, 0),
])  # fmt: skip
def test_ranks_own_every_expert_once_and_their_bytes_sum_to_the_whole(name, ep_size, redundant):
    num_bytes, num_tensors = by_hand(name, "draft")
    routed_bytes = NUM_EXPERTS[name] * EXPERT_BYTES[name]
    taken, written = Counter(), 0
    for rank in range(ep_size):
        model, manifest = engine(name, 1, "draft", ep_size=ep_size, ep_rank=rank)
        assert (manifest.num_bytes, len(manifest)) == (num_bytes, num_tensors)
        plan = plan_reload(model, manifest)
        taken.update(write.name for write in plan.writes)
        written += plan.coverage.written_bytes
        assert len(plan.writes) + len(plan.skipped) == num_tensors
    assert set(taken) == set(manifest.by_name)
    assert {taken[entry] for entry in taken if expert_of(entry)} == {1}
    assert {taken[entry] for entry in taken if not expert_of(entry)} == {ep_size}
    assert written == routed_bytes + ep_size * (num_bytes - routed_bytes)


def test_288_experts_need_32_replicas_to_be_spread_over_64_ranks():
    with pytest.raises(ValueError, match="cannot be spread evenly over 64 ranks"):
        engine("glm_5_3_flash", 1, "draft", ep_size=64)
    num_bytes, _ = by_hand("glm_5_3_flash", "draft")
    model, manifest = engine("glm_5_3_flash", 1, "draft", ep_size=64, ep_rank=63, num_redundant_experts=32)
    plan = plan_reload(model, manifest)
    assert {expert_of(write.name)[1] for write in plan.writes if expert_of(write.name)} == set(range(27, 32))
    assert len(plan.skipped) == (288 - 5) * TENSORS_PER_EXPERT
    assert plan.coverage.written_bytes == num_bytes - (288 - 5) * EXPERT_BYTES["glm_5_3_flash"]


@pytest.mark.parametrize("name", MODELS)
def test_mxfp8_adds_derived_scales_that_no_name_has_to_bring(name):
    model, manifest = engine(name, 1, fmt="sm100_mxfp8")
    plan = plan_reload(model, manifest)
    derived = [parameter for parameter in model.parameters() if getattr(parameter, "weight_loader_numel", None) == 0]
    values = 3 * HIDDEN[name] * 2048 * (NUM_EXPERTS[name] + 1)  # the shared expert is in the kernel here
    assert sum(parameter.nbytes for parameter in derived) == values // 32  # a byte for 32 values
    assert len(plan.coverage.derived) == len(derived) == 4
    assert (manifest.num_bytes, len(manifest)) == by_hand(name, num_moe_layers=1)
    assert plan.coverage.written_bytes == manifest.num_bytes


def test_one_missing_scale_among_the_full_size_names_is_found_by_its_name():
    model, manifest = engine("glm_5_3_flash", 1)
    gone = "model.layers.3.mlp.experts.287.up_proj.weight_scale_inv"
    with pytest.raises(CoverageError) as error:
        plan_reload(model, Manifest(tuple(entry for entry in manifest if entry.name != gone)))
    assert error.value.missing == (gone,)


def lines_and_bytes(num_layers):
    """Lines of Python that planning runs, the most bytes it holds at once, those that stay, and the tensors planned."""
    config = CONFIGS["deepseek_v3"](num_layers)
    config.n_routed_experts = 64  # tensors of full size, fewer of them: each line that is run is counted
    num_lines = 0

    def trace(frame, event, argument):
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    model = build(config)
    manifest = checkpoint(config, model)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plan_reload(model, manifest)
    finally:
        sys.settrace(before)
    model = build(config)
    gc.collect()
    tracemalloc.start()
    try:
        plan = plan_reload(model, manifest)
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan.writes) == len(manifest)
    return num_lines, peak, kept, len(manifest)


def test_work_and_memory_of_planning_are_linear_in_the_number_of_tensors():
    lines_and_bytes(1)  # operator tables and caches are made once per process
    one, two, four = (lines_and_bytes(num_layers) for num_layers in (1, 2, 4))
    assert four[0] - two[0] == pytest.approx(2 * (two[0] - one[0]), rel=0.01)
    lines, peak, kept, tensors = (after - before for before, after in zip(two, four, strict=True))
    assert lines < 1500 * tensors
    assert peak < 3500 * tensors
    assert kept < 2500 * tensors
