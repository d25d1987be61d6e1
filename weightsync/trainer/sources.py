"""Where a trainer's weights come from: a live module, plain tensors, or a checkpoint on disk.

A source declares every tensor (`metadata`) and yields them in that order (`iter_full`). One whose tensors all exist
at once, in memory that lasts, also gives them by name (`resident`): then mapped transports read them where they lie.

    source = ModuleSource(model)                                # parameters and persistent buffers, DTensors gathered
    source = CheckpointSource("/models/glm-4-moe")              # safetensors, one file or many with an index
    source = TensorSource({"w": tensor})
"""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightsync.errors import ManifestError, shown
from weightsync.manifest import Manifest, ParamMeta
from weightsync.transport.base import select
from weightsync.transport.layouts import Layouts


class WeightSource(ABC):
    """The trainer's weights, declared and then yielded in that order."""

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]:
        """Every tensor in wire order. The same list object as long as nothing changed."""

    @abstractmethod
    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass over `(name, full tensor)`, exactly as `metadata` declares.

        It may run collectives of the trainer's own (an FSDP gather): tensor i is complete before it is yielded. A
        tensor may be reused or freed once the next one is asked for.
        """

    @property
    def manifest(self) -> Manifest:
        """`metadata` as a manifest."""
        return Manifest(tuple(self.metadata))

    def resident(self) -> Mapping[str, torch.Tensor] | None:
        """All tensors by name, if they exist at once in memory that lasts until the next call; else None."""
        return None

    def layout(self) -> object | None:
        """Stands for shapes, dtypes and strides of the resident tensors as `metadata` saw them last: the same object as
        long as they stay. None if that is not known.
        """
        return None


class _Declared:
    """The metadata of named tensors: the very same list until a name, a shape or a dtype is another.

    Looked at in every push, so without Python per tensor. Not by identity: `param.data = other` keeps the object and
    may change both.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self.layout = Layouts([])
        self._metadata: list[ParamMeta] = []

    def metadata(self, names: list[str], tensors: list[torch.Tensor]) -> list[ParamMeta]:
        if names != self._names or not self.layout.hold(tensors):
            layout = Layouts(tensors)
            rows = zip(names, layout.dtypes, layout.shapes, strict=True)
            metadata = [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in rows]
            self._names, self.layout = names, layout
            if metadata != self._metadata:
                self._metadata = metadata
        return self._metadata


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class TensorSource(WeightSource):
    """Tensors by name, in the mapping's order.

    Args:
        tensors: Name -> tensor. Read again at each push, so the caller may put other tensors there; names, shapes
            and dtypes that change make a new handshake.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._declared = _Declared()

    @property
    def metadata(self) -> list[ParamMeta]:
        """See `WeightSource.metadata`.

        Raises:
            ManifestError: A value is no tensor.
        """
        tensors = list(self._tensors.values())
        if any(not issubclass(kind, torch.Tensor) for kind in set(map(type, tensors))):  # few kinds, many tensors
            wrong = {name: type(value).__name__ for name, value in self._tensors.items() if not _is_tensor(value)}
            said = [f"{name} is a {kind}" for name, kind in wrong.items()]
            raise ManifestError(f"a source holds tensors by name, but {shown(said)}", names=list(wrong))
        return self._declared.metadata(list(self._tensors), tensors)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.iter_full`."""
        yield from self._tensors.items()

    def resident(self) -> Mapping[str, torch.Tensor]:
        """See `WeightSource.resident`."""
        return self._tensors

    def layout(self) -> object:
        """See `WeightSource.layout`."""
        return self._declared.layout


class NamedSource(WeightSource):
    """Some tensors of another source, in its order.

    Args:
        source: The other source.
        names: Which.

    Raises:
        CoverageError: `metadata` raises it for a name that the source lacks, or that stands twice.
    """

    def __init__(self, source: WeightSource, names: Sequence[str]) -> None:
        self._source, self._names = source, tuple(names)

    @property
    def metadata(self) -> list[ParamMeta]:
        """See `WeightSource.metadata`; a new list each time."""
        manifest = self._source.manifest
        return [manifest.entries[i] for i in select(manifest, range(len(manifest)), self._names)]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.iter_full`; runs through the whole source, whose gathers have to stay in step."""
        chosen = set(self._names)
        yield from (pair for pair in self._source.iter_full() if pair[0] in chosen)

    def resident(self) -> Mapping[str, torch.Tensor] | None:
        """See `WeightSource.resident`."""
        tensors = self._source.resident()
        return None if tensors is None else {name: tensors[name] for name in self._names}


_TABLES = itemgetter("_parameters", "_buffers", "_modules")
_TRANSIENT = itemgetter("_non_persistent_buffers_set")


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


class ModuleSource(WeightSource):
    """A live module's parameters and persistent buffers, under their names in its `state_dict`.

    A tied parameter travels once, under its first name. A DTensor (FSDP2, tensor parallel) travels as its
    `full_tensor()`, gathered when its turn comes; all ranks of the trainer have to iterate.

    Args:
        module: The module; it may be trained between pushes, and get other tensors.
        rename: Wire name of a state_dict name; None leaves the tensor out.
    """

    def __init__(self, module: nn.Module, rename: Callable[[str], str | None] | None = None) -> None:
        self._module = module
        self._rename = rename
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}
        self._declared = _Declared()
        self._names: list[str] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._structure: list[Any] | None = None

    def _find_slots(self) -> None:
        """Remembers in which dict each tensor stands, so that a push need not walk the module."""
        seen: set[int] = set()
        self._slots, self._modules, self._structure = {}, [], None
        for prefix, module in self._module.named_modules():
            self._modules.append(weakref.ref(module))
            transient = module._non_persistent_buffers_set
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is None or id(tensor) in seen or (table is module._buffers and key in transient):
                        continue
                    seen.add(id(tensor))
                    name: str | None = f"{prefix}.{key}" if prefix else key
                    if self._rename is not None:
                        name = self._rename(str(name))
                    if name is None:
                        continue
                    if name in self._slots:
                        raise ManifestError(f"two tensors are renamed to {name!r}", names=[name])
                    self._slots[name] = (table, key)
        self._names = list(self._slots)
        self._structure = self._structure_now()

    def _structure_now(self) -> list[Any] | None:
        """Which modules, tables, keys and objects there are; None if a module is gone.

        Identities are those of living objects: of modules, and of what their tables hold. A tensor that was replaced is
        read from its table anyway; but one that is tied or untied, or was None, makes other names.
        """
        modules = [reference() for reference in self._modules]
        if None in modules:
            return None
        own = list(map(vars, modules))
        tables = list(chain.from_iterable(map(_TABLES, own)))
        held = list(map(id, chain.from_iterable(table.values() for table in tables)))
        keys, lengths = list(chain.from_iterable(tables)), list(map(len, tables))
        return [list(map(id, tables)), lengths, keys, held, list(map(frozenset, map(_TRANSIENT, own)))]

    def _tensors(self) -> list[torch.Tensor]:
        """The tensors as they are now, in the order of `_names`."""
        if self._structure is None or self._structure_now() != self._structure:
            self._find_slots()
        return [table[key] for table, key in self._slots.values()]

    @property
    def metadata(self) -> list[ParamMeta]:
        """See `WeightSource.metadata`."""
        tensors = self._tensors()
        return self._declared.metadata(self._names, tensors)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.iter_full`."""
        tensors = self._tensors()
        for name, tensor in zip(self._names, tensors, strict=True):
            detached: Any = tensor.detach()
            yield name, detached.full_tensor() if _is_sharded(detached) else detached

    def resident(self) -> Mapping[str, torch.Tensor] | None:
        """See `WeightSource.resident`: None as soon as one tensor is sharded."""
        tensors = self._tensors()
        kinds = set(map(type, tensors))  # few, whatever the number of tensors
        if any(hasattr(kind, "full_tensor") for kind in kinds):
            return None
        return dict(zip(self._names, tensors, strict=True))

    def layout(self) -> object:
        """See `WeightSource.layout`."""
        return self._declared.layout


def sources_by_target(source: object, target: str) -> dict[str, WeightSource]:
    """What a client was given as its source, as a source for each target.

    Args:
        source: A module, a `WeightSource`, or target name -> either.
        target: The target of a single source.

    Raises:
        TypeError: It is something else, such as a plain mapping of tensors.
        ValueError: It is an empty mapping.
    """
    given = source if isinstance(source, Mapping) else {target: source}
    if not given:
        raise ValueError("source is an empty mapping: name at least one target")
    sources: dict[str, WeightSource] = {}
    for name, one in given.items():
        if isinstance(one, nn.Module):
            sources[name] = ModuleSource(one)
        elif isinstance(one, WeightSource):
            sources[name] = one
        elif isinstance(source, Mapping) and isinstance(one, torch.Tensor):
            raise TypeError(
                f"source maps {name!r} to a tensor; a mapping as source is target name -> source. "
                "For plain tensors by name pass weightsync.TensorSource(tensors)"
            )
        else:
            raise TypeError(
                f"the source of target {name!r} is a {type(one).__name__}; it must be a torch.nn.Module or a "
                "weightsync.WeightSource: TensorSource for tensors by name, CheckpointSource for a path"
            )
    return sources


class CheckpointSource(WeightSource):
    """Safetensors on disk, read anew at each push, one tensor in memory at a time.

    Args:
        path: A `.safetensors` file, or a folder with `model.safetensors.index.json` or with `*.safetensors` files.

    Raises:
        ManifestError: There is no such checkpoint, or the index names a tensor that its file lacks.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._metadata: list[ParamMeta] = []
        self._stamp: list[tuple[str, int, int]] = []
        self._files: list[tuple[Path, list[str]]] = []

    def _names_by_file(self) -> list[tuple[Path, list[str] | None]]:
        """Files in order, with the names that the index gives them (None: all)."""
        if self._path.is_file():
            return [(self._path, None)]
        index = self._path / "model.safetensors.index.json"
        if index.is_file():
            names: dict[str, list[str]] = {}
            for name, file in json.loads(index.read_text())["weight_map"].items():
                names.setdefault(file, []).append(name)
            return [(self._path / file, listed) for file, listed in sorted(names.items())]
        files = sorted(self._path.glob("*.safetensors"))
        if not files:
            raise ManifestError(f"no safetensors checkpoint at {self._path}")
        return [(file, None) for file in files]

    @property
    def metadata(self) -> list[ParamMeta]:
        """See `WeightSource.metadata`; read from the files' headers, again when a file changed."""
        from safetensors import safe_open

        listed = self._names_by_file()
        if missing := [str(file) for file, _ in listed if not file.is_file()]:
            raise ManifestError(f"files of the checkpoint are missing: {', '.join(missing)}")
        stamp = [(str(f), f.stat().st_mtime_ns, f.stat().st_size) for f, _ in listed]
        if stamp != self._stamp:
            self._files, metadata = [], []
            for file, names in listed:
                with safe_open(file, framework="pt") as reader:
                    present = set(reader.keys())
                    chosen = sorted(present) if names is None else names
                    if lost := [name for name in chosen if name not in present]:
                        raise ManifestError(f"{file} lacks tensors that the index gives it", names=lost)
                    for name in chosen:
                        part = reader.get_slice(name)
                        metadata.append(ParamMeta(name, _SAFETENSORS[part.get_dtype()], tuple(part.get_shape())))
                self._files.append((file, chosen))
            self._stamp = stamp
            if metadata != self._metadata:
                self._metadata = metadata
        return self._metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.iter_full`."""
        from safetensors import safe_open

        _ = self.metadata
        for file, names in self._files:
            with safe_open(file, framework="pt") as reader:
                for name in names:
                    yield name, reader.get_tensor(name)


# The names that safetensors headers use.
_SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
