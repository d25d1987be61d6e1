"""Whether a layer's shared expert runs inside the MegaMoE launch, decided once and before any weight loads.

Why once: a fused shared expert owns parameters in kernel layout and its MLP is never built; deciding later, or
differently on two ranks, leaves weights without a place. Fusing must not cost accuracy, so a shared expert is fused
only in a precision that its checkpoint reaches without a rounding that the separate MLP would not have had (BF16 is
never rounded to fit).

    decision = decide_shared(FORMATS["sm100_mxfp8"], SharedExpert("block_fp8", intermediate=2048), intermediate=2048)
    decision.fused, decision.format, decision.reason
    decision = decide_shared(FORMATS["sm90_fp8"], SharedExpert("block_fp8", intermediate=2048), intermediate=2048)
    decision.fused     # False: the Hopper kernel fuses none; build the MLP and add its output

Source: vLLM 0.33's fusing rules for DeepSeek-V4 and GLM-5-next.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe_adapter.formats import CONVERSIONS, SOURCES, Conversion, Format


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The shared expert as a checkpoint has it.

    Attributes:
        source: Key of `SOURCES`.
        intermediate: Its intermediate size (moe_intermediate_size x n_shared_experts).
        sharded: Whether tensor parallelism splits it; the kernel wants it whole.
    """

    source: str
    intermediate: int
    sharded: bool = False


@dataclass(frozen=True, slots=True)
class SharedDecision:
    """What was decided, and why.

    Attributes:
        fused: Whether the experts own the shared expert.
        format: Its kernel format when fused, else None.
        reason: For the log.
    """

    fused: bool
    format: str | None
    reason: str


def decide_shared(
    fmt: Format, shared: SharedExpert | None, *, intermediate: int, kernel_refusal: str | None = None
) -> SharedDecision:
    """Decides for one layer; a pure function of its arguments, so all ranks agree.

    Args:
        fmt: Format of the routed experts.
        shared: The shared expert, or None if there is none or the caller keeps it apart.
        intermediate: Intermediate size of one routed expert.
        kernel_refusal: Why the installed DeepGEMM cannot fuse, if it cannot.

    Raises:
        ValueError: `shared.source` is unknown.
    """
    if shared is None:
        return SharedDecision(False, None, "no shared expert was handed over")
    if shared.source not in SOURCES:
        raise ValueError(f"unknown shared-expert source {shared.source!r}; known: {', '.join(SOURCES)}")
    if not fmt.shared_precisions:
        return SharedDecision(False, None, f"{fmt.kernel} fuses no shared expert")
    if shared.sharded:
        return SharedDecision(False, None, "it is split by tensor parallelism and the kernel takes it whole")
    if shared.intermediate <= 0 or shared.intermediate % intermediate:
        return SharedDecision(
            False,
            None,
            f"its intermediate size {shared.intermediate} is not a multiple of a routed expert's {intermediate}",
        )
    reachable = [
        precision
        for precision in fmt.shared_precisions
        if CONVERSIONS.get((shared.source, precision), Conversion.QUANTISE) is not Conversion.QUANTISE
    ]
    if not reachable:
        fused_as = " or ".join(fmt.shared_precisions)
        return SharedDecision(
            False,
            None,
            f"{fmt.name} fuses {fused_as}, which a {shared.source} checkpoint reaches only by rounding, if at all",
        )
    if kernel_refusal is not None:
        return SharedDecision(False, None, kernel_refusal)
    return SharedDecision(True, reachable[0], f"{shared.source} fused as {reachable[0]}")
