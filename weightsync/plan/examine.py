"""Runs a model's loader over meta tensors until every name has been seen, however often it raises on the way.

    examination = Examination(model, ledger, entries)
    examination.examine()
    examination.failures["layers.0.w"]      # (it looked for a name, "KeyError: ...")

If `load_weights` raises, the name whose tensor it had at hand is to blame, and the same iterator is given to it again.
Names that fail are tried through wrappers (loading.py). Names that depend on values run a second time with other
placeholders, so that both sides of a branch are seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from weightsync.errors import LayoutError
from weightsync.manifest import ParamMeta
from weightsync.plan.calls import FunctionMode
from weightsync.plan.dry_run import DispatchMode
from weightsync.plan.ledger import Ledger
from weightsync.plan.loading import Feed, Loader, has_wrappers, through_wrappers

NUM_ERRORS = 200  # restarts of load_weights before a dry run gives up looking for more bad names
NUM_ERRORS_AS_IS = 8  # the same where wrappers may be to blame, before names are tried through them


class Examination:
    """One dry run: `examine` runs the loader until every name has been seen.

    Attributes:
        ledger: Where writes and errors are noted.
        entries: Tensors of the manifest by name.
        loader: The model's loader.
        failures: Per name that made the loader raise: whether it looked for a name, and its words.
        mapping: Wire names that landed under another name; those that landed with bare parameter names, as they are.
    """

    def __init__(self, model: torch.nn.Module, ledger: Ledger, entries: list[ParamMeta]) -> None:
        self.ledger = ledger
        self.entries = {entry.name: entry for entry in entries}
        self.loader = Loader(model)
        self.failures: dict[str, tuple[bool, str]] = {}
        self.mapping: dict[str, str] = {}
        self._drawn: set[str] = set()
        self._inference = any(parameter.is_inference() for parameter in model.parameters())
        self._wrapped = has_wrappers(self.loader.module)

    def examine(self) -> None:
        """Names as they are, then through wrappers, then value-dependent names with other placeholders."""
        self._load(list(self.entries), max_errors=NUM_ERRORS if not self._wrapped else NUM_ERRORS_AS_IS)
        if self._wrapped:
            self._retry_through_wrappers()
        self._retry_values()

    def _retry_values(self) -> None:
        """The other side of branches on values."""
        values = [name for name in self.ledger.value_reads if name in self.entries]
        self.ledger.placeholder = 1
        for is_bare in (False, True):
            again = [name for name in values if (self.mapping.get(name) == name) is is_bare]
            self._load(again, self.mapping, bare=is_bare, max_errors=len(again), keep_failures=False)

    def _retry_through_wrappers(self) -> None:
        """Names that failed or were not reached: with wrapper components, then while nobody sees those."""
        written = self.written()
        first = {name: self.failures.pop(name) for name in list(self.failures) if name not in written}
        undrawn = [name for name in self.entries if name not in self._drawn]
        mapping = {name: through_wrappers(self.loader.module, name) for name in self.entries if name not in written}
        moved = {name: mapped for name, mapped in mapping.items() if mapped != name}
        self._load(list(dict.fromkeys([*moved, *undrawn])), moved, max_errors=NUM_ERRORS)
        written = self.written()
        self.mapping = {name: mapped for name, mapped in moved.items() if name in written}
        left = [name for name in self.entries if name not in written and (name in moved or name in first)]
        second = {name: self.failures.pop(name) for name in left if name in self.failures}
        self._load(left, bare=True, max_errors=NUM_ERRORS)
        written = self.written()
        self.mapping.update((name, name) for name in left if name in written)
        for name in left:
            if name not in written and (name in first or name in second):
                self.failures[name] = first.get(name) or second[name]

    def written(self) -> set[str]:
        """Names that write something."""
        return {name for claim in self.ledger.claims for name in claim.names}

    def _load(
        self,
        names: list[str],
        mapping: Mapping[str, str] | None = None,
        *,
        max_errors: int,
        bare: bool = False,
        keep_failures: bool = True,
    ) -> None:
        """Gives `names` to the loader, again after each error, until all are drawn and no error is left."""
        remaining, mapping = names, mapping or {}
        attempts = 0
        while remaining and attempts < max_errors:
            feed = Feed(self.ledger, [(self.entries[name], mapping.get(name, name)) for name in remaining])
            blamed: set[str] = set()
            while attempts < max_errors and not (blamed and feed.exhausted):
                attempts += 1
                failed = self._attempt(feed, bare, keep_failures)
                if failed is None:
                    self._drawn |= feed.drawn
                    return
                blamed.add(failed)
            self._drawn |= feed.drawn
            if not feed.exhausted:
                return
            # The loader drew everything before it began, or failed at the last name: the rest comes again.
            done = self.written() | set(self.failures) | blamed | self.ledger.touched
            left = [name for name in remaining if name not in done]
            remaining = left if len(left) < len(remaining) else []

    def unreached(self) -> tuple[str, ...]:
        """Names that the loader never got to, since it failed too often before."""
        if not self.failures:
            return ()
        return tuple(name for name in self.entries if name not in self._drawn and name not in self.failures)

    def _attempt(self, feed: Feed, bare: bool, keep_failures: bool) -> str | None:
        """One call of the loader; returns the name to blame if it raised."""
        ledger = self.ledger
        dispatch = DispatchMode(ledger)
        gradients: AbstractContextManager[Any] = torch.inference_mode() if self._inference else torch.no_grad()
        try:
            with gradients, dispatch, FunctionMode(ledger, dispatch):
                self.loader.run(feed, bare)
        except Exception as error:
            name = _blame(error, ledger, self.entries)
            if name is None:
                raise LayoutError(f"load_weights failed before it loaded any weight: {_words(error)}") from error
            if keep_failures and name not in ledger.value_reads:
                looked_up = isinstance(error, (LookupError, AttributeError)) or name not in ledger.touched
                self.failures.setdefault(name, (looked_up, _words(error)))
            return name
        return None


def _words(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _blame(error: Exception, ledger: Ledger, entries: dict[str, ParamMeta]) -> str | None:
    """The name whose tensor the innermost frame has at hand, else the one being loaded."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if isinstance(value, torch.Tensor):
                found = ledger.name_of(value) or found
        trace = trace.tb_next
    return found or ledger.current or next(iter(reversed(list(ledger.touched))), None)
