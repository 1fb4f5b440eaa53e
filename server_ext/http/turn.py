"""One turn in flight: P is asked, D generates, and the end is settled or abandoned.

Order: `generate` (called by vLLM's chat serving through `EngineTap`), then exactly one of `settle` and `abandon`.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bidikv_sdk.wire import CacheReport, Choice, Timings
from server_ext.core.tickets import sign
from server_ext.engine import compat
from server_ext.http.metrics import turn_metrics
from server_ext.http.prefill_client import PrefillUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from bidikv_sdk.wire import Outcome, Reason, Route
    from server_ext.core.session_record import Session
    from server_ext.http.home_client import HomeClient
    from server_ext.http.prefill_client import PrefillClient, Prefilled
    from server_ext.http.render import Prompt, TurnRenderer

logger = compat.init_logger("vllm.bidikv")


@dataclass(slots=True)
class Plan:
    """What is known of a turn when it begins.

    - `record`: the session as the turn found it.
    - `num_kept`: the chunks of its transcript that the turn continues.
    - `nonce`: of this turn; the engine knows the turn's request by it.
    - `fingerprint`: of D's model and weights; what P computes under another one is of no use.
    - `prompt`: what D and P compute.
    - `route`: the way it goes.
    - `asked`: the way that the caller asked for, None for none; where there is nothing to fetch the two differ.
    - `choice`: what the way was chosen from; None where nothing was.
    - `ticket`: signed transfer parameters for reading the lease; None where P gets none.
    - `held_tokens`, `diverged_at`: of the lease, for the report.
    - `lease_reason`: why the lease is gone or smaller; None where it is whole.
    - `ticket_reason`: why there is no ticket although tokens matched.
    - `changed`: why the prompt does not begin with all that D holds, where it does not; None for no known reason.
    - `prefill_salt`: of P's prefix cache; None for none.
    """

    record: Session
    num_kept: int
    nonce: str
    fingerprint: str
    request_id: str
    prompt: Prompt
    route: Route
    asked: Route | None
    choice: Choice | None
    ticket: dict[str, Any] | None
    held_tokens: int
    diverged_at: int | None
    lease_reason: Reason | None
    ticket_reason: Reason | None
    changed: Reason | None
    prefill_salt: str | None


@dataclass(slots=True)
class Clock:
    """When the steps of a turn were reached, in monotonic seconds; None where one was not."""

    started_s: float
    rendered_s: float
    begun_s: float
    prefilled_s: float | None = None
    generated_s: float | None = None
    first_token_s: float | None = None


@dataclass(slots=True)
class Reply:
    """What the engine generated so far.

    - `num_cached_tokens`: of the prompt, in D's own prefix cache or read from P; all of it where that read went well.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_cached_tokens: int = 0


class Turn:
    """One turn between its begin and its end; `keep` is told what a settled one has left."""

    def __init__(
        self,
        plan: Plan,
        clock: Clock,
        *,
        home: HomeClient,
        prefill: PrefillClient,
        renderer: TurnRenderer,
        keep: Callable[[Session], None],
        secret: bytes,
    ) -> None:
        self.plan = plan
        self._clock = clock
        self._home = home
        self._prefill = prefill
        self._renderer = renderer
        self._keep = keep
        self._secret = secret
        self._reply = Reply()
        self._prefilled: Prefilled | None = None
        self._prefill_reason: Reason | None = None
        self._failed_urls: list[str] = []
        self._may_still_read = False
        self._generation: AsyncGenerator[Any, None] | None = None
        self.is_over = False

    # Generation

    def generate(self, engine_client: Any, prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        """Stand in for the engine client's `generate`: the same arguments, the same outputs."""
        self._generation = self._generate(engine_client, prompt, params, request_id, options)
        return self._generation

    async def _generate(
        self, engine_client: Any, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        transfer = None
        if self.plan.route != "local":
            transfer = await self._ask_prefill_node()
        if self.plan.ticket is not None and not self._may_still_read:
            # P has read, or never will: give the references back now, not at the deadline.
            read_age_s = None if self._prefilled is None else self._prefilled.read_age_s
            ticket_id = self.plan.ticket["remote_request_id"]
            self._home.call_soon("return_ticket", {"ticket_id": ticket_id, "read_age_s": read_age_s})
        extra = {name: value for name, value in (params.extra_args or {}).items() if name != "kv_transfer_params"}
        if transfer is not None:
            named = {**transfer, "bidikv_fingerprint": self.plan.fingerprint}
            extra["kv_transfer_params"] = sign(named, self._secret)
        params.extra_args = extra or None
        options["session_id"] = self.plan.nonce
        self._clock.generated_s = time.perf_counter()
        async for output in engine_client.generate(prompt, params, request_id, **options):
            self._take(output)
            output.kv_transfer_params = None  # block ids and hosts are not for clients
            yield output

    async def _ask_prefill_node(self) -> dict[str, Any] | None:
        plan = self.plan
        params = plan.ticket or sign({"do_remote_decode": True, "do_remote_prefill": False}, self._secret)
        self._may_still_read = plan.ticket is not None  # also where this call is cut half-way
        try:
            prefilled = await self._prefill.prefill(
                plan.prompt.token_ids, params, cache_salt=plan.prefill_salt, request_id=plan.request_id
            )
        except PrefillUnavailable as unavailable:
            logger.warning("Turn %s is computed on D: %s", plan.request_id, unavailable)
            self._prefill_reason = unavailable.reason
            self._may_still_read = unavailable.may_still_read
            self._failed_urls = unavailable.failed_urls
            return None
        finally:
            self._clock.prefilled_s = time.perf_counter()
        self._may_still_read = False
        if prefilled.fingerprint != plan.fingerprint:
            logger.warning("Turn %s is computed on D: P serves another model or other weights.", plan.request_id)
            self._prefill_reason = "model_changed"
            self._failed_urls = [prefilled.url]
            return None
        self._prefilled = prefilled
        return prefilled.params

    def _take(self, output: Any) -> None:
        clock = self._clock
        if clock.first_token_s is None and not output.finished:
            clock.first_token_s = time.perf_counter()
        elif clock.first_token_s is None and clock.generated_s is not None:
            # A reply that comes whole: vLLM has noted when its first token was there.
            latency_s = getattr(output.metrics, "first_token_latency", 0.0)
            clock.first_token_s = clock.generated_s + latency_s if latency_s > 0 else None
        self._reply.num_cached_tokens = output.num_cached_tokens or self._reply.num_cached_tokens
        for completion in output.outputs:
            self._reply.token_ids.extend(completion.token_ids)
            self._reply.text += completion.text

    # The end

    async def settle(
        self,
        message: dict[str, Any],
        completion: dict[str, Any],
        *,
        skip_special_tokens: bool,
        chunk: dict[str, Any],
        ttl_s: float | None,
    ) -> dict[str, Any]:
        """Make the turn part of its session, and its blocks the session's lease.

        Args:
            message: the assistant's message, as the client gets it.
            completion: the reply, kept for a retry of the same turn.
            skip_special_tokens: how the reply's text was decoded.
            chunk: the turn's own part of the transcript (delta and tools).
            ttl_s: of the lease; None for the default.

        Returns:
            The `bidikv` object of the reply.

        Raises:
            Refused: the engine did not answer; the turn is not part of the session then.
        """
        plan = self.plan
        settling_s = time.perf_counter()
        num_kept, pending_text = self._renderer.reply_ids(
            self._reply.token_ids, self._reply.text, skip_special_tokens=skip_special_tokens
        )
        kept_ids = plan.prompt.token_ids + array("i", self._reply.token_ids[:num_kept])
        cache = self.report()
        report = cache.to_json()
        transcript = {
            **chunk,
            "messages": [*chunk["messages"], message],
            "pending_text": pending_text,
            "prompt_hash": plan.prompt.text_hash,
        }
        said = json.dumps(transcript).encode()
        calls = message.get("tool_calls")
        settled = await self._home.call(
            "settle",
            {
                "nonce": plan.nonce,
                "num_tokens_kept": len(kept_ids),
                "token_ids": kept_ids.tobytes(),
                "chunk": said,
                "reply": json.dumps({"completion": completion, "cache": report}).encode(),
                "report": json.dumps(report).encode(),
                "ttl_s": ttl_s,
                "ended_by": f"tool:{calls[0]['function']['name']}" if calls else "stop",
                "observed": self._observed(cache),
            },
        )
        self.is_over = True
        plan.record.cut(plan.num_kept)
        plan.record.append(said, kept_ids)
        plan.record.revision = settled["revision"]
        self._keep(plan.record)
        turn_metrics().observe(cache)
        info = settled["info"]
        info["cache"] = report
        info["cache"]["timings_s"]["settle"] = time.perf_counter() - settling_s
        return info

    async def abandon(self) -> None:
        """End a turn that failed or whose client left; the previous lease and the session stay as they were."""
        if self.is_over:
            return
        self.is_over = True
        if self._generation is not None:
            with suppress(Exception):  # whatever the engine says, the session must be free again
                await self._generation.aclose()  # aborts the engine's request
        # A ticket that P may still be reading stays until its deadline.
        await self._home.call("abandon", {"nonce": self.plan.nonce, "return_ticket": not self._may_still_read})

    async def abandon_whatever_happens(self) -> None:
        """Abandon, even while the caller is being cancelled."""
        try:
            await asyncio.shield(self.abandon())
        except Exception as error:  # noqa: BLE001 - the home's own deadline ends the turn then
            logger.warning("Turn %s was not abandoned in order: %s", self.plan.request_id, error)

    # The report

    def report(self) -> CacheReport:
        """Say where the prompt's KV cache came from, and why."""
        plan = self.plan
        num_prompt = len(plan.prompt.token_ids)
        if self._prefilled is not None and not self._handover_failed():
            fetched, reused = self._prefilled.fetched_tokens, self._prefilled.local_tokens
            outcome: Outcome = "fetched" if fetched else "prefilled" if reused else "recomputed"
        else:
            fetched, reused = 0, min(self._reply.num_cached_tokens, num_prompt)
            outcome = "local" if reused else "recomputed"
        return CacheReport(
            outcome=outcome,
            reason=self._reason(),
            prompt_tokens=num_prompt,
            held_tokens=plan.held_tokens,
            reused_tokens=reused,
            fetched_tokens=fetched,
            computed_tokens=num_prompt - reused - fetched,
            diverged_at=plan.diverged_at,
            timings_s=self._timings(),
            choice=plan.choice,
        )

    def _handover_failed(self) -> bool:
        """Tell whether D computed the prompt itself after all, for it could not read what P had computed."""
        return self._prefilled is not None and self._reply.num_cached_tokens < len(self.plan.prompt.token_ids)

    def _observed(self, cache: CacheReport) -> dict[str, Any]:
        """Return what the home learns from (`core.cost.Observed`)."""
        # Where D computed after all, the report is of D's part, and nothing can be told of the others.
        prefilled = None if self._handover_failed() else self._prefilled
        timings = cache.timings_s
        return {
            "prompt_tokens": cache.prompt_tokens,
            "reused_tokens": cache.reused_tokens,
            "fetched_tokens": cache.fetched_tokens,
            "prefill_s": None if prefilled is None else timings.prefill,
            "fetch_s": timings.fetch,
            "handover_s": None if self._handover_failed() else timings.handover,
            "pair": None if prefilled is None else prefilled.url,
            "failed_pairs": self._failed_urls if prefilled is None else prefilled.failed_urls,
            "is_read_failed": prefilled is not None and prefilled.reason in {"read_failed", "ticket_late"},
        }

    def _reason(self) -> Reason:
        plan = self.plan
        if self._handover_failed():
            return "read_failed"
        if self._prefill_reason is not None:
            return self._prefill_reason
        if self._prefilled is not None and self._prefilled.reason is not None:
            return self._prefilled.reason  # type: ignore[return-value]
        if plan.asked in {"recompute", "prefill", "local"}:
            return "forced"
        if plan.diverged_at is not None and plan.ticket_reason != "over_budget":
            # Behind this nothing could be read, whatever else became of the lease; and it may have left too little.
            return plan.changed or "messages_changed"
        if plan.lease_reason is not None:
            return plan.lease_reason
        if plan.ticket_reason is not None:
            return plan.ticket_reason
        return "forced" if plan.asked is not None else "cheapest"

    def _timings(self) -> Timings:
        clock, prefilled = self._clock, self._prefilled
        since = clock.prefilled_s if clock.prefilled_s is not None else clock.begun_s
        return Timings(
            render=clock.rendered_s - clock.started_s,
            begin=clock.begun_s - clock.rendered_s,
            prefill=None if clock.prefilled_s is None else clock.prefilled_s - clock.begun_s,
            fetch=None if prefilled is None else prefilled.fetch_s,
            handover=None if clock.first_token_s is None else clock.first_token_s - since,
            ttft=None if clock.first_token_s is None else clock.first_token_s - clock.started_s,
        )


class EngineTap:
    """The engine client that one turn's chat serving sees: everything is the real one's, but `generate`."""

    def __init__(self, engine_client: Any, turn: Turn) -> None:
        self._engine_client = engine_client
        self._turn = turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine_client, name)

    def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        """Conduct the turn (see `Turn.generate`)."""
        return self._turn.generate(self._engine_client, prompt, params, request_id, **options)
