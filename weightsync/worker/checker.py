"""`/weight_checker`: digests of the live weights, and their comparison with earlier ones, as vLLM's route of that name.

found = digests_of({"model": model})           # {"model.layers.0.weight": digest}
answer_check(Check("compare", baseline), found)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from weightsync.control import Check, Json
from weightsync.errors import ProtocolError


def digests_of(targets: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The digest of every tensor, by target and path."""
    from weightsync.verify import fingerprint

    found: dict[str, Any] = {}
    for target, model in targets.items():
        found |= {f"{target}.{path}": row.digest for path, row in fingerprint(model).rows.items()}
    return found


def answer_check(check: Check, found: dict[str, Any]) -> Json:
    """What the route answers.

    Raises:
        ProtocolError: An unknown action, or a comparison without a baseline.
    """
    if check.action == "checksum":
        return {"checksums": found}
    if check.action != "compare" or check.baseline is None:
        raise ProtocolError(f"weight_checker knows checksum and compare (with a baseline), got {check.action!r}")
    baseline = check.baseline
    mismatches = sorted(key for key in found.keys() | baseline.keys() if found.get(key) != baseline.get(key))
    return {"match": not mismatches, "mismatches": mismatches}
