"""A server that speaks enough of OpenAI's protocol to be asked, and misbehaves on command."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


def chat_reply(text: str, asked: Body, **more: Any) -> Body:
    """A well-formed reply to a chat."""
    return {
        "model": asked.get("model"),
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": len(text)},
        **more,
    }


@dataclass
class Fault:
    """What to do instead of answering: a status, raw bytes, a reset, a cut body, or to wait first."""

    kind: str
    status: int = 500
    body: bytes = b""
    seconds: float = 0.0


@dataclass
class FakeServer:
    """`faults` are taken one per question, first come first served; then `answer` answers.

    `seen` keeps the raw bodies of all questions in order of arrival, `headers` the headers, `most` the largest number
    of questions that were being answered at once. `list_seconds` are waited before the model list is told, once each.
    """

    answer: Callable[[Body], Body | bytes] = lambda asked: chat_reply("right", asked)
    faults: list[Fault] = field(default_factory=list)
    models: list[str] = field(default_factory=lambda: ["tiny"])
    owned_by: str = "someone"
    pages: dict[str, str] = field(default_factory=dict)
    port: int = 0
    list_seconds: list[float] = field(default_factory=list)
    seen: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def entered(self, body: bytes, headers: dict[str, str]) -> Fault | None:
        with self._lock:
            self.seen.append(body)
            self.headers.append(headers)
            self._now += 1
            self.most = max(self.most, self._now)
            return self.faults.pop(0) if self.faults else None

    def left(self) -> None:
        with self._lock:
            self._now -= 1


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    def model(name: str) -> Body:
        return {"id": name, "owned_by": server.owned_by}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.endswith("/v1/models"):
                time.sleep(server.list_seconds.pop(0) if server.list_seconds else 0)
                self._send(200, json.dumps({"data": [model(name) for name in server.models]}).encode())
            elif self.path in server.pages:
                self._send(200, server.pages[self.path].encode())
            else:
                self._send(404, b"{}")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            fault = server.entered(body, dict(self.headers))
            try:
                if fault is None:
                    reply = server.answer(json.loads(body) | {"_path": self.path})
                    self._send(200, reply if isinstance(reply, bytes) else json.dumps(reply).encode())
                else:
                    self._misbehave(fault, json.loads(body))
            finally:
                server.left()

        def _misbehave(self, fault: Fault, asked: Body) -> None:
            time.sleep(fault.seconds)
            whole = fault.body or json.dumps(chat_reply("late", asked)).encode()
            if fault.kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
            elif fault.kind == "cut":
                self._send(200, whole[: len(whole) // 2], length=len(whole))
                self.close_connection = True
            elif fault.kind == "status":
                self._send(fault.status, fault.body or b'{"error": {"message": "no"}}')
            else:
                self._send(200, whole)

        def _send(self, status: int, body: bytes, length: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

        def finish(self) -> None:
            # A connection that was reset on purpose has nothing left to flush.
            if not self.wfile.closed and self.connection.fileno() >= 0:
                super().finish()

    return Handler


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Serve in a thread; on the port that `server` names, or any for 0."""
    http = ThreadingHTTPServer(("127.0.0.1", server.port), _handler(server))
    http.daemon_threads = True
    http.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.port = http.server_address[1]
    thread = threading.Thread(target=lambda: http.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
