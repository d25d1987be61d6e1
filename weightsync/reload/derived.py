"""State that follows from weights without being loaded: arrival marks, Python numbers, sizes.

Four protocols a module may speak, and what is done where it doesn't:

    weights_replayed(calls)      told which loader calls were replayed as plain copies; needed if loaders keep books
    discard_arrivals()           told that old bytes were put back
    weights_torn()               told that bytes are mixed and books of before no longer hold
    refresh_derived()            recomputes, in place, what forward otherwise builds lazily and keeps
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weightsync import reachable
from weightsync.plan.loading import Loader
from weightsync.python_state import PythonState
from weightsync.reload.hooks.scopes import ABSENT
from weightsync.reload.unchanged import while_unchanged

if TYPE_CHECKING:
    from weightsync.reload.direct import BoundPlan

Call = tuple[str, str, int]  # weight name, shard id, expert id
_NOTHING: Any = object()


def host_scalars(model: torch.nn.Module) -> Mapping[str, Any]:
    """Python numbers and flags among the attributes of modules and their helper objects, by path.

    Objects within containers are left out: what a kernel is called with hangs on the module or its kernel object.
    """
    return while_unchanged(model, "host scalars", lambda: _host_scalars(model))


def _host_scalars(model: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for holder in reachable.visit(model):
        is_object = not isinstance(holder.value, (torch.Tensor, *reachable.CONTAINERS, *reachable.CALLABLES))
        if not is_object or (not isinstance(holder.value, torch.nn.Module) and not _is_attribute_path(holder.path)):
            continue
        for name, value in reachable.attributes_of(holder.value).items():
            if isinstance(value, (bool, int, float)) and name != "training":
                found[f"{holder.path}.{name}" if holder.path else name] = value
    return found


def _is_attribute_path(path: str) -> bool:
    return not any(mark in path for mark in "[{<")


def changed_scalars(before: Mapping[str, Any], model: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    """Path -> (before, now) of numbers and flags that changed or came up; None stands for "not there"."""
    now = host_scalars(model)
    if now is before:
        return {}
    return {
        path: (before.get(path), now.get(path))
        for path in {**before, **now}
        if not _same(before.get(path, ABSENT), now.get(path, ABSENT))
    }


def tell_replayed(bound: BoundPlan, model: torch.nn.Module, received: Mapping[str, None]) -> None:
    """Tells modules with `weights_replayed` which loader calls stand behind the copies of this session."""
    calls = bound.replayed_calls(model)
    everything = calls.keys() <= received.keys()
    chosen = bound.all_replayed_calls if everything else by_module(calls, [n for n in calls if n in received])
    for module, its_calls in chosen.items():
        replayed: Any = module.weights_replayed
        replayed(its_calls)


def record_calls(model: torch.nn.Module, bound: BoundPlan) -> dict[str, list[tuple[torch.nn.Module, Call]]]:
    """Runs the loaders of modules with `weights_replayed` once, with nothing behind them, and notes their calls.

    Returns:
        Wire name -> calls, each with its module.
    """
    modules = [module for module in model.modules() if callable(getattr(module, "weights_replayed", None))]
    owned = {path for path, module in model.named_modules() if any(module is other for other in modules)}
    names = [n for n, e in bound.entries.items() if e.is_copy and not e.is_dropped and owned & set(e.modules)]
    calls: dict[str, list[tuple[torch.nn.Module, Call]]] = {name: [] for name in names}
    if not names:
        return calls
    current = [""]

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            current[0] = name
            entry = bound.entries[name]
            yield name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    state = PythonState.capture(model)
    try:
        for module in modules:
            for parameter in module._parameters.values():
                loader = getattr(parameter, "weight_loader", None)
                if parameter is not None and callable(loader):
                    vars(parameter)["weight_loader"] = _noting(loader, module, lambda: calls[current[0]])
        Loader(model, dict(bound.plan.mapping))(feed())
    finally:
        state.restore()
    return calls


def discard_arrivals(modules: Iterable[torch.nn.Module]) -> None:
    """Tells modules that keep books of arrivals that the old bytes are back."""
    for module in modules:
        discard = getattr(module, "discard_arrivals", None)
        if callable(discard):
            discard()


def tell_torn(modules: Iterable[torch.nn.Module]) -> None:
    """Tells modules that keep books of arrivals that their bytes are mixed, which restored books would hide."""
    for module in modules:
        torn = getattr(module, "weights_torn", None)
        if callable(torn):
            torn()


def by_module(
    calls: Mapping[str, Sequence[tuple[torch.nn.Module, Call]]], names: Iterable[str]
) -> dict[torch.nn.Module, tuple[Call, ...]]:
    """The calls of some names, by module."""
    found: dict[torch.nn.Module, list[Call]] = {}
    for name in names:
        for module, call in calls[name]:
            found.setdefault(module, []).append(call)
    return {module: tuple(its_calls) for module, its_calls in found.items()}


def _noting(loader: Any, module: torch.nn.Module, calls: Any) -> Any:
    signature = inspect.signature(loader)

    def note(*args: Any, **kwargs: Any) -> bool:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        calls().append((module, (given["weight_name"], given["shard_id"], given["expert_id"])))
        return True

    return note


def _same(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and (left == right or (left != left and right != right)))
