"""Partial scope: which parameters are not sent, or only in part, and so have to come out as they are.

A staged module starts from its live bytes where those are in checkpoint layout. Where a hook changed the layout, the
rest of a partly sent parameter can't be got back from the processed bytes, so the push is refused.

    partial = Partial(modules, records, live)
    partial.count(entry, plan)            # per received name
    partial.unsent()                      # paths that no hook may change
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch

from weightsync.errors import LayoutError, shown
from weightsync.plan.plan import ReloadPlan
from weightsync.reload.audit import LiveSlot, LiveTensors, address
from weightsync.reload.direct import Entry
from weightsync.reload.hooks.post_load import declares_direct
from weightsync.reload.layerwise import Staging
from weightsync.reload.layouts import ModuleMode, ModuleRecord
from weightsync.reload.records import TensorLayout, same_layout


class Partial:
    """What a partial session has loaded of each parameter.

    Args:
        modules: The model's modules by path.
        records: Their records.
        modes: How each is loaded.
        live: Live tensors.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        records: Mapping[torch.nn.Module, ModuleRecord],
        modes: Mapping[str, ModuleMode],
        live: LiveTensors,
    ) -> None:
        self._live = live
        self._loadable: dict[
            str, int
        ] = {}  # path of each parameter that hooks must not process twice -> loadable bytes
        self._unfit: set[str] = set()  # those whose live bytes are not in checkpoint layout
        for path, module in modules.items():
            if declares_direct(module):
                continue
            from_record = path in modes and modes[path].from_record
            parameters = records[module].parameters if from_record else module._parameters
            for name, parameter in parameters.items():
                if isinstance(parameter, (torch.Tensor, TensorLayout)):
                    self._add(f"{path}.{name}" if path else name, parameter)
        self._loaded: defaultdict[str, float] = defaultdict(float)

    def count(self, entry: Entry, plan: ReloadPlan) -> None:
        """Counts what a received name wrote; an interpreted one is taken to write all of its destinations."""
        for path, num_bytes in _written(entry, plan):
            self._loaded[path] += num_bytes

    def unsent(self) -> set[str]:
        """Paths of parameters that are not, or not wholly, loaded."""
        return {path for path, loadable in self._loadable.items() if self._loaded[path] < loadable}

    def start(self, staging: Staging, compounding: Collection[str]) -> None:
        """Lets staged tensors start from the live bytes, where those are in the same layout.

        Args:
            staging: The staged unit.
            compounding: Tensors that start as recorded, since hooks go on from their value.
        """
        for path, staged in staging.tensors.items():
            live = self._live.by_path.get(path)
            is_derived = self._loadable.get(path) == 0  # hooks make it from others, and start as in the first load
            if path not in compounding and not is_derived and live is not None and same_layout(staged, live.alias):
                staged.copy_(live.alias)

    def refuse_unfit(self, modules: Iterable[str], coming: Iterable[tuple[Entry, ReloadPlan]] = ()) -> None:
        """Refuses to stage modules of which a processed parameter is not wholly sent.

        Args:
            modules: Modules that will be staged.
            coming: Names that are still to come, each with its plan.

        Raises:
            LayoutError: Names the parameters.
        """
        expected: defaultdict[str, float] = defaultdict(float)
        for entry, plan in coming:
            for path, num_bytes in _written(entry, plan):
                expected[path] += num_bytes
        prefixes = tuple(f"{module}." if module else "" for module in modules)
        rest = [
            path
            for path in self._unfit
            if self._loaded[path] + expected[path] < self._loadable[path]
            and any(path.startswith(prefix) and "." not in path[len(prefix) :] for prefix in prefixes)
        ]
        if rest:
            raise LayoutError(
                f"{len(rest)} parameters are not (wholly) sent, and their live bytes are no longer in "
                "checkpoint layout: "
                f"{shown(sorted(rest))}; send all tensors of these modules",
                names=sorted(rest),
            )

    def _add(self, path: str, parameter: torch.Tensor | TensorLayout) -> None:
        attributes = parameter.attributes if isinstance(parameter, TensorLayout) else vars(parameter)
        numel = 1
        for size in parameter.shape:
            numel *= size
        self._loadable[path] = int(attributes.get("weight_loader_numel", numel)) * parameter.dtype.itemsize
        live = self._live.by_path.get(path)
        if live is None or not same_layout(parameter, live.alias):
            self._unfit.add(path)


def _written(entry: Entry, plan: ReloadPlan) -> Iterable[tuple[str, float]]:
    if not entry.is_copy:
        yield from ((path, float("inf")) for path in entry.paths)
        return
    for write in entry.plan.writes:
        destination = plan.destinations[write.destination]
        yield from ((path, float(write.dest.num_bytes)) for path in (destination.path, *destination.aliases))


class Unsent:
    """A parameter that no hook may change in this session, since it holds an earlier hook's result.

    Args:
        staged: Its staged tensor, if it is staged.
        live: Its live place.
    """

    def __init__(self, staged: torch.Tensor | None, live: LiveSlot | None) -> None:
        self._tensor = staged if staged is not None else live.slot.tensor if live is not None else None
        self._address = address(self._tensor) if self._tensor is not None else None
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensor: torch.Tensor) -> None:
        """Called before live bytes are written."""
        self._kept.append((tensor, tensor.clone()))

    def undo(self) -> None:
        """Puts live bytes back."""
        for tensor, old in self._kept:
            tensor.copy_(old)

    def differs(self, now: torch.Tensor | None) -> bool:
        """Whether the hooks wrote live bytes, or put another tensor or storage there."""
        return bool(self._kept) or now is not self._tensor or (now is not None and address(now) != self._address)
