"""vLLM's own chat route, for callers that name a session: any OpenAI client, with its whole history in every request.

`attach` replaces `POST /v1/chat/completions` by a route that looks for a session id. Without one, and wherever a
session cannot serve the request (a turn of it runs, a parameter that sessions refuse, an engine that is no home), the
request goes to vLLM's own function untouched, and gets its answer and its errors. So naming a session never makes a
request fail that would not fail without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from server_ext.engine import compat
from server_ext.engine.compat import ChatCompletionRequest, load_aware_call, with_cancellation
from server_ext.http.conductor import Caller, Conductor
from server_ext.http.errors import Refused
from server_ext.http.naming import Named, named_in
from server_ext.http.routes import ClosingStream, request_id_of
from server_ext.http.turn_request import TurnRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

logger = compat.init_logger("vllm.bidikv")
_PATH = "/v1/chat/completions"


def attach(app: FastAPI) -> None:
    """Put the route in the place of vLLM's.

    Called from an endpoint plugin's `attach_router`: vLLM lets a plugin's route replace one of the same path. Without
    such a route nothing is attached, and a warning says so.
    """
    stock = next((route for route in app.routes if isinstance(route, APIRoute) and route.path == _PATH), None)
    if stock is None:
        logger.warning("No route %s to add sessions to.", _PATH)
        return

    async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Any:
        """Answer within the session that the caller names, else as vLLM does."""
        conductor: Conductor | None = getattr(raw_request.app.state, "bidikv_conductor", None)
        if conductor is not None:
            body = await raw_request.json()
            named = named_in(body, raw_request.headers, conductor.settings)
            if named is not None:
                turn = SessionTurn(conductor, named, body)
                response: Response | None = await _answer(turn, raw_request=raw_request)
                if turn.is_served:
                    # None: the client has left, nobody reads this.
                    return response if response is not None else Response(status_code=499)
        return await stock.endpoint(request, raw_request)

    app.add_api_route(
        _PATH,
        create_chat_completion,
        methods=["POST"],
        response_model=None,
        dependencies=stock.dependencies,
        responses=stock.responses,
    )


class SessionTurn:
    """A chat completion on its way through a session; `is_served` until it must go to vLLM's own route."""

    def __init__(self, conductor: Conductor, named: Named, body: dict[str, Any]) -> None:
        self._conductor = conductor
        self._named = named
        self._body = body
        self.is_served = True

    async def run(self, raw_request: Request) -> Response | None:
        """Return the reply; None, with nothing changed, where a session cannot give one."""
        headers = {"X-Request-Id": request_id_of(raw_request)}
        try:
            result = await self.result(raw_request)
        except Refused as refused:
            return refused.to_response(headers)
        if result is None:
            return None
        if isinstance(result, dict):
            return JSONResponse(result, headers=headers)
        interval_s = getattr(getattr(raw_request.app.state, "args", None), "sse_keep_alive_interval", 0)
        events = compat.with_sse_keep_alive(result, float(interval_s))
        return ClosingStream(events, media_type="text/event-stream", headers=headers)

    async def result(self, raw_request: Request) -> dict[str, Any] | AsyncIterator[str] | None:
        """Return the completion, or the events of its stream; None, with nothing changed, where a session has none.

        Raises:
            Refused: what the request says to sessions is wrong. No stock client says this: its caller wants to know.
        """
        request_id = request_id_of(raw_request)
        tenant, named = self._conductor.tenants.tenant_of(raw_request.headers), self._named
        caller = Caller(tenant, named.session_id, request_id, parent_id=named.parent_id, is_final=named.is_final)
        try:
            return await self._conductor.run(caller, TurnRequest.parse_whole(self._body), raw_request)
        except Refused as refused:
            if (refused.info.param or "").startswith("bidikv"):
                raise
            logger.debug("Request %s is served without its session: %s", request_id, refused)
        except Exception:
            logger.exception("Request %s is served without its session.", request_id)
        self.is_served = False
        return None


@with_cancellation
@load_aware_call
async def _answer(turn: SessionTurn, *, raw_request: Request) -> Response | None:
    return await turn.run(raw_request)
