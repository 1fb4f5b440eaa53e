"""A proxy in front of D for agents of frameworks: it can shape their completions, and records what D said.

A model of this size cannot choose tools, so the test does it there: every first call of a question is made to call
a tool, and every second one to answer. What it says is still the model's own. Nothing is added that concerns sessions.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

_CHAT = "/v1/chat/completions"
_HOP_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})


@dataclass
class Heard:
    """One completion: what was asked, the tokens, and D's report (None: served without a session)."""

    body: dict[str, Any]
    prompt_ids: list[int]
    ids: list[int]
    bidikv: dict[str, Any] | None


class Policy:
    """The proxy; a context manager.

    Args:
        url: D's, without a path.
        shape: changes a completion's body before it is sent on.
        heard: takes every completion, in the order of their ends.
    """

    def __init__(self, url: str, shape: Callable[[dict[str, Any]], None], heard: list[Heard]) -> None:
        self._heard = heard
        self.controls: list[str] = []
        """Paths of all other requests."""
        self._shape = shape
        self._client = httpx.Client(base_url=url, timeout=120, trust_env=False)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            """One connection."""

            def do_POST(self) -> None:
                """Pass a request on."""
                proxy.serve(self)

            do_GET = do_POST  # noqa: N815 - http.server's name

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as above
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._client.close()

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request with D's answer."""
        content = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        headers = {k: v for k, v in handler.headers.items() if k.lower() not in _HOP_HEADERS}
        body: dict[str, Any] = {}
        if handler.path == _CHAT:
            body = json.loads(content)
            self._shape(body)
            body["return_token_ids"] = True
            content = json.dumps(body).encode()
        else:
            self.controls.append(handler.path)
        reply = self._client.request(handler.command, handler.path, content=content, headers=headers)
        if body and reply.is_success:
            self._heard.append(_heard(body, reply))
        handler.send_response(reply.status_code)
        for name in ("Content-Type", "X-Request-Id"):
            if name in reply.headers:
                handler.send_header(name, reply.headers[name])
        handler.send_header("Content-Length", str(len(reply.content)))
        with contextlib.suppress(ConnectionError):  # a renewal whose agent has ended meanwhile
            handler.end_headers()
            handler.wfile.write(reply.content)


def _heard(body: dict[str, Any], reply: httpx.Response) -> Heard:
    if not body.get("stream"):
        whole = reply.json()
        return Heard(body, whole["prompt_token_ids"], whole["choices"][0]["token_ids"], whole.get("bidikv"))
    events = [line[6:] for line in reply.text.split("\n") if line.startswith("data: {")]
    chunks = [json.loads(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return Heard(
        body,
        next(chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")),
        [token for choice in choices for token in choice.get("token_ids") or ()],
        next((chunk["bidikv"] for chunk in reversed(chunks) if "bidikv" in chunk), None),
    )
