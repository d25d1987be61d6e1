"""The seam to DeepGEMM: builds found and refused, buffers shared, launches whose doubles compute from staged bytes."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from deep_gemm_doubles import sgl_sm90, upstream_without_shared, vendored_sm100
from expert_checkpoints import Checkpoint, dense_moe, relative_l2, sizes_of

from megamoe_adapter import kernel
from megamoe_adapter.activation import MegaMoEActivation
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.formats import FORMATS
from megamoe_adapter.kernel import BufferSpec, build_for, find_builds, fusing_refusal, support
from megamoe_adapter.shared_experts import SharedExpert
from megamoe_adapter.weights import log_once

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")
NUM_EXPERTS, TOP_K = 4, 2
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def forget_builds():
    for cached in (find_builds, build_for, support):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def fresh_seam():
    def clear():
        forget_builds()
        kernel._buffers.clear()
        kernel._met.clear()

    clear()
    yield
    clear()


@pytest.fixture
def install(monkeypatch):
    """Puts doubles in place of installed builds; `deep_gemm` and vLLM's copy are absent unless given."""

    def put(deep_gemm=None, vendored=None):
        for name, module in (("deep_gemm", deep_gemm), ("vllm.third_party.deep_gemm", vendored)):
            monkeypatch.setitem(sys.modules, name, module)  # None: as if not installed
            if module is not None and name.startswith("vllm"):
                monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
                monkeypatch.setitem(sys.modules, "vllm.third_party", types.ModuleType("vllm.third_party"))
        forget_builds()

    put()
    return put


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a given capability, as far as the seam asks; the tensors stay on CPU."""

    def pretend(major, minor=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(kernel, "_index", lambda device: 0)

    return pretend


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# What is here, and what it can run


def test_nothing_installed_says_what_to_install(install, gpu):
    gpu(9)
    assert find_builds() == ((), ())
    assert support("sm90_fp8", CUDA).reason == (
        "no build can run fp8_mega_moe: DeepGEMM is not installed. Install one: "
        "pip install 'sgl-deep-gemm==0.1.4' 'apache-tvm-ffi==0.1.11' (with torch 2.11 and nvcc >= 12.9)"
    )
    gpu(10)
    forget_builds()
    assert "pip install 'vllm>=0.33'" in support("sm100_nvfp4", CUDA).reason


def test_tensors_on_cpu_run_no_kernel(install):
    assert support("sm90_fp8", CPU).reason == "fp8_mega_moe runs on a GPU, the tensors are on cpu"


@pytest.mark.parametrize(("major", "minor"), [(10, 0), (10, 3)])
def test_sm100_and_sm103_are_one_family(install, gpu, major, minor):
    gpu(major, minor)
    install(vendored=vendored_sm100())
    for fmt in FORMATS.values():
        assert support(fmt.name, CUDA).ok is (fmt.arch == "sm100"), fmt.name


def test_a_gpu_of_another_family_names_the_formats_for_it(install, gpu):
    gpu(9)
    install(deep_gemm=sgl_sm90(), vendored=vendored_sm100())
    assert support("sm90_fp8", CUDA).ok
    refusal = support("sm100_mxfp8", CUDA)
    assert refusal.reason == "sm100_mxfp8 needs an SM100 GPU, this one is SM90; formats for it: sm90_fp8"
    gpu(12)
    forget_builds()
    assert "this one is SM120; formats for it: none" in support("sm90_fp8", CUDA).reason


def test_each_format_takes_the_first_build_that_has_its_kernel(install):
    sgl, vendored = sgl_sm90(), vendored_sm100()
    install(deep_gemm=sgl, vendored=vendored)
    assert build_for("sm90_fp8").module is sgl
    assert build_for("sm100_nvfp4").module is vendored
    assert [build.flavour for build in find_builds()[0]] == ["upstream", "vllm"]


def test_sgls_build_is_told_from_upstream_by_its_distribution(install, monkeypatch):
    install(deep_gemm=sgl_sm90())
    versions = {"sgl-deep-gemm": "0.1.4"}
    monkeypatch.setattr(kernel, "_version", lambda name: versions.get(name, "unknown"))
    (build,) = find_builds()[0]
    assert (build.flavour, build.version) == ("sgl", "0.1.4")
    assert kernel.sm90_l2_group(build) == 64
    versions["sgl-deep-gemm"] = "0.2.5"
    forget_builds()
    assert kernel.sm90_l2_group(find_builds()[0][0]) == 128


def test_a_build_that_is_too_old_is_said_to_lack_what_it_lacks(install, gpu):
    gpu(10)
    old = types.ModuleType("deep_gemm")
    old.fp8_fp4_mega_moe = lambda: None
    old.get_symm_buffer_for_mega_moe = lambda group, num_experts: None
    install(deep_gemm=old)
    reason = support("sm100_mxfp8", CUDA).reason
    assert "deep_gemm (upstream unknown) lacks get_symm_buffer_for_mega_moe(mma_type=...)" in reason
    assert "lacks nvfp4_mega_moe, a symmetric buffer for it" in support("sm100_nvfp4", CUDA).reason


def test_a_build_that_does_not_import_is_reported_not_hidden(install, gpu, monkeypatch):
    gpu(9)

    def import_module(name):
        if name == "deep_gemm":
            raise OSError("libc10_cuda.so: undefined symbol")
        raise ModuleNotFoundError(f"No module named {name!r}", name="vllm")

    monkeypatch.setattr(kernel.importlib, "import_module", import_module)
    forget_builds()
    assert "deep_gemm: OSError: libc10_cuda.so: undefined symbol" in support("sm90_fp8", CUDA).reason

    def half_installed(name):
        raise ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi")

    monkeypatch.setattr(kernel.importlib, "import_module", half_installed)
    forget_builds()
    assert "deep_gemm: No module named 'tvm_ffi'" in support("sm90_fp8", CUDA).reason


def test_a_build_without_shared_experts_keeps_them_apart_with_the_reason(install, gpu):
    assert fusing_refusal("sm100_mxfp8") is None, "no GPU: the reference will run, which fuses"
    gpu(10)
    install(deep_gemm=upstream_without_shared())
    refusal = fusing_refusal("sm100_mxfp8")
    assert "(upstream 2.6.0) lacks num_shared_experts, shared_l1_weights, shared_l2_weights, get_block_m" in refusal
    module = MegaMoEExperts(
        2, 1, 512, 512, fmt="sm100_mxfp8", source="block_fp8", shared=SharedExpert("block_fp8", 512), device="meta"
    )
    assert not module.shared_fused
    assert module.shared_decision.reason == refusal
    install(vendored=vendored_sm100())
    assert fusing_refusal("sm100_mxfp8") is None


def test_shapes_are_checked_against_the_build_before_a_buffer_is_allocated(install, gpu, group):
    gpu(10)
    install(deep_gemm=upstream_without_shared())
    module = layer("sm100_mxfp8", "mxfp8")
    with pytest.raises(ValueError, match=r"hidden % 512 == 0, got hidden 256 .*DeepGEMM 2026-06"):
        kernel.run(module, *inputs(256))


# Launches


def layer(fmt, source, data=None, **kwargs):
    kwargs = {"backend": "kernel", "max_num_tokens": 64, **kwargs}
    module = MegaMoEExperts(NUM_EXPERTS, TOP_K, *sizes_of(fmt), fmt=fmt, source=source, **kwargs)
    for name, tensor in (data.tensors if data else {}).items():
        module.load(name, tensor)
    if data is None:
        module.accept_present_weights()
    else:
        module.finish()
    return module


def inputs(hidden, num_tokens=7):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    weights, ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K, -1)
    ids[1:2, 0] = -1
    return x, ids, weights


# Relative L2 to the checkpoint's values: what rounding the tokens, and the weights where they are requantised, costs.
LAUNCHES = [
    ("sm90_fp8", "block_fp8", None, 0.06),
    ("sm100_mxfp8", "block_fp8", "block_fp8", 0.1),
    ("sm100_mxfp8", "mxfp8", None, 0.06),
    ("sm100_mxfp4", "mxfp4_ct", "block_fp8_ue8m0", 0.06),
    ("sm100_bf16", "bf16", None, 0.01),
    ("sm100_nvfp4", "nvfp4_modelopt", "bf16", 0.2),
]


@pytest.fixture
def layer_and_data(request, install, gpu, group):
    fmt, source, shared_source, tolerance = request.param
    gpu(9 if fmt == "sm90_fp8" else 10)
    install(deep_gemm=sgl_sm90() if fmt == "sm90_fp8" else None, vendored=vendored_sm100(block_m=4))
    hidden, intermediate = sizes_of(fmt)
    data = Checkpoint(source, hidden, intermediate, range(NUM_EXPERTS))
    shared = None
    if shared_source is not None:
        more = Checkpoint(shared_source, hidden, intermediate, ["shared"], seed=8)
        data.tensors |= more.tensors
        data.values |= more.values
        shared = SharedExpert(shared_source, intermediate)
    activation = MegaMoEActivation.from_limit(1.0)
    return layer(fmt, source, data, shared=shared, activation=activation), data, tolerance


@pytest.mark.parametrize("layer_and_data", LAUNCHES, indirect=True, ids=lambda launch: launch[0] + "-" + launch[1])
def test_a_launch_is_given_what_its_kernel_reads(layer_and_data):
    """The double decodes staged tokens and kernel tensors by itself; only rounding is left."""
    module, data, tolerance = layer_and_data
    for num_tokens in (7, 3):
        x, ids, weights = inputs(module.hidden, num_tokens)
        y = kernel.run(module, x, ids, weights)
        assert y.dtype == torch.bfloat16
        assert relative_l2(y, dense_moe(data.values, x, ids, weights, clamp=1.0)) < tolerance
    empty = kernel.run(module, x[:0], ids[:0], weights[:0])
    assert tuple(empty.shape) == (0, module.hidden)


@pytest.mark.parametrize("layer_and_data", LAUNCHES[:1], indirect=True)
def test_rows_past_the_tokens_are_left_alone(layer_and_data):
    module, _, _ = layer_and_data
    kernel.run(module, *inputs(module.hidden))
    ((_, buffer),) = kernel._buffers.values()
    assert (buffer.topk_idx[7:] == -7).all()
    assert buffer.topk_weights[:7].isfinite().all()
    assert buffer.topk_idx.dtype == torch.int64


def test_layers_share_a_buffer_unless_something_it_depends_on_differs(install, gpu, group, monkeypatch):
    gpu(9)
    install(deep_gemm=sgl_sm90())
    one, other, wider = (layer("sm90_fp8", "block_fp8", prefix=name) for name in "abc")
    wider.max_num_tokens = 4096
    barriers = []
    monkeypatch.setattr(dist, "barrier", lambda group: barriers.append(group))
    for module in (one, other, wider, one):
        kernel.run(module, *inputs(512))
    assert len(kernel._buffers) == 2
    assert BufferSpec.of(one) == BufferSpec.of(other) != BufferSpec.of(wider)
    assert barriers == [group], "ranks meet once per group and device"
    buffers = [buffer for _, buffer in kernel._buffers.values()]
    kernel.release_buffers()
    assert all(buffer.destroyed for buffer in buffers)
    assert not kernel._buffers


def test_the_first_launch_may_not_be_captured(install, gpu, group, monkeypatch):
    gpu(9)
    install(deep_gemm=sgl_sm90())
    module = layer("sm90_fp8", "block_fp8")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the layer once before capturing a CUDA graph"):
        kernel.run(module, *inputs(512))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel.run(module, *inputs(512))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel.run(module, *inputs(512))
    kernel._met.clear()
    with pytest.raises(RuntimeError, match="waits for all ranks"):
        kernel.run(module, *inputs(512))


def test_without_a_process_group_or_a_build_it_says_so(install, gpu):
    gpu(9)
    module = layer("sm90_fp8", "block_fp8")
    with pytest.raises(RuntimeError, match="fp8_mega_moe runs on a GPU"):
        kernel.run(module, *inputs(512))
    install(deep_gemm=sgl_sm90())
    with pytest.raises(RuntimeError, match="needs a process group of 1 ranks, also of one"):
        kernel.run(module, *inputs(512))


def test_backend_auto_falls_back_to_the_reference_and_says_why_once(install, gpu, caplog):
    log_once.cache_clear()
    gpu(9)
    on_gpu = types.SimpleNamespace(is_cuda=True, device=CUDA)
    modules = [layer("sm90_fp8", "block_fp8", backend=backend) for backend in ("auto", "auto", "kernel", "reference")]
    assert [module._use_kernel(on_gpu) for module in modules[:2]] == [False, False]
    assert caplog.text.count("MegaMoE runs as plain torch: no build can run fp8_mega_moe") == 1
    with pytest.raises(RuntimeError, match="no build can run fp8_mega_moe"):
        modules[2]._use_kernel(on_gpu)
    install(deep_gemm=sgl_sm90())
    assert [module._use_kernel(on_gpu) for module in modules] == [True, True, True, False]


@pytest.mark.gpu
def test_the_fused_hopper_kernel_agrees_with_the_reference():
    if not support("sm90_fp8", CUDA).ok:
        pytest.skip(support("sm90_fp8", CUDA).reason)
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=CUDA)
    try:
        data = Checkpoint("block_fp8", 1024, 512, range(8))
        make = {"fmt": "sm90_fp8", "source": "block_fp8", "device": CUDA, "max_num_tokens": 256}
        fused = MegaMoEExperts(8, 2, 1024, 512, backend="kernel", **make)
        for name, tensor in data.tensors.items():
            fused.load(name, tensor.cuda())
        fused.finish()
        x = torch.randn(100, 1024, device="cuda", dtype=torch.bfloat16)
        weights, ids = torch.rand(100, 8, device="cuda").topk(2, -1)
        y = fused(x, ids, weights)
        fused.backend = "reference"
        assert relative_l2(y, fused(x, ids, weights)) < 0.02
        swapped = fused.w13_weight.data.view(torch.uint8).view(8, -1, 2, 8, 1024)
        swapped.copy_(swapped.flip(2).clone())
        assert relative_l2(y, fused(x, ids, weights)) > 0.5
    finally:
        kernel.release_buffers()
        dist.destroy_process_group()
