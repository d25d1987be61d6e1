"""Puts results into the live tensors: values move, addresses don't.

After a hook has run, each place that held a live tensor holds either that tensor, or another one with the new value.
`settle` compares place by place, refuses before it writes anything if a result doesn't fit the live tensor, then copies
values and puts the live tensors back, inside new helper objects, containers and closures too.

    settle(model, live_places, write)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync.errors import LayoutError, shown
from weightsync.reachable import Slot, replace, walk
from weightsync.reload.audit import LiveSlot, address
from weightsync.reload.hooks.scopes import ABSENT, Scope, is_plain, tensors_in
from weightsync.reload.hooks.swap import Swap
from weightsync.reload.records import same_layout

Write = Callable[[str, torch.Tensor, torch.Tensor], None]
_CONTAINERS = (list, tuple, dict, set)


@dataclass(slots=True)
class Settled:
    """What `settle` did.

    Attributes:
        copied: Paths whose value was copied into the live tensor.
        added: Paths that hold a tensor now and held none before.
    """

    copied: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


def settle(
    model: torch.nn.Module, before: Mapping[str, LiveSlot], write: Write, *, slots: list[Slot] | None = None
) -> Settled:
    """Makes every place of `before` hold its live tensor with the value that is at that place now.

    Args:
        model: The model.
        before: The live places to settle.
        write: `write(path, live, value)` copies `value` into the bytes of `live`.
        slots: What the model (or the part of it that `before` covers) holds now; None to walk it.

    Raises:
        LayoutError: A live tensor's place is empty, or holds a tensor of another kind, shape, stride, dtype or device.
            All such paths are named; nothing has been written.
    """
    now = {slot.path: slot for slot in (walk(model) if slots is None else slots)}
    moved: list[tuple[str, LiveSlot, torch.Tensor]] = []
    problems: dict[str, str] = {}
    for path, live in before.items():
        slot = now.get(path)
        problem = _misfit(live, slot)
        if problem:
            problems[path] = problem
        elif slot is not None and (slot.tensor is not live.slot.tensor or not _same_bytes(slot.tensor, live.alias)):
            moved.append((path, live, slot.tensor))
    if problems:
        lines = [f"{path}: {problem}" for path, problem in problems.items()]
        raise LayoutError(
            f"{len(problems)} tensors came out of loading or post-load hooks in another form than the live "
            "ones, so they "
            f"cannot be updated in place: {shown(lines)}; nothing was copied",
            names=list(problems),
        )
    _copy_values(moved, write)
    homes = _put_back(model, moved)
    settled = Settled(copied=[path for path, _, _ in moved])
    for path, slot in now.items():
        if path not in before:
            settled.added.append(path)
            if id(slot.tensor) in homes:
                replace(model, path, homes[id(slot.tensor)])
    return settled


def keep_untouched(
    swap: Swap,
    assigned: Mapping[int, set[str]],
    is_new_value: Callable[[str, torch.Tensor], bool],
    hidden: list[tuple[Scope, dict[Any, Any]]] | None = None,
    owned: Collection[str] = (),
) -> None:
    """Takes the recorded world out again, except for what was loaded or set by a hook.

    A name that still holds what `swap` installed, and that nobody assigned, goes back to its live value: a KV cache
    that the engine bound after the first load, a latch that this hook does not know. What a hook set stays, for
    `settle`.

    Args:
        swap: Installed.
        assigned: Names assigned on each holder since.
        is_new_value: `is_new_value(path, tensor)`: whether a tensor that `swap` made was loaded or written since.
        hidden: Where plain items go that a dict or set held, was found without, and that hooks put others beside:
            further hooks have to find it without them too. None to put them back at once.
        owned: Paths that are known to be these hooks': as recorded where they do not set them, as after a first load.
    """
    for scope, start, live in zip(swap.scopes, swap.start, swap.live, strict=True):
        now = scope.read()
        if scope.registry == "items" and isinstance(scope.holder, MutableSequence) and len(now) != len(start):
            continue  # positions have shifted, so all of it is the hook's
        touched = assigned.get(id(scope.holder), set()) if scope.registry == "attributes" else set()
        final: dict[Any, Any] = {}
        for name in [*live, *(name for name in now if name not in live)]:
            value, first, old = now.get(name, ABSENT), start.get(name, ABSENT), live.get(name, ABSENT)
            is_owned = scope.registry != "items" and scope.key_of(name) in owned
            keep = value is not first or name in touched or swap.is_changed(first) or is_owned
            if not keep and value is not old:
                recorded, path = scope.values.get(name, ABSENT), scope.path_of(name)
                pairs = zip(tensors_in(recorded, value), tensors_in(recorded, old), strict=True)
                keep = any(
                    is_new_value(path + rest, there)
                    for (rest, _, there), (_, _, was) in pairs
                    if isinstance(there, torch.Tensor) and isinstance(was, torch.Tensor) and there is not was
                )
            is_hidden = scope.registry == "items" and value is first is ABSENT and old is not ABSENT and is_plain(old)
            if hidden is not None and is_hidden and len(now) != len(start):
                hidden.append((scope, {name: old}))
                continue
            chosen = value if keep else old
            if chosen is not ABSENT:
                final[name] = chosen
        scope.write(final)


def carry_attributes(swap: Swap) -> None:
    """Sets on live parameters what loaders and hooks set on the ones that stood in their place.

    Tensors among it are left to `settle`.
    """
    for _, layout, there, live in swap.recorded_tensors():
        if there is live or not isinstance(live, torch.Tensor):
            continue
        for name, value in vars(there).items():
            was = layout.attributes.get(name, ABSENT)
            if value is not was and not isinstance(value, torch.Tensor):
                vars(live)[name] = value


def _misfit(live: LiveSlot, slot: Slot | None) -> str:
    was = live.alias
    if slot is None:
        return "nothing is there any more"
    value = slot.tensor
    if slot.kind != live.slot.kind:
        return f"{live.slot.kind} became {slot.kind}"
    if value.is_meta and not was.is_meta:
        return "it has no bytes (meta device)"
    if was.layout != torch.strided or value.layout != torch.strided:
        return "" if value is live.slot.tensor else f"{was.layout} became {value.layout}"
    if value.dtype != was.dtype or value.shape != was.shape:
        return f"{was.dtype} {tuple(was.shape)} became {value.dtype} {tuple(value.shape)}"
    if not same_layout(value, was):
        return f"stride {was.stride()} became {value.stride()}"
    return ""


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.device == right.device and address(left) == address(right)


def _copy_values(moved: list[tuple[str, LiveSlot, torch.Tensor]], write: Write) -> None:
    """Copies each value; one that lies in bytes which are about to be overwritten is taken out first."""
    targets = {live.alias.untyped_storage()._cdata for _, live, _ in moved}
    values = [
        (path, live.alias, value.clone() if value.untyped_storage()._cdata in targets else value)
        for path, live, value in moved
        if not _same_bytes(value, live.alias)
    ]
    for path, alias, value in values:
        write(path, alias, value)


def _put_back(model: torch.nn.Module, moved: list[tuple[str, LiveSlot, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Puts live tensors back at their places; returns them by the `id` of what stood there."""
    homes = {}
    for path, live, value in moved:
        tensor = live.slot.tensor
        if not _same_bytes(tensor, live.alias) or tensor.shape != live.alias.shape:
            tensor.data = live.alias
        if value is not tensor:
            homes[id(value)] = tensor
            replace(model, path, tensor)
    return homes
