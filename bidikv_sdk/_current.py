"""The current session of code that calls a stock client: a context variable, and the verbs that go with it.

`current_session` → enter → (`sent_to`, `answered` by the transport; `hold`, `release`, … by the caller) → exit. The
session's server is the one that its last completion was sent to, with the same HTTP module, transport and key. May
import `_keeper`, `_requests`, `_state`, `_transport` and below.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from bidikv_sdk._errors import BidiKVError, NotFoundError
from bidikv_sdk._keeper import AsyncLeaseHold, LeaseHold
from bidikv_sdk._requests import bidikv_object, check_session_id, session_call
from bidikv_sdk._state import SessionState
from bidikv_sdk._transport import AsyncTransport, Settings, Transport
from bidikv_sdk.wire import ROUTES, SessionInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from bidikv_sdk._clock import Clock
    from bidikv_sdk._requests import Call, Reply
    from bidikv_sdk.wire import CacheReport, LeaseInfo, Route

OnExit = Literal["keep", "release", "end"]

# A control call is not worth more of the agent's time: what is not given back expires by itself.
_TIMEOUT_S: Final = 10.0

_logger = logging.getLogger("bidikv")
_stack: ContextVar[tuple[CurrentSession, ...]] = ContextVar("bidikv_sessions", default=())


def current_session(
    session_id: str | None = None,
    *,
    parent: CurrentSession | str | None = None,
    route: Route | None = None,
    ttl_s: float | None = None,
    on_exit: OnExit = "keep",
) -> CurrentSession:
    """Return a context manager (`with` or `async with`) in which stock clients' completions belong to a session.

    It takes effect for clients with a `session_transport`, in this task or thread and in those that it starts with its
    context, and may be entered again, and inside another one.

    Args:
        session_id: Any id, as of a thread or a conversation; None: 128 random bits.
        parent: The session that this one branches off, or its id: the server shares the parent's cache as far as the
            histories are the same.
        route: How prompts get their cache; None: the server decides.
        ttl_s: Seconds that a lease lives after a turn or a renewal; None: the server's default.
        on_exit: What becomes of the session at the end of the block: its lease lives on until it expires (`keep`), its
            cache is given back (`release`), or the server forgets it too (`end`). In asynchronous code the latter two
            need `async with`.

    Raises:
        ValueError: an id cannot travel in a header, or another argument is none of its words.
    """
    return CurrentSession(session_id, parent=parent, route=route, ttl_s=ttl_s, on_exit=on_exit)


def active_session() -> CurrentSession | None:
    """Return the session of the innermost `current_session` block around the caller; None outside of one."""
    stack = _stack.get()
    return stack[-1] if stack else None


@dataclass(frozen=True, slots=True)
class Server:
    """Where a session's completions go: control calls go the same way, in both flavours."""

    module: Any
    inner: Any
    base_url: str
    headers: Mapping[str, str]
    clock: Clock

    def send(self, call: Call) -> Reply:
        """Send a control call; raises the SDK's errors."""
        if hasattr(self.inner, "handle_request"):
            return Transport(self._settings, self.module.Client(transport=self.inner)).send(call)
        # The completions are asynchronous, and a tool that is not runs in a thread, or blocks their loop.
        with self.module.Client() as client:
            return Transport(self._settings, client).send(call)

    async def send_async(self, call: Call) -> Reply:
        """Send a control call; raises the SDK's errors."""
        if hasattr(self.inner, "handle_async_request"):
            return await AsyncTransport(self._settings, self.module.AsyncClient(transport=self.inner)).send(call)
        import asyncio  # noqa: PLC0415 - loaded already where this runs

        return await asyncio.to_thread(self.send, call)

    @property
    def _settings(self) -> Settings:
        return Settings(self.base_url, None, _TIMEOUT_S, 1, self.headers, self.clock, self.module)


class CurrentSession:
    """A session of stock clients; made by `current_session`.

    A context manager, `with` and `async with` alike. The verbs never raise what the server or the network do: they log
    it and return None. Before the session's first completion there is nothing to hold or to give back.
    """

    def __init__(
        self,
        session_id: str | None,
        *,
        parent: CurrentSession | str | None,
        route: Route | None,
        ttl_s: float | None,
        on_exit: OnExit,
    ) -> None:
        for name, value, words in (("route", route, (None, *ROUTES)), ("on_exit", on_exit, get_args(OnExit))):
            if value not in words:
                msg = f"{name} must be one of {', '.join(map(str, words))}, got {value!r}"
                raise ValueError(msg)
        self._state = SessionState(session_id, system=None, tools=None, route=route, ttl_s=ttl_s, parameters={})
        parent_id = parent.id if isinstance(parent, CurrentSession) else parent
        self.parent_id = None if parent_id is None else check_session_id(parent_id)
        """Id of the session that this one branches off."""
        self._options = {"route": route, "ttl_s": ttl_s}
        self._on_exit: OnExit = on_exit
        self._server: Server | None = None
        self._info: SessionInfo | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def __enter__(self) -> Self:
        _stack.set((*_stack.get(), self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leave()
        if self._on_exit != "keep":
            self._control(self._on_exit)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *exc_info: object) -> None:
        self._leave()
        if self._on_exit != "keep":
            await self._control_async(self._on_exit)

    @property
    def id(self) -> str:
        """The session's id."""
        return self._state.id

    @property
    def info(self) -> SessionInfo | None:
        """What the last reply said of the session; None where it was served without one."""
        return self._info

    @property
    def cache(self) -> CacheReport | None:
        """Where the cache of the last completion's prompt came from; None where it was served without the session."""
        return None if self._info is None else self._info.cache

    @property
    def lease(self) -> LeaseInfo | None:
        """The lease as the last reply told it."""
        return None if self._info is None else self._info.lease

    def fork(self, session_id: str | None = None, *, on_exit: OnExit = "keep") -> CurrentSession:
        """Return a child, as for a sub-agent: its completions begin on this session's cache.

        Args:
            session_id: Its id; None: 128 random bits.
            on_exit: As in `current_session`.
        """
        return CurrentSession(session_id, parent=self, on_exit=on_exit, **self._options)  # type: ignore[arg-type]

    def hold(self, ttl_s: float | None = None) -> CurrentHold:
        """Return a context manager, `with` and `async with` alike, that keeps the lease alive, as around a tool call.

        Args:
            ttl_s: Seconds that each renewal asks for; None: the session's own.
        """
        return CurrentHold(self, ttl_s)

    def extend(self, ttl_s: float | None = None) -> SessionInfo | None:
        """Keep the lease for at least `ttl_s` more seconds (None: the session's own); never shortens it."""
        return self._control("extend", ttl_s=ttl_s)

    def release(self) -> SessionInfo | None:
        """Give the cache back and keep the session: its next completion computes the prompt again."""
        return self._control("release")

    def end(self) -> SessionInfo | None:
        """Give the cache back and forget the session; a later completion begins it anew."""
        return self._control("end")

    def rewind(self, turn: int) -> SessionInfo | None:
        """Return to the end of an earlier turn (0: the beginning), where the cache then ends."""
        return self._control("rewind", turn=turn)

    async def extend_async(self, ttl_s: float | None = None) -> SessionInfo | None:
        """Do what `extend` does."""
        return await self._control_async("extend", ttl_s=ttl_s)

    async def release_async(self) -> SessionInfo | None:
        """Do what `release` does."""
        return await self._control_async("release")

    async def end_async(self) -> SessionInfo | None:
        """Do what `end` does."""
        return await self._control_async("end")

    async def rewind_async(self, turn: int) -> SessionInfo | None:
        """Do what `rewind` does."""
        return await self._control_async("rewind", turn=turn)

    # ---------------------------------------------------------------- for the transport

    @property
    def fields(self) -> dict[str, Any]:
        """What goes into a completion's body."""
        given = {name: value for name, value in self._options.items() if value is not None}
        return {
            "session_id": self.id,
            **({"parent_session_id": self.parent_id} if self.parent_id else {}),
            **({"bidikv": bidikv_object(**given)} if given else {}),  # type: ignore[arg-type]
        }

    @property
    def headers(self) -> dict[str, str]:
        """What goes into a completion's headers: routers hash header and body apart."""
        parent = {"X-Parent-Session-ID": self.parent_id} if self.parent_id else {}
        return {"X-Session-ID": self.id, **parent}

    def sent_to(self, server: Server) -> None:
        """Remember where a completion was sent; nothing is known of its reply yet."""
        self._server, self._info = server, None

    def answered(self, content: bytes) -> None:
        """Take the report out of a completion, or of a stream's chunk that has one."""
        try:
            self._info = SessionInfo.from_json(json.loads(content).get("bidikv"))
        except (ValueError, AttributeError):  # served without the session, or no JSON at all
            self._info = None

    # ---------------------------------------------------------------- control calls

    def renewals(self, ttl_s: float | None) -> tuple[LeaseHold, AsyncLeaseHold] | None:
        """Return both flavours of what keeps the lease; None where no completion was sent yet."""
        server = self._server
        if server is None:
            return None

        def call(timeout_s: float) -> Call:
            return self._state.control("extend", ttl_s=ttl_s, timeout_s=timeout_s, max_retries=0)

        def renew(timeout_s: float) -> LeaseInfo:
            return self._state.observe(server.send(call(timeout_s))).lease

        async def renew_async(timeout_s: float) -> LeaseInfo:
            return self._state.observe(await server.send_async(call(timeout_s))).lease

        of = (self.id, ttl_s, server.clock)
        return LeaseHold(*of, renew), AsyncLeaseHold(*of, renew_async)

    def _control(self, verb: str, **options: Any) -> SessionInfo | None:
        if self._server is None:
            return None
        try:
            return self._took(self._server.send(self._call(verb, **options)))
        except NotFoundError:
            return None
        except (BidiKVError, RuntimeError) as error:  # RuntimeError: the client was closed before
            self._warn(verb, error)
            return None

    async def _control_async(self, verb: str, **options: Any) -> SessionInfo | None:
        if self._server is None:
            return None
        try:
            return self._took(await self._server.send_async(self._call(verb, **options)))
        except NotFoundError:
            return None
        except (BidiKVError, RuntimeError) as error:  # as above
            self._warn(verb, error)
            return None

    def _call(self, verb: str, **options: Any) -> Call:
        if verb == "rewind":
            return session_call("POST", self.id, verb, fields=options)
        return self._state.end() if verb == "end" else self._state.control(verb, **options)

    def _took(self, reply: Reply) -> SessionInfo:
        info = self._state.observe(reply)
        self._info = replace(info, cache=self.cache)
        return info

    def _warn(self, verb: str, error: Exception) -> None:
        _logger.warning("session %s: %s failed, the lease expires by itself: %s", self.id, verb, error)

    def _leave(self) -> None:
        # Not by a token: a framework may leave the block in another context than it was entered in.
        stack = list(_stack.get())
        if self in stack:
            del stack[len(stack) - 1 - stack[::-1].index(self)]
            _stack.set(tuple(stack))


class CurrentHold:
    """Keeps the lease of a `CurrentSession` alive until its block ends; made by `CurrentSession.hold`."""

    def __init__(self, session: CurrentSession, ttl_s: float | None) -> None:
        self._session = session
        self._ttl_s = ttl_s
        self._holds: tuple[LeaseHold, AsyncLeaseHold] | None = None

    @property
    def lost(self) -> bool:
        """True where the lease is gone, or no renewal succeeded for a full TTL."""
        return self._holds is not None and any(hold.lost for hold in self._holds)

    @property
    def lost_reason(self) -> str | None:
        """Why the lease is lost, in words; None where it is not."""
        return next((hold.lost_reason for hold in self._holds or () if hold.lost), None)

    def __enter__(self) -> Self:
        self._holds = self._session.renewals(self._ttl_s)
        if self._holds is not None:
            self._holds[0].__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._holds is not None:
            self._holds[0].__exit__(*exc_info)

    async def __aenter__(self) -> Self:
        self._holds = self._session.renewals(self._ttl_s)
        if self._holds is not None:
            await self._holds[1].__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._holds is not None:
            await self._holds[1].__aexit__(*exc_info)
