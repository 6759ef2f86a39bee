"""One server, asked question by question. Only a question that got no answer is asked again.

No answer: the connection failed or broke, or the server said that it cannot serve now (HTTP 429, 5xx). Everything else
is an answer, also a late one: a question that ran into the time limit counts as an error of its arm.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any, Self

import httpx

from evals.runner.endpoint import Endpoint, EndpointError, Limits
from evals.runner.replies import hidden, payload, response_from
from evals.samples import Request, Response

_BUSY = frozenset({429, 503})
"""The server is there and asks for patience."""

_UNSERVED = frozenset({408, 425, 500, 502, 504, *_BUSY})


class EndpointDown(RuntimeError):
    """A server was away for longer than the patience; what was answered before is kept."""


class TooLarge(Exception):
    """A reply grew beyond its limit."""


class Client:
    """An open connection pool to one endpoint. `transport` takes the network's place in tests."""

    def __init__(
        self, endpoint: Endpoint, limits: Limits | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.endpoint = endpoint
        self._limits = limits or Limits()
        self._key = endpoint.key()
        self._model = endpoint.model
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # The environment is left out: a proxy or a .netrc must not come between, or learn the key.
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=self._limits.connect),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            trust_env=False,
            follow_redirects=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, request: Request) -> Response:
        """The answer to one question, or an `error` that belongs to this arm.

        Raises:
            EndpointDown: the server was away for longer than the patience.
            EndpointError: no model is named, and the server has none or several.
        """
        limits = self._limits
        failures, pause = 0, limits.first_pause
        away_since: float | None = None
        while True:
            started = time.monotonic()
            try:
                model = await self._model_name()
                body = payload(request, model, self.endpoint.api, self.endpoint.extra)
                async with asyncio.timeout(limits.answer):
                    status, reply, wait = await self._post(body)
                if status not in _UNSERVED:
                    return response_from(status, reply, time.monotonic() - started, self._key)
                why, busy, pause = f"HTTP {status}", status in _BUSY, max(pause, wait)
            except TimeoutError:
                return Response(error=f"no answer within {limits.answer:g} s", seconds=time.monotonic() - started)
            except TooLarge:
                return Response(error=f"the reply is larger than {limits.reply_bytes} bytes")
            except httpx.TransportError as error:
                why, busy = type(error).__name__, False
            except httpx.RequestError as error:
                # A whole reply that cannot be decoded.
                return Response(error=f"the reply cannot be read: {type(error).__name__}")
            # Counted from the first failure: an answer may take longer than the patience before its server goes away.
            away_since = time.monotonic() if away_since is None else away_since
            if not busy and await self.alive():
                failures, away_since = failures + 1, None
                if failures >= limits.tries:
                    return Response(error=f"no answer in {failures} tries, though the server is there: {why}")
            elif time.monotonic() - away_since >= limits.patience:
                gone = f"{self.endpoint.base} has not answered for {limits.patience:g} s ({why})"
                raise EndpointDown(f"{gone}; what was answered is kept, resume the run when it is back")
            await asyncio.sleep(min(pause, limits.longest_pause))
            pause *= 2

    async def alive(self) -> bool:
        """Whether the server lists its models now."""
        try:
            return (await self._get(f"{self.endpoint.base}/models"))[0] == 200
        except (httpx.RequestError, TooLarge):
            return False

    async def fetch(self, url: str) -> str | None:
        """The text at an address of this server, such as its metrics; None where it has nothing to say there.

        Raises:
            EndpointDown: it cannot be reached.
        """
        try:
            async with asyncio.timeout(self._limits.page):
                status, body, _ = await self._send("GET", url, None)
        # The last two are names that no host can have.
        except (httpx.RequestError, TimeoutError, TooLarge, httpx.InvalidURL, UnicodeError) as error:
            raise EndpointDown(f"{url} cannot be reached ({type(error).__name__})") from error
        return body.decode("utf-8", "replace") if status == 200 else None

    async def post(self, url: str, content: bytes) -> tuple[int, bytes]:
        """Status and body of any other call of this server, within the time limit of an answer."""
        async with asyncio.timeout(self._limits.answer):
            status, body, _ = await self._send("POST", url, content)
        return status, body

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server lists.

        Raises:
            EndpointError: it refuses to list them.
            httpx.TransportError: it cannot be reached, or does not serve now.
        """
        status, body, _ = await self._get(f"{self.endpoint.base}/models")
        if status in _UNSERVED:
            raise httpx.ReadError(f"HTTP {status}")
        if status != 200:
            raise EndpointError(f"{self.endpoint.base}/models answers HTTP {status}; check the address and the API key")
        listed = None
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            listed = httpx.Response(status, content=body).json().get("data")
        return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []

    async def _model_name(self) -> str:
        if not self._model:
            names = [str(entry.get("id", "")) for entry in await self.models()]
            if len(names) != 1 or not names[0]:
                listed = f"lists {len(names)} models ({', '.join(names[:5])[:200]})"
                raise EndpointError(f"{self.endpoint.base} {listed}; name the one to ask")
            self._model = names[0]
        return self._model

    async def _post(self, body: bytes) -> tuple[int, bytes, float]:
        return await self._send("POST", self.endpoint.path, body)

    async def _get(self, url: str) -> tuple[int, bytes, float]:
        try:
            async with asyncio.timeout(self._limits.connect):
                return await self._send("GET", url, None)
        except TimeoutError:
            raise httpx.ReadTimeout(f"{url}: nothing within {self._limits.connect:g} s") from None

    async def _send(self, method: str, url: str, content: bytes | None) -> tuple[int, bytes, float]:
        """Status, whole body and the pause that the server asks for; compressed bodies are bounded too."""
        async with self._http.stream(method, url, content=content) as reply:
            parts, size = [], 0
            async for part in reply.aiter_bytes():
                size += len(part)
                if size > self._limits.reply_bytes:
                    raise TooLarge
                parts.append(part)
            wait = reply.headers.get("Retry-After", "")
            body = hidden(b"".join(parts), self._key)
            return reply.status_code, body, float(wait) if wait.isdecimal() and len(wait) < 6 else 0.0
