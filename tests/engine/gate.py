"""Stands between D and P where a test wants to see, change, hold or lose what they tell each other."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from .common import PREFILL_PATH

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
    from typing_extensions import Self

    from .rig import Rig

Call = dict[str, Any]
"""A prefill call's body."""


class Gate:
    """Stands in P's place: hands each call to `handle`, which may pass it on.

    * **calls** - bodies of all calls so far.
    """

    def __init__(self, rig: Rig, handle: Callable[[Gate, Call], httpx.Response | None]) -> None:
        self.calls: list[Call] = []
        self._rig = rig
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                """Answer one call; where `handle` gives nothing, the connection ends without an answer."""
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                gate.calls.append(body)
                gate.headers = {name: self.headers[name] for name in ("Authorization", "X-Request-Id")}
                reply = handle(gate, body)
                self.close_connection = True
                if reply is None:
                    return
                self.send_response(reply.status_code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply.content)))
                self.end_headers()
                self.wfile.write(reply.content)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.headers: dict[str, str] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", rig.gate_port), Handler)
        self._server.daemon_threads = True

    def pass_on(self, body: Call) -> httpx.Response:
        """Call P with this body, as D would."""
        return self._rig.prefill.post(PREFILL_PATH, json=body, headers=self.headers)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def ticket_of(call: Call) -> dict[str, Any]:
    """Return the ticket of a prefill call."""
    ticket = call["kv_transfer_params"]
    assert ticket["remote_block_ids"], "the call carries no ticket"
    return ticket
