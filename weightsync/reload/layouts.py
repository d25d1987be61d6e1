"""Checkpoint layouts: what a model looked like before its post-load hooks, and who has to go back there to be loaded.

A loader writes into the layout that construction gave a module. A post-load hook may then change it: transpose, pad,
repack, free. So a module is loaded in one of two ways:

    direct      loaders write into the live tensors. Only where the live layout is the loaders' layout: the module says
                so with `supports_direct_reload = True`, or no hook could have changed it.
    layerwise   loaders write into a staged copy in checkpoint layout, the hook runs there, and the result is copied
                into the live tensors.

`record_layouts` is called once, after construction and before the first load's hooks run:

    model = Model(config)
    record_layouts(model)
    model.load_weights(weights); ...hooks...
    module_modes(model, "direct")["layers.0.experts"].reason
    with checkpoint_layout(model, "direct"):         # a dry run of the loaders happens in here
        ...
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from weightsync import reachable
from weightsync.errors import LayoutError, shown
from weightsync.reload.hooks.first_load import FirstLoad
from weightsync.reload.hooks.post_load import Hook, declares_direct, hooks_in_order, recorded_hooks, set_latches
from weightsync.reload.hooks.registered import next_number
from weightsync.reload.hooks.scopes import Scope, is_outer, only_tensors, scopes_on
from weightsync.reload.hooks.swap import Swap
from weightsync.reload.records import TensorLayout, layouts_of
from weightsync.reload.state import state_of, unwrapped
from weightsync.reload.unchanged import while_unchanged

if TYPE_CHECKING:
    from weightsync.plan.coverage import Coverage

Mode = Literal["direct", "layerwise"]


@dataclass(frozen=True)
class ModuleRecord:
    """One module before its post-load hooks.

    Attributes:
        scopes: Its parameters, its buffers, its attributes, and what the helper objects, functions and partials that it
            holds have.
        outer: What closures and calls hold, which others may hold too.
        children: Names of its child modules.
        path: Its path then.
    """

    scopes: tuple[Scope, ...]
    outer: tuple[Scope, ...] = ()
    children: frozenset[str] = frozenset()
    path: str = ""

    def at(self, path: str) -> ModuleRecord:
        """The record of the same module where it is now, e.g. within a wrapper that came since."""
        if path == self.path:
            return self
        scopes, outer = (
            tuple(replace(scope, path=_moved(scope.path, self.path, path)) for scope in group)
            for group in (self.scopes, self.outer)
        )
        return ModuleRecord(scopes, outer, self.children, path)

    @cached_property
    def besides_parameters(self) -> tuple[Scope, ...]:
        """All but the parameters; of what is held outside only tensors."""
        tensors = (only_tensors(scope) for scope in self.outer)
        return (*self.scopes[1:], *(scope for scope in tensors if scope.values))

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Recorded parameters by name."""
        return self.scopes[0].values

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Recorded plain attributes by name."""
        return self.scopes[2].values


@dataclass(frozen=True, slots=True)
class ModuleMode:
    """How one module is loaded.

    Attributes:
        mode: "direct" or "layerwise".
        reason: Why, for people.
        from_record: Whether loaders see the recorded layout; else they see the live one.
    """

    mode: Mode
    reason: str
    from_record: bool


def _moved(path: str, old: str, new: str) -> str:
    rest = path.removeprefix(old)
    return new + rest if new else rest.removeprefix(".")


def modules_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Every module that `walk` finds, registered or not, by path; parents first, the root is ""."""
    return {
        found.path: found.value
        for found in reachable.visit(unwrapped(model))
        if isinstance(found.value, torch.nn.Module)
    }


def record_layouts(model: torch.nn.Module) -> None:
    """Remembers each module's tensors and Python attributes as construction left them.

    Call it after construction and before any post-load hook has run, once. It keeps no tensor alive: shapes, strides,
    dtypes and loader attributes, the bytes of small tensors, and the fill value of large ones.

    Args:
        model: The model; an earlier record of it is replaced.

    Raises:
        LayoutError: A session is open.
    """
    model = unwrapped(model)
    state = state_of(model)
    with state.lock:
        if state.session is not None:
            raise LayoutError("a reload session is open on this model; record layouts before the first one")
        layouts = layouts_of(slot.tensor for slot in reachable.walk(model))
        records: dict[torch.nn.Module, list[Scope]] = {}
        modules = modules_of(model)
        seen: set[int] = set()
        for found in reachable.visit(model):
            if id(found.value) not in seen:
                seen.add(id(found.value))
                records.setdefault(modules[found.module], []).extend(scopes_on(found.value, found.path, layouts))
        state.end_first_load()
        state.hooks = recorded_hooks(modules.items())
        for module, hooks in state.hooks.items():
            for _, method in hooks:  # a hook's own closure, where no attribute leads to it
                function = getattr(method, "__func__", method)
                if isinstance(function, types.FunctionType) and id(function) not in seen:
                    seen.add(id(function))
                    records[module].extend(scopes_on(function, f"<{function.__qualname__}>", layouts))
        state.records = {
            module: ModuleRecord(
                tuple(scope for scope in scopes if not is_outer(scope)),
                tuple(scope for scope in scopes if is_outer(scope)),
                frozenset(module._modules),
                scopes[0].path,
            )
            for module, scopes in records.items()
        }
        state.compounding.clear()
        state.reach.clear()
        state.reads.clear()
        state.known.clear()
        state.harmless.clear()
        state.unread.clear()
        state.latches.clear()
        state.settings.clear()
        state.first_handle = next_number()
        state.first_load = FirstLoad(state.records, hooks_in_order(modules.items(), state.hooks), state)


def module_modes(model: torch.nn.Module, mode: Mode) -> Mapping[str, ModuleMode]:
    """How each module that has tensors to load is loaded in a session of the given mode.

    Args:
        model: The model.
        mode: Of the session. "direct" falls back to layerwise for each module that may not be direct.

    Raises:
        LayoutError: Modules need their checkpoint layout and have no record of it. All are named.
    """
    return line_up(model, mode)[1]


def line_up(model: torch.nn.Module, mode: Mode) -> tuple[Sequence[Hook], Mapping[str, ModuleMode]]:
    """All hooks in the order in which a loader runs them, and how each module is loaded; see `module_modes`."""
    if mode not in ("direct", "layerwise"):
        raise LayoutError(f'mode must be "direct" or "layerwise", got {mode!r}')
    model = unwrapped(model)
    first_load = state_of(model).first_load
    if first_load is not None and first_load.has_begun:
        state_of(model).end_first_load()
    return while_unchanged(model, ("line-up", mode), lambda: _line_up(model, mode))


def _line_up(model: torch.nn.Module, mode: Mode) -> tuple[list[Hook], dict[str, ModuleMode]]:
    records, modules = state_of(model).records, modules_of(model)
    hooks = hooks_in_order(modules.items(), state_of(model).hooks)
    hooked = {id(hook.module): hook for hook in hooks}
    modes: dict[str, ModuleMode] = {}
    unrecorded: list[str] = []
    for path, module in modules.items():
        record = records.get(module)
        hook = hooked.get(id(module))
        if hook is not None and record is None and not declares_direct(module) and set_latches(hook):
            unrecorded.append(path or type(module).__name__)
            continue
        if not _has_loadable(module, record):
            if mode == "layerwise" and any(buffer is not None for buffer in module._buffers.values()):
                from_record = hook is not None and record is not None
                modes[path] = ModuleMode(mode, "it has buffers that may be loaded", from_record)
            continue
        if declares_direct(module):
            modes[path] = ModuleMode(mode, "it declares supports_direct_reload", from_record=False)
        elif hook is not None:
            modes[path] = ModuleMode("layerwise", f"{hook.name} may change its layout", from_record=True)
        elif record is not None and hooks and (changed := _changed_parameters(module, record)):
            reason = f"since construction something changed {shown(changed)}"
            modes[path] = ModuleMode("layerwise", reason, from_record=True)
        else:
            modes[path] = ModuleMode(mode, "no hook can change its layout", from_record=False)
        if modes[path].from_record and record is None:
            unrecorded.append(path or type(module).__name__)
    _follow_shared_tensors(modules, records, modes)
    if unrecorded:
        raise LayoutError(
            f"{len(unrecorded)} modules have a post-load hook, and how they were before it is not known: "
            f"{shown(unrecorded)}; call weightsync.record_layouts(model) after construction and before the first "
            "load's hooks, or declare supports_direct_reload = True where the hook leaves the loaders' layout alone",
            names=unrecorded,
        )
    return hooks, modes


def lost_starts(model: torch.nn.Module, modes: Mapping[str, ModuleMode], coverage: Coverage) -> list[str]:
    """Parameters that start from zeros in elements that no name writes, since what they were is not known.

    Args:
        model: The model.
        modes: How each module is loaded.
        coverage: What names write.
    """
    lost = []
    for path in [*(path for path, _ in coverage.padding), *coverage.left_out]:
        module, _, name = path.rpartition(".")
        if module in modes and modes[module].from_record:
            layout = state_of(model).records[modules_of(model)[module]].parameters.get(name)
            if isinstance(layout, TensorLayout) and not layout.keeps_start:
                lost.append(path)
    return lost


@contextmanager
def checkpoint_layout(model: torch.nn.Module, mode: Mode) -> Iterator[None]:
    """Inside, loaders find every module in the layout that they write to; afterwards nothing has changed.

    Recorded tensors that are no longer live as they were are placeholders on the meta device, with class, attributes
    and sharing as recorded; small buffers and plain tensors have their recorded bytes. All other tensors are the live
    ones, so nothing may be written inside.
    """
    model = unwrapped(model)
    records = state_of(model).records
    modules = modules_of(model)
    modes = module_modes(model, mode)
    swap = Swap(
        [scope for path, m in modes.items() if m.from_record for scope in records[modules[path]].scopes],
        placeholder=True,
        counters=state_of(model).latches,
    )
    swap.install()
    try:
        yield
    finally:
        swap.uninstall()


def loadable_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters that a checkpoint fills: those of which at least one element is loaded."""
    return {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and getattr(parameter, "weight_loader_numel", None) != 0
    }


def _has_loadable(module: torch.nn.Module, record: ModuleRecord | None) -> bool:
    recorded = record.parameters.values() if record else ()
    return bool(loadable_parameters(module)) or any(
        isinstance(value, TensorLayout) and value.attributes.get("weight_loader_numel") != 0 for value in recorded
    )


def _follow_shared_tensors(
    modules: Mapping[str, torch.nn.Module],
    records: Mapping[torch.nn.Module, ModuleRecord],
    modes: dict[str, ModuleMode],
) -> None:
    """A module that shared a parameter with one in recorded layout goes there too: both see one tensor again."""
    sharing: dict[int, list[str]] = {}
    for path in modes:
        record = records.get(modules[path])
        blocks = (
            {id(value.block) for value in record.parameters.values() if isinstance(value, TensorLayout)}
            if record
            else ()
        )
        for block in blocks:
            sharing.setdefault(block, []).append(path)
    groups = [paths for paths in sharing.values() if len(paths) > 1]
    changed = True
    while changed:
        changed = False
        for paths in groups:
            leaders = [path for path in paths if modes[path].from_record]
            for path in paths if leaders else ():
                if not modes[path].from_record:
                    modes[path] = ModuleMode("layerwise", f"it shares a parameter with {leaders[0]}", from_record=True)
                    changed = True


def _changed_parameters(module: torch.nn.Module, record: ModuleRecord) -> list[str]:
    """Names of parameters that are no longer as recorded."""
    live = module._parameters
    names = {name for name, value in record.parameters.items() if isinstance(value, TensorLayout)}
    names |= {name for name, value in live.items() if value is not None}
    return sorted(name for name in names if not _is_as_recorded(record.parameters.get(name), live.get(name)))


def _is_as_recorded(recorded: Any, live: torch.Tensor | None) -> bool:
    return isinstance(recorded, TensorLayout) and live is not None and recorded.fits(live)
