"""How wire names get into a model: its own `load_weights`, found through wrappers, else a loader by name.

    load = Loader(model)
    load([(name, tensor), ...])              # in the model's own way
    load.mapping                             # wire name -> name that was given to load_weights, where they differ

Wrappers insert a component into paths: `torch.compile` adds `_orig_mod`, LoRA adds `base_layer`, data parallelism adds
`module`. Names are tried as they are. Only a name that fails gets the components that the model's own tree has at that
place, compared component by component, once. Where a loader makes up names of its own (expert 3's `w1` goes to
`experts.w13`), no wire name can help: for those it runs while `named_parameters` leaves the components out.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from weightsync.errors import LayoutError
from weightsync.manifest import ParamMeta
from weightsync.plan.ledger import Ledger
from weightsync.reachable import holders, walk

Weights = Iterable[tuple[str, torch.Tensor]]
WRAPPERS = ("_orig_mod", "base_layer", "module")


class Loader:
    """Loads wire tensors into a model.

    Attributes:
        path: Path of the module whose `load_weights` is used; "" for the model itself.
        is_default: Whether no module has a `load_weights`, so that names are parameter paths.
        mapping: Wire names that have to be given to the loader under another name. A name that is mapped to itself is
            loaded while wrapper components are left out of `named_parameters`.
    """

    def __init__(self, model: torch.nn.Module, mapping: Mapping[str, str] | None = None) -> None:
        self.path, self.module, own = _find(model)
        self.is_default = own is None
        self._load: Callable[[Weights], Any] = own or functools.partial(load_by_name, model)
        self.mapping = dict(mapping or {})
        self._bare = frozenset(name for name, given in self.mapping.items() if name == given)

    def __call__(self, weights: Weights) -> None:
        """Loads `weights` in order, each under its mapped name, drawing them one at a time."""
        if not self._bare:
            self._load((self.mapping.get(name, name), tensor) for name, tensor in weights)
            return
        for is_bare, group in itertools.groupby(weights, key=lambda pair: pair[0] in self._bare):
            with bare_names(self.module) if is_bare else contextlib.nullcontext():
                self._load((self.mapping.get(name, name), tensor) for name, tensor in group)

    def run(self, feed: Feed, bare: bool) -> None:
        """Gives `feed` to the loader as it is, with or without wrapper components in `named_parameters`."""
        with bare_names(self.module) if bare else contextlib.nullcontext():
            self._load(feed)


def _find(model: torch.nn.Module) -> tuple[str, torch.nn.Module, Callable[[Weights], Any] | None]:
    """The module that loads, and its method: the outermost one, through wrappers that have a single child for it."""
    path, node = "", model
    while True:
        own = getattr(type(node), "load_weights", None) or vars(node).get("load_weights")
        if own is not None:
            load: Callable[[Weights], Any] = node.load_weights  # type: ignore[assignment]
            return path, node, load
        inner = next((name for name in WRAPPERS if node._modules.get(name) is not None), None)
        if inner is None:
            return "", model, None
        path, node = (f"{path}.{inner}" if path else inner), node._modules[inner]  # type: ignore[assignment]


def load_by_name(model: torch.nn.Module, weights: Weights) -> None:
    """Loads each tensor into the parameter or buffer of its name, through `weight_loader` if that has one.

    A child module with a `load_weights` of its own gets the names below it, without the prefix. Wrapper components that
    a name lacks are stepped through.

    Raises:
        KeyError: Nothing has that name.
    """
    for name, tensor in weights:
        node, rest = model, name.split(".")
        while True:
            child = _child(node, rest[0]) if len(rest) > 1 else None
            if child is None:
                wrapped = next((name for name in WRAPPERS if node._modules.get(name) is not None), None)
                if wrapped is None or _own(node, rest[0]) is not None:
                    break
                child, rest = node._modules[wrapped], ["", *rest]
            node, rest = child, rest[1:]  # type: ignore[assignment]
            own = getattr(node, "load_weights", None)
            if own is not None:
                break
        own = getattr(node, "load_weights", None) if node is not model else None
        if own is not None:
            own([(".".join(rest), tensor)])
            continue
        target = _own(node, rest[0]) if len(rest) == 1 else None
        if target is None:
            raise KeyError(name)
        loader = getattr(target, "weight_loader", None)
        if loader is not None:
            loader(target, tensor)
        else:
            copy_exactly(target, tensor)


def copy_exactly(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a tensor of the same shape; unlike `copy_` alone it never broadcasts.

    Raises:
        ValueError: The shapes differ.
    """
    if target.shape != tensor.shape:
        raise ValueError(f"expected shape {tuple(target.shape)}, got {tuple(tensor.shape)}")
    target.data.copy_(tensor)


def _child(node: torch.nn.Module, name: str) -> torch.nn.Module | None:
    return node._modules.get(name)


def _own(node: torch.nn.Module, name: str) -> torch.Tensor | None:
    found = node._parameters.get(name)
    return found if found is not None else node._buffers.get(name)


def through_wrappers(root: torch.nn.Module, name: str) -> str:
    """`name` with the wrapper components that `root`'s module tree has on its way; unchanged if there are none.

    A component that the tree lacks (`q_proj` where the model fused `qkv_proj`) takes the wrapper of its siblings.
    """
    components = name.split(".")
    node: torch.nn.Module | None = root
    out: list[str] = []
    for position, component in enumerate(components):
        while node is not None and node._modules.get(component) is None and _own(node, component) is None:
            wrapper = next((inner for inner in WRAPPERS if node._modules.get(inner) is not None), None)
            if wrapper is None:
                break
            out.append(wrapper)
            node = node._modules[wrapper]
        out.append(component)
        child = node._modules.get(component) if node is not None else None
        if node is not None and child is None and position == len(components) - 2:
            siblings = [
                inner for sibling in node._modules.values() if sibling is not None for inner in sibling._modules
            ]
            wrapper = next((inner for inner in WRAPPERS if inner in siblings), None)
            if wrapper is not None and components[-1] != wrapper:
                out.append(wrapper)
        node = child
    return ".".join(out)


@contextlib.contextmanager
def bare_names(root: torch.nn.Module) -> Iterator[None]:
    """Inside, `named_parameters` and `named_buffers` of `root` and its descendants leave wrapper components out."""
    shadowed = [(module, method) for module in root.modules() for method in ("named_parameters", "named_buffers")]
    shadowed = [(module, method) for module, method in shadowed if method not in vars(module)]
    for module, method in shadowed:
        object.__setattr__(module, method, functools.partial(_without_wrappers, getattr(module, method)))
    try:
        yield
    finally:
        for module, method in shadowed:
            object.__delattr__(module, method)


def _without_wrappers(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in method(*args, **kwargs):
        yield ".".join(part for part in name.split(".") if part not in WRAPPERS), tensor


def has_wrappers(root: torch.nn.Module) -> bool:
    """Whether any module of the tree is a wrapper's child."""
    return any(component in WRAPPERS for path, _ in root.named_modules() for component in path.split(".")[-1:])


class Feed:
    """The iterator that a dry run gives to `load_weights`: meta tensors, one name at a time, drawn at most once.

    Attributes:
        exhausted: Whether everything has been drawn.
        drawn: Names drawn so far.
    """

    def __init__(self, ledger: Ledger, pending: Iterable[tuple[ParamMeta, str]]) -> None:
        self._ledger = ledger
        # Made here, where no mode is active yet; each is let go of when it is drawn.
        self._pending = deque(
            (meta.name, given, torch.empty(meta.shape, dtype=meta.dtype, device="meta")) for meta, given in pending
        )
        self.exhausted = False
        self.drawn: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if not self._pending:
            self.exhausted = True
            self._ledger.begin(None, is_drawn=True)
            raise StopIteration
        name, given, tensor = self._pending.popleft()
        self._ledger.add_source(name, tensor)
        self._ledger.begin(name, is_drawn=True)
        self.drawn.add(name)
        return given, tensor


def observe(model: torch.nn.Module, ledger: Ledger) -> None:
    """Shadows post-load hooks and puts observers before weight loaders, on instances; `PythonState` undoes it.

    Raises:
        LayoutError: An object has a post-load hook that can't be shadowed.
    """
    for holder in holders(model):
        hook = "process_weights_after_loading"
        if callable(getattr(type(holder), hook, None)) or callable(getattr(holder, "__dict__", {}).get(hook)):
            if not hasattr(holder, "__dict__"):
                raise LayoutError(
                    f"{type(holder).__name__}.{hook} can't be kept from running: the class has slots only"
                )
            object.__setattr__(holder, hook, _nothing)
        if isinstance(holder, torch.nn.Module) and callable(getattr(holder, "weight_loader", None)):
            object.__setattr__(holder, "weight_loader", _observed(getattr(holder, "weight_loader"), ledger))  # noqa: B009  # mypy takes it for a tensor
    seen: set[int] = set()
    for slot in walk(model):
        if id(slot.tensor) in seen:
            continue
        seen.add(id(slot.tensor))
        attributes = getattr(slot.tensor, "__dict__", {})
        for key in ("weight_loader", "_weight_loader"):
            if callable(attributes.get(key)):
                attributes[key] = _observed(attributes[key], ledger)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for a post-load hook during a dry run."""


def _observed(loader: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    """`loader`, noting names that came with an `expert_id` and were not taken."""
    try:
        parameters = list(inspect.signature(loader).parameters)
    except (TypeError, ValueError):
        parameters = []
    position = parameters.index("expert_id") if "expert_id" in parameters else None

    def observed(*args: Any, **kwargs: Any) -> Any:
        before = len(ledger.claims)
        result = loader(*args, **kwargs)
        expert = kwargs.get("expert_id")
        if expert is None and position is not None and position < len(args):
            expert = args[position]
        if expert is not None and len(ledger.claims) == before and (result is None or result is False):
            names = [ledger.name_of(item) for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
            for name in names:
                if name is not None:
                    ledger.foreign_experts[name] = expert
        return result

    functools.update_wrapper(observed, loader)
    for name in (
        "__self__",
        "__func__",
        "func",
        "args",
        "keywords",
    ):  # what bound methods and partials let a caller ask for
        if hasattr(loader, name):
            setattr(observed, name, getattr(loader, name))
    return observed
