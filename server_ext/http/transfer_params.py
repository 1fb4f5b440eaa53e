"""Refuses `kv_transfer_params` on every public route: which blocks are read from where is not for clients to say.

The engines ignore what no holder of the secret has signed (`engine.decode`, `engine.prefill`); this middleware makes
it a clear error instead of a silent one.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from server_ext.http.errors import Refused
from server_ext.http.prefill_route import PREFILL_PATH
from server_ext.http.routes import MAX_BODY_BYTES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAME = "kv_transfer_params"


class RefuseTransferParams:
    """ASGI middleware: a body with `kv_transfer_params` is a 400, all else passes unchanged.

    What is larger than a session's body may be passes unseen, and unbuffered from there on: the session routes refuse
    it, and vLLM's have limits of their own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the body of a POST before the route does."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] == PREFILL_PATH:
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        num_bytes, is_whole = 0, False
        while not is_whole and num_bytes <= MAX_BODY_BYTES:
            messages.append(message := await receive())
            num_bytes += len(message.get("body", b""))
            is_whole = message["type"] != "http.request" or not message.get("more_body")
        if is_whole and names_transfer_params(b"".join(message.get("body", b"") for message in messages)):
            msg = f"{_NAME} is not accepted from clients; leave it out"
            refused = Refused(msg, code="unsupported_parameter", param=_NAME)
            request_id = Headers(scope=scope).get("X-Request-Id") or uuid.uuid4().hex
            await refused.to_response({"X-Request-Id": request_id})(scope, receive, send)
            return
        unread = iter(messages)

        async def replay() -> Message:
            message = next(unread, None)
            return message if message is not None else await receive()

        await self._app(scope, replay, send)


def names_transfer_params(body: bytes) -> bool:
    """Tell whether a JSON body sets `kv_transfer_params`, also through vLLM's extra arguments."""
    # Nearly always there is no need to parse. The name may also be written with escapes, or in UTF-16 or UTF-32.
    if not any(hint in body for hint in (_NAME.encode(), b"\\u", b"\0")):
        return False
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return False  # no JSON, or too deep for the route as well: it will say so
    if not isinstance(fields, dict):
        return False
    extra = fields.get("vllm_xargs")
    return fields.get(_NAME) is not None or (isinstance(extra, dict) and _NAME in extra)
