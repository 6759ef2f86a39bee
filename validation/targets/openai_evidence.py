"""What a server shows of itself: who it is, and whether it decodes by the backend that it was asked for.

Three places are read: its configuration (`/server_info`, which vLLM has in developer mode), its metrics, and its log
where that is a file here. A configuration that names the backend says what was asked for. That counts as shown; a
`sign`, a text of log or metrics that only the backend's own code writes, is stronger and then asked for besides.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from evals.runner.client import Client, EndpointDown
from evals.runner.endpoint import EndpointError
from validation.errors import one_line
from validation.targets.base import ArmConfig

SPECIALIZED = "latency_specialized"

LOG_BYTES = 64 * 2**20
"""Read of a log, from its end."""

_METRIC = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(.*)")
"""A line of metrics: a name, perhaps labels, and a value."""

_LASTING = ("url", "model", "root", "max_model_len", "version", "kv_cache_dtype", "decode_backend")
"""What a restart must not change."""


@dataclass(frozen=True)
class Evidence:
    """`identity` says who the server is. `shown` where it shows that it decodes by its own path, and `why` in words."""

    identity: Mapping[str, str] = field(default_factory=dict)
    shown: bool = False
    why: str = ""
    is_vllm: bool = False

    def contradicts(self, config: ArmConfig) -> str:
        """What the server says of itself that the arm's configuration denies; empty where nothing does."""
        said = self.identity.get("decode_backend")
        if said and said != config.decode_backend:
            return f"is asked for decode_backend {config.decode_backend!r}, its server was started with {said!r}"
        return ""

    def changed_from(self, before: Evidence) -> str:
        """What is no longer as it was; empty where a server is still the same."""
        pairs = {name: (before.identity.get(name), self.identity.get(name)) for name in _LASTING}
        return "; ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in pairs.items() if old != new)


async def gather(client: Client, log: str, sign: str) -> Evidence:
    """Read what the server shows now.

    Raises:
        EndpointDown: it cannot be reached.
        EndpointError: it does not list the model that is to be asked, or its log cannot be read.
    """
    endpoint = client.endpoint
    if await client.fetch(f"{endpoint.base}/models") is None:
        raise EndpointError(f"{endpoint.base}/models gives no list; check the address and the API key")
    try:
        listed = await client.models()
    except httpx.RequestError as error:
        raise EndpointDown(f"{endpoint.base}/models cannot be reached ({type(error).__name__})") from None
    names = [str(entry.get("id")) for entry in listed]
    model = endpoint.model or (names[0] if len(names) == 1 else "")
    if model not in names:
        what = f"has no model {model!r}" if model else f"lists {len(names)} models, and none was named"
        raise EndpointError(f"{endpoint.base} {what}; it has: {one_line(', '.join(names))[:300]}")
    entry = listed[names.index(model)]
    metrics = await client.fetch(f"{endpoint.root}/metrics") or ""
    info = _table(await client.fetch(f"{endpoint.root}/server_info?config_format=json"))
    version = _table(await client.fetch(f"{endpoint.root}/version")).get("version")
    identity = {
        "url": endpoint.base,
        "model": model,
        **{name: str(entry[name]) for name in ("root", "max_model_len") if entry.get(name) is not None},
        **({"version": str(version)} if version else {}),
        **dict(_configured(info, metrics)),
    }
    shown, why = _shown(identity, metrics, _tail(log), sign)
    return Evidence(
        {name: one_line(value)[:300] for name, value in identity.items()}, shown, why, entry.get("owned_by") == "vllm"
    )


def place(url: str) -> tuple[str, int, str]:
    """Host, port and path of a server's address, with one name for this machine, which has many."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):
        address = ip_address(host)
        host = "localhost" if address.is_loopback or address.is_unspecified else str(address)
    return host, parts.port or (443 if parts.scheme == "https" else 80), parts.path


def _configured(info: Mapping[str, Any], metrics: str) -> Iterator[tuple[str, str]]:
    """Cache format and decode backend, as far as the server tells."""
    found = re.search(r'^vllm:cache_config_info\{[^}]*\bcache_dtype="([^"]*)"', metrics, re.MULTILINE)
    if found:
        yield "kv_cache_dtype", found[1]
    config = info.get("vllm_config")
    additional = config.get("additional_config") if isinstance(config, dict) else None
    if isinstance(config, dict):
        backend = additional.get("decode_backend") if isinstance(additional, dict) else None
        yield "decode_backend", str(backend or "auto")


def _shown(identity: Mapping[str, str], metrics: str, log: str, sign: str) -> tuple[bool, str]:
    if sign:
        places = [name for name, holds in (("metrics", _counted(metrics, sign)), ("log", sign in log)) if holds]
        return bool(places), f"its sign is in its {' and '.join(places)}" if places else "its sign is nowhere"
    if identity.get("decode_backend") == SPECIALIZED:
        return True, "its configuration names the backend"
    return False, "neither its configuration nor a sign shows the backend"


def _counted(metrics: str, sign: str) -> bool:
    """Whether a metric with the sign has a value: one that stands at 0, or is only described, ran nothing."""
    for line in metrics.splitlines():
        found = _METRIC.match(line)
        if found and sign in line and not found[1].endswith("_created"):
            with contextlib.suppress(ValueError, IndexError):
                if float(found[2].split()[0]) > 0:
                    return True
    return False


def _table(text: str | None) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        table = json.loads(text or "")
        if isinstance(table, dict):
            return table
    return {}


def _tail(log: str) -> str:
    if not log:
        return ""
    try:
        with Path(log).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            return file.read(LOG_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise EndpointError(f"log {log!r} cannot be read ({error.strerror})") from error
