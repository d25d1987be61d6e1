"""The seam to DeepGEMM: which build is here, what it and the GPU can run, and one launch.

Why one file: three distributions carry these kernels under two module names, with differing entry points, arguments and
token alignments; nothing else in the package imports them or knows.

    module                      distribution        MegaMoE kernels
    deep_gemm                   upstream            SM100: fp8_fp4, bf16
    deep_gemm                   sgl-deep-gemm       SM90: fp8;  SM100: fp8_fp4, bf16
    vllm.third_party.deep_gemm  vllm's own copy     SM100: fp8_fp4, bf16, nvfp4

A launch stages tokens into a symmetric buffer that all ranks of the group have mapped, then runs one kernel that
dispatches, multiplies and combines. Every rank of the group launches once per layer per step, also with zero tokens.
All of it can be captured in a CUDA graph, after one launch outside (which compiles, allocates and meets the other
ranks).

    support("sm90_fp8", torch.device("cuda"))        # Support(ok=False, reason="... pip install ...")
    y = run(experts, x, topk_ids, topk_weights)
    release_buffers()                                # before destroy_process_group

Source: DeepGEMM's and sgl-deep-gemm's Python entry points; a call that ran on an H200 with sgl-deep-gemm 0.1.4.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megamoe_adapter.formats import FORMATS, Format
from megamoe_adapter.layout import check_shapes, restore_scale_strides
from megamoe_adapter.selection import ARCH_OF_MAJOR
from megamoe_adapter.staging import shared_scale_rows, stage_inputs

if TYPE_CHECKING:
    from megamoe_adapter.experts import MegaMoEExperts

MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")
# A build that is installed but broken fails in many ways: a missing symbol, no nvcc, an assertion on CUDA_HOME.
IMPORT_FAILURES = (ImportError, OSError, RuntimeError, AssertionError, AttributeError)
INSTALL = {
    "sm90": "pip install 'sgl-deep-gemm==0.1.4' 'apache-tvm-ffi==0.1.11' (with torch 2.11 and nvcc >= 12.9)",
    "sm100": "pip install 'vllm>=0.33' (which carries DeepGEMM), or DeepGEMM from its repository, 2026-06 or later",
}


@dataclass(frozen=True, slots=True)
class Build:
    """One DeepGEMM that imports.

    Attributes:
        module: The imported module.
        flavour: "upstream", "sgl" or "vllm".
        version: As its distribution says; "unknown" if it has none.
    """

    module: ModuleType
    flavour: str
    version: str

    def buffer_entry(self, fmt: Format) -> Any:
        """What allocates the symmetric buffer of a format; None if the build has none."""
        name = "NVFP4SymmBuffer" if fmt.has_global_scales else "get_symm_buffer_for_mega_moe"
        return getattr(self.module, name, None)

    def release(self, fmt: Format) -> str | None:
        """The release whose shape limits apply, see `layout.check_shapes`."""
        if fmt.arch == "sm90":
            return None
        return "2026-10" if "num_shared_experts" in _parameters(self.buffer_entry(fmt)) else "2026-06"

    def missing(self, fmt: Format) -> list[str]:
        """Entry points and arguments that a format needs and this build lacks."""
        lacking = [name for name in (fmt.kernel,) if not hasattr(self.module, name)]
        entry = self.buffer_entry(fmt)
        if entry is None:
            lacking.append("a symmetric buffer for it")
        elif not fmt.has_global_scales and "mma_type" not in _parameters(entry):
            lacking.append("get_symm_buffer_for_mega_moe(mma_type=...)")
        return lacking


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a format's kernel can run on a device, and if not, why and what would help."""

    ok: bool
    reason: str = ""


@functools.cache
def find_builds() -> tuple[tuple[Build, ...], tuple[str, ...]]:
    """Every DeepGEMM that imports, in order of preference, and why others that are installed do not."""
    builds, failures = [], []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):  # installed, but something it needs is not
                failures.append(f"{name}: {error}")
        except IMPORT_FAILURES as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
        else:
            builds.append(_described(name, module))
    return tuple(builds), tuple(failures)


@functools.cache
def build_for(fmt_name: str) -> Build | None:
    """The first build that has the kernel of a format (a key of `FORMATS`); looked for once."""
    return next((build for build in find_builds()[0] if not build.missing(FORMATS[fmt_name])), None)


@functools.cache
def support(fmt_name: str, device: torch.device) -> Support:
    """Whether a format's kernel can run on a device with what is installed; asked once per format and device.

    Args:
        fmt_name: Key of `FORMATS`.
        device: Where the weights and tokens are.
    """
    fmt = FORMATS[fmt_name]
    if device.type != "cuda":
        return Support(False, f"{fmt.kernel} runs on a GPU, the tensors are on {device}")
    major, minor = torch.cuda.get_device_capability(device)
    if ARCH_OF_MAJOR.get(major) != fmt.arch:
        fitting = [name for name, row in FORMATS.items() if row.arch == ARCH_OF_MAJOR.get(major)]
        return Support(
            False,
            f"{fmt_name} needs an {fmt.arch.upper()} GPU, this one is SM{major}{minor}; "
            f"formats for it: {', '.join(fitting) or 'none'}",
        )
    if build_for(fmt_name) is not None:
        return Support(True)
    builds, failures = find_builds()
    found = [f"{b.module.__name__} ({b.flavour} {b.version}) lacks {', '.join(b.missing(fmt))}" for b in builds]
    state = "; ".join([*found, *failures]) or "DeepGEMM is not installed"
    return Support(False, f"no build can run {fmt.kernel}: {state}. Install one: {INSTALL[fmt.arch]}")


def fusing_refusal(fmt_name: str) -> str | None:
    """Why the installed kernel cannot take a shared expert into its launch; None if it can or if none is installed."""
    fmt = FORMATS[fmt_name]
    if not torch.cuda.is_available():
        return None
    build = build_for(fmt_name)
    if build is None:
        return None
    api = _parameters(build.buffer_entry(fmt)) | _parameters(getattr(build.module, fmt.kernel))
    lacking = sorted({"num_shared_experts", "shared_l1_weights", "shared_l2_weights"} - api)
    if fmt.scale is not None and not hasattr(build.module, _block_m_entry(fmt)):
        lacking.append(_block_m_entry(fmt))
    if not lacking:
        return None
    return f"the installed DeepGEMM ({build.flavour} {build.version}) lacks {', '.join(lacking)}; a newer one fuses it"


def sm90_l2_group(build: Build) -> int:
    """Columns per scale between the two GEMMs of the Hopper kernel: 64 in sgl-deep-gemm 0.1.x, 128 from 0.2 on."""
    return 64 if build.version.startswith("0.1.") else 128


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """What a symmetric buffer depends on; layers that agree share one.

    Attributes:
        fmt_name: Key of `FORMATS`.
        num_experts: Physical experts over all ranks.
        max_num_tokens: Per rank, before the build's alignment.
        top_k: Experts per token.
        hidden: H.
        intermediate: I.
        num_shared_experts: Fused shared experts, in units of `intermediate`.
        shared_dtype: Their dtype; None without any.
        activation: Its name.
    """

    fmt_name: str
    num_experts: int
    max_num_tokens: int
    top_k: int
    hidden: int
    intermediate: int
    num_shared_experts: int
    shared_dtype: torch.dtype | None
    activation: str

    @classmethod
    def of(cls, experts: MegaMoEExperts) -> BufferSpec:
        """The spec of one layer."""
        shared = experts.shared_bank
        return cls(
            fmt_name=experts.bank.format.name,
            num_experts=experts.placement.num_physical,
            max_num_tokens=experts.max_num_tokens,
            top_k=experts.top_k,
            hidden=experts.hidden,
            intermediate=experts.intermediate,
            num_shared_experts=0 if shared is None else shared.intermediate // experts.intermediate,
            shared_dtype=None if shared is None else shared.format.weight_dtype,
            activation=experts.activation.name,
        )


# Values keep the group alive, so that its id cannot come to mean another group.
_buffers: dict[tuple[int, int, BufferSpec], tuple[dist.ProcessGroup, Any]] = {}
_met: dict[tuple[int, int], dist.ProcessGroup] = {}


def symmetric_buffer(build: Build, group: dist.ProcessGroup, device: torch.device, spec: BufferSpec) -> Any:
    """The buffer of a spec, allocated by the first layer that asks; that first call is collective over the group.

    Raises:
        ValueError: The build does not take these shapes.
        RuntimeError: It would have to be allocated while a CUDA graph is being captured.
    """
    key = (id(group), _index(device), spec)
    if key not in _buffers:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first MegaMoE launch allocates its buffer; run the layer once before capturing a CUDA graph"
            )
        fmt = FORMATS[spec.fmt_name]
        check_shapes(fmt, spec.hidden, spec.intermediate, build.release(fmt))
        kwargs: dict[str, Any] = {}
        if not fmt.has_global_scales:
            kwargs = {"mma_type": fmt.mma_type, "activation": spec.activation}
        elif spec.shared_dtype is not None:
            kwargs = {"shared_dtype": spec.shared_dtype}
        if spec.num_shared_experts:
            kwargs["num_shared_experts"] = spec.num_shared_experts
        sizes = (spec.num_experts, spec.max_num_tokens, spec.top_k, spec.hidden, spec.intermediate)
        _buffers[key] = (group, build.buffer_entry(fmt)(group, *sizes, **kwargs))
    return _buffers[key][1]


def release_buffers() -> None:
    """Frees every symmetric buffer; call it on all ranks before their process group is destroyed."""
    for _, buffer in _buffers.values():
        buffer.destroy()
    _buffers.clear()
    _met.clear()


def meet_once(group: dist.ProcessGroup, device: torch.device) -> None:
    """Before the first launch of a group on a device: waits for the device, then for the other ranks.

    A rank that launched while another still compiles would spin on memory that is not mapped yet. The group's own
    timeout bounds the wait.
    """
    key = (id(group), _index(device))
    if key in _met:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first MegaMoE launch waits for all ranks; run the layer once before capturing a graph")
    torch.cuda.synchronize(device)
    dist.barrier(group=group)
    _met[key] = group


def run(experts: MegaMoEExperts, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """One launch: routed and fused shared experts of one layer, combined over the group.

    Args:
        experts: The layer, finished.
        x: (num_tokens, H) bfloat16 on the layer's GPU; zero tokens still launch, for the other ranks.
        topk_ids: (num_tokens, top_k) physical ids; -1 is skipped.
        topk_weights: (num_tokens, top_k) float32, final.

    Returns:
        (num_tokens, H) bfloat16, new.

    Raises:
        RuntimeError: Nothing here can run the format, there is no process group, or a graph is captured too early.
        ValueError: The build does not take the layer's shapes.
    """
    fmt = experts.bank.format
    build = build_for(fmt.name)
    if build is None:
        raise RuntimeError(f"{experts.prefix}: {support(fmt.name, x.device).reason}")
    group = _group_of(experts)
    buffer = symmetric_buffer(build, group, x.device, BufferSpec.of(experts))
    meet_once(group, x.device)
    num_tokens = x.shape[0]
    if num_tokens:
        shared_rows = _shared_rows(build, experts, buffer, group, num_tokens, x.device)
        shared = None if experts.shared_bank is None else experts.shared_bank.format
        stage_inputs(fmt, shared, buffer, x, topk_ids, topk_weights, shared_rows)
    y = torch.empty(num_tokens, experts.hidden, dtype=torch.bfloat16, device=x.device)
    getattr(build.module, fmt.kernel)(y, *_weights(experts), buffer, **_kernel_kwargs(experts))
    return y


def _shared_rows(
    build: Build,
    experts: MegaMoEExperts,
    buffer: Any,
    group: dist.ProcessGroup,
    num_tokens: int,
    device: torch.device,
) -> torch.Tensor | None:
    if experts.shared_bank is None or experts.shared_bank.format.scale is None:
        return None
    fmt = experts.bank.format
    sizes = (
        group.size(),
        experts.placement.num_physical,
        buffer.num_max_tokens_per_rank,
        num_tokens,
        experts.top_k,
    )
    mma_type = () if fmt.has_global_scales else (fmt.mma_type,)
    return shared_scale_rows(num_tokens, int(getattr(build.module, _block_m_entry(fmt))(*sizes, *mma_type)), device)


def _weights(experts: MegaMoEExperts) -> tuple[Any, Any]:
    l1, l2 = experts.kernel_weights()
    if experts.bank.scale_is_packed:
        l1, l2 = ((weight, restore_scale_strides(scale)) for weight, scale in (l1, l2))
    return l1, l2


def _kernel_kwargs(experts: MegaMoEExperts) -> dict[str, Any]:
    fmt = experts.bank.format
    kwargs: dict[str, Any] = {"fast_math": True, **experts.activation.kernel_kwargs()}
    if fmt.recipe is not None and not fmt.has_global_scales:
        kwargs["recipe"] = fmt.recipe
    if experts.shared_bank is not None:
        kwargs["shared_l1_weights"], kwargs["shared_l2_weights"] = experts.kernel_weights(shared=True)
    if fmt.has_global_scales:
        kwargs.update(
            l1_alpha=experts.l1_alpha.data,
            l2_alpha=experts.l2_alpha.data,
            l2_activation_scale=experts.l2_activation_scale_value,
            use_x_scales=True,
        )
    return kwargs


def _group_of(experts: MegaMoEExperts) -> dist.ProcessGroup:
    group = experts.ep_group
    if group is None and dist.is_initialized() and dist.get_world_size() == experts.ep_size:
        group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            f"{experts.prefix}: the MegaMoE kernel needs a process group of {experts.ep_size} ranks, also of one; "
            "call ep_group.resolve_ep_group, or torch.distributed.init_process_group, and pass ep_group"
        )
    return group


def _block_m_entry(fmt: Format) -> str:
    return "get_block_m_for_nvfp4_mega_moe" if fmt.has_global_scales else "get_block_m_for_mega_moe"


def _described(name: str, module: ModuleType) -> Build:
    if name.startswith("vllm."):
        return Build(module, "vllm", _version("vllm"))
    sgl = _version("sgl-deep-gemm")
    if sgl != "unknown":
        return Build(module, "sgl", sgl)
    return Build(module, "upstream", getattr(module, "__version__", _version("deep-gemm")))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _parameters(entry: Any) -> frozenset[str]:
    return frozenset(inspect.signature(entry).parameters)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
