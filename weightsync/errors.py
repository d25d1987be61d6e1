"""Every error this package raises on purpose.

    WeightSyncError
    ├── ManifestError          a manifest contradicts itself or the peer's
    ├── CoverageError          names or destination bytes missing, unexpected or duplicated
    ├── LayoutError            shape, dtype, stride or address is not what it has to be
    │   └── PlanError          also a CoverageError: a plan fails on both at once
    ├── TransportError         bytes did not travel
    │   ├── TransportTimeout   a deadline passed
    │   ├── PeerFailed         the other side reported an error or died
    │   └── ProtocolError      the other side said something the protocol does not allow
    ├── ReloadError            a reload was used out of turn or could not be carried out
    │   └── TornModelError     live bytes are part old, part new: only a full push helps
    └── VerifyError            two fingerprints that must agree do not

A message says what, which (first names, count of the rest), expected against got, and what to do. The same facts
are fields, so that a program need not parse text.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_NAMES_SHOWN = 5


def shown(names: Sequence[str], limit: int = NUM_NAMES_SHOWN) -> str:
    """The first names of a list and the count of the rest, for a message."""
    head = ", ".join(names[:limit])
    return head if len(names) <= limit else f"{head} and {len(names) - limit} more"


class WeightSyncError(Exception):
    """Root of every error this package raises on purpose."""


class ManifestError(WeightSyncError):
    """A manifest contradicts itself or the peer's.

    Attributes:
        names: The wire names at fault.
    """

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class CoverageError(WeightSyncError):
    """Names or destination bytes are missing, unexpected or duplicated.

    Attributes:
        missing: Wire names (where they can be told, else destination paths with a region) that nothing supplies.
        unexpected: Wire names that no destination takes.
        duplicated: Wire names that write bytes which another name, or the same name again, writes too.
    """

    def __init__(
        self,
        message: str = "",
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        duplicated: Sequence[str] = (),
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.duplicated = tuple(duplicated)
        parts = [
            f"{label} ({len(names)}): {shown(names)}"
            for label, names in (
                ("missing", self.missing),
                ("unexpected", self.unexpected),
                ("duplicated", self.duplicated),
            )
            if names
        ]
        super().__init__("; ".join([message, *parts] if message else parts))


class LayoutError(WeightSyncError):
    """A shape, dtype, stride or address is not what it has to be.

    Attributes:
        names: Wire names or tensor paths at fault.
    """

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class PlanError(CoverageError, LayoutError):
    """A plan fails on coverage and on layout at once; it is caught as either, and carries the fields of both."""

    def __init__(
        self,
        message: str = "",
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        duplicated: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> None:
        CoverageError.__init__(self, message, missing=missing, unexpected=unexpected, duplicated=duplicated)
        self.names = tuple(names)


class TransportError(WeightSyncError):
    """Bytes did not travel."""


class TransportTimeout(TransportError):
    """A deadline passed before the peer answered or the bytes arrived."""


class PeerFailed(TransportError):
    """The other side reported an error or died; its own words are in the message."""


class ProtocolError(TransportError):
    """The other side said something that the protocol does not allow."""


class ReloadError(WeightSyncError):
    """A reload was used out of turn, or could not be carried out."""


class TornModelError(ReloadError):
    """Live bytes are part old, part new; the next full push repairs the model."""


class VerifyError(WeightSyncError):
    """Two fingerprints that must agree do not."""
