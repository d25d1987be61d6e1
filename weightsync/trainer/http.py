"""An engine behind HTTP, as an `Endpoint`.

endpoint = HttpEndpoint("http://127.0.0.1:8000")
endpoint.call("weight_info", {}, deadline_seconds=5)
endpoint.close()
"""

from __future__ import annotations

import json
import time
from typing import Any

from weightsync.control import READ_ONLY_ROUTES, Json, error_from_json
from weightsync.errors import PeerFailed, ProtocolError, TransportTimeout

MAX_ANSWER_BYTES = 256 << 20
_CONNECT_SECONDS = 5.0


class HttpEndpoint:
    """Makes control calls over kept-alive connections; safe to use from several threads.

    Args:
        url: Root of the engine's server.
    """

    def __init__(self, url: str) -> None:
        import httpx

        self.url = url.rstrip("/")
        self._httpx: Any = httpx
        self._client = httpx.Client(
            base_url=self.url, limits=httpx.Limits(max_keepalive_connections=8), trust_env=False
        )

    def call(self, route: str, body: Json, deadline_seconds: float) -> Json:
        """See `control.Endpoint.call`.

        Raises:
            TransportTimeout: No complete answer within the deadline.
            PeerFailed: The server is not there, or hung up.
            ProtocolError: It answered something that is not JSON of ours.
        """
        timeout = self._httpx.Timeout(deadline_seconds, connect=min(deadline_seconds, _CONNECT_SECONDS))
        method = "GET" if route in READ_ONLY_ROUTES else "POST"
        content = None if method == "GET" else json.dumps(body, separators=(",", ":"))
        headers = {"content-type": "application/json"} if content is not None else None
        try:
            with self._client.stream(method, f"/{route}", content=content, headers=headers, timeout=timeout) as answer:
                status, raw = answer.status_code, self._read(answer, route, time.monotonic() + deadline_seconds)
        except self._httpx.TimeoutException as error:
            raise TransportTimeout(f"{self.url}/{route} did not answer in {deadline_seconds:g} s ({error})") from error
        except self._httpx.HTTPError as error:
            raise PeerFailed(f"{self.url}/{route}: {type(error).__name__}: {error}") from error
        try:
            value = json.loads(raw)
        except ValueError as error:
            raise ProtocolError(f"{self.url}/{route} answered {status} with no JSON: {raw[:80]!r}") from error
        if not isinstance(value, dict):
            raise ProtocolError(
                f"{self.url}/{route} answered {status} with {type(value).__name__}, an object is expected"
            )
        if "error" in value:
            raise error_from_json(value["error"], self.url)
        if status != 200:
            raise ProtocolError(f"{self.url}/{route} answered {status}: {raw[:200]!r}; is it a weightsync server?")
        ranks = value.get("ranks")
        if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
            raise ProtocolError(f"{self.url}/{route} answered without a list of ranks: {raw[:200]!r}")
        return value

    def _read(self, answer: Any, route: str, end: float) -> bytes:
        """The body, within the deadline and a size no answer of ours has."""
        parts, size = [], 0
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise ProtocolError(f"{self.url}/{route} answers more than {MAX_ANSWER_BYTES} bytes")
            if time.monotonic() > end:
                raise TransportTimeout(f"{self.url}/{route} did not finish its answer in time")
        return b"".join(parts)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
