"""Moves turns through a fleet: a discrete-event simulation on simpy's clock.

The way of a turn, one event each: `_start` (its home looks up the lease) -> `_ready` (P has what D held) ->
`_computed` (P is done, D may have its ticket back) -> `_arrived` (D has the KV; it waits for blocks) -> `_step`
(its answer ends, its blocks become the lease). A turn that D computes itself goes from `_start` to `_arrived` and
`_computed_here`. Nothing happens between events, and there is one process only, the clock: a process for each
session would take several times as long.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Any, Final

import simpy

from bidikv_sdk.wire import Route
from server_ext.analysis.memory import DecodeMemory, chunk_rates
from server_ext.core.gaps import TOOL_PREFIX
from server_ext.core.settings import HomeSettings

from .engines import DecodeEngine, PrefillEngine
from .rates import FleetRates
from .results import Recorder, Results
from .turn import Session, Turn

if TYPE_CHECKING:
    from server_ext.traffic import PlannedSession

_TOOL: Final = TOOL_PREFIX + "any"
_WARM_UP: Final = 0.25
"""Of the time in which sessions begin: what comes before is left out of the figures."""
_EXPIRY_MARGIN_S: Final = 5.0
"""A reader declines a ticket with less to go."""
_NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """A fleet, and how it is run.

    Raises:
        ValueError: a value makes no sense; the text names it.
    """

    num_prefill: int
    """0: every turn is computed where it is decoded."""
    num_decode: int
    rates: FleetRates
    settings: HomeSettings
    route: Route = "fetch"
    has_prefill_cache: bool = True
    """Whether a prefill engine finds in its own prefix cache what it computed before, as far as its pool reaches."""
    holds_tools: bool = False
    """Whether agents keep their lease alive during tool calls (`session.hold`), up to the server's `max_ttl_s`."""
    chunk_tokens: int = 256
    """What leases are counted in; fewer is finer and slower."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("num_prefill", self.num_prefill, 0),
            ("num_decode", self.num_decode, 1),
            ("chunk_tokens", self.chunk_tokens, 1),
            ("seed", self.seed, 0),
        ):
            if value < least:
                msg = f"{name} is {value}; give at least {least}"
                raise ValueError(msg)


class Fleet:
    """One run of one fleet."""

    def __init__(self, config: FleetConfig) -> None:
        rates = config.rates
        # The table counts in chunks; the least to fetch is compared in tokens, here.
        settings = replace(config.settings, min_fetch_tokens=0)
        self._config = config
        self._rates = rates
        self._route: Route = "local" if not config.num_prefill else config.route
        self._clock = simpy.Environment()
        self._random = Random(config.seed)  # noqa: S311 (a simulation's choices, no secrets)
        cache_tokens = rates.pool_tokens if config.has_prefill_cache else 0
        self.prefills = [PrefillEngine(str(number), cache_tokens) for number in range(config.num_prefill)]
        computing = chunk_rates(rates.prefill_s_per_token, rates.attention_tokens, config.chunk_tokens)
        self.decodes = [
            DecodeEngine(
                DecodeMemory(settings, computing, pool_tokens=rates.pool_tokens, chunk_tokens=config.chunk_tokens),
                rates,
                config.settings,
            )
            for _ in range(config.num_decode)
        ]
        if rates.shares_machines:
            for prefill, home in zip(self.prefills, self.decodes, strict=False):
                prefill.neighbour, home.neighbour = home, prefill
        self._recorder = Recorder()
        self._num_turns = 0

    def run(
        self,
        sessions: "Iterator[PlannedSession]",
        *,
        last_start_s: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Results:
        """Run sessions to their end, once.

        Args:
            sessions: in the order of their start.
            last_start_s: when the last one begins, about: the figures are of the turns from a quarter of that time
                up to it. None: of all turns.
            on_progress: told the number of sessions that have begun, now and then.
        """
        self._sessions = enumerate(sessions)
        self._on_progress = on_progress or (lambda _: None)
        self._open_next()
        if last_start_s is not None:
            for at_s in (_WARM_UP * last_start_s, last_start_s):
                self._at(at_s, self._take_busy)
        self._recorder.window_s = (0.0, _NEVER) if last_start_s is None else (_WARM_UP * last_start_s, last_start_s)
        self._clock.run()
        return self._recorder.results(self._config, self.prefills, self.decodes, end_s=self._clock.now)

    # ---------------------------------------------------------------- the clock

    def _at(self, delay_s: float, callback: Callable[[Any], None], value: Any = None) -> None:
        callbacks = self._clock.timeout(delay_s, value).callbacks
        callbacks.append(callback)

    def _take_busy(self, _event: Any) -> None:
        self._recorder.take_busy(self.prefills, self.decodes, now_s=self._clock.now)

    # ---------------------------------------------------------------- sessions

    def _open_next(self, event: Any = None) -> None:
        """Begin the session that is due, and wait for the next."""
        if event is not None:
            number, plan = event.value
            self._begin_turn(Session(number, plan, self.decodes[self._home(number)]))
            if number % 1000 == 0:
                self._on_progress(number)
        following = next(self._sessions, None)
        if following is not None:
            self._at(max(0.0, following[1].start_s - self._clock.now), self._open_next, following)

    def _home(self, number: int) -> int:
        # As even, and as deaf to load, as rendezvous hashing over the engines.
        digest = blake2b(b"%d" % number, digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(self.decodes)

    def _start(self, event: Any) -> None:
        self._begin_turn(event.value)

    def _begin_turn(self, session: Session) -> None:
        """Let the home look up the lease, and send the turn on its way."""
        now_s, home, route = self._clock.now, session.home, self._route
        plan = session.plan.turns[session.next_turn]
        session.next_turn += 1
        self._num_turns += 1
        turn = Turn(session, plan, session.next_turn, now_s, "fetch" if route == "auto" else route)
        if turn.prompt_tokens + plan.output_tokens > self._rates.max_context_tokens:
            self._recorder.refuse("over_context")
            return
        turn.prefill = self._choose() if self.prefills else None
        self._look_up(turn, str(self._num_turns))
        ready_s = now_s + self._rates.control_s + self._rates.control_steps * home.batch.step_s
        turn.idle_s = self._rates.control_s
        if turn.way == "local":
            turn.cached_tokens = turn.request.cached_tokens
            self._at(ready_s - now_s, self._arrived, turn)
        else:
            self._to_prefill(turn, ready_s)

    def _look_up(self, turn: Turn, nonce: str) -> None:
        """Ask the home for the lease, and for the way where it chooses."""
        now_s, session = self._clock.now, turn.session
        home, want_ticket, routed = session.home, turn.way == "fetch", None
        if self._route == "auto":
            pairs = (turn.prefill.name,) if turn.prefill is not None else ()
            routed = home.routing.begin(
                nonce, session.key, "auto", prompt_tokens=turn.prompt_tokens, pairs=pairs, now_s=now_s
            )
        request = turn.request = home.memory.begin(
            session.key,
            "",
            nonce,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.plan.output_tokens,
            shared_tokens=min(turn.kept_tokens, turn.prompt_tokens - 1),
            want_ticket=want_ticket if routed is None else routed.wants_ticket,
            now_s=now_s,
        )
        if routed is not None:
            diverged_at = turn.kept_tokens if request.begun.diverged_at is not None else None
            turn.way = routed.settled(request.begun.ticket, request.held_tokens, diverged_at).way

    # ---------------------------------------------------------------- on P

    def _to_prefill(self, turn: Turn, ready_s: float) -> None:
        now_s, rates, home = self._clock.now, self._rates, turn.session.home
        prefill = turn.prefill
        assert prefill is not None  # noqa: S101 (only with prefill engines does a turn go here)
        held, begun = turn.request.held_tokens, turn.request.begun
        cached = prefill.num_cached(turn.session.number, min(turn.kept_tokens, turn.prompt_tokens - 1))
        turn.cached_tokens = cached
        # vLLM looks at what waits when the prompt before it is computed: the read begins then, not before.
        look_s = max(ready_s, prefill.free_s())
        settings = self._config.settings
        if begun.ticket is None or held <= cached or held < settings.min_fetch_tokens:
            self._at(ready_s - now_s, self._ready, turn)
        elif look_s - now_s + _EXPIRY_MARGIN_S >= settings.ticket_ttl_s:
            turn.is_ticket_late = True
            self._at(ready_s - now_s, self._ready, turn)
        else:
            turn.fetched_tokens = held - cached
            duration_s = turn.fetched_tokens * rates.fetch_s_per_token
            turn.idle_s += duration_s + rates.fetch_fixed_s
            sent_s = home.outbound.reserve(duration_s, now_s=look_s)
            end_s = max(sent_s, prefill.inbound.reserve(duration_s, now_s=look_s)) + rates.fetch_fixed_s
            turn.fetch_s = end_s - look_s
            self._at(end_s - now_s, self._ready, turn)

    def _choose(self) -> PrefillEngine:
        """Return the shorter queue of two: nearly as good as the shortest of all, and as cheap for many."""
        prefills = self.prefills
        if len(prefills) == 1:
            return prefills[0]
        one, two = self._random.sample(prefills, 2)
        return one if one.free_s() <= two.free_s() else two

    def _ready(self, event: Any) -> None:
        """Put a prompt into P's queue: what is fetched for it is there."""
        turn: Turn = event.value
        prefill = turn.prefill
        assert prefill is not None  # noqa: S101 (as above)
        turn.compute_s = self._rates.prefill_s(turn.prompt_tokens, turn.cached_tokens + turn.fetched_tokens)
        turn.idle_s += turn.compute_s
        prefill.add(turn, now_s=self._clock.now)
        if len(prefill.queue) == 1:
            self._wake_prefill(prefill)
            self._share(prefill, prefill.neighbour)

    def _wake_prefill(self, prefill: PrefillEngine) -> None:
        """See to it that P is looked at when its prompt is computed; what was foreseen before no longer counts."""
        prefill.num_changes += 1
        delay_s = max(0.0, prefill.next_end_s() - self._clock.now)
        self._at(delay_s, self._computed, (prefill, prefill.num_changes))

    def _share(self, prefill: PrefillEngine | None, home: DecodeEngine | None) -> None:
        """Let two engines on one machine take each other's time."""
        if prefill is None or home is None:
            return
        now_s, rates = self._clock.now, self._rates
        home.batch.stretch(rates.decode_slowdown if prefill.queue else 1.0, now_s=now_s)
        self._wake(home)
        if prefill.set_speed(1 / rates.prefill_slowdown if len(home.batch) else 1.0, now_s=now_s):
            self._wake_prefill(prefill)

    def _computed(self, event: Any) -> None:
        """Give the ticket back, and hand over what D has not."""
        prefill, num_changes = event.value
        if num_changes != prefill.num_changes:
            return
        now_s, rates = self._clock.now, self._rates
        turn = prefill.pop(now_s=now_s)
        home = turn.session.home
        if prefill.queue:
            self._wake_prefill(prefill)
        else:
            self._share(prefill, prefill.neighbour)
        turn.answered_s = now_s
        if turn.way != "recompute":
            prefill.cache(turn.session.number, turn.prompt_tokens)
        if turn.request.begun.ticket is not None:
            home.memory.table.return_ticket(turn.request.begun.ticket.ticket_id, now_s=now_s)
            if home.waiting:
                self._admit(home)
        # What is computed again carries a salt of its own, also on D.
        cached = 0 if turn.way == "recompute" else turn.request.cached_tokens
        duration_s = (turn.prompt_tokens - cached) * rates.handover_s_per_token
        turn.idle_s += duration_s + rates.handover_fixed_s + rates.step_s(1, turn.prompt_tokens)
        sent_s = prefill.outbound.reserve(duration_s, now_s=now_s)
        end_s = max(sent_s, home.inbound.reserve(duration_s, now_s=now_s)) + rates.handover_fixed_s
        self._at(end_s - now_s, self._arrived, turn)

    # ---------------------------------------------------------------- on D

    def _arrived(self, event: Any) -> None:
        home = event.value.session.home
        home.waiting.append(event.value)
        self._admit(home)

    def _admit(self, home: DecodeEngine) -> None:
        """Give blocks to what waits for them, in order."""
        now_s, waiting = self._clock.now, home.waiting
        while waiting:
            turn = waiting[0]
            if not home.memory.admit(turn.request, now_s=now_s):
                if not self._can_change(home):
                    waiting.popleft()
                    self._recorder.refuse("no_room")
                    home.memory.end(turn.request, "stop", now_s=now_s)
                    continue
                break
            waiting.popleft()
            if turn.way == "local":
                home.computing.append(turn)
                if len(home.computing) == 1:
                    self._compute_here(home)
            else:
                self._decode(home, turn, num_done=0, lag_steps=self._rates.handover_steps)
        self._wake(home)

    def _can_change(self, home: DecodeEngine) -> bool:
        """Tell whether something holds blocks that will give them back."""
        pool = home.memory.table.pool(now_s=self._clock.now)
        return bool(len(home.batch) or home.computing or pool.pending_ticket_blocks)

    def _compute_here(self, home: DecodeEngine) -> None:
        """Prefill the first of the queue on D, in chunks that share their steps with what decodes."""
        turn, now_s = home.computing[0], self._clock.now
        num_new = turn.prompt_tokens - turn.cached_tokens
        turn.compute_s = self._rates.prefill_s(turn.prompt_tokens, turn.cached_tokens)
        turn.idle_s += turn.compute_s
        num_steps = math.ceil(num_new / self._rates.step_tokens)
        duration_s = turn.compute_s + num_steps * home.batch.step_s
        home.batch.slow(turn.compute_s / num_steps, now_s=now_s)
        self._observe_step(home, num_new // num_steps)
        self._at(duration_s, self._computed_here, home)

    def _computed_here(self, event: Any) -> None:
        home = event.value
        turn = home.computing.popleft()
        home.batch.slow(0.0, now_s=self._clock.now)
        # The last chunk's step has made the first token.
        self._decode(home, turn, num_done=1, lag_steps=0.0)
        turn.first_token_s = self._clock.now
        if home.computing:
            self._compute_here(home)
        self._wake(home)

    def _decode(self, home: DecodeEngine, turn: Turn, *, num_done: int, lag_steps: float) -> None:
        num_steps = turn.plan.output_tokens - num_done
        context_tokens = turn.prompt_tokens + turn.plan.output_tokens // 2
        turn.first_token_s = home.batch.join(
            turn, num_steps, context_tokens, lag_steps=lag_steps, now_s=self._clock.now
        )
        self._share(home.neighbour, home)
        self._observe_step(home, 0)

    def _observe_step(self, home: DecodeEngine, num_prompt_tokens: int) -> None:
        if self._route == "auto" and len(home.batch):
            home.learned.observe_step(
                home.batch.step_s, num_decodes=len(home.batch), num_prompt_tokens=num_prompt_tokens
            )

    def _wake(self, home: DecodeEngine) -> None:
        """See to it that the batch is looked at when its next sequence ends, at the latest."""
        if len(home.batch):
            at_s = max(home.batch.next_end_s(), self._clock.now)
            if at_s < home.wake_s:
                home.wake_s = at_s
                self._at(at_s - self._clock.now, self._step, home)

    def _step(self, event: Any) -> None:
        """End what has its last token; an event that an earlier one made needless does nothing."""
        home, now_s = event.value, self._clock.now
        if home.wake_s > now_s:
            return
        home.wake_s = _NEVER
        for turn in list(home.batch.pop_ended(now_s=now_s)):
            self._end(home, turn)
        if home.waiting:
            self._admit(home)
        else:
            self._wake(home)
        self._share(home.neighbour, home)

    def _end(self, home: DecodeEngine, turn: Turn) -> None:
        """Make the turn's blocks the lease, and come back after the gap."""
        now_s, session = self._clock.now, turn.session
        turns = session.plan.turns
        following = turns[session.next_turn] if session.next_turn < len(turns) else None
        calls_tool = following is not None and following.after_tool
        home.memory.end(turn.request, _TOOL if calls_tool else "stop", now_s=now_s)
        self._recorder.add(turn, is_forced=self._route not in {"auto", "fetch"}, end_s=now_s)
        if self._route == "auto":
            home.routing.settle(turn.request.nonce, turn.observed(), now_s=now_s)
        if following is None:
            return
        if calls_tool and self._config.holds_tools:
            # Renewals come before the end: what is left at the next turn is one life, more or less.
            ttl_s = following.gap_s + self._config.settings.default_ttl_s
            home.memory.extend(session.key, ttl_s, now_s=now_s)
        session.history_tokens = turn.prompt_tokens + turn.plan.output_tokens
        self._at(following.gap_s, self._start, session)
