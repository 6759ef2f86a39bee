"""Where an arm's questions go: an address that speaks OpenAI's protocol, and how it is spoken to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

APIS = {"chat": "chat/completions", "completions": "completions"}
"""Dialects of the protocol, and the path of each below the base address."""

RESERVED = frozenset({"model", "messages", "prompt", "seed", "temperature", "top_p", "max_tokens", "n", "stream"})
"""Fields of a request that the plan decides; an endpoint's own extra fields may not change them."""


class EndpointError(ValueError):
    """An endpoint that cannot be used as described; one line that says what to do."""


@dataclass(frozen=True)
class Limits:
    """How long and how often an endpoint is waited for. Times are in seconds.

    `answer` bounds one answer from first byte sent to last byte read. `page` bounds one look at what a server says of
    itself: vLLM gathers facts of its machine first, for tens of seconds on a busy one. `patience` is how long a server
    may be away before the run is given up, `tries` how often one question may fail on a server that is there.
    """

    connect: float = 10.0
    page: float = 300.0
    answer: float = 1800.0
    patience: float = 600.0
    tries: int = 5
    first_pause: float = 0.25
    longest_pause: float = 5.0
    reply_bytes: int = 64 * 2**20


@dataclass(frozen=True)
class Endpoint:
    """A server. `url` is the base address, such as `http://localhost:8000/v1`; `key_variable` names the environment
    variable that holds its API key, or is empty. `extra` is sent with every question.

    Raises:
        EndpointError: the address is not plain http(s), or carries credentials or a query; an unknown dialect.
    """

    url: str
    model: str = ""
    api: str = "chat"
    key_variable: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shown = self.url.rpartition("@")[2]
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            valid = False
        if not valid or any(not c.isprintable() or c.isspace() for c in self.url):
            raise EndpointError(f"{shown!r} is not an address; one like http://localhost:8000/v1 is needed")
        if parts.username is not None or parts.query or parts.fragment:
            raise EndpointError(
                f"the address of {shown!r} carries a user, a query or a fragment; give it plainly, and the key in an "
                "environment variable"
            )
        if self.api not in APIS:
            raise EndpointError(f"no dialect is called {self.api!r}; dialects: {', '.join(APIS)}")
        decided = sorted(RESERVED & set(self.extra))
        if decided:
            raise EndpointError(f"extra fields {', '.join(decided)} are decided by the plan; take them out")

    @property
    def base(self) -> str:
        """The base address without a slash at its end; `/v1` where only a host was given."""
        url = self.url.rstrip("/")
        return url if urlsplit(url).path else f"{url}/v1"

    @property
    def root(self) -> str:
        """The server itself, where vLLM has its health, version and metrics."""
        return self.base.removesuffix("/v1")

    @property
    def path(self) -> str:
        """Where questions go."""
        return f"{self.base}/{APIS[self.api]}"

    def key(self) -> str:
        """The API key, read now; empty where no variable is named.

        Raises:
            EndpointError: the variable is not set, or holds what no header can.
        """
        if not self.key_variable:
            return ""
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            raise EndpointError(f"{self.key_variable} is not set; it names the API key of {self.base}")
        if not key.isascii() or not key.isprintable():
            raise EndpointError(f"{self.key_variable} holds characters that no API key has")
        return key

    def public(self) -> dict[str, Any]:
        """What may be written down: everything but the key."""
        return {"url": self.base, "model": self.model, "api": self.api, "extra": dict(self.extra)}
