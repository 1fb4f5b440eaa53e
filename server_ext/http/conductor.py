"""Conducts turns on D: load, render, begin, prefill on P, generate on D, stream, settle.

Generation goes through vLLM's own chat serving, so that tool calls, reasoning, logprobs and server-sent events are
exactly stock; a shallow copy of it gets an engine client whose `generate` conducts the turn.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from bidikv_sdk.chunks import ChunkSum
from bidikv_sdk.wire import Choice
from server_ext.engine import compat
from server_ext.http.errors import Refused, refused_by_vllm, vllm_errors
from server_ext.http.home_client import HomeClient
from server_ext.http.prefill_client import PrefillClient
from server_ext.http.recall import Recall, read_record
from server_ext.http.render import TurnRenderer
from server_ext.http.tenants import Tenants
from server_ext.http.transcript import Transcript
from server_ext.http.turn import Clock, EngineTap, Plan, Turn

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncIterator, Awaitable, Callable

    import httpx

    from server_ext.core.records import Key
    from server_ext.core.session_record import Session
    from server_ext.engine.settings import EngineSettings
    from server_ext.http.render import Prompt
    from server_ext.http.transcript import Place
    from server_ext.http.turn_request import TurnRequest

logger = compat.init_logger("vllm.bidikv")
_DONE = "data: [DONE]\n\n"
_RECALLED_BYTES: Final = 64 << 20
_CHANGES_HISTORY: Final = frozenset({"open", "rewind", "end"})
_OTHER_HISTORY: Final = frozenset({"session_not_found", "turn_conflict"})
"""How a home refuses a turn whose session is not, or not any more, what it was rendered from."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose turn it is, and under which names.

    - `tenant`: of the API key.
    - `session_id`: as the caller chose it.
    - `request_id`: the caller's, or a new one.
    - `parent_id`: the session that an unknown one branches off; None where the caller names none.
    - `is_final`: the lease is released when the turn is settled.
    """

    tenant: str
    session_id: str
    request_id: str
    parent_id: str | None = None
    is_final: bool = False

    @property
    def key(self) -> Key:
        """The key of the session."""
        return self.tenant, self.session_id

    @property
    def session(self) -> dict[str, str]:
        """The key of the session, as arguments of a home's ops."""
        return {"tenant": self.tenant, "session_id": self.session_id}


class Conductor:
    """All that D's API server needs to run turns."""

    def __init__(
        self,
        engine_client: Any,
        serving_chat: Any,
        settings: EngineSettings,
        *,
        has_keys: bool,
        prefill_transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.home = HomeClient(engine_client, timeout_s=settings.control_timeout_s)
        self.tenants = Tenants(settings.secret, has_keys=has_keys)
        self.settings = settings
        self._serving_chat = serving_chat
        self._renderer = TurnRenderer(serving_chat)
        block_size = engine_client.vllm_config.cache_config.block_size
        home = settings.home
        max_bytes = min(_RECALLED_BYTES, home.max_session_bytes)
        self.recall = Recall(max_bytes=max_bytes, max_age_s=home.session_retention_s)
        self._expiry: asyncio.TimerHandle | None = None
        self._prefill = PrefillClient(settings, block_size=block_size, transport=prefill_transport)

    async def run(self, caller: Caller, request: TurnRequest, raw_request: Any) -> dict[str, Any] | AsyncIterator[str]:
        """Run one turn.

        Args:
            caller: whose turn.
            request: the turn.
            raw_request: the HTTP request, for vLLM's own serving code.

        Returns:
            The completion, or the events of its stream; the turn is settled when either is complete. The stream must
            be closed (`aclose`) where it is not read to its end.

        Raises:
            Refused: the session is as it was.
        """
        started_s = time.perf_counter()
        ready = await self._begin_from_recall(caller, request)
        if ready is None:
            asked = {"turn": request.turn, "idempotency_key": request.key, "parent_id": caller.parent_id}
            loaded = await self.home.call("load", {**caller.session, **asked})
            if loaded["reply"] is not None:
                return self._replay(loaded, stream=request.stream)
            ready = await self._render_and_begin(caller, request, read_record(caller.key, loaded))
        if ready.begun["reply"] is not None:  # another try of the same turn has completed in the meantime
            return self._replay(ready.begun, stream=request.stream)
        clock = Clock(started_s=started_s, rendered_s=ready.rendered_s, begun_s=time.perf_counter())
        turn = self._turn(caller, request, ready, clock)
        said = _Said(turn, request, ready.vllm_request, ready.place.delta, functools.partial(self._release, caller))
        try:
            result = await self._generate(turn, ready.vllm_request, ready.prompt.token_ids, raw_request)
            if request.stream:
                events = self._stream(said, result)
                await anext(events)  # from here on its end is run, even if nobody ever reads from it
                return events
            completion: dict[str, Any] = result.model_dump()
            completion |= await said.settle(completion)
        except BaseException:
            await turn.abandon_whatever_happens()
            raise
        return completion

    async def own(self, op: str, caller: Caller, arg: dict[str, Any]) -> dict[str, Any]:
        """Call one of the ops with which an owner looks after a session, and return the home's reply.

        Raises:
            Refused: as `HomeClient.call`.
        """
        try:
            return await self.home.call(op, {**caller.session, **arg})
        finally:  # behind the call: a turn that ended before it may have told only now what it left
            if op in _CHANGES_HISTORY:
                self.recall.forget(caller.key)

    async def _release(self, caller: Caller, info: dict[str, Any]) -> dict[str, Any]:
        """Release the lease of a session whose last turn this was; return what has become of its `bidikv` object."""
        if not caller.is_final:
            return info
        try:
            released = await self.home.call("release", caller.session)
        except Refused as refused:  # it expires by itself
            logger.warning("The lease of a final turn was not released: %s", refused)
            return info
        return {**released["info"], "cache": info["cache"]}

    async def _begin_from_recall(self, caller: Caller, request: TurnRequest) -> _Ready | None:
        """Begin a turn that continues one of this process's own; None where the home has to be asked first."""
        record = self.recall.take(caller.key, request.turn)
        if record is None:
            return None
        # Rendering changes messages in place, and they may have to be rendered again, from another history.
        own = replace(request, messages=copy.deepcopy(request.messages))
        try:
            return await self._render_and_begin(caller, own, record)
        except Refused as refused:
            if refused.info.code in _OTHER_HISTORY:
                return None
            self._keep(record)
            raise

    def _keep(self, record: Session) -> None:
        self.recall.keep(record, now_s=time.monotonic())
        if self._expiry is None:
            self._forget_old()

    def _forget_old(self) -> None:
        """Drop copies that are due, now and whenever another is: also on a server that nobody calls any more."""
        wait_s = self.recall.sweep(now_s=time.monotonic())
        self._expiry = None if wait_s is None else asyncio.get_running_loop().call_later(wait_s, self._forget_old)

    async def _render_and_begin(self, caller: Caller, request: TurnRequest, record: Session) -> _Ready:
        told = Transcript(record)
        if request.turn is None:
            place = told.find(request.messages, request.tools or [])
        else:
            place = told.end(request.messages, request.tools)
        recompute = request.route == "recompute"
        salt = self.tenants.cache_salt(caller.tenant, session_id=caller.session_id if recompute else None)
        vllm_request = request.to_vllm(place.tools, cache_salt=salt)
        prompt = await self._renderer.render(vllm_request, place.history, place.delta)
        # For what vLLM counts in a history, such as the tool calls that Kimi's ids are numbered by.
        vllm_request.messages = [*place.history.messages, *place.delta]
        rendered_s = time.perf_counter()

        def undo(late: dict[str, Any]) -> None:
            if late["reply"] is None:
                self.home.call_soon("abandon", {"nonce": late["nonce"], "return_ticket": True})

        arg = {
            **caller.session,
            "turn": record.turn + 1,
            "idempotency_key": request.key,
            "revision": record.revision,
            "num_kept": place.num_kept,
            "prompt_ids": prompt.token_ids.tobytes(),
            "route": request.route or self.settings.home.default_route,
            "prefill_urls": list(self.settings.prefill_urls),
        }
        begun = await self.home.call("begin", arg, on_late=undo)
        return _Ready(record, place, vllm_request, prompt, rendered_s, begun)

    def _turn(
        self,
        caller: Caller,
        request: TurnRequest,
        ready: _Ready,
        clock: Clock,
    ) -> Turn:
        begun = ready.begun
        fresh = self.settings.fresh_prefill_salt or begun["route"] == "recompute"
        plan = Plan(
            record=ready.record,
            num_kept=ready.place.num_kept,
            nonce=begun["nonce"],
            fingerprint=begun["fingerprint"],
            request_id=caller.request_id,
            prompt=ready.prompt,
            route=begun["route"],
            asked=None if request.route == "auto" else request.route,
            choice=None if begun["choice"] is None else Choice.from_json(begun["choice"]),
            ticket=begun["ticket"],
            held_tokens=begun["held_tokens"],
            diverged_at=begun["diverged_at"],
            lease_reason=begun["lease_reason"],
            ticket_reason=begun["ticket_reason"],
            changed=ready.place.changed,
            prefill_salt=uuid.uuid4().hex if fresh else self.tenants.cache_salt(caller.tenant),
        )
        return Turn(
            plan,
            clock,
            home=self.home,
            prefill=self._prefill,
            renderer=self._renderer,
            keep=self._keep,
            secret=self.settings.secret,
        )

    async def _generate(self, turn: Turn, vllm_request: Any, token_ids: array[int], raw_request: Any) -> Any:
        # Prepared ids win over the messages, which vLLM then neither renders nor tokenizes.
        vllm_request.kv_transfer_params = {"prompt_token_ids": token_ids.tolist()}
        serving = copy.copy(self._serving_chat)
        serving.engine_client = EngineTap(serving.engine_client, turn)
        with vllm_errors():
            result = await serving.create_chat_completion(vllm_request, raw_request)
        error = getattr(result, "error", None)
        if error is not None:
            raise refused_by_vllm(error.code, error.message)
        return result

    async def _stream(self, said: _Said, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """Pass vLLM's events on; the last one before the end carries the report."""
        total = ChunkSum()
        wants_usage = said.request.wants_usage or self._serving_chat.enable_force_include_usage
        last: dict[str, Any] = {}  # where no usage chunk is wanted: the chunk before it, which takes the report
        try:
            yield ""
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    data = event.removeprefix("data: ").strip()
                    if data == "[DONE]":
                        break
                    chunk = json.loads(data)
                    if "error" in chunk:
                        refused = refused_by_vllm(chunk["error"].get("code") or 500, chunk["error"]["message"])
                        yield event if said.request.turn is None else _event({"error": refused.info.to_json()})
                        break
                    total.add(chunk)
                    if not chunk["choices"]:
                        try:
                            report = await said.settle(dict(total.completion()))
                            # vLLM's own last chunk names the system.
                            named = {"system_fingerprint": chunk.get("system_fingerprint")}
                            chunk = {**(chunk if wants_usage else {**last, **named}), **report}
                        except Refused as refused:
                            chunk = {"error": refused.info.to_json()}
                        yield _event(chunk)
                    elif wants_usage or not chunk["choices"][0].get("finish_reason"):
                        yield event
                    else:
                        last = chunk
            yield _DONE
        finally:
            await said.turn.abandon_whatever_happens()

    def _replay(self, record: dict[str, Any], *, stream: bool) -> dict[str, Any] | AsyncIterator[str]:
        """Return the stored reply of the last turn to a retry of it."""
        stored = json.loads(record["reply"])
        completion = {**stored["completion"], "bidikv": {**record["info"], "cache": stored["cache"]}}
        return _as_events(completion) if stream else completion

    async def check_template(self) -> bool:
        """Return, and say in the log at start-up, whether this model's sessions continue exactly.

        Raises:
            Refused: they could not be rendered at all.
        """
        appends = await self._renderer.appends()
        if appends:
            logger.info("The chat template only appends: sessions continue D's own token ids.")
        else:
            logger.warning(
                "The chat template rewrites its history: each turn is rendered afresh, and a lease serves the part "
                "that has not changed."
            )
        return appends

    async def close(self) -> None:
        """Close the connections to P, and look after no copies any more."""
        if self._expiry is not None:
            self._expiry.cancel()
        await self._prefill.close()


@dataclass(frozen=True, slots=True)
class _Ready:
    """A turn that has begun.

    - `record`: the session that it was rendered from.
    - `place`: where in its history the turn goes on.
    - `vllm_request`, `prompt`: what D is asked.
    - `rendered_s`: when it was rendered (monotonic seconds).
    - `begun`: what the home's op `begin` returned.
    """

    record: Session
    place: Place
    vllm_request: Any
    prompt: Prompt
    rendered_s: float
    begun: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Said:
    """A turn, and all that its end needs to know of its beginning."""

    turn: Turn
    request: TurnRequest
    vllm_request: Any
    delta: list[dict[str, Any]]
    release: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    """Gives the lease back where the caller said that it is not needed any more."""

    async def settle(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Settle the turn, and tell in the completion's usage how much of the prompt was not computed.

        Returns:
            `bidikv` of the reply. Nothing where a client that sends whole histories gets its answer, but could not be
            given a lease: it did not ask for one, and sends all again.

        Raises:
            Refused: the turn is not part of the session.
        """
        message = completion["choices"][0]["message"]
        usage, cache = completion.get("usage"), self.turn.report()
        if usage is not None:
            details = usage.get("prompt_tokens_details") or {}
            usage["prompt_tokens_details"] = {**details, "cached_tokens": cache.reused_tokens + cache.fetched_tokens}
        try:
            info = await self.turn.settle(
                {name: value for name, value in message.items() if value or name == "content"},
                completion,
                skip_special_tokens=self.vllm_request.skip_special_tokens,
                chunk={"messages": self.delta, "tools": self.request.tools},
                ttl_s=self.request.ttl_s,
            )
        except Refused as refused:
            if self.request.turn is not None:
                raise
            logger.warning("A chat completion was answered, but not kept: %s", refused)
            await self.turn.abandon_whatever_happens()
            return {}
        return {"bidikv": await self.release(info)}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def _as_events(completion: dict[str, Any]) -> AsyncIterator[str]:
    """Return a stored completion as a stream of two chunks: the whole message, then usage and report."""
    choice = completion["choices"][0]
    message = dict(choice["message"])
    if message.get("tool_calls"):
        message["tool_calls"] = [{**call, "index": i} for i, call in enumerate(message["tool_calls"])]
    base = {name: completion.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    yield _event({**base, "choices": [{"index": 0, "delta": message, "finish_reason": choice["finish_reason"]}]})
    last = {name: completion.get(name) for name in ("usage", "system_fingerprint", "bidikv")}
    yield _event({**base, "choices": [], **last})
    yield _DONE
