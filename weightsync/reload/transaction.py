"""One reload from open to close: the object that `start_reload` returns.

    data:      load_weights, load_bucket, load_buckets  -> intake.py
    end:       prepare (prove, hooks, audit), then finish (publish)
    give up:   abort, or any error: Python state back, journal back, else torn

Whatever can be refused is refused in `open`, which changes nothing if it raises.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weightsync.errors import CoverageError, ReloadError, WeightSyncError, shown
from weightsync.manifest import Manifest, ParamMeta
from weightsync.plan.coverage import Scope as PlanScope
from weightsync.plan.plan import ReloadPlan, plan_reload
from weightsync.plan.record import Casts
from weightsync.python_state import PythonState
from weightsync.reachable import standing_still
from weightsync.reload.audit import LiveTensors
from weightsync.reload.derived import (
    changed_scalars,
    discard_arrivals,
    host_scalars,
    tell_replayed,
    tell_torn,
)
from weightsync.reload.direct import BoundPlan
from weightsync.reload.gate import close_gate, open_gate, refuse_unready
from weightsync.reload.hooks.lazy_caches import empty_lazy_caches
from weightsync.reload.hooks.post_load import HookGuards
from weightsync.reload.hooks.runner import HookRunner
from weightsync.reload.intake import HeldPolicy, Intake
from weightsync.reload.journal import Journal, Rollback
from weightsync.reload.layerwise import build_units, staged_parameters
from weightsync.reload.layouts import Mode, line_up, lost_starts, modules_of
from weightsync.reload.partial import Partial
from weightsync.reload.report import ReloadReport
from weightsync.reload.state import Status, state_of, unwrapped
from weightsync.transport.buckets import Bucket

_claiming: weakref.WeakSet[ReloadSession] = weakref.WeakSet()
_claims_lock = threading.Lock()
Weights = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
MAX_HELD_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The arguments of `start_reload`."""

    mode: Mode = "direct"
    scope: PlanScope = "full"
    rollback: Rollback = "none"
    manifest: Manifest | None = None
    ignore: tuple[str, ...] = ()
    casts: Casts = "refuse"
    allow_empty: bool = False
    max_held_bytes: int = MAX_HELD_BYTES
    held_policy: HeldPolicy = "spill"
    version: int | None = None


class ReloadSession:
    """An open reload; made by `start_reload`.

    For one thread at a time. A second `start_reload` on the same model is refused from any thread, and leaves this one
    unharmed.

    Attributes:
        model: The model, without a `torch.compile` wrapper.
        mode: "direct" or "layerwise".
        scope: "full" or "partial".
        version: Version announced at start, if any.
        plan: The plan. Without a manifest: the latest one made, None before the first `load_weights`.
        report: What was done, once finished; None before.
    """

    def __init__(self, model: torch.nn.Module, options: SessionOptions) -> None:
        self.model = unwrapped(model)
        self._given = model
        self.mode = options.mode
        self.scope = options.scope
        self.version = options.version
        self.plan: ReloadPlan | None = None
        self.report: ReloadReport | None = None
        self._options = options
        self._state = state_of(model)
        self._seconds = {"plan": 0.0, "load": 0.0, "hooks": 0.0, "audit": 0.0}
        self._failure: BaseException | None = None
        self._prepared: ReloadReport | None = None
        self._python_state: PythonState | None = None
        self._is_open = False
        self._claimed: frozenset[int] = frozenset()

    @property
    def is_open(self) -> bool:
        """Whether it was neither finished nor aborted."""
        return self._is_open

    def load_weights(self, weights: Weights) -> None:
        """Takes checkpoint tensors; may be called any number of times.

        Args:
            weights: `(name, tensor)` pairs or a mapping. All pairs of a list, tuple or mapping are checked before any
                of them is written; an iterator is drawn one by one. The caller may reuse the tensors once the call
                returns (on a GPU: on the same stream).

        Raises:
            CoverageError: A name is unknown, or comes twice.
            LayoutError: A shape, dtype or loader does not fit.
            ReloadError: The session is not open any more, or holding tensors would exceed the bound.
        """
        with self._loading():
            pairs = list(weights.items()) if isinstance(weights, Mapping) else weights
            if isinstance(pairs, Sequence):
                self._take(pairs)
            else:
                for pair in pairs:
                    self._take([pair])

    def load_bucket(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Takes one packed buffer of a session that was started with a manifest; tensors may be split over buckets.

        Args:
            bucket: What the buffer holds.
            buffer: uint8, one dim, contiguous; may be reused once the call returns (on a GPU: on the same stream).

        Raises:
            CoverageError: A name is unknown, or bytes of it come twice.
            LayoutError: A part does not fit its tensor or the buffer.
            ReloadError: The session is not open any more, or has no manifest.
        """
        self.load_buckets([(bucket, buffer)])

    def load_buckets(self, filled: Sequence[tuple[Bucket, torch.Tensor]]) -> None:
        """Takes several packed buffers that are all valid now, such as mapped memory; else as `load_bucket`.

        Args:
            filled: Buckets, each with its buffer.

        Raises:
            CoverageError, LayoutError, ReloadError: As `load_bucket`.
        """
        with self._loading():
            if self._options.manifest is None:
                raise ReloadError(
                    "buckets hold parts of tensors that only a manifest describes; start with manifest=..."
                )
            self._intake.take_buckets(filled)

    def prepare(self) -> None:
        """The first half of `finish`: proves completeness, runs the post-load hooks, audits addresses.

        Nothing is published and the model doesn't serve yet, so that several models, or ranks, can all get here before
        any of them goes on. A second call does nothing.

        Raises:
            CoverageError, LayoutError, ReloadError, Exception: As `finish`.
        """
        self._require_open()
        if self._prepared is not None:
            return
        if self._failure is not None:
            failure = self._failure
            self.abort(f"an earlier call failed: {failure}")
            raise ReloadError(
                f"this reload failed before and cannot be finished ({type(failure).__name__}: {failure}); it was "
                f"aborted and the model is {self._state.status}; start again"
            ) from failure
        try:
            with self._runner.loading(), self._runner.still:
                self._prepared = self._finish()
        except BaseException as error:
            self._give_up(error)
            raise

    def finish(self, version: int | None = None) -> ReloadReport:
        """Proves completeness, runs the post-load hooks, audits addresses and publishes the version.

        Args:
            version: Version of the new bytes; None for the one announced at start, if any. A push without a version
                leaves the model without one.

        Returns:
            What was done.

        Raises:
            CoverageError: Names are missing, or nothing was loaded.
            LayoutError: A result does not fit its live tensor, or a tensor moved.
            ReloadError: The version is not newer than the newest one published (the session stays open), an earlier
                call failed, or the session is not open.
            Exception: What a post-load hook raised, with a note that names the hook.
        """
        self._require_open()
        version = self.version if version is None else version
        self.refuse_old(version)
        self.prepare()
        return self._publish(version)

    def abort(self, reason: str = "") -> Status:
        """Gives up: old bytes come back where none were overwritten or a journal was kept, else the model is torn.

        Args:
            reason: For the message that a later refusal to serve shows.

        Returns:
            The model's status now, "live" or "torn".
        """
        self._require_open()
        self._give_up(ReloadError(reason or "aborted"))
        return self._state.status

    # --- opening

    def open(self) -> None:
        """Plans and prepares; `start_reload` calls it. Nothing has changed if it raises."""
        options = self._options
        with self._timed("plan"), standing_still(self.model):
            modules = modules_of(self.model)
            self._claim(modules)
            self._live = LiveTensors(self.model)
            refuse_unready(modules, (live.slot for live in self._live.by_path.values()))  # before any byte is read
            if options.manifest is not None:
                self.plan = self._plan(options.manifest, self.scope)
            self._prepare(modules)
        self._was = self._state.status
        was_gated = bool(self._state.gate)  # a torn model refuses already
        try:
            close_gate(self.model, self._given)
            self._guards.__enter__()
            self._is_open = True
        except BaseException:
            self._guards.__exit__()
            if not was_gated:
                open_gate(self.model)
            raise

    def _claim(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Takes the modules for this session; refuses those that an open session of another model has."""
        with _claims_lock:
            taken = [
                path or type(module).__name__
                for other in _claiming
                for path, module in (modules.items() if other is not self else ())
                if id(module) in other._claimed  # alive, since the other session's model is
            ]
            if taken:
                raise ReloadError(
                    f"{shown(taken)} belong to another model too, which has a reload session open; finish or abort "
                    "that one first"
                )
            self._claimed = frozenset(map(id, modules.values()))
            _claiming.add(self)

    def release_claim(self) -> None:
        """Lets sessions of other models take this model's modules."""
        with _claims_lock:
            _claiming.discard(self)

    def _prepare(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Makes what the session works with; looks at the model and changes nothing on it."""
        options = self._options
        hooks, self._modes = line_up(self.model, self.mode)
        parameters = staged_parameters(self.model, modules, self._modes)
        self._units = build_units(modules, self._modes, hooks, parameters, self._state.reach)
        self._journal = Journal(options.rollback)
        self._guards = HookGuards(hooks)
        self._partial = (
            Partial(modules, self._state.records, self._modes, self._live) if self.scope == "partial" else None
        )
        self._runner = HookRunner(self.model, modules, hooks, self._guards, self._live, self._journal, self._partial)
        self._intake = Intake(
            self._runner, self._units, parameters, options.max_held_bytes, options.held_policy, self._partial
        )
        self._scalars = host_scalars(self.model) if hooks else {}
        if self.plan is not None:
            self._add_plan(self.plan, is_complete=True)
        self._python_state = PythonState.capture(self.model)

    def _plan(self, manifest: Manifest, scope: PlanScope) -> ReloadPlan:
        options = self._options
        return plan_reload(
            self.model,
            manifest,
            mode=self.mode,
            scope=scope,
            ignore=options.ignore,
            casts=options.casts,
            allow_empty=options.allow_empty,
        )

    def _add_plan(self, plan: ReloadPlan, *, is_complete: bool) -> None:
        bound = self._state.bound
        if bound is None or bound.plan is not plan or not bound.is_bound_to(self._live, self._units):
            bound = BoundPlan(plan, self._live, self._units)
        if is_complete:
            self._state.bound = bound
        if self._partial is not None and self._options.manifest is not None:
            touched = set(plan.module_order)
            staged = [module for unit in self._units if touched & set(unit.modules) for module in unit.modules]
            self._partial.refuse_unfit(staged, [(entry, plan) for entry in bound.entries.values()])
        self._intake.add_plan(bound, is_complete=is_complete)
        self.plan = plan

    # --- loading

    @contextmanager
    def _loading(self) -> Iterator[None]:
        self._require_open()
        if self._prepared is not None:
            raise ReloadError("this reload is prepared and takes no more data; finish it, or abort it")
        if self._failure is not None:
            raise ReloadError(
                f"this reload failed before ({type(self._failure).__name__}: {self._failure}); abort it and start again"
            ) from self._failure
        try:
            with self._timed("load"), self._runner.loading():
                yield
        except BaseException as error:
            self._failure = error
            raise

    def _take(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._options.manifest is None:
            known = self._intake.entries
            unknown = [pair for pair in pairs if pair[0] not in known]
            if unknown:
                self._plan_for(unknown)
        self._intake.take(pairs)

    def _plan_for(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Plans names that no plan knows: with the last push's manifest if they stand in it, else by themselves."""
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if twice:
            raise CoverageError("nothing of this call was written", duplicated=twice)
        last = self._state.last_manifest
        if last is not None and self.plan is None and all(_is_as_in(last, name, tensor) for name, tensor in pairs):
            try:
                self._add_plan(self._plan(last, self.scope), is_complete=True)
                return
            except WeightSyncError:
                self._state.last_manifest = None  # the model changed since; plan what comes instead
        self._add_plan(self._plan(Manifest.from_tensors(pairs), "partial"), is_complete=False)

    # --- finishing

    def _finish(self) -> ReloadReport:
        intake, runner = self._intake, self._runner
        self._prove_complete()
        with self._timed("hooks"):
            intake.drain(self.plan.coverage.left_out if self.plan is not None else ())
            for bound in intake.plans:
                tell_replayed(bound, self.model, intake.received)
            if intake.received:
                runner.finish_model(list(intake.staged.values()), intake.interpreted_live)
        self._guards.__exit__()
        with self._timed("audit"), standing_still(self.model):
            added = self._live.audit(self.model)
            host_scalars_changed = changed_scalars(self._scalars, self.model) if runner.hooks else {}
        return ReloadReport(
            mode=self.mode,
            scope=self.scope,
            num_names=len(intake.received),
            num_bytes=intake.num_bytes,
            plan_hash=self.plan.hash if self.plan is not None else "",
            interpreted={name: reason for bound in intake.plans for name, reason in bound.interpreted.items()},
            dropped=[name for bound in intake.plans for name in bound.dropped],
            fallbacks={p: m.reason for p, m in self._modes.items() if self.mode == "direct" and m.mode == "layerwise"},
            hooks=runner.ran,
            uncalled_hooks=[h.name for h in runner.hooks if not h.callable_by_us and not self._guards.has_run(h)],
            host_scalars=host_scalars_changed,
            zeroed=lost_starts(self.model, self._modes, self.plan.coverage) if self.plan is not None else [],
            unobserved=runner.unobserved,
            added=added,
            rebuilt_on_forward=empty_lazy_caches(self.model, runner.modules) if intake.received else [],
            peak_staged_bytes=intake.peak_staged_bytes,
            peak_held_bytes=intake.held.peak_bytes + intake.peak_together_bytes,
            spilled_bytes=intake.held.spilled_bytes,
            journal_bytes=self._journal.num_bytes,
            seconds=self._seconds,
        )

    def _prove_complete(self) -> None:
        intake = self._intake
        if not intake.received and not self._options.allow_empty:
            raise CoverageError(
                "nothing was loaded; pass allow_empty=True if that is meant", missing=list(intake.entries)
            )
        missing = []
        if len(intake.received) < len(intake.entries):
            missing = [n for n, entry in intake.entries.items() if n not in intake.received and not entry.is_dropped]
        if self._options.manifest is not None and missing:
            raise CoverageError("these stand in the manifest and did not come", missing=missing)
        if self._options.manifest is None and (missing or len(intake.plans) > 1 or self._is_piecewise()):
            metas = (
                ParamMeta(name, e.dtype, tuple(e.shape)) for name in intake.received if (e := intake.entries[name])
            )
            with self._timed("plan"):
                self.plan = self._plan(Manifest(tuple(metas)), self.scope)

    def _is_piecewise(self) -> bool:
        return self.plan is not None and self.plan.scope != self.scope

    def _publish(self, version: int | None) -> ReloadReport:
        state, report = self._state, self._prepared
        if report is None:
            raise ReloadError("nothing was prepared")
        report.version = version
        with state.lock:
            state.version = version
            if version is not None:
                state.newest_version = version
            if self.scope == "full" and self.plan is not None:
                state.last_manifest = self.plan.manifest
            self._close("live")
        self.report = report
        return report

    # --- giving up

    def _give_up(self, error: BaseException) -> None:
        runner = self._runner
        if self._python_state is not None:
            self._python_state.restore()
        self._guards.__exit__()
        status: Status = self._was
        if runner.wrote_live:
            if self._journal.is_on:
                with runner.loading():
                    self._journal.restore()
                discard_arrivals(runner.modules.values())
            else:
                status = "torn"
        with self._state.lock:
            if status == "torn":
                tell_torn(runner.modules.values())  # their restored books know nothing of the new bytes
                open_gate(self.model)  # the restored state had no gate
                close_gate(self.model, self._given)
                self._state.torn_by = f"{type(error).__name__}: {error}"
            self._close(status)

    def _close(self, status: Status) -> None:
        self._is_open = False
        self.release_claim()
        self._intake.close()
        self._journal.close()
        self._python_state = None
        # Whoever keeps the session must not keep tensors with it.
        del self._intake, self._runner, self._live, self._partial, self._units
        self._state.status = status
        self._state.session = None
        if status == "live":
            open_gate(self.model)

    def _require_open(self) -> None:
        if not self._is_open:
            raise ReloadError("this reload session is over (finished or aborted); start another one")

    def refuse_old(self, version: int | None) -> None:
        """Raises ReloadError for a version that is not newer than the newest one published."""
        newest = self._state.newest_version
        if version is not None and newest is not None and version <= newest:
            raise ReloadError(
                f"version {version} is not newer than {newest}, the newest one published; versions only grow"
            )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - start


def _is_as_in(manifest: Manifest, name: str, tensor: torch.Tensor) -> bool:
    meta = manifest.by_name.get(name)
    return meta is not None and meta.dtype is tensor.dtype and meta.shape == tuple(tensor.shape)
