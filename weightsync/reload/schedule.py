"""In which order arriving tensors are written, held back, and staged units opened and finished.

A unit is what is staged at a time: a module, with the modules that its hook or shared bytes tie to it. One unit is
open at a time, so a tensor of another unit is held until its turn comes:

    arrive a.w1      open a, write a.w1
    arrive b.w1      hold b.w1
    arrive a.w2      write a.w2, finish a, open b, write b.w1

This file decides and moves no bytes, so that the same decisions can be played through beforehand for a manifest.

    schedule = Schedule(routes, expected, late)
    for step in schedule.arrive("a.w1", can_hold=True): ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NamedTuple

Action = Literal["open", "write", "hold", "write_held", "finish"]


class Step(NamedTuple):
    """One thing to do: `unit` is -1 for "hold"; `name` is "" for "open" and "finish"."""

    action: Action
    unit: int
    name: str = ""


class Schedule:
    """Decides step by step.

    Args:
        routes: Units of each name, by number.
        expected: Names that make each unit complete; None if they are not known, then it completes at the end.
        late: Units that stay open until the session finishes, because a hook that has to wait needs them.
    """

    def __init__(
        self,
        routes: Mapping[str, Collection[int]],
        expected: Mapping[int, Collection[str] | None],
        late: Collection[int],
    ) -> None:
        self.routes = dict(routes)
        self._left = {unit: None if names is None else set(names) for unit, names in expected.items()}
        self._late = set(late)
        self._open: set[int] = set()
        self._done: set[int] = set()
        self._waiting: dict[int, dict[str, None]] = {}  # unit -> names held for it, in order of arrival
        self.held: dict[str, int] = {}  # name -> number of units that still want it

    def add(self, routes: Mapping[str, Collection[int]], late: Collection[int]) -> None:
        """Takes further names, and further units that have to stay open."""
        self.routes.update(routes)
        self._late.update(late)

    def keep_open(self, unit: int, late: Collection[int]) -> None:
        """Takes a "finish" back: the unit, and those in `late`, stay open until the session finishes."""
        self._done.discard(unit)
        self._open.add(unit)
        self._late.update(late, (unit,))

    def has_opened(self, unit: int) -> bool:
        """Whether a unit is open, or is finished."""
        return unit in self._open or unit in self._done

    @property
    def is_staging(self) -> bool:
        """Whether a unit is open that is not late."""
        return bool(self._open - self._late)

    def takes(self, unit: int) -> bool:
        """Whether a tensor of this unit would be written at once, and not held."""
        return unit in self._open or unit in self._late or not self.is_staging

    def arrive(self, name: str, *, can_hold: bool) -> Iterator[Step]:
        """What to do with a tensor that arrived.

        Args:
            name: Its name.
            can_hold: Whether it may be held; else its unit is opened beside an open one.
        """
        for unit in self.routes.get(name, ()):
            if not can_hold or self.takes(unit):
                yield from self.arrive_together(unit)
                yield Step("write", unit, name)
                continue
            self._waiting.setdefault(unit, {})[name] = None
            if name not in self.held:
                self.held[name] = 0
                yield Step("hold", -1, name)
            self.held[name] += 1

    def arrived(self, name: str, units: Collection[int]) -> Iterator[Step]:
        """Finishes the units that a name completes, once it is written, and opens what can follow.

        Args:
            name: Its name.
            units: The units that count it.
        """
        yield from self.arrived_together(dict.fromkeys(units, (name,)))

    def arrive_together(self, unit: int) -> Iterator[Step]:
        """What to do before tensors are written that this unit takes."""
        if unit not in self._open:
            yield from self._opened(unit)

    def arrived_together(self, names: Mapping[int, Collection[str]]) -> Iterator[Step]:
        """`arrived` for several names at once.

        Args:
            names: Names by the units that count them.
        """
        for unit, of_unit in names.items():
            left = self._left.get(unit)
            if left is not None:
                left.difference_update(of_unit)
        yield from self._finish_complete()

    def drain(self) -> Iterator[Step]:
        """Stages everything that is still held, unit by unit, and finishes all units that may finish."""
        yield from self._finish_complete()
        for unit in sorted(self._open - self._late):
            if unit not in self._late:  # it may have become late meanwhile
                yield from self._finished(unit)
        while self._waiting:
            unit = next(iter(self._waiting))
            yield from self._opened(unit)
            if unit not in self._late:
                yield from self._finished(unit)

    def _finish_complete(self) -> Iterator[Step]:
        while True:
            complete = [u for u in sorted(self._open - self._late) if self._is_complete(u)]
            for unit in complete:
                if unit not in self._late:  # it may have become late meanwhile
                    yield from self._finished(unit)
            if self.is_staging or not self._waiting:
                return
            ready = (unit for unit in self._waiting if self._is_complete(unit))
            yield from self._opened(next(ready, max(self._waiting, key=lambda unit: len(self._waiting[unit]))))

    def _is_complete(self, unit: int) -> bool:
        return self._left.get(unit) is not None and not self._left[unit]

    def _opened(self, unit: int) -> Iterator[Step]:
        self._open.add(unit)
        yield Step("open", unit)
        for name in self._waiting.pop(unit, {}):
            self.held[name] -= 1
            if not self.held[name]:
                del self.held[name]
            yield Step("write_held", unit, name)

    def _finished(self, unit: int) -> Iterator[Step]:
        self._open.discard(unit)
        self._done.add(unit)
        yield Step("finish", unit)


def peak_held_bytes(
    schedule: Schedule, arrivals: Mapping[str, int], counting_units: Callable[[str], Collection[int]]
) -> int:
    """Plays a whole push through and returns the most bytes held at once.

    Args:
        schedule: A fresh one.
        arrivals: Bytes of each name, in order of arrival.
        counting_units: The units that count a name.
    """
    held = peak = 0
    for name, num_bytes in arrivals.items():
        for steps in (schedule.arrive(name, can_hold=True), schedule.arrived(name, counting_units(name))):
            for step in steps:
                if step.action == "hold":
                    held += num_bytes
                    peak = max(peak, held)
                elif step.action == "write_held" and step.name not in schedule.held:
                    held -= arrivals[step.name]
    return peak
