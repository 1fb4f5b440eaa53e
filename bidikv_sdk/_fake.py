"""The sessions and leases behind `bidikv_sdk.testing`: what a server does, without HTTP and without a model.

A turn runs `begin_turn` or `begin_chat` → `complete` or `abort`. One token is one word.
May import `_fake_chat`, `_fake_replies`, `wire`, `prefix` and `_clock`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from bidikv_sdk._fake_chat import Place, is_servable, place_of
from bidikv_sdk._fake_replies import ScriptedReply, completion_of, count_tokens
from bidikv_sdk.prefix import num_blocks
from bidikv_sdk.wire import (
    CacheReport,
    ErrorInfo,
    LeaseInfo,
    LeaseState,
    Outcome,
    PoolInfo,
    Reason,
    SessionInfo,
    Timings,
    sessions_to_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bidikv_sdk._clock import Clock
    from bidikv_sdk._types import Message

_BLOCK_SIZE: Final = 16
_TOTAL_BLOCKS: Final = 1024
_MAX_TTL_S: Final = 900.0
_REFUSED_PARAMETERS: Final = (
    "echo",
    "prompt_logprobs",
    "kv_transfer_params",
    "cache_salt",
    "add_generation_prompt",
)
# A running turn may end at any time: a client should look again soon.
_RUNNING_RETRY_S: Final = 0.5


class Refused(Exception):
    """The request is answered with an error of the protocol."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


@dataclass(slots=True)
class FakeSession:
    """What the server knows of one session."""

    id: str
    turn: int = 0
    messages: list[Message] = field(default_factory=list)
    tools: Any = None
    lease_state: LeaseState = "none"
    lease_reason: Reason | None = None
    deadline_s: float = 0.0
    num_tokens: int = 0
    next_reason: Reason = "first_turn"
    """Why the next turn has nothing to reuse, where it has not."""
    last_key: str | None = None
    last_completion: dict[str, Any] | None = None
    last_cache: CacheReport | None = None
    running: FakeTurn | None = None
    marks: list[int] = field(default_factory=lambda: [0])
    """Number of messages behind each turn that is known, the last of them `turn`."""
    origin: tuple[str, int] | None = None
    """Of a fork: its parent, and the turn at which it began."""

    def go_back(self, num_marks: int) -> None:
        """Forget what lies behind so many of the known ends of turns; behind none of them all is forgotten."""
        if num_marks < len(self.marks):
            self.turn = self.turn - len(self.marks) + num_marks if num_marks else 0
            self.marks = self.marks[:num_marks] or [0]
            self.messages = self.messages[: self.marks[-1]]

    def cut(self, turn: int) -> None:
        """Go back to the end of a turn; raise `Refused` where that cannot be."""
        if self.running is not None:
            raise Refused(ErrorInfo("turn_conflict", "a turn is running", retry_after_s=_RUNNING_RETRY_S))
        num_known = len(self.marks) - (self.turn - turn)
        if turn > self.turn or num_known < 1:
            raise Refused(ErrorInfo("turn_conflict", f"turn {turn} is not known", expected_turn=self.turn + 1))
        if turn < self.turn:
            self.marks = self.marks[:num_known]
            self.messages = self.messages[: self.marks[-1]]
            self.turn, self.last_key, self.last_completion, self.last_cache = turn, None, None, None
            # Of an empty history nothing is known, so that all is kept.
            self.num_tokens = min(self.num_tokens, count_tokens(self.messages) or self.num_tokens)


@dataclass(frozen=True, slots=True)
class FakeTurn:
    """A turn that runs: its session, what `complete` will append, and what it will answer."""

    session: FakeSession
    delta: list[Message]
    key: str | None
    ttl_s: float
    completion: dict[str, Any]
    cache: CacheReport
    num_marks: int
    """Known ends of turns in the session up to the one that it continues."""
    is_plain: bool = False
    """Served without the session."""


class FakeStore:
    """All sessions of a fake server, by id."""

    def __init__(self, clock: Clock, ttl_s: float, model: str) -> None:
        self.sessions: dict[str, FakeSession] = {}
        self._clock = clock
        self._ttl_s = ttl_s
        self.model = model

    def known(self, session_id: str) -> FakeSession:
        """Return a session, its lease expired where its time is over; raise `Refused` where it is unknown."""
        session = self.sessions.get(session_id)
        if session is None:
            raise Refused(
                ErrorInfo("session_not_found", f"no session {session_id!r}: open it again with the full history")
            )
        if session.lease_state == "active" and self._clock.now_s() >= session.deadline_s:
            self.drop_lease(session, "expired", "lease_expired")
        return session

    def open(self, session_id: str, body: Mapping[str, Any]) -> FakeSession:
        """Open a session, or replace the transcript of one."""
        turn = body.get("turn", 0)
        session = self.sessions.get(session_id)
        if session is not None and session.turn == turn and not body.get("replace"):
            return session
        if session is not None and not body.get("replace"):
            raise Refused(
                ErrorInfo("turn_conflict", f"{session_id!r} has another turn", expected_turn=session.turn + 1)
            )
        if session is None:
            session = FakeSession(session_id, next_reason="home_lost" if turn else "first_turn")
            self.sessions[session_id] = session
        session.turn = turn
        session.messages = copy.deepcopy(body.get("messages") or [])
        session.marks = [len(session.messages)]
        session.tools = body.get("tools", session.tools)
        session.last_key = session.last_completion = session.last_cache = None
        return session

    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the list of sessions, or a page of it."""
        ids = list(self.sessions)
        limit = query.get("limit")
        if limit is not None:
            if not limit.isdigit() or int(limit) < 1:
                raise Refused(ErrorInfo("invalid_request", f"limit is {limit!r}", param="limit"))
            ids = sorted(session_id for session_id in ids if session_id > query.get("after", ""))
        kept = ids[: int(limit)] if limit is not None else ids
        infos = [self.shown(self.known(session_id)) for session_id in kept]
        return sessions_to_json(infos, has_more=len(kept) < len(ids))

    def fork(self, parent: FakeSession, body: Mapping[str, Any]) -> FakeSession:
        """Open a child with a session's history up to a turn, or return the one that this fork has opened before."""
        child_id, at_turn, ttl_s = body.get("child_id"), body.get("at_turn"), body.get("ttl_s")
        if not isinstance(child_id, str) or child_id == parent.id:
            raise Refused(ErrorInfo("invalid_request", "a fork needs an id of its own", param="child_id"))
        child = self.sessions.get(child_id)
        if child is not None:
            if child.origin is None or child.origin[0] != parent.id or at_turn not in {None, child.origin[1]}:
                raise Refused(ErrorInfo("turn_conflict", f"{child_id!r} exists", expected_turn=child.turn + 1))
            return child
        at_turn = parent.turn if at_turn is None else at_turn
        child = replace(parent, id=child_id, origin=(parent.id, at_turn), messages=copy.deepcopy(parent.messages))
        child.cut(at_turn)
        child.last_key = child.last_completion = child.last_cache = None
        if child.lease_state == "active":
            child.deadline_s = self._deadline_s(ttl_s)
        self.sessions[child_id] = child
        return child

    def extend(self, session: FakeSession, ttl_s: float | None) -> None:
        """Keep the lease for at least `ttl_s` more seconds."""
        if session.lease_state != "active":
            raise Refused(ErrorInfo("lease_lost", f"the lease is {session.lease_state}", reason=session.lease_reason))
        session.deadline_s = max(session.deadline_s, self._deadline_s(ttl_s))

    def drop_lease(self, session: FakeSession, state: LeaseState, reason: Reason) -> None:
        """End the lease, if there is one."""
        if session.lease_state == "active":
            session.lease_state, session.lease_reason, session.next_reason = state, reason, reason
            session.num_tokens = 0

    def begin_turn(
        self,
        session_id: str,
        key: str | None,
        body: Mapping[str, Any],
        take_script: Callable[[], ScriptedReply],
    ) -> FakeTurn | dict[str, Any]:
        """Start a turn, which takes the next script, or return the stored completion of a repeated one."""
        number, delta, asked = body.get("turn"), body.get("messages"), body.get("bidikv", {})
        if not isinstance(number, int) or not delta:
            raise Refused(ErrorInfo("invalid_request", "a turn needs its number and messages", param="messages"))
        for name in _REFUSED_PARAMETERS:
            if name in body:
                raise Refused(ErrorInfo("unsupported_parameter", f"{name} is not supported", param=name))
        if number == 1 and session_id not in self.sessions:
            self.open(session_id, {})
        session = self.known(session_id)
        if session.running is not None:
            raise Refused(ErrorInfo("turn_conflict", "a turn is running", retry_after_s=_RUNNING_RETRY_S))
        if session.last_completion is not None and (number, key) == (session.turn, session.last_key):
            return session.last_completion
        if number != session.turn + 1:
            raise Refused(ErrorInfo("turn_conflict", f"turn {number} does not fit", expected_turn=session.turn + 1))
        session.tools = body.get("tools", session.tools)
        script = take_script()
        messages = [*session.messages, *delta]
        return self._run(session, messages, delta, script, asked, key=key, num_marks=len(session.marks))

    def begin_chat(
        self,
        session_id: str | None,
        parent_id: str | None,
        body: Mapping[str, Any],
        take_script: Callable[[], ScriptedReply],
    ) -> FakeTurn:
        """Start a completion with its whole history, within a session where one is named and can serve it."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused(ErrorInfo("invalid_request", "a completion needs messages", param="messages"))
        session = self._for_chat(session_id, parent_id) if session_id and is_servable(body) else None
        script = take_script()
        if session is None:
            return self._run(FakeSession("plain"), messages, messages, script, {}, is_plain=True)
        tools = body.get("tools") or None
        place = place_of(messages, session.messages, session.marks, same_tools=tools == (session.tools or None))
        session.tools = tools
        asked = body.get("bidikv", {})
        return self._run(
            session,
            messages,
            place.delta,
            script,
            asked,
            num_marks=place.num_marks,
            place=place,
        )

    def _for_chat(self, session_id: str, parent_id: str | None) -> FakeSession | None:
        """Return a session that may run a turn: a known one, a fork of a known parent, or a new one; None: it runs."""
        if session_id not in self.sessions:
            parent = self.sessions.get(parent_id or "")
            if parent is not None and parent.running is None and parent_id != session_id:
                self.known(parent.id)  # so that what has expired is not shared
                self.fork(parent, {"child_id": session_id})
            else:
                self.open(session_id, {})
        session = self.known(session_id)
        return session if session.running is None else None

    def _run(  # noqa: PLR0913 - all that a turn is
        self,
        session: FakeSession,
        messages: Sequence[Message],
        delta: list[Message],
        script: ScriptedReply,
        asked: Mapping[str, Any],
        *,
        key: str | None = None,
        num_marks: int = 0,
        place: Place | None = None,
        is_plain: bool = False,
    ) -> FakeTurn:
        prompt_tokens = count_tokens(messages)
        cache = _cache_report(session, prompt_tokens, script, asked.get("route", "auto"), place)
        cached_tokens = None if is_plain else cache.reused_tokens + cache.fetched_tokens
        completion_id = f"chatcmpl-{session.id}-{session.turn + 1}"
        completion = completion_of(completion_id, self.model, delta, script, prompt_tokens, cached_tokens)
        ttl_s = asked.get("ttl_s", self._ttl_s)
        turn = FakeTurn(session, copy.deepcopy(delta), key, ttl_s, completion, cache, num_marks, is_plain)
        session.running = turn
        return turn

    def complete(self, turn: FakeTurn) -> dict[str, Any]:
        """Append the turn, grant its lease, and return the completion with `bidikv`."""
        if turn.is_plain:
            return turn.completion
        session = turn.session
        session.go_back(turn.num_marks)
        session.turn += 1
        reply = turn.completion["choices"][0]["message"]
        reply = {name: value for name, value in reply.items() if value or name == "content"}
        session.messages = [*session.messages, *turn.delta, reply]
        session.marks = [*session.marks, len(session.messages)]
        session.lease_state, session.lease_reason = "active", None
        session.deadline_s = self._deadline_s(turn.ttl_s)
        session.num_tokens = count_tokens(session.messages)
        session.last_key, session.last_cache = turn.key, turn.cache
        info = self.info(session, turn.cache)
        session.last_completion = {**turn.completion, "bidikv": info.to_json()}
        session.running = None
        return session.last_completion

    def abort(self, turn: FakeTurn) -> None:
        """Forget a turn that is not complete; nothing happens to a complete one."""
        if turn.session.running is turn:
            turn.session.running = None

    def info(self, session: FakeSession, cache: CacheReport | None = None) -> SessionInfo:
        """Return the `bidikv` object."""
        is_active = session.lease_state == "active"
        remaining_s = session.deadline_s - self._clock.now_s() if is_active else 0.0
        lease = LeaseInfo(
            session.lease_state,
            remaining_s,
            session.num_tokens,
            num_blocks(session.num_tokens, _BLOCK_SIZE),
            session.lease_reason,
        )
        num_used = sum(num_blocks(other.num_tokens, _BLOCK_SIZE) for other in self.sessions.values())
        pool = PoolInfo(_TOTAL_BLOCKS - num_used, _TOTAL_BLOCKS, pending_ticket_blocks=0)
        return SessionInfo(session.id, session.turn, lease, cache, pool)

    def shown(self, session: FakeSession) -> SessionInfo:
        """Return the `bidikv` object as get and list give it."""
        return replace(self.info(session), last_turn=session.last_cache)

    def _deadline_s(self, ttl_s: float | None) -> float:
        return self._clock.now_s() + min(self._ttl_s if ttl_s is None else ttl_s, _MAX_TTL_S)


def _cache_report(
    session: FakeSession,
    prompt_tokens: int,
    script: ScriptedReply,
    route: str,
    place: Place | None,
) -> CacheReport:
    # A history that was cut may be shorter than what is held.
    held_tokens = session.num_tokens if place is not None else min(session.num_tokens, prompt_tokens)
    changed = place.changed if place is not None else None
    matched_tokens = min(held_tokens, place.common_tokens) if place is not None else held_tokens
    by_route: dict[str, Outcome] = {"local": "local", "prefill": "prefilled", "recompute": "recomputed"}
    outcome = script.outcome or (by_route.get(route, "fetched") if matched_tokens else "recomputed")
    usual: Reason = changed or ("cheapest" if route == "auto" else "forced")
    reused_tokens = matched_tokens if outcome in {"local", "prefilled"} else 0
    fetched_tokens = matched_tokens if outcome == "fetched" else 0
    return CacheReport(
        outcome=outcome,
        reason=script.reason or (usual if held_tokens else session.next_reason),
        prompt_tokens=prompt_tokens,
        held_tokens=held_tokens,
        reused_tokens=reused_tokens,
        fetched_tokens=fetched_tokens,
        computed_tokens=prompt_tokens - reused_tokens - fetched_tokens,
        diverged_at=matched_tokens if changed and held_tokens else None,
        timings_s=Timings(ttft=0.0),
    )
