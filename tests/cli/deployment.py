"""A deployment of one D and one P as the command line sees it: a real port, and behind it the SDK's `FakeServer`.

`card`, `engine`, `prefill` and `metrics` are what D tells of its model, of itself, of its Ps and to Prometheus: there
tests plant faults.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import httpx

from bidikv_sdk.testing import FakeServer
from bidikv_sdk.wire import PROTOCOL
from server_ext.core.settings import HomeSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

METRICS = """\
# TYPE bidikv_blocks gauge
bidikv_blocks{state="total"} 1024.0
bidikv_blocks{state="free"} 900.0
bidikv_blocks{state="leased"} 120.0
bidikv_blocks{state="ticketed"} 4.0
bidikv_blocks{state="provisional"} 2.0
bidikv_bytes{state="total"} 754974720.0
bidikv_sessions{state="idle"} 5.0
bidikv_sessions{state="running"} 1.0
bidikv_turns_total{outcome="fetched",reason="cheapest"} 30.0
bidikv_turns_total{outcome="recomputed",reason="first_turn"} 10.0
bidikv_prompt_tokens_total{source="fetched"} 800.0
bidikv_prompt_tokens_total{source="reused"} 50.0
bidikv_prompt_tokens_total{source="computed"} 150.0
bidikv_lease_revocations_total{reason="lease_revoked"} 3.0
bidikv_stale_reads_total 0.0
vllm:num_requests_running 1.0
"""


def facts(role: str, **changes: Any) -> dict[str, Any]:
    """Return what a healthy engine tells of itself."""
    told = {
        "role": role,
        "protocol": PROTOCOL,
        "version": version("bidikv-sdk"),
        "vllm": "0.32.0",
        "platform": "cpu",
        "model": "0123456789abcdef",
        "dtype": "float32",
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "max_model_len": 4096,
        "prefix_caching": True,
        "max_num_batched_tokens": 256,
        "kv_connector": "BidiKVConnector",
        "kv_role": "kv_both" if role == "prefill" else "kv_consumer",
        "bidirectional_kv_xfer": role == "prefill",
        "kv_recompute_threshold": 0 if role == "prefill" else 64,
        "has_api_keys": False,
        "prompt_tokens_details": True,
        "time_s": time.time(),
    }
    if role == "decode":
        home = {name: getattr(HomeSettings(), name) for name in HomeSettings.__slots__}
        told["settings"] = {**home, "prefill_timeout_s": None, "fresh_prefill_salt": False}
        told["appends"], told["num_prefill_urls"] = True, 1
    return told | changes


class Deployment:
    """What answers behind the port; `raw(method, path)` may answer first with (status, body)."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.api_key: str | None = None
        self.card = {"id": "m", "root": "m", "max_model_len": 4096}
        self.engine = facts("decode")
        self.prefill: list[dict[str, Any]] = [
            {"state": "ready", "engine": facts("prefill"), "clock_offset_s": 0.01},
        ]
        self.metrics: str | None = METRICS
        self.raw: Callable[[str, str], tuple[int, Any] | None] = lambda method, path: None
        self.url = ""

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer one request as D's API server does."""
        path = request.url.path
        if (answer := self.raw(request.method, path)) is not None:
            return httpx.Response(answer[0], json=answer[1])
        if path == "/metrics":
            return httpx.Response(404) if self.metrics is None else httpx.Response(200, text=self.metrics)
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [self.card]})
        if path == "/v1/bidikv/engine":
            return httpx.Response(200, json={"engine": self.engine})
        if path == "/v1/bidikv/prefill":
            return httpx.Response(200, json={"prefill": self.prefill})
        response = self.server.transport().handle_request(request)
        response.read()
        return response


@contextmanager
def serving(deployment: Deployment) -> Iterator[Deployment]:
    """Serve a deployment on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = httpx.Request(self.command, f"http://d{self.path}", headers=dict(self.headers), content=body)
            response = deployment.answer(request)
            self.send_response(response.status_code)
            for name in ("Content-Type", "X-Request-Id"):
                if name in response.headers:
                    self.send_header(name, response.headers[name])
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def do_GET(self) -> None:
            """Answer."""
            self._answer()

        def do_POST(self) -> None:
            """Answer."""
            self._answer()

        def do_DELETE(self) -> None:
            """Answer."""
            self._answer()

        def log_message(self, *args: object) -> None:
            """Keep quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        deployment.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield deployment
        finally:
            http.shutdown()
            thread.join()
