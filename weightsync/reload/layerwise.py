"""Layerwise loading: which modules are staged together, and the staged copy of one such unit.

A unit is usually one module. Modules are staged together when a module-stage hook of one may look into the others (its
child modules), and when they share bytes (tied embeddings), or one wire tensor goes through a loader into several of
them.

    live module   <- hook result, copied at the end
       ^                       |
    staged copy in checkpoint layout <- wire tensors

    units = build_units(modules, modes, hooks, parameters)
    staging = Staging(model, modules, units[0], parameters, written);  staging.tensors["layers.0.w"].copy_(tensor)
    with staging.installed(): hook()
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weightsync import reachable
from weightsync.reload.hooks.post_load import Hook, Stage
from weightsync.reload.hooks.scopes import Scope, scope_of
from weightsync.reload.hooks.swap import Swap
from weightsync.reload.layouts import ModuleMode
from weightsync.reload.records import TensorLayout, layouts_of
from weightsync.reload.state import state_of


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules that are staged together.

    Attributes:
        number: Its index among the session's units.
        modules: Paths of the staged modules.
        from_record: Those of them that loaders see in recorded layout.
        hooks: Module-stage hooks that run when the unit is complete, in the loader's order.
        needs: Paths of all modules whose tensors have to be there before the hooks run; staged ones and direct ones.
        is_late: Whether it stays staged until the session finishes, since a hook of another stage reads or changes it.
    """

    number: int
    modules: tuple[str, ...]
    from_record: tuple[str, ...]
    hooks: tuple[Hook, ...]
    needs: frozenset[str]
    is_late: bool


def build_units(
    modules: Mapping[str, torch.nn.Module],
    modes: Mapping[str, ModuleMode],
    hooks: Iterable[Hook],
    parameters: Mapping[str, Scope],
    reach: Mapping[str, Collection[str]],
) -> list[Unit]:
    """Groups the layerwise modules of a session.

    Args:
        modules: All modules by path.
        modes: How each module is loaded.
        hooks: All hooks, in order.
        parameters: From `staged_parameters`.
        reach: Modules that a hook is known to look into, outside its own and those below, by the hook's name.
    """
    layerwise = [path for path, mode in modes.items() if mode.mode == "layerwise"]
    if not layerwise:
        return []
    groups = _Groups(layerwise)
    hooks = list(hooks)
    early: dict[str, list[Hook]] = {}
    for hook in hooks:
        if hook.stage is Stage.MODULE and hook.callable_by_us:
            early.setdefault(hook.path, []).append(hook)
    below: dict[str, list[str]] = {path: [] for path in early}
    for path in modes:
        for ancestor in ancestors(path):
            if ancestor in below:
                below[ancestor].append(path)
    for paths in below.values():
        groups.join(path for path in paths if path in groups)
    by_block: dict[int, list[str]] = {}
    for path, scope in parameters.items():
        for layout in scope.values.values():
            if isinstance(layout, TensorLayout) and layout.block.num_bytes:
                by_block.setdefault(id(layout.block), []).append(path)
    for paths in by_block.values():
        groups.join(paths)
    waiting = {id(hook.module) for hook in hooks if hook.stage is not Stage.MODULE}
    order = {id(hook): position for position, hook in enumerate(hooks)}
    reached = {path for paths in reach.values() for path in paths}
    units: list[Unit] = []
    for members in groups.all():
        owners = dict.fromkeys(above for path in members for above in ancestors(path) if above in early)
        own = sorted((hook for above in owners for hook in early[above]), key=lambda hook: order[id(hook)])
        hooked = {path for above in owners for path in below[above]}
        recorded = tuple(path for path in members if modes[path].from_record)
        is_late = any(id(modules[path]) in waiting or path not in hooked for path in recorded)
        is_late |= any(reach.get(hook.name) for hook in own) or not reached.isdisjoint(members)
        units.append(Unit(len(units), tuple(members), recorded, tuple(own), frozenset(hooked.union(members)), is_late))
    return units


def staged_parameters(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], modes: Mapping[str, ModuleMode]
) -> dict[str, Scope]:
    """The parameters of every layerwise module, as loaders see them: recorded, or as they are live.

    The start bytes of live ones alias the live tensors.
    """
    records = state_of(model).records
    layerwise = {path: modules[path] for path, mode in modes.items() if mode.mode == "layerwise"}
    live = [path for path in layerwise if not modes[path].from_record]
    tensors = [p for path in live for p in layerwise[path]._parameters.values() if p is not None]
    layouts = layouts_of(tensors, alias=True)
    return {
        path: records[module].at(path).scopes[0]
        if modes[path].from_record
        else scope_of(module, "parameters", path, layouts)
        for path, module in layerwise.items()
    }


class Staging:
    """The staged copy of one unit.

    Args:
        model: The model.
        modules: All modules by path.
        unit: What to stage.
        parameters: From `staged_parameters`.
        written: Paths that the session may write in these modules; those that are not parameters are staged too.
        shown: Names and tensors to show as recorded, besides those that the model's state says.

    Attributes:
        unit: What is staged.
        swap: The staged values.
        tensors: Staged tensors by path.
        num_bytes: Bytes of all tensors made for it.
        was_interpreted: Whether a loader ran on it, and may have put other tensors in place of the staged ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: Mapping[str, torch.nn.Module],
        unit: Unit,
        parameters: Mapping[str, Scope],
        written: Collection[str],
        shown: Collection[str] = (),
    ) -> None:
        self.unit = unit
        self.was_interpreted = False
        self._model = model
        self._modules = modules
        self._parameters = parameters
        self._written = set(written)
        records = state_of(model).records
        scopes: list[Scope] = []
        for path in unit.modules:
            scopes.append(parameters[path])
            if path in unit.from_record:
                scopes.extend(records[modules[path]].at(path).besides_parameters)
            elif any(f"{path}.{name}".lstrip(".") in written for name in modules[path]._buffers):
                scopes.append(_live_buffers(modules[path], path))
        state = state_of(model)
        self.swap = Swap(
            scopes,
            new={*written, *state.compounding, *shown},
            counters={*state.latches, *shown},
            settings=state.settings,
        )
        self.tensors = self.swap.made()
        self._deep = self._stage_deep(path for path in written if path not in self.tensors)
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._all()}
        self.num_bytes = sum(storages.values())

    def stage(self, paths: Iterable[str]) -> None:
        """Stages live tensors that turn out to be written only now; those that are staged already stay as they are."""
        further = {path for path in paths if path not in self.tensors}
        self._written |= further
        self._deep |= self._stage_deep(further)

    def again(self, loaded: Mapping[str, torch.Tensor], shown: Collection[str] = ()) -> Staging:
        """A fresh staged copy of the same unit that holds the same loaded values.

        Args:
            loaded: Values by path.
            shown: As for the constructor.
        """
        staging = Staging(self._model, self._modules, self.unit, self._parameters, self._written, shown)
        for path, value in loaded.items():
            staging.tensors[path].copy_(value)
        return staging

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the model holds the staged tensors; afterwards the live ones again."""
        self.install()
        try:
            yield
        finally:
            self.uninstall()

    def install(self) -> None:
        """Puts the staged values into the model."""
        self.swap.install()
        for path, (staged, _) in self._deep.items():
            reachable.replace(self._model, path, staged)

    def uninstall(self) -> None:
        """Puts the live values back into the model."""
        for path, (_, live) in self._deep.items():
            reachable.replace(self._model, path, live)
        self.swap.uninstall()

    def _all(self) -> list[torch.Tensor]:
        return [*self.tensors.values(), *(staged for staged, _ in self._deep.values())]

    def _stage_deep(self, paths: Iterable[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Staged copies of live tensors within containers or helper objects that a loader writes."""
        wanted = set(paths)
        if not wanted:
            return {}
        slots = [slot for path in self.unit.modules for slot in reachable.walk_module(self._modules[path], path)]
        deep = {slot.path: (slot.tensor.detach().clone(), slot.tensor) for slot in slots if slot.path in wanted}
        self.tensors = self.tensors | {path: staged for path, (staged, _) in deep.items()}
        return deep


def ancestors(path: str) -> Iterator[str]:
    """A module path and the paths that it lies within, the model's own ("") last."""
    while path:
        yield path
        path = path[: max(path.rfind("."), path.rfind("["), path.rfind("{"), 0)]
    yield ""


def _live_buffers(module: torch.nn.Module, path: str) -> Scope:
    tensors = [buffer for buffer in module._buffers.values() if buffer is not None]
    return scope_of(module, "buffers", path, layouts_of(tensors, alias=True))


class _Groups:
    """Disjoint sets of paths, merged step by step; groups keep the order of their first path."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._group_of = {path: [path] for path in paths}

    def __contains__(self, path: str) -> bool:
        return path in self._group_of

    def join(self, paths: Iterable[str]) -> None:
        target: list[str] | None = None
        for path in paths:
            group = self._group_of[path]
            if target is None:
                target = group
            elif group is not target:
                target.extend(group)
                for member in group:
                    self._group_of[member] = target

    def all(self) -> list[list[str]]:
        seen: dict[int, list[str]] = {}
        for group in self._group_of.values():
            seen.setdefault(id(group), group)
        return list(seen.values())
