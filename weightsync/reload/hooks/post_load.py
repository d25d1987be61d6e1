"""Post-load hooks: who has one, in which order a loader runs them, and how each runs once per reload.

An engine's loader fills the parameters and then lets modules turn them into what their kernels want
(`process_weights_after_loading`). A reload has to repeat exactly that: each hook once, after all of its inputs, in the
loader's order

    1. module      quant_method.process_weights_after_loading(module), or the module's own hook, parents first
    2. attention   the module's own hook, which takes the activation dtype
    3. model       the hook of a module that has load_weights, or of the root; the innermost model first

A hook that calls another module's hook is fine: during a session every hook is shadowed on its instance by a guard
that runs it at most once, and not at all before `finish`.

    with HookGuards(hooks) as guards:
        model.load_weights(weights)      # a hook called in here does nothing
        guards.run(hook, dtype)
"""

from __future__ import annotations

import copy
import dis
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from weightsync.errors import ReloadError

HOOK = "process_weights_after_loading"
_NO_OP_INSTRUCTIONS = {"RESUME", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE", "NOP"}


class Stage(IntEnum):
    """When a loader runs a hook."""

    MODULE = 0
    ATTENTION = 1
    MODEL = 2


@dataclass(frozen=True, eq=False)
class Hook:
    """One post-load hook.

    Attributes:
        path: Path of the module.
        module: The module.
        owner: The object whose method it is: the module, or its `quant_method`.
        stage: When it runs.
        takes_dtype: Whether it wants the activation dtype.
        callable_by_us: False if it needs arguments that only the model's own code has.
        method: What it calls, unshadowed: as recorded where the module has a record.
    """

    path: str
    module: torch.nn.Module
    owner: Any
    stage: Stage
    takes_dtype: bool
    callable_by_us: bool = True
    method: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """Path and method, for messages."""
        where = self.path or type(self.module).__name__
        return f"{where}.{HOOK}" if self.owner is self.module else f"{where}.quant_method.{HOOK}"


Recorded = Mapping[torch.nn.Module, "Sequence[tuple[Any, Callable[..., Any]]]"]  # owner and method of each hook


def own_hooks(
    path: str, module: torch.nn.Module, *, is_root: bool = False, recorded: Recorded | None = None
) -> list[Hook]:
    """The hooks that belong to one module and do something.

    Args:
        path: Path of the module.
        module: The module.
        is_root: Whether it is the model itself.
        recorded: From `recorded_hooks`. A hook of the first load counts even if it removed or replaced itself since.
    """
    found: list[Hook] = []
    if "_orig_mod" in module._modules:  # torch.compile's wrapper hands on every attribute of the module inside
        return found
    first = (recorded or {}).get(module, ())
    quant_method = getattr(module, "quant_method", None)
    owner, method = next(((o, m) for o, m in first if o is not module), (quant_method, _method_of(quant_method)))
    if owner is not None and method is not None and _does_something(method):
        found.append(Hook(path, module, owner, Stage.MODULE, takes_dtype=False, method=method))
    method = next((m for o, m in first if o is module), _method_of(module))
    if method is not None and _does_something(method) and not _is_quant_method(module, method):
        required = _num_required(method)
        is_model = is_root or callable(getattr(module, "load_weights", None))
        attention = not is_model and (required == 1 or type(module).__name__.endswith("Attention"))
        stage = Stage.MODEL if is_model else Stage.ATTENTION if attention else Stage.MODULE
        found.append(Hook(path, module, module, stage, _takes_dtype(method), required <= 1, method))
    return found


def recorded_hooks(modules: Iterable[tuple[str, torch.nn.Module]]) -> Recorded:
    """Owner and method of every hook as they are now, to be given to `hooks_in_order` later."""
    return {
        module: [(hook.owner, hook.method) for hook in hooks if hook.method is not None]
        for path, module in modules
        if (hooks := own_hooks(path, module, is_root=path == ""))
    }


def hooks_in_order(modules: Iterable[tuple[str, torch.nn.Module]], recorded: Recorded | None = None) -> list[Hook]:
    """All hooks in the order in which a loader runs them.

    Args:
        modules: `(path, module)`, parents before children; the first is the root.
        recorded: From `recorded_hooks`.
    """
    hooks = [h for path, module in modules for h in own_hooks(path, module, is_root=path == "", recorded=recorded)]
    inner_first = {id(hook): -hook.path.count(".") - bool(hook.path) for hook in hooks if hook.stage is Stage.MODEL}
    return sorted(hooks, key=lambda hook: (hook.stage, inner_first.get(id(hook), 0)))


def set_latches(hook: Hook) -> list[str]:
    """Attributes that a hook both asks for and sets, and that are set now: an earlier run may keep it from running.

    Read off its code, so a hint: `if self._done: return ... self._done = True`.
    """
    method: Any = hook.method
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    if code is None:
        return []
    steps = list(dis.get_instructions(code))
    stored = {step.argval for step in steps if step.opname == "STORE_ATTR"}
    asked = {step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")}
    holders = (vars(hook.module), getattr(hook.owner, "__dict__", {}))
    return sorted(name for name in stored & asked if any(_is_latched(holder.get(name)) for holder in holders))


def names_set_by(hook: Hook) -> set[str]:
    """Names of attributes that a hook's code sets, under some condition perhaps, on whatever object."""
    return {
        step.argval
        for function in functions_of(hook)
        for code in _codes(function.__code__)
        for step in dis.get_instructions(code)
        if step.opname == "STORE_ATTR"
    }


def functions_of(hook: Hook) -> list[types.FunctionType]:
    """A hook's function and those that it calls: methods of owner and module, globals of its package, closures."""
    found: list[types.FunctionType] = []
    seen: set[int] = set()
    pending: list[Any] = [hook.method]
    while pending:
        method = pending.pop()
        method = getattr(method, "func", method)  # a partial
        function = inspect.unwrap(getattr(method, "__func__", method))
        if not isinstance(function, types.FunctionType) or id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        found.append(function)
        for code in _codes(function.__code__):
            for called in code.co_names:
                pending.extend(getattr(holder, called, None) for holder in (hook.owner, type(hook.module)))
                near = function.__globals__.get(called)
                if str(getattr(near, "__module__", "")).partition(".")[0] == function.__module__.partition(".")[0]:
                    pending.append(near)
        pending.extend(c.cell_contents for c in function.__closure__ or () if c != types.CellType())
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_latched(value: Any) -> bool:
    if isinstance(value, (int, float, list)):
        return value is True  # a count or a log goes on
    return value is not None


def declares_direct(module: torch.nn.Module) -> bool:
    """Whether a module, or its quantisation method, says that its live layout is its loaders' layout."""
    return bool(
        getattr(module, "supports_direct_reload", False)
        or getattr(getattr(module, "quant_method", None), "supports_direct_reload", False)
    )


def activation_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype that attention-like hooks are given: the model's, its config's, else that of its first weights."""
    config = getattr(model, "config", None)
    for holder, name in ((model, "dtype"), (config, "dtype"), (config, "torch_dtype")):
        found = getattr(holder, name, None)
        if isinstance(found, torch.dtype):
            return found
    floating = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    return next(floating, torch.get_default_dtype())


class HookGuards:
    """Shadows every hook on its instance until closed: called early it does nothing, later it runs at most once.

    Args:
        hooks: The hooks to shadow.
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = list(hooks)
        self._methods: dict[int, Callable[..., Any]] = {}
        self._own: dict[int, Any] = {}  # what owners had as an attribute of their own
        self._allowed: set[int] = set()
        self._done: set[int] = set()

    def __enter__(self) -> HookGuards:
        for hook in self._hooks:
            if id(hook.owner) in self._methods:
                continue
            attributes = getattr(hook.owner, "__dict__", {})
            method = hook.method or getattr(hook.owner, HOOK)
            if isinstance(attributes.get(HOOK), _Guard):
                raise ReloadError(
                    f"{hook.name}: its {type(hook.owner).__name__} is shared with another model, which has a reload "
                    "session open; finish or abort that one first"
                )
            try:
                if HOOK in attributes:
                    self._own[id(hook.owner)] = attributes[HOOK]
                    if isinstance(attributes[HOOK], Watch):
                        method = attributes[HOOK]  # this is the first load, which is observed
                self._methods[id(hook.owner)] = method
                object.__setattr__(hook.owner, HOOK, self._guard(hook))
            except (AttributeError, TypeError) as error:
                raise ReloadError(
                    f"{hook.name}: its owner, a {type(hook.owner).__name__}, takes no attribute, so the hook cannot be "
                    'held back until all data is there; give its class a __dict__ (no __slots__, or "__dict__" in them)'
                ) from error
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            method = self._methods.pop(id(hook.owner), None)
            attributes = getattr(hook.owner, "__dict__", {})
            if method is None or not isinstance(attributes.get(HOOK), _Guard):
                continue  # not shadowed, or a hook put another in the place of the shadow
            del attributes[HOOK]
            own = self._own.get(id(hook.owner))
            if isinstance(own, Watch):
                own.put_on()
            elif own is not None:
                object.__setattr__(hook.owner, HOOK, own)

    def run(self, hook: Hook, dtype: torch.dtype) -> None:
        """Runs a hook unless it ran already; hooks that it calls run too, each once."""
        if hook.callable_by_us:
            getattr(hook.owner, HOOK)(*_arguments(hook, dtype))

    def allow(self, hooks: Iterable[Hook]) -> None:
        """Lets these hooks run from now on."""
        self._allowed.update(_key(hook.owner, hook.module) for hook in hooks)

    def forget(self, hooks: Iterable[Hook]) -> None:
        """Lets these hooks run once more, after what they did was undone."""
        self._done.difference_update(_key(hook.owner, hook.module) for hook in hooks)

    def has_run(self, hook: Hook) -> bool:
        """Whether the hook ran under this guard."""
        return _key(hook.owner, hook.module) in self._done

    def _guard(self, hook: Hook) -> _Guard:
        return _Guard(hook, self._methods[id(hook.owner)], self._allowed, self._done)


class _Guard:
    """What stands in a hook's place. An object of this package, which no walk over the model enters."""

    def __init__(self, hook: Hook, method: Callable[..., Any], allowed: set[int], done: set[int]) -> None:
        self._hook, self.method, self._allowed, self._done = hook, method, allowed, done

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the hook if it may run and has not run."""
        hook = self._hook
        layer = hook.module if hook.owner is hook.module else (args[0] if args else kwargs.get("layer", hook.module))
        key = _key(hook.owner, layer)
        if key not in self._allowed or key in self._done:
            return None
        self._done.add(key)
        return self.method(*args, **kwargs)


class Watch:
    """What stands in a hook's place from `record_layouts` on, until it has run once for each of its modules.

    Args:
        owner: The hook's owner, which has a `__dict__`.
        method: The hook.

    Attributes:
        method: The hook.
    """

    def __init__(self, owner: Any, method: Callable[..., Any]) -> None:
        self.method = method
        self.__wrapped__ = method  # so that signatures are the hook's
        self._owner = owner
        self._was = vars(owner).get(HOOK)
        self._observers: list[tuple[Any, set[int]]] = []  # each with the `id` of the modules that it waits for

    def add(self, observer: Any, modules: Iterable[torch.nn.Module]) -> None:
        """Lets `observer.observe(owner, module)`, a context, be around the next run for each of these modules."""
        self._observers.append((observer, {id(module) for module in modules}))

    def put_on(self) -> None:
        """Stands in the hook's place if anybody still waits for it; else the hook has it back."""
        if any(waiting for _, waiting in self._observers):
            object.__setattr__(self._owner, HOOK, self)
        elif self._was is not None:
            object.__setattr__(self._owner, HOOK, self._was)

    def take_off(self) -> None:
        """Gives the hook its place back."""
        attributes = vars(self._owner)
        if attributes.get(HOOK) is self:
            del attributes[HOOK]
            if self._was is not None:
                object.__setattr__(self._owner, HOOK, self._was)

    def remove(self, observer: Any) -> None:
        """Forgets an observer; after the last one the hook has its place back for good."""
        self._observers = [entry for entry in self._observers if entry[0] is not observer]
        if not self._observers:
            self.take_off()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the hook, which finds itself at its place."""
        is_own = isinstance(self._owner, torch.nn.Module) and any(id(self._owner) in ids for _, ids in self._observers)
        layer = self._owner if is_own else args[0] if args else kwargs.get("layer", self._owner)
        self.take_off()
        with ExitStack() as stack:
            for observer, waiting in self._observers:
                if id(layer) in waiting:
                    waiting.remove(id(layer))
                    stack.enter_context(observer.observe(self._owner, layer))
            result = self.method(*args, **kwargs)
        if vars(self._owner).get(HOOK) is self._was:
            self.put_on()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.method, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.method,)


def _itself(method: Any) -> Any:
    return method


def _is_quant_method(module: torch.nn.Module, method: Callable[..., Any]) -> bool:
    """Whether a module is itself a quantisation method: then its hook takes the layer, and the layer runs it."""
    hook = inspect.signature(method)
    return callable(getattr(module, "create_weights", None)) and next(iter(hook.parameters), "") == "layer"


def _key(owner: Any, module: Any) -> int:
    return hash((id(owner), id(module)))


def _arguments(hook: Hook, dtype: torch.dtype) -> tuple[Any, ...]:
    if hook.owner is not hook.module:
        return (hook.module,)
    return (dtype,) if hook.takes_dtype else ()


def _method_of(owner: Any) -> Callable[..., Any] | None:
    """An owner's hook, also while it is shadowed; None if it has none."""
    method = getattr(owner, HOOK, None)
    if isinstance(method, (_Guard, Watch)):
        return method.method
    return method if callable(method) else None


def _does_something(method: Callable[..., Any]) -> bool:
    function = inspect.unwrap(getattr(method, "__func__", method))
    code = getattr(function, "__code__", None)
    return code is None or any(step.opname not in _NO_OP_INSTRUCTIONS for step in dis.get_instructions(code))


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in inspect.signature(method).parameters.values() if p.kind in positional]


def _num_required(method: Callable[..., Any]) -> int:
    return sum(parameter.default is inspect.Parameter.empty for parameter in _parameters(method))


def _takes_dtype(method: Callable[..., Any]) -> bool:
    parameters = _parameters(method)
    return _num_required(method) == 1 or any(p.name in ("act_dtype", "dtype") for p in parameters[:1])
