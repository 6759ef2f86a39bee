"""From a server's bytes to a `Response`. What comes is untrusted: nothing in it may raise, stall or pass for an answer.

A reply that is complete is never asked for again, however bad it is: a broken answer is evidence about its arm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from pydantic import ValidationError

from evals.samples import ECHOED, Request, Response

DEEPEST = 64
"""Levels of nesting that a reply may have; OpenAI's have six."""

SHORTEST_SECRET = 8
"""Characters from which on a key is taken out of replies. Shorter ones (`EMPTY`, `test`) are words, no secrets."""

_PLACES = ("effective", "parameters", "sampling_params", "metadata")
"""Where servers that echo a request's parameters put them, besides the reply itself."""

_THOUGHTS = ("reasoning_content", "reasoning")
"""Where servers put reasoning that they take out of the text."""


def payload(request: Request, model: str, api: str, extra: Mapping[str, Any]) -> bytes:
    """The body of a question: the same bytes for both arms, but for the model's name and the endpoint's own fields."""
    asked: dict[str, Any]
    if api == "chat":
        asked = {"messages": [{"role": m.role, "content": m.content} for m in request.messages]}
    else:
        asked = {"prompt": prompt_text(request)}
    asked |= {"seed": request.seed, "temperature": request.temperature, "top_p": request.top_p}
    asked |= {"max_tokens": request.max_tokens, "n": 1, "stream": False}
    return json.dumps({**asked, "model": model, **extra}, sort_keys=True, separators=(",", ":")).encode()


def prompt_text(request: Request) -> str:
    """A chat for a server without chat: a single question as it is, more turns each behind its role."""
    if len(request.messages) == 1:
        return request.messages[0].content
    return "".join(f"{m.role}: {m.content}\n\n" for m in request.messages) + "assistant:"


def response_from(status: int, body: bytes, seconds: float, key: str = "") -> Response:
    """What a complete reply amounts to; `error` says why where it is no answer. `raw` always has the whole reply."""
    text = hidden(body, key).decode("utf-8", "replace")
    try:
        reply = json.loads(text, parse_constant=_no_constant)
        if _too_deep(reply):
            raise ValueError(f"nested deeper than {DEEPEST} levels")
        reply = _hidden_in(reply, key)
    except (ValueError, RecursionError) as error:
        problem = f"HTTP {status}" if status != 200 else f"the reply is not JSON ({_short(error)})"
        return Response(error=problem, raw={"body": text}, seconds=seconds)
    if not isinstance(reply, dict):
        return Response(error=f"HTTP {status}: the reply is no JSON object", raw={"body": text}, seconds=seconds)
    try:
        return Response(**_fields(status, reply), raw=reply, seconds=seconds)
    except ValidationError as error:
        # JSON that the record cannot carry, such as 1e999.
        problem = f"the reply cannot be recorded ({_short(error.errors()[0]['msg'])})"
        return Response(error=problem, raw={"body": text}, seconds=seconds)


def hidden(body: bytes, key: str) -> bytes:
    """A reply without the key, as it is or as JSON writes it."""
    if len(key) >= SHORTEST_SECRET:
        for form in {key, json.dumps(key)[1:-1], key.replace("/", "\\/")}:
            body = body.replace(form.encode(), b"***")
    return body


def _hidden_in(value: Any, key: str) -> Any:
    """Parsed JSON without the key: any character of it may have been escaped."""
    if len(key) < SHORTEST_SECRET:
        return value
    if isinstance(value, str):
        return value.replace(key, "***")
    if isinstance(value, dict):
        return {name.replace(key, "***"): _hidden_in(entry, key) for name, entry in value.items()}
    return [_hidden_in(entry, key) for entry in value] if isinstance(value, list) else value


def _fields(status: int, reply: Mapping[str, Any]) -> dict[str, Any]:
    if status != 200:
        return {"error": f"HTTP {status}: {_short(_message(reply))}"}
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    if not isinstance(choice, dict):
        return {"error": "the reply has not exactly one choice"}
    message = choice.get("message", choice)
    content = message.get("content", message.get("text")) if isinstance(message, dict) else None
    reason = choice.get("finish_reason")
    fields = {
        "finish_reason": reason if isinstance(reason, str) else "",
        "tokens": _count(reply.get("usage"), "completion_tokens"),
        "effective": dict(_effective(reply, choice)),
    }
    if isinstance(content, str):
        return {**fields, "text": content}
    # A model that spent all its tokens thinking, or ended while it thought, gives no content at all: an empty answer of
    # its own. Anything else without text is broken.
    thought = isinstance(message, dict) and any(isinstance(message.get(name), str) for name in _THOUGHTS)
    empty = content is None and (reason == "length" or thought)
    return fields if empty else {**fields, "error": "the reply has no text"}


def _effective(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the server says it used. Numbers stay what they are, so that a judge can compare them."""
    for name in ("model", "system_fingerprint"):
        if isinstance(reply.get(name), str):
            yield name, reply[name]
    places = [reply, *(reply[name] for name in _PLACES if isinstance(reply.get(name), dict))]
    for name in ECHOED:
        said = [place[name] for place in places if isinstance(place.get(name), int | float)]
        if said:
            yield name, said[-1]
    prompt_tokens = _count(reply.get("usage"), "prompt_tokens")
    if prompt_tokens is not None:
        yield "prompt_tokens", prompt_tokens
    ids = reply.get("prompt_token_ids", choice.get("prompt_token_ids"))
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        yield "prompt_sha256", sha256(json.dumps(ids).encode()).hexdigest()


def _message(reply: Mapping[str, Any]) -> str:
    error = reply.get("error", reply)
    if isinstance(error, dict):
        error = error.get("message", error.get("detail", ""))
    return str(error)


def _count(table: Any, name: str) -> int | None:
    value = table.get(name) if isinstance(table, dict) else None
    return value if type(value) is int and 0 <= value < 2**53 else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for entry in level
            if isinstance(entry, dict | list)
            for inner in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return False
    return True


def _short(text: object) -> str:
    """At most 300 printable characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)[:300]).split())
