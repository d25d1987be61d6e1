"""A push from a trainer of several ranks, whose weights are gathered as they leave (FSDP, tensor parallel).

Rank 0 talks to the engines. The others only take part in the gathers: they run the same passes over the source as
rank 0 does, no more and no fewer, also when the push fails in the middle. So a refused handshake, a dead engine or a
full disk ends as the same error on every rank, and never as one rank waiting in a gather that the others have left.

    client = LockstepClient(ModuleSource(fsdp_model), url, group=None)     # on every rank; None: the default group
    report = client.push(version=7)                                        # the same report, or the same error, on all
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed

from weightsync.control import Endpoint, Json, error_from_json, error_to_json
from weightsync.errors import PeerFailed
from weightsync.manifest import ParamMeta
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.report import PushReport
from weightsync.trainer.sources import WeightSource

LEADER = 0
dist: Any = torch.distributed


class LockstepClient:
    """A `TrainerClient` on rank 0, and its company on the other ranks. Waits are bounded by the group's own timeout.

    Args:
        source: On every rank; `iter_full` may run collectives of `group` or any other group of all these ranks.
        url: Engines; only rank 0 connects to them.
        group: The trainer's ranks; None: the default group.
        options: As `TrainerClient`'s.
    """

    def __init__(
        self,
        source: WeightSource,
        url: str | Endpoint | Sequence[str | Endpoint],
        *,
        group: Any = None,
        **options: Any,
    ) -> None:
        self._source, self._group = source, group
        self._client: TrainerClient | None = None
        if dist.get_rank(group) == LEADER:
            self._client = TrainerClient(_Announced(source, self._tell), url, **options)

    def push(self, version: int | None = None, names: Sequence[str] | None = None) -> PushReport:
        """See `TrainerClient.push`; called on every rank.

        Raises:
            WeightSyncError: The same error on every rank.
        """
        if self._client is None:
            return self._accompany()
        try:
            report = self._client.push(version, names)
        except Exception as error:
            self._tell({"failed": error_to_json(error)})
            raise
        self._tell({"done": dataclasses.asdict(report)})
        return report

    def _accompany(self) -> PushReport:
        """Runs a pass over the source whenever rank 0 does, until it says how the push ended."""
        failure: BaseException | None = None
        while True:
            message = self._heard()
            if "failed" in message:
                raise failure or error_from_json(message["failed"], "rank 0 of the trainer")
            if "done" in message:
                if failure is not None:
                    raise failure
                return PushReport(**message["done"])
            try:
                for _ in self._source.iter_full():
                    pass
            except Exception as error:  # rank 0 will fail too, or say that it did not; either way it is told on exit
                failure = error

    def _tell(self, message: Json) -> None:
        raw = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(self._device())
        self._broadcast(torch.tensor([raw.numel()], device=self._device()))
        self._broadcast(raw)

    def _heard(self) -> Json:
        size = torch.zeros(1, dtype=torch.int64, device=self._device())
        self._broadcast(size)
        raw = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device())
        self._broadcast(raw)
        message: Json = json.loads(bytes(raw.tolist()))
        return message

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            dist.broadcast(tensor, group=self._group, group_src=LEADER)
        except RuntimeError as error:
            raise PeerFailed(f"the trainer's own group failed while its ranks kept in step: {error}") from error

    def _device(self) -> torch.device:
        backend = dist.get_backend(self._group)
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def close(self) -> None:
        """Closes rank 0's client."""
        if self._client is not None:
            self._client.close()


class _Announced(WeightSource):
    """Rank 0's source: says when a pass begins, and always goes through with it."""

    def __init__(self, source: WeightSource, tell: Any) -> None:
        self._source, self._tell = source, tell

    @property
    def metadata(self) -> list[ParamMeta]:
        return self._source.metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._tell({"pass": True})
        tensors = self._source.iter_full()
        try:
            for item in tensors:  # noqa: UP028  no `yield from`: that would close the pass when its reader stops
                yield item
        finally:
            for _ in tensors:  # the other ranks are in these gathers, whoever stopped listening here
                pass

    def resident(self) -> Mapping[str, torch.Tensor] | None:
        return self._source.resident()
