"""What the SDK knows of one session, and what follows from it: no I/O, no clock, the same for sync and async.

A turn runs `begin` → `exchange` (yields calls, takes replies) → `commit` → `finish` (end of its block); `fork`,
`rewind` and `replace` exchange calls as well; the other verbs build one call, whose reply goes to `observe`. May import
`_requests`, `_retry`, `_turn`, `_history` and below.
"""

from __future__ import annotations

import copy
import logging
import secrets
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from bidikv_sdk._errors import APIStatusError, SessionBusy, SessionEnded, SessionNotFound, TurnConflict
from bidikv_sdk._history import TurnRecord, messages_of_turns, split_turns
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
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from bidikv_sdk._requests import Call, Reply
    from bidikv_sdk._types import ChatCompletion, Delta, Message, Tool
    from bidikv_sdk.wire import LeaseInfo, Route, SessionInfo

_SERVER_FAULT: Final = 500

_logger = logging.getLogger("bidikv")


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
        self.id = _mint_id() if session_id is None else check_session_id(session_id)
        self.lease: LeaseInfo | None = None
        self.tools = None if tools is None else list(tools)
        self.tools_sent = tools is None
        """Whether the server has `tools`; it keeps them for later turns."""
        self.records: list[TurnRecord] = []
        self.in_doubt = False
        """True where a turn may be complete on the server only, because its reply never came."""
        self.opened = False
        """Whether the server may know the session."""
        self.ended = False
        self.running = threading.Lock()
        self._pending: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._route: Route | None = route
        self._ttl_s = ttl_s
        self._parameters = dict(parameters)

    @property
    def turn(self) -> int:
        """Number of completed turns."""
        return len(self.records)

    @property
    def history(self) -> list[Message]:
        """The messages of the completed turns; the system prompt lies in the first turn's delta."""
        return messages_of_turns(self.records)

    @property
    def transcript(self) -> list[Message]:
        """A copy of the messages: all completed turns, and what goes before the next delta, as the system prompt."""
        return copy.deepcopy(self.history + self._pending)

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
        self._occupy()
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
        messages = self._pending + messages_of(delta)
        route = route or self._route
        if route not in (None, *ROUTES):
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
        """Build the call of `extend` or `release`; the options are `ttl_s` and those of `session_call`."""
        self.check_open()
        ttl_s = options.pop("ttl_s", None)
        if verb == "extend" and ttl_s is None:
            ttl_s = self._ttl_s
        return session_call("POST", self.id, verb, fields={"ttl_s": ttl_s}, **options)

    def status(self) -> Call:
        """Build the call that asks for the session."""
        self.check_open()
        return session_call("GET", self.id)

    def end(self, timeout_s: float | None = None) -> Call:
        """Build the call that ends the session; the caller sets `ended`."""
        return session_call("POST", self.id, "end", timeout_s=timeout_s)

    # ---------------------------------------------------------------- other histories

    def resume(self, messages: Sequence[Message], turn: int | None) -> None:
        """Take a history from elsewhere, which the server may know.

        Raises:
            TypeError: an item is no message.
            ValueError: the transcript has fewer assistant messages than turns.
        """
        self.records, self._pending = split_turns(_checked(messages), turn, self.tools)
        self.opened = True

    def child(self, at_turn: int | None) -> SessionState:
        """Return the state of a fork (None: at the end) under a new id; raises as `begin` and `checked_turn`."""
        self.check_open()
        if self.running.locked():  # only looked at: several threads may fork at once
            raise self._busy()
        child = copy.copy(self)
        child.id = _mint_id()
        child.lease = None
        child.in_doubt = False
        child.running = threading.Lock()
        child.cut(self.checked_turn(self.turn if at_turn is None else at_turn))
        return child

    def fork(self, child: SessionState, ttl_s: float | None) -> Generator[Call, Reply, None]:
        """Yield the calls that make a child on the server, and take their replies.

        Where the server does not know the history here, the child is opened from its own.
        """
        if not self.opened:
            return
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        fields = {"child_id": child.id, "at_turn": child.turn, "ttl_s": ttl_s}
        child.observe((yield from child.known_or_opened(session_call("POST", self.id, "fork", fields=fields))))

    def rewind(self, turn: int) -> Generator[Call, Reply, None]:
        """Yield the calls that go back to the end of a turn, and take their replies.

        Raises:
            ValueError: there is no such turn.
        """
        then = copy.copy(self)
        then.cut(self.checked_turn(turn))
        reply = None
        if self.opened:
            call = session_call("POST", self.id, "rewind", fields={"turn": turn})
            reply = yield from then.known_or_opened(call)
        self.cut(turn)
        self.in_doubt = False
        if reply is not None:
            self.observe(reply)

    def replace(self, messages: Sequence[Message]) -> Generator[Call, Reply, None]:
        """Yield the call that puts another history in the place of this one, and take its reply.

        Raises:
            TypeError: an item is no message.
        """
        records, pending = split_turns(_checked(messages), None, self.tools)
        reply = None
        if self.opened:
            history = messages_of_turns(records)
            reply = yield open_call(self.id, history, self.tools, len(records), replace=True)
        self.records, self._pending = records, pending
        # A session that the server did not know stays so: its next turn finds out, and opens it with this history.
        self.tools_sent, self.in_doubt = self.tools is None or reply is not None, False
        self.opened = self.opened or bool(records)
        if reply is not None:
            self.observe(reply)

    def known_or_opened(self, call: Call) -> Generator[Call, Reply, Reply]:
        """Yield a call that needs the server to know this history, and where it does not, the one that tells it."""
        try:
            return (yield call)
        except (SessionNotFound, TurnConflict) as error:
            if is_retryable(error):
                raise
        _logger.info("session %s: opening it from its %d turns", self.id, self.turn)
        return (yield open_call(self.id, self.history, self.tools, self.turn, replace=True))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep turns from running for the length of a block; raises `SessionBusy` where one runs."""
        self._occupy()
        try:
            yield
        finally:
            self.running.release()

    def cut(self, turn: int) -> None:
        """Forget what came behind a turn."""
        if turn < self.turn:
            record = self.records[turn]
            self._pending, self.tools, self.tools_sent = record.pending, record.tools, record.tools_sent
        self.records = self.records[:turn]

    def checked_turn(self, turn: int) -> int:
        """Return a number of completed turns; raises `ValueError` where there are not so many."""
        if 0 <= turn <= self.turn:
            return turn
        msg = f"there is no turn {turn} in session {self.id}, which has completed {self.turn}"
        raise ValueError(msg)

    # ---------------------------------------------------------------- replies

    def observe(self, reply: Reply) -> SessionInfo:
        """Read the reply to a control call and keep its lease."""
        info = read_session(reply)
        self.keep_lease(info)
        return info

    def append(self, delta: list[Message], reply: Message, tools: Any) -> None:
        """Take a completed turn into the history."""
        before = (self._pending, self.tools, self.tools_sent)
        # A new list: a copy of this state, as a fork is one, keeps its own.
        self.records = [*self.records, TurnRecord(delta, reply, *before)]
        self._pending, self.tools, self.tools_sent = [], tools, True

    def keep_lease(self, info: SessionInfo) -> None:
        """Keep the lease, unless the reply was overtaken by that of a later turn."""
        if info.turn >= self.turn:
            self.lease = info.lease

    def check_open(self) -> None:
        """Raise `SessionEnded` where the session was ended before."""
        if self.ended:
            msg = f"session {self.id} was ended; open a new one with client.session()"
            raise SessionEnded(msg)

    def _occupy(self) -> None:
        if not self.running.acquire(blocking=False):
            raise self._busy()

    def _busy(self) -> SessionBusy:
        return SessionBusy(f"a turn of session {self.id} is running; go on when it is complete")


class ActiveTurn:
    """One turn, from `begin` to `finish`; as a context manager it finishes at the end of the block."""

    def __init__(self, state: SessionState, delta: list[Message], tools: Any, call: Call) -> None:
        self._state = state
        self._delta = delta
        self._tools = tools
        self._call = call
        self._reopened = False
        self._was_in_doubt = state.in_doubt
        state.in_doubt = state.opened = True

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
        state.append(self._delta, message, self._tools)
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


def _mint_id() -> str:
    # 128 random bits: a router hashes the id before the session exists, so the client makes it.
    return secrets.token_urlsafe(16)


def _checked(messages: Sequence[Message]) -> list[Message]:
    items: Any = copy.deepcopy(messages)
    if not isinstance(items, list | tuple) or not all(hasattr(item, "keys") for item in items):
        msg = f"a history is a list of message dicts, got {items!r:.80}"
        raise TypeError(msg)
    return [dict(item) for item in items]


def _is_refusal(error: BaseException | None) -> bool:
    """Say whether a turn surely did not run: it could not be sent, or every try of it would be refused."""
    if isinstance(error, APIStatusError):
        return error.status < _SERVER_FAULT and not is_retryable(error)
    return isinstance(error, TypeError | ValueError)
