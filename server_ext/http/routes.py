"""The session routes of D (docs/http.md): each takes a call apart, asks the home or the conductor, and answers."""

from __future__ import annotations

import functools
import json
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from bidikv_sdk.wire import SessionInfo, sessions_to_json
from server_ext.engine.compat import init_logger, load_aware_call, with_cancellation
from server_ext.http import turn_request
from server_ext.http.conductor import Caller, Conductor
from server_ext.http.errors import Refused
from server_ext.http.turn_request import TurnRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send

logger = init_logger("vllm.bidikv")
router = APIRouter(prefix="/v1/sessions", tags=["bidikv"])

_REQUEST_ID = "X-Request-Id"
_MAX_REQUEST_ID_CHARS = 128
MAX_BODY_BYTES = 64 << 20  # a million tokens of text several times over; more is no chat


class ClosingStream(StreamingResponse):
    """A stream whose generator is closed with it, so that a client that leaves ends its turn at once."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and close the generator whatever happens."""
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


class Call:
    """One HTTP call: its body, its caller and the conductor that answers."""

    def __init__(self, raw_request: Request, session_id: str | None, body: dict[str, Any]) -> None:
        self.raw_request = raw_request
        self.body = body
        self.conductor: Conductor = raw_request.app.state.bidikv_conductor
        self.request_id = request_id_of(raw_request)
        header_id = raw_request.headers.get("x-session-id")
        named = session_id if session_id is not None else body.get("session_id")
        if not isinstance(named, str):
            msg = f"session_id is {named!r:.80}; give the session's id"
            raise Refused(msg, param="session_id")
        self.session_id = turn_request.session_id_of(named, body, header_id)
        self.tenant = self.conductor.tenants.tenant_of(raw_request.headers)

    @property
    def caller(self) -> Caller:
        """Whose call it is."""
        return Caller(self.tenant, self.session_id, self.request_id)

    async def home(self, op: str, **arg: Any) -> JSONResponse:
        """Answer with what the home says."""
        turn_request.options_of(self.body)
        answer = await self.conductor.own(op, self.caller, arg)
        return self.reply({"bidikv": shown(answer)})

    def reply(self, content: dict[str, Any]) -> JSONResponse:
        """Answer with a JSON object."""
        return JSONResponse(content, headers={_REQUEST_ID: self.request_id})


def shown(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the `bidikv` object of a home's answer; that of get and list tells of the last turn as well."""
    report = answer.get("last_report")
    return {**answer["info"], "last_turn": json.loads(report)} if report else answer["info"]


def request_id_of(raw_request: Request) -> str:
    """Return the caller's request id, or a new one (the same for the whole call) where that is none for a log."""
    given = raw_request.headers.get(_REQUEST_ID)
    if given is None or len(given) > _MAX_REQUEST_ID_CHARS or not (given.isascii() and given.isprintable()):
        given = getattr(raw_request.state, "bidikv_request_id", None) or uuid.uuid4().hex
        raw_request.state.bidikv_request_id = given
    return given


def answers(route: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Turn refusals into replies, and anything unexpected into a logged 500 that gives nothing away."""

    @functools.wraps(route)
    async def answer(*args: Any, **kwargs: Any) -> Response:
        raw_request: Request = kwargs["raw_request"]
        headers = {_REQUEST_ID: request_id_of(raw_request)}
        if getattr(raw_request.app.state, "bidikv_conductor", None) is None:
            msg = "this engine is no home of sessions; ask a decode node"
            return Refused(msg, code="session_not_found").to_response(headers)
        try:
            return await route(*args, **kwargs)
        except Refused as refused:
            return refused.to_response(headers)
        except RecursionError:
            return Refused("the body is nested too deeply; flatten it").to_response(headers)
        except Exception:
            logger.exception("Request %s failed.", headers[_REQUEST_ID])
            msg = f"internal error; the server's log has it under request id {headers[_REQUEST_ID]}"
            return Refused(msg, code="internal_error").to_response(headers)

    return answer


async def body_of(raw_request: Request) -> dict[str, Any]:
    """Read a JSON object; an empty body is an empty object.

    Raises:
        Refused: the body is too large, or no JSON object.
    """
    raw = bytearray()
    async for piece in raw_request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            msg = f"the body has more than {MAX_BODY_BYTES} bytes; shorten the messages"
            raise Refused(msg, code="request_too_large")
    try:
        body = json.loads(raw.decode()) if raw else {}
        # Half of a surrogate pair is JSON, but no text: neither a tokenizer nor a reply could carry it on.
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(body, ensure_ascii=False).encode()
    except ValueError as error:
        msg = f"the body is not JSON: {error}"
        raise Refused(msg) from error
    if not isinstance(body, dict):
        msg = f"the body is a JSON {type(body).__name__}; send an object"
        raise Refused(msg)
    return body


@router.post("")
@answers
async def open_session(raw_request: Request) -> Response:
    """Open a session, or open it again from a full history."""
    call = Call(raw_request, None, await body_of(raw_request))
    body = call.body
    turn = turn_request.turn_of(body.get("turn", 0), least=0, meaning="the number of turns that messages contains")
    history = {
        "messages": turn_request.messages_of(body, required=False),
        "tools": turn_request.tools_of(body),
    }
    chunk = json.dumps(history).encode() if any(history.values()) else b""
    return await call.home("open", turn=turn, chunk=chunk, replace=turn_request.flag_of(body, "replace"))


@router.get("")
@answers
async def list_sessions(raw_request: Request) -> Response:
    """List the caller's own sessions, all of them or a page."""
    conductor: Conductor = raw_request.app.state.bidikv_conductor
    query = raw_request.query_params
    page = {"limit": turn_request.limit_of(query.get("limit")), "after": query.get("after")}
    listing = await conductor.home.call("list", {"tenant": conductor.tenants.tenant_of(raw_request.headers), **page})
    sessions = [SessionInfo.from_json(shown(session)) for session in listing["sessions"]]
    return JSONResponse(
        sessions_to_json(sessions, has_more=listing["has_more"]), headers={_REQUEST_ID: request_id_of(raw_request)}
    )


@router.get("/{session_id}")
@answers
async def get_session(session_id: str, raw_request: Request) -> Response:
    """Return the state of a session."""
    return await Call(raw_request, session_id, {}).home("get")


# The body is read before a disconnect is listened for, so the inner function does both.
@router.post("/{session_id}/turns")
@answers
async def run_turn(session_id: str, raw_request: Request) -> Response:
    """Run one turn."""
    call = Call(raw_request, session_id, await body_of(raw_request))
    response: Response | None = await _run_turn(call, raw_request=raw_request)
    # None: the client has left, nobody reads this.
    return response if response is not None else Response(status_code=499)


@with_cancellation
@load_aware_call
@answers  # in here too: where the client has left, nobody asks what became of this task
async def _run_turn(call: Call, *, raw_request: Request) -> Response:
    key = raw_request.headers.get("idempotency-key") or uuid.uuid4().hex
    result = await call.conductor.run(call.caller, TurnRequest.parse(call.body, key=key), raw_request)
    if isinstance(result, dict):
        return call.reply(result)
    return ClosingStream(result, media_type="text/event-stream", headers={_REQUEST_ID: call.request_id})


@router.post("/{session_id}/extend")
@answers
async def extend(session_id: str, raw_request: Request) -> Response:
    """Keep the session's lease for longer."""
    call = Call(raw_request, session_id, await body_of(raw_request))
    return await call.home("extend", ttl_s=turn_request.ttl_of(call.body.get("ttl_s"), "ttl_s"))


@router.post("/{session_id}/release")
@answers
async def release(session_id: str, raw_request: Request) -> Response:
    """Give the session's cache back; the session stays."""
    return await Call(raw_request, session_id, await body_of(raw_request)).home("release")


@router.post("/{session_id}/fork")
@answers
async def fork(session_id: str, raw_request: Request) -> Response:
    """Open a session that has this one's history up to a turn, and shares its cache."""
    call = Call(raw_request, session_id, await body_of(raw_request))
    at_turn = call.body.get("at_turn")
    if at_turn is not None:
        at_turn = turn_request.turn_of(at_turn, least=0, meaning="the number of turns that the fork has")
    ttl_s = turn_request.ttl_of(call.body.get("ttl_s"), "ttl_s")
    return await call.home("fork", child_id=turn_request.child_id_of(call.body), at_turn=at_turn, ttl_s=ttl_s)


@router.post("/{session_id}/rewind")
@answers
async def rewind(session_id: str, raw_request: Request) -> Response:
    """Return the session to the end of an earlier turn."""
    call = Call(raw_request, session_id, await body_of(raw_request))
    turn = turn_request.turn_of(call.body.get("turn"), least=0, meaning="the number of turns to keep")
    return await call.home("rewind", turn=turn)


@router.post("/{session_id}/end")
@router.delete("/{session_id}")
@answers
async def end(session_id: str, raw_request: Request) -> Response:
    """Give the session's cache back and forget the session."""
    return await Call(raw_request, session_id, await body_of(raw_request)).home("end")
