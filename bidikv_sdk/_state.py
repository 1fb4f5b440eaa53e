"""What the SDK knows of one session, and what follows from it: no I/O, no clock, the same for sync and async.

A turn runs `begin` → `exchange` (yields calls, takes replies) → `commit` → `finish` (end of its block); the
other verbs build one call, whose reply goes to `observe`. May import `_requests`, `_retry`, `_turn` and below.
"""

from __future__ import annotations

import copy
import logging
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bidikv_sdk._errors import APIStatusError, SessionBusy, SessionEnded, SessionNotFound, TurnConflict
from bidikv_sdk._requests import (
    bidikv_object,
    check_parameters,
    check_session_id,
    messages_of,
    open_call,
    read_session,
    session_call,
    turn_call,
    turn_parts,
)
from bidikv_sdk._retry import is_retryable
from bidikv_sdk._turn import Turn
from bidikv_sdk.wire import ROUTES

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from typing_extensions import Self

    from bidikv_sdk._requests import Call, Reply
    from bidikv_sdk._types import ChatCompletion, Delta, Message, Tool
    from bidikv_sdk.wire import LeaseInfo, Route, SessionInfo

_SERVER_FAULT: Final = 500

_logger = logging.getLogger("bidikv")


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One completed turn; the transcript keeps the boundaries, so that it can be cut between turns."""

    delta: list[Message]
    reply: Message


class SessionState:
    """A session's transcript, numbering and last known lease, and the calls that follow from them."""

    def __init__(
        self,
        session_id: str | None,
        *,
        system: str | None,
        tools: Sequence[Tool] | None,
        route: Route | None,
        ttl_s: float | None,
        parameters: Mapping[str, Any],
    ) -> None:
        check_parameters(parameters)
        # 128 random bits: a router hashes the id before the session exists, so the client makes it.
        self.id = secrets.token_urlsafe(16) if session_id is None else check_session_id(session_id)
        self.lease: LeaseInfo | None = None
        self.tools = None if tools is None else list(tools)
        self.tools_sent = tools is None
        """Whether the server has `tools`; it keeps them for later turns."""
        self.records: list[TurnRecord] = []
        self.in_doubt = False
        """True where a turn may be complete on the server only, because its reply never came."""
        self.ended = False
        self.running = threading.Lock()
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._route = route
        self._ttl_s = ttl_s
        self._parameters = dict(parameters)

    @property
    def turn(self) -> int:
        """Number of completed turns."""
        return len(self.records)

    @property
    def history(self) -> list[Message]:
        """The messages of the completed turns; the system prompt lies in the first turn's delta."""
        return [message for record in self.records for message in (*record.delta, record.reply)]

    @property
    def transcript(self) -> list[Message]:
        """A copy of the messages: the system prompt, and all completed turns."""
        return copy.deepcopy(self.history or self._system)

    def begin(
        self,
        delta: Delta,
        *,
        stream: bool,
        route: Route | None,
        ttl_s: float | None,
        timeout_s: float | None,
        parameters: Mapping[str, Any],
    ) -> ActiveTurn:
        """Start a turn; its `finish` must follow.

        Raises:
            TypeError, ValueError: the delta, a parameter or the route cannot be sent.
            SessionEnded: `end` was called before.
            SessionBusy: another turn is running.
        """
        self.check_open()
        if not self.running.acquire(blocking=False):
            msg = f"a turn of session {self.id} is running; send the next one when it is complete"
            raise SessionBusy(msg)
        try:
            return self._begin(delta, parameters, stream=stream, route=route, ttl_s=ttl_s, timeout_s=timeout_s)
        except BaseException:
            self.running.release()
            raise

    def _begin(
        self,
        delta: Delta,
        parameters: Mapping[str, Any],
        *,
        stream: bool,
        route: Route | None,
        ttl_s: float | None,
        timeout_s: float | None,
    ) -> ActiveTurn:
        check_parameters(parameters)
        messages = messages_of(delta) if self.records else self._system + messages_of(delta)
        route = route or self._route
        if route is not None and route not in ROUTES:
            msg = f"route must be one of {', '.join(ROUTES)}, got {route!r}"
            raise ValueError(msg)
        merged = {**self._parameters, **parameters}
        tools = merged.pop("tools", None)
        tools = self.tools if tools is None else list(tools)
        body = {
            **{name: value for name, value in merged.items() if value is not None},
            "session_id": self.id,
            "turn": self.turn + 1,
            "messages": messages,
            "bidikv": bidikv_object(route=route, ttl_s=self._ttl_s if ttl_s is None else ttl_s),
        }
        if tools != self.tools or not self.tools_sent:
            body["tools"] = tools
        return ActiveTurn(self, messages, tools, turn_call(body, stream=stream, timeout_s=timeout_s))

    def control(self, verb: str, **options: Any) -> Call:
        """Build the call of `extend` or `release`; the options are those of `session_call`."""
        self.check_open()
        if verb == "extend" and options.get("ttl_s") is None:
            options["ttl_s"] = self._ttl_s
        return session_call("POST", self.id, verb, **options)

    def status(self) -> Call:
        """Build the call that asks for the session."""
        self.check_open()
        return session_call("GET", self.id)

    def end(self, timeout_s: float | None = None) -> Call:
        """Build the call that ends the session; the caller sets `ended`."""
        return session_call("POST", self.id, "end", timeout_s=timeout_s)

    def observe(self, reply: Reply) -> SessionInfo:
        """Read the reply to a control call and keep its lease."""
        info = read_session(reply)
        self.keep_lease(info)
        return info

    def keep_lease(self, info: SessionInfo) -> None:
        """Keep the lease, unless the reply was overtaken by that of a later turn."""
        if info.turn >= self.turn:
            self.lease = info.lease

    def check_open(self) -> None:
        """Raise `SessionEnded` where the session was ended before."""
        if self.ended:
            msg = f"session {self.id} was ended; open a new one with client.session()"
            raise SessionEnded(msg)


class ActiveTurn:
    """One turn, from `begin` to `finish`; as a context manager it finishes at the end of the block."""

    def __init__(self, state: SessionState, delta: list[Message], tools: Any, call: Call) -> None:
        self._state = state
        self._delta = delta
        self._tools = tools
        self._call = call
        self._reopened = False
        self._was_in_doubt = state.in_doubt
        state.in_doubt = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, error: BaseException | None, traceback: object) -> None:
        self.finish(error)

    def exchange(self) -> Generator[Call, Reply, Reply]:
        """Yield the calls of this turn, take their replies, and return the one to the turn itself.

        Where the server lost the session, or holds an older state than the transcript here, or a turn whose
        reply never came, the session is opened again from the full history.
        """
        state = self._state
        try:
            return (yield self._call)
        except SessionNotFound:
            if not state.turn:
                raise
            replace = False
        except TurnConflict as error:
            if not self._is_stale(error.expected_turn):
                raise
            replace = True
        _logger.info("session %s: opening it again from its %d turns", state.id, state.turn)
        yield open_call(state.id, state.history, state.tools, state.turn, replace=replace)
        self._reopened = True
        return (yield self._call)

    def commit(self, completion: ChatCompletion, reply: Reply) -> Turn:
        """Append the turn to the transcript.

        Raises:
            InvalidResponse: the reply breaks the protocol.
        """
        state = self._state
        message, info, cache = turn_parts(completion, reply)
        state.records.append(TurnRecord(self._delta, message))
        state.tools, state.tools_sent = self._tools, True
        state.in_doubt = self._was_in_doubt = False
        state.keep_lease(info)
        return Turn(
            turn=state.turn,
            message=copy.deepcopy(message),
            completion=completion,
            lease=info.lease,
            cache=cache,
            pool=info.pool,
            reopened=self._reopened,
            raw_headers=reply.headers,
        )

    def finish(self, error: BaseException | None = None) -> None:
        """Let the next turn begin."""
        if _is_refusal(error):
            # This turn did not run, in no try of it; what was in doubt before still is.
            self._state.in_doubt = self._was_in_doubt
        self._state.running.release()

    def _is_stale(self, expected_turn: int | None) -> bool:
        """Say whether the server's transcript may be replaced by ours without losing anyone's turn."""
        if expected_turn is None:
            return False
        number = self._state.turn + 1
        return expected_turn < number or (self._was_in_doubt and expected_turn == number + 1)


def _is_refusal(error: BaseException | None) -> bool:
    """Say whether a turn surely did not run: it could not be sent, or every try of it would be refused."""
    if isinstance(error, APIStatusError):
        return error.status < _SERVER_FAULT and not is_retryable(error)
    return isinstance(error, TypeError | ValueError)
