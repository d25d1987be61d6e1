"""Which wire names a rank may leave alone: experts and layers that live on another rank.

A loader that takes no notice of a name is an error unless something says that the name belongs elsewhere:

    layers.0.experts.5.w1.weight    its sibling of expert 4 fills a stacked tensor here: this rank has some experts
    layers.7.mlp.weight             the module layers.7 exists and holds no tensor: a placeholder of another stage

That every name is taken by at least one rank is for the handshake to prove, over `plan.skipped` of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from weightsync.plan.writes import Claim, Destination

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a path component that is a number


class Foreign:
    """Answers for the names of one dry run.

    Args:
        root: The module whose `load_weights` ran.
        written: Claims of each name that wrote something.
        destinations: What the claims' indices mean.
    """

    def __init__(
        self, root: torch.nn.Module, written: Mapping[str, Sequence[Claim]], destinations: Sequence[Destination]
    ) -> None:
        self._root, self._written, self._destinations = root, written, destinations

    def why(self, name: str) -> str:
        """Why a name that wrote nothing may belong to another rank; "" if nothing says so."""
        placeholder = _placeholder_module(name, self._root)
        if placeholder:
            return f"{placeholder} holds no tensor on this rank"
        for match in _NUMBER.finditer(name):
            if (name[: match.start()], name[match.end() :]) in self._siblings:
                return f"expert {match.group()} of {name[: match.start()].rstrip('.')} is not on this rank"
        return ""

    @cached_property
    def _siblings(self) -> set[tuple[str, str]]:
        """(prefix, suffix) around a number of a written name that is not in its destination's path: an expert's."""
        found: set[tuple[str, str]] = set()
        for name, claims in self._written.items():
            for match in _NUMBER.finditer(name):
                prefix = name[: match.end()]
                if any(not _runs_through(self._destinations[claim.destination], prefix) for claim in claims):
                    found.add((name[: match.start()], name[match.end() :]))
        return found


def _placeholder_module(name: str, root: torch.nn.Module) -> str:
    """Path of the `nn.Identity` that stands on a name's way, as pipeline stages have for each other's layers."""
    node, path = root, []
    for component in name.split(".")[:-1]:
        child = node._modules.get(component)
        if child is None:
            break
        node = child
        path.append(component)
    return ".".join(path) if isinstance(node, torch.nn.Identity) else ""


def _runs_through(destination: Destination, prefix: str) -> bool:
    """Whether the path up to and with the number is a component-wise part of the destination's path."""
    return any(f".{prefix}." in f".{path}." for path in (destination.path, *destination.aliases))
