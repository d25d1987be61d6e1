"""What trainer and engine say to each other: typed messages, JSON, the protocol version, errors that cross the wire.

    trainer                                              engine (every rank answers)
    init_weight_transfer_engine  Hello      ----------> dry run against the manifest -> Accept, or every wrong name
    start_weight_update          Start      ----------> connects to the offered memory or group, opens the reload
    update_weights               Update     ----------> moves bytes; any number of times
    finish_weight_update         Finish     ----------> hooks, audit ("prepare"), then the version is live ("publish")
    abort_weight_update          Abort      ----------> from any point: old bytes, or `torn`
    shutdown_weight_transfer_engine Shutdown ---------> the connection and the session end

Where nothing new has to be connected, start, one update and finish are one call, `push_weights`. Its body may come in
two parts, `InParts`: the engine opens its session while the trainer still looks at its tensors, and reads none of
them before the second part has come.

A message is a frozen dataclass. `encode` gives plain JSON values; `decode` checks every field's presence and type and
refuses what it does not know, so a wrong body is a `ProtocolError` that names the field. Nothing is ever unpickled.

    body = {"init_info": encode(hello)}
    hello = decode(Hello, body["init_info"])
    error_from_json(error_to_json(error))        # the same class, the same words, the same fields
"""

from __future__ import annotations

import dataclasses
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar

from weightsync import errors
from weightsync.errors import PeerFailed, ProtocolError, WeightSyncError, shown

PROTOCOL_VERSION = 1

INIT, START, UPDATE = "init_weight_transfer_engine", "start_weight_update", "update_weights"
FINISH, ABORT, SHUTDOWN = "finish_weight_update", "abort_weight_update", "shutdown_weight_transfer_engine"
PUSH = "push_weights"  # start, one update and finish in one call, where nothing new has to be connected
SENT = "sent"  # when a trainer on this host made an update, finish or push call: seconds of the monotonic clock
WITHDRAWN = "withdrawn"  # why a trainer takes back a push that it began: nothing of it was read, the session goes on
TAKES_PARTS = "takes_parts"  # in a server's answer to a handshake: a push may come in two parts
HEAD_BYTES = "weightsync-head-bytes"  # HTTP header: length of the first part of a body that comes in two parts
INFO, CHECKER = "weight_info", "weight_checker"
PAUSE, RESUME, IS_PAUSED, HEALTH = "pause", "resume", "is_paused", "health"
ROUTES = (INIT, START, UPDATE, FINISH, PUSH, ABORT, SHUTDOWN, INFO, CHECKER, PAUSE, RESUME, IS_PAUSED, HEALTH)
READ_ONLY_ROUTES = (INFO, IS_PAUSED, HEALTH)

# Where vLLM's bodies wrap their content, so do ours.
ENVELOPES = {INIT: "init_info", START: "start_info", UPDATE: "update_info"}

Json = dict[str, Any]
T = TypeVar("T")


class InParts(Json):
    """A body of which the trainer has said the first part alone.

    Attributes:
        rest: Waits for the other part, at most the given number of seconds, and gives it with the time of its arrival
            by the monotonic clock. Raises a TransportError if it does not come.
    """

    def __init__(self, head: Json, rest: Callable[[float], tuple[Json, float]]) -> None:
        super().__init__(head)
        self.rest = rest


class Endpoint(Protocol):
    """Whoever answers control calls: a `Receiver` in this process, a server behind HTTP, or a group of either."""

    def call(self, route: str, body: Json, deadline_seconds: float) -> Json:
        """Answers one call with `{"ranks": [one JSON object per rank]}`.

        Args:
            route: One of `ROUTES`.
            body: JSON values.
            deadline_seconds: Longest time to wait for the answer.

        Raises:
            WeightSyncError: The rank's own error, of its own class.
        """
        ...

    def close(self) -> None:
        """Frees what the endpoint itself holds (connections, threads); never the engine behind it."""
        ...


@dataclass(frozen=True, slots=True)
class Facts:
    """What one side can do, for choosing a transport.

    Attributes:
        host: Equal on two processes exactly when they can reach each other's memory files: boot, pid namespace, user.
        process: Equal within one process alone.
        device: `"cpu"` or `"cuda"`: where the tensors lie.
        device_uuid: The GPU's own UUID; None on a CPU. (An index means another GPU under another
            CUDA_VISIBLE_DEVICES.)
        shared_memory: This platform has anonymous shared memory files.
        nccl: This build of torch has NCCL and a GPU is in use.
    """

    host: str
    process: str
    device: str
    device_uuid: str | None
    shared_memory: bool
    nccl: bool


@dataclass(frozen=True, slots=True)
class Hello:
    """Who wants to push what: answered by an `Accept` of every rank.

    Attributes:
        protocol: `PROTOCOL_VERSION` of the trainer.
        session_id: Names this trainer until it leaves; a second trainer is refused.
        trainer: Host and process of the trainer, for messages.
        targets: Target name -> manifest rows `[name, dtype, shape]` in wire order.
        mode: `"direct"` or `"layerwise"`.
        scope: `"full"` or `"partial"`.
        bucket_bytes: Hard cap of one bucket.
        deadline_seconds: Longest silence that either side takes for life.
        formats: Scale and storage formats of the wire, by a name both sides know; compared where both sides give one.
        facts: A `Facts`, encoded.
        casts: `"refuse"` or `"allow"`: whether loaders may change a tensor's dtype.
    """

    protocol: int
    session_id: str
    trainer: str
    targets: dict[str, Any]
    mode: str
    scope: str
    bucket_bytes: int
    deadline_seconds: float
    formats: dict[str, Any]
    facts: dict[str, Any]
    casts: str = "refuse"


@dataclass(frozen=True, slots=True)
class TargetAccept:
    """One target's agreed plan on one rank.

    Attributes:
        manifest_hash: Hash of the manifest as the engine read it.
        plan_hash: Hash of the plan that the dry run gave.
        owned: Ranges `[start, stop)` of manifest entries that this rank loads.
        ignored: Ranges of entries that the engine ignores on purpose.
        interpreted: Number of names that are not plain copies and run through the model's own loader in each push.
    """

    manifest_hash: str
    plan_hash: str
    owned: list[Any]
    ignored: list[Any]
    interpreted: int


@dataclass(frozen=True, slots=True)
class Accept:
    """One rank's answer to a `Hello`.

    Attributes:
        protocol: `PROTOCOL_VERSION` of the engine.
        session_id: The trainer's.
        engine: Names the engine; ranks of one engine share it.
        rank: Rank within the engine.
        world: Number of ranks of the engine.
        version: The newest version that was ever published there, None if none was.
        state: `"live"`, `"loading"` or `"torn"`.
        bucket_bytes: The cap that both sides use.
        targets: Target name -> `TargetAccept`, encoded.
        facts: A `Facts`, encoded.
    """

    protocol: int
    session_id: str
    engine: str
    rank: int
    world: int
    version: int | None
    state: str
    bucket_bytes: int
    targets: dict[str, Any]
    facts: dict[str, Any]

    @property
    def key(self) -> str:
        """Names this rank among all ranks of a push."""
        return f"{self.engine}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Start:
    """Opens one push.

    Attributes:
        session_id: The trainer's.
        version: The version that finish will publish; it must be greater than the live one.
        generation: Names the offer; equal to the last one when nothing has to be connected anew.
        offer: What the transport offers, None when `generation` is already connected.
        per_rank: Rank key -> `{"plans": {target: plan hash}, "offer": what concerns this rank alone}`.
    """

    session_id: str
    version: int
    generation: str
    offer: dict[str, Any] | None
    per_rank: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Update:
    """Moves bytes of one target.

    Attributes:
        session_id: The trainer's.
        target: Which target.
        names: The names of this update, None for all.
        data: What the transport needs to know about this transfer.
        per_rank: Rank key -> what the transport needs on this rank alone.
    """

    session_id: str
    target: str
    names: list[str] | None
    data: dict[str, Any]
    per_rank: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """Ends a push: `"prepare"` runs hooks and audit, `"publish"` makes the version live, `"commit"` is both."""

    session_id: str
    phase: str = "commit"


@dataclass(frozen=True, slots=True)
class Abort:
    """Gives up a push.

    Attributes:
        session_id: The trainer's; None together with `force`, for an operator.
        reason: Why, in words.
        force: Abort whoever's push it is.
    """

    session_id: str | None = None
    reason: str = "aborted by the trainer"
    force: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """Digests of the live weights, as vLLM's `/weight_checker`.

    Attributes:
        action: `"checksum"` or `"compare"`.
        baseline: For compare: what `"checksum"` gave before.
    """

    action: str
    baseline: dict[str, Any] | None = None


def encode(message: Any) -> Json:
    """A message as plain JSON values (not a deep copy)."""
    return {spec.name: getattr(message, spec.name) for spec in dataclasses.fields(message)}


@cache
def _field_types(cls: Any) -> dict[str, tuple[tuple[type, ...], bool]]:
    """Accepted Python types and 'is required' of each field."""
    hints = typing.get_type_hints(cls)
    table = {}
    for spec in dataclasses.fields(cls):
        hint = hints[spec.name]
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        accepted = tuple(typing.get_origin(part) or part for part in parts)
        if float in accepted:
            accepted = (*accepted, int)
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        table[spec.name] = (accepted, required)
    return table


def decode(cls: type[T], value: object) -> T:
    """Reads a message.

    Raises:
        ProtocolError: `value` is no object, a field is missing, unknown, or of another type.
    """
    what = cls.__name__
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} must be a JSON object, got {type(value).__name__}")
    table = _field_types(typing.cast("Any", cls))
    if unknown := sorted(str(name) for name in value.keys() - table.keys()):
        raise ProtocolError(f"{what} has unknown fields: {shown(unknown)}; known: {', '.join(table)}")
    if missing := [name for name, (_, required) in table.items() if required and name not in value]:
        raise ProtocolError(f"{what} lacks {shown(missing)}")
    for name, item in value.items():
        accepted = table[name][0]
        is_stray_bool = isinstance(item, bool) and bool not in accepted
        if is_stray_bool or not isinstance(item, accepted):
            expected = " or ".join(t.__name__ for t in accepted)
            raise ProtocolError(f"{what}.{name} must be {expected}, got {type(item).__name__} {item!r:.80}")
        if isinstance(item, list) and name == "names" and not all(isinstance(entry, str) for entry in item):
            raise ProtocolError(f"{what}.{name} must hold strings only")
    return cls(**value)


def to_ranges(indices: Iterable[int]) -> list[list[int]]:
    """Ascending indices as `[start, stop)` ranges: `[0, 1, 2, 5] -> [[0, 3], [5, 6]]`."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1][1] = index + 1
        else:
            ranges.append([index, index + 1])
    return ranges


def from_ranges(ranges: object, size: int) -> list[int]:
    """The inverse of `to_ranges`.

    Raises:
        ProtocolError: Not ascending disjoint ranges within `[0, size)`.
    """
    if not isinstance(ranges, list):
        raise ProtocolError(f"ranges must be a list, got {type(ranges).__name__}")
    indices: list[int] = []
    last = 0
    for pair in ranges:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)):
            raise ProtocolError(f"a range must be [start, stop], got {pair!r:.80}")
        start, stop = pair
        if not last <= start < stop <= size:
            raise ProtocolError(f"range [{start}, {stop}) is out of order or outside [0, {size})")
        indices.extend(range(start, stop))
        last = stop
    return indices


@dataclass(frozen=True, slots=True)
class _ErrorJson:
    type: str
    message: str
    names: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    traceback: str = ""


_NAME_LISTS = ("names", "missing", "unexpected", "duplicated")
_ERROR_CLASSES: dict[str, type[WeightSyncError]] = {
    name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, WeightSyncError)
}


def error_to_json(error: BaseException) -> Json:
    """`{"type", "message", "traceback", and the name lists that the error carries}`.

    An error that is not this package's own goes as `PeerFailed` with its class name in the message.
    """
    own = isinstance(error, WeightSyncError)
    message = str(error) if own else f"{type(error).__name__}: {error}"
    # A class of another module goes as the first of its bases that both sides know.
    known = [cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERROR_CLASSES]
    value: Json = {"type": known[0] if own else PeerFailed.__name__, "message": message}
    for name in _NAME_LISTS:
        if names := getattr(error, name, ()):
            value[name] = [str(entry) for entry in names]
    if not own:
        value["traceback"] = "".join(traceback.format_exception(error))[-8000:]
    return value


def error_from_json(value: object, peer: str = "") -> WeightSyncError:
    """The error that the peer raised: same class, message and name lists.

    Args:
        value: What `error_to_json` gave; anything else becomes a `ProtocolError`.
        peer: Who sent it; added as a note, with the peer's traceback where it sent one.
    """
    try:
        read = decode(_ErrorJson, value)
    except ProtocolError as malformed:
        return ProtocolError(f"{peer or 'the peer'} sent a malformed error: {malformed}")
    cls = _ERROR_CLASSES.get(read.type)
    if cls is None:
        return ProtocolError(f"{peer or 'the peer'} sent an error of unknown type {read.type!r}: {read.message}")
    error = cls.__new__(cls, read.message)  # past __init__: the message is already complete
    Exception.__init__(error, read.message)
    for name in _NAME_LISTS:
        setattr(error, name, tuple(getattr(read, name)))
    if peer:
        error.add_note(f"raised by {peer}")
    if read.traceback:
        error.add_note(f"the peer's traceback:\n{read.traceback}")
    return error


def primary_error(failures: Sequence[BaseException]) -> BaseException:
    """The error that says most of several: a refusal before a peer's death before a timeout that followed."""
    order: tuple[type[BaseException], ...] = (errors.TransportTimeout, errors.PeerFailed, errors.TransportError)

    def weight(error: BaseException) -> int:
        return next((index for index, cls in enumerate(order) if isinstance(error, cls)), len(order))

    return max(failures, key=weight)
