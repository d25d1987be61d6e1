"""Names whose value is not the hooks': they find the live one, whatever was recorded.

settings = LiveNames(latches)
settings.add("layers.0.kind"); "layers.0.kind" in settings
settings.has_all_others = True       # the first load was observed: all that hooks did not change is live
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator


class LiveNames(Collection[str]):
    """A set of paths that never holds one of the hooks' own.

    Args:
        latches: Paths that are the hooks' own; may grow.

    Attributes:
        has_all_others: Whether it holds every path that is not one of the latches.
    """

    def __init__(self, latches: set[str]) -> None:
        self._latches = latches
        self._paths: set[str] = set()
        self.has_all_others = False

    def __contains__(self, path: object) -> bool:
        return path not in self._latches and (self.has_all_others or path in self._paths)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths - self._latches)

    def __len__(self) -> int:
        return len(self._paths - self._latches)

    def knows(self, path: str) -> bool:
        """Whether a path was told by name."""
        return path in self._paths

    def add(self, paths: Iterable[str]) -> None:
        """Takes in some paths."""
        self._paths.update(paths)

    def clear(self) -> None:
        """Forgets all."""
        self._paths.clear()
        self.has_all_others = False
