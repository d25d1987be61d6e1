"""Which names' loaders change Python state of the model besides copying: `p.data.copy_(t); self.loaded = True`.

A replayed copy would never repeat that, so such names are interpreted. A dry run compares what hangs on the model
before and after; only if something differs, it is run once more, and looked at after each name.

    watch = Watch(model)
    ...load...
    watch.changed()                         # paths; nothing more to do if there is none

    watch = Watch(model, paths); ledger.watch = watch
    ...load again...                        # the ledger calls watch.look(names) as one name follows another
    watch.effects["layers.0.w"]             # path of what its loader changed

Modules with `weights_replayed` keep their own books and are told separately, so theirs do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch

from weightsync.plan.values import shallow
from weightsync.plan.writes import Claim, Destination
from weightsync.reachable import Found, visit

NUM_ALWAYS_COMPARED = 64  # holders; where more change, a name is compared with those near what it writes


class Watch:
    """What hangs on a model at one moment.

    Args:
        model: The model, as its loaders are about to find it.
        paths: Of the holders to compare; None for all.

    Attributes:
        effects: Per name, the path of a holder that its loader changed.
    """

    def __init__(self, model: torch.nn.Module, paths: Collection[str] | None = None) -> None:
        self.effects: dict[str, str] = {}
        found = visit(model)
        books = {entry.path for entry in found if callable(getattr(entry.value, "weights_replayed", None))}
        first: dict[int, Found] = {}
        for entry in found:
            if entry.module not in books and (paths is None or entry.path in paths):
                first.setdefault(id(entry.value), entry)
        self._holders = list(first.values())
        self._rows = {id(entry.value): shallow(entry.value) for entry in self._holders}
        self._by_module: dict[str, list[Found]] = defaultdict(list)
        for entry in self._holders:
            self._by_module[entry.module].append(entry)
        self._num_claims = 0

    def changed(self) -> list[str]:
        """Paths of the holders that are not as they were; each is told once."""
        return [entry.path for entry in self._changed(self._holders)]

    def look(self, names: Sequence[str], claims: Sequence[Claim], destinations: Sequence[Destination]) -> None:
        """Blames `names` for what has changed since the last look.

        Args:
            names: Whose loaders may have run since.
            claims: Every write so far.
            destinations: What those refer to.
        """
        near: Iterable[Found] = self._holders
        if len(self._holders) > NUM_ALWAYS_COMPARED:
            modules = {destinations[claim.destination].module for claim in claims[self._num_claims :]}
            near = [entry for module in modules for entry in self._by_module.get(module, ())]
        self._num_claims = len(claims)
        for entry in self._changed(near):
            for name in names:
                self.effects.setdefault(name, entry.path)

    def look_at_all(self, claims: Sequence[Claim], destinations: Sequence[Destination]) -> None:
        """Blames for what else has changed whoever writes to the same module; every name if nobody does."""
        for entry in self._changed(self._holders):
            writers = {n for c in claims if destinations[c.destination].module == entry.module for n in c.names}
            for name in writers or {n for c in claims for n in c.names}:
                self.effects.setdefault(name, entry.path)

    def _changed(self, holders: Iterable[Found]) -> list[Found]:
        changed = []
        for entry in holders:
            row = shallow(entry.value)
            if row != self._rows[id(entry.value)]:
                self._rows[id(entry.value)] = row
                changed.append(entry)
        return changed
