"""Moves turns through a fleet: a discrete-event simulation on simpy's clock.

The way of a turn, one event each: `_begin_turn` (its home looks up the lease) -> `_ready` (P has what D held) ->
`_computed` (P is done, D may have its ticket back) -> `_arrived` (D has the KV; it waits for blocks) -> `_step`
(its answer ends, its blocks become the lease). A turn that D computes itself goes from `_begin_turn` to `_arrived` and
`_computed_here`. Nothing happens between events, and there is nothing but the clock: a coroutine for each
session would take several times as long.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Final

from server_ext.analysis.memory import DecodeMemory, chunk_rates
from server_ext.core.gaps import TOOL_PREFIX

from .clock import Clock
from .config import FleetConfig, part
from .engines import DecodeEngine, PrefillEngine
from .results import Recorder
from .turn import Session, Turn

if TYPE_CHECKING:
    from bidikv_sdk.wire import Route
    from server_ext.traffic import PlannedSession

_TOOL: Final = TOOL_PREFIX + "any"
_WARM_UP: Final = 0.25
"""Of the time in which sessions begin: what comes before is left out of the figures."""
_EXPIRY_MARGIN_S: Final = 5.0
"""A reader declines a ticket with less to go."""
_NEVER: Final = float("inf")
_TOLD_EVERY: Final = 500
"""Sessions between two reports of progress."""


class Fleet:
    """One run of one fleet, or of one of its groups."""

    def __init__(self, config: FleetConfig, group: int = 0) -> None:
        rates = config.rates
        # The table counts in chunks; the least to fetch is compared in tokens, here.
        settings = replace(config.settings, min_fetch_tokens=0)
        self._config = config
        self._rates = rates
        self._route: Route = "local" if not config.num_prefill else config.route
        self._clock = Clock()
        self._random = Random(config.seed * config.num_groups + group)  # noqa: S311 (a simulation's choices, no secrets)
        cache_tokens = rates.pool_tokens if config.has_prefill_cache else 0
        numbers = part(config.num_prefill, group, config.num_groups)
        self.prefills = [PrefillEngine(str(number), rates, cache_tokens) for number in numbers]
        computing = chunk_rates(rates.prefill_s_per_token, rates.attention_tokens, config.chunk_tokens)
        self.decodes = [
            DecodeEngine(
                DecodeMemory(settings, computing, pool_tokens=rates.pool_tokens, chunk_tokens=config.chunk_tokens),
                rates,
                config.settings,
            )
            for _ in config.homes(group)
        ]
        self._first_home = config.homes(group).start
        if rates.shares_machines:
            for prefill, home in zip(self.prefills, self.decodes, strict=False):
                prefill.neighbour, home.neighbour = home, prefill
        self._recorder = Recorder()
        self._num_turns = 0

    def run(
        self,
        sessions: "Iterator[PlannedSession]",
        *,
        numbers: "Iterable[int] | None" = None,
        last_start_s: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Recorder:
        """Run sessions to their end, once; return what was seen.

        Args:
            sessions: in the order of their start; those of the group.
            numbers: what they are called; their homes follow from it. None: 0 and up.
            last_start_s: when the last one begins, about: the figures are of the turns from a quarter of that time
                up to it. None: of all turns.
            on_progress: told the number of sessions that have begun, now and then.
        """
        self._sessions = zip(count() if numbers is None else numbers, sessions, strict=False)
        self._on_progress = on_progress or (lambda _: None)
        self._next_told = 0
        self._open_next()
        if last_start_s is not None:
            for at_s in (_WARM_UP * last_start_s, last_start_s):
                self._clock.after(at_s, self._take_busy)
        self._recorder.window_s = (0.0, _NEVER) if last_start_s is None else (_WARM_UP * last_start_s, last_start_s)
        self._clock.run()
        self._recorder.close(self._config, self.prefills, self.decodes, end_s=self._clock.now_s)
        return self._recorder

    # ---------------------------------------------------------------- the clock

    def _take_busy(self, _: None) -> None:
        self._recorder.take_busy(self.prefills, self.decodes, now_s=self._clock.now_s)

    # ---------------------------------------------------------------- sessions

    def _open_next(self, planned: "tuple[int, PlannedSession] | None" = None) -> None:
        """Begin the session that is due, and wait for the next."""
        if planned is not None:
            number, plan = planned
            self._begin_turn(Session(number, plan, self.decodes[self._config.home(number) - self._first_home]))
            if number >= self._next_told:
                self._on_progress(number)
                self._next_told = number + _TOLD_EVERY
        following = next(self._sessions, None)
        if following is not None:
            self._clock.after(max(0.0, following[1].start_s - self._clock.now_s), self._open_next, following)

    def _begin_turn(self, session: Session) -> None:
        """Let the home look up the lease, and send the turn on its way."""
        now_s, home, route = self._clock.now_s, session.home, self._route
        plan = session.plan.turns[session.next_turn]
        session.next_turn += 1
        self._num_turns += 1
        turn = Turn(session, plan, session.next_turn, now_s, "fetch" if route == "auto" else route)
        if turn.prompt_tokens + plan.output_tokens > self._rates.max_context_tokens:
            self._recorder.refuse("over_context")
            return
        turn.prefill = self._choose() if self.prefills else None
        self._look_up(turn, str(self._num_turns), now_s=now_s)
        ready_s = now_s + self._rates.control_s + self._rates.control_steps * home.batch.step_s
        turn.idle_s = self._rates.control_s
        if turn.way == "local":
            turn.cached_tokens = turn.request.cached_tokens
            self._clock.after(ready_s - now_s, self._arrived, turn)
        else:
            self._to_prefill(turn, ready_s, now_s=now_s)

    def _look_up(self, turn: Turn, nonce: str, *, now_s: float) -> None:
        """Ask the home for the lease, and for the way where it chooses."""
        session = turn.session
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

    def _to_prefill(self, turn: Turn, ready_s: float, *, now_s: float) -> None:
        rates, home = self._rates, turn.session.home
        prefill = turn.prefill
        assert prefill is not None  # noqa: S101 (only with prefill engines does a turn go here)
        held, begun = turn.request.held_tokens, turn.request.begun
        cached = prefill.num_cached(turn.session.number, min(turn.kept_tokens, turn.prompt_tokens - 1))
        turn.cached_tokens = cached
        # vLLM looks at what waits between two steps: the read begins then, not before, beside what is computed next.
        look_s = max(ready_s, prefill.next_end_s())
        settings = self._config.settings
        if begun.ticket is None or held <= cached or held < settings.min_fetch_tokens:
            self._clock.after(ready_s - now_s, self._ready, turn)
        elif look_s - now_s + _EXPIRY_MARGIN_S >= settings.ticket_ttl_s:
            turn.is_ticket_late = True
            self._clock.after(ready_s - now_s, self._ready, turn)
        else:
            turn.fetched_tokens = held - cached
            duration_s = turn.fetched_tokens * rates.fetch_s_per_token
            turn.idle_s += duration_s + rates.fetch_fixed_s
            sent_s = home.outbound.reserve(duration_s, now_s=look_s)
            end_s = max(sent_s, prefill.inbound.reserve(duration_s, now_s=look_s)) + rates.fetch_fixed_s
            turn.fetch_s = end_s - look_s
            self._clock.after(end_s - now_s, self._ready, turn)

    def _choose(self) -> PrefillEngine:
        """Return the shorter queue of two: nearly as good as the shortest of all, and as cheap for many."""
        prefills, draw = self.prefills, self._random.random
        num_others = len(prefills) - 1
        if not num_others:
            return prefills[0]
        # Two different ones; `sample` takes ten times as long.
        first, second = int(draw() * (num_others + 1)), int(draw() * num_others)
        one, two = prefills[first], prefills[second + (second >= first)]
        return one if one.free_s() <= two.free_s() else two

    def _ready(self, turn: Turn) -> None:
        """Put a prompt into P's queue: what is fetched for it is there."""
        now_s, prefill = self._clock.now_s, turn.prefill
        assert prefill is not None  # noqa: S101 (as above)
        num_present = turn.cached_tokens + turn.fetched_tokens
        turn.num_new = turn.prompt_tokens - num_present
        turn.compute_s = self._rates.prefill_s(turn.prompt_tokens, num_present)
        turn.idle_s += turn.compute_s
        if prefill.add(turn, now_s=now_s):
            self._wake_prefill(prefill, now_s=now_s)
            self._share(prefill, prefill.neighbour, now_s=now_s)

    def _wake_prefill(self, prefill: PrefillEngine, *, now_s: float) -> None:
        """See to it that P is looked at when its step ends; what was foreseen before no longer counts."""
        prefill.num_changes += 1
        delay_s = max(0.0, prefill.next_end_s() - now_s)
        self._clock.after(delay_s, self._computed, (prefill, prefill.num_changes))

    def _share(self, prefill: PrefillEngine | None, home: DecodeEngine | None, *, now_s: float) -> None:
        """Let two engines on one machine take each other's time."""
        if prefill is None or home is None:
            return
        rates = self._rates
        home.batch.stretch(rates.decode_slowdown if prefill.computing else 1.0, now_s=now_s)
        self._wake(home, now_s=now_s)
        if prefill.set_speed(1 / rates.prefill_slowdown if home.batch.num_running else 1.0, now_s=now_s):
            self._wake_prefill(prefill, now_s=now_s)

    def _computed(self, foreseen: tuple[PrefillEngine, int]) -> None:
        """Hand over what P has computed, and let it go on."""
        prefill, num_changes = foreseen
        if num_changes != prefill.num_changes:
            return
        now_s = self._clock.now_s
        computed = prefill.pop(now_s=now_s)
        if prefill.computing:
            self._wake_prefill(prefill, now_s=now_s)
        else:
            self._share(prefill, prefill.neighbour, now_s=now_s)
        for turn in computed:
            self._hand_over(prefill, turn, now_s=now_s)

    def _hand_over(self, prefill: PrefillEngine, turn: Turn, *, now_s: float) -> None:
        """Give the ticket back, and send D what it has not."""
        rates, home = self._rates, turn.session.home
        turn.answered_s = now_s
        if turn.way != "recompute":
            prefill.cache(turn.session.number, turn.prompt_tokens)
        if turn.request.begun.ticket is not None:
            home.memory.return_ticket(turn.request.begun.ticket.ticket_id, now_s=now_s)
            if home.waiting:
                self._admit(home, now_s=now_s)
        # What is computed again carries a salt of its own, also on D.
        cached = 0 if turn.way == "recompute" else turn.request.cached_tokens
        duration_s = (turn.prompt_tokens - cached) * rates.handover_s_per_token
        turn.idle_s += duration_s + rates.handover_fixed_s + rates.step_s(1, turn.prompt_tokens)
        sent_s = prefill.outbound.reserve(duration_s, now_s=now_s)
        end_s = max(sent_s, home.inbound.reserve(duration_s, now_s=now_s)) + rates.handover_fixed_s
        self._clock.after(end_s - now_s, self._arrived, turn)

    # ---------------------------------------------------------------- on D

    def _arrived(self, turn: Turn) -> None:
        home = turn.session.home
        home.waiting.append(turn)
        self._admit(home, now_s=self._clock.now_s)

    def _admit(self, home: DecodeEngine, *, now_s: float) -> None:
        """Give blocks to what waits for them, in order."""
        waiting = home.waiting
        while waiting:
            turn = waiting[0]
            if not home.memory.admit(turn.request, now_s=now_s):
                if not self._can_change(home, now_s=now_s):
                    waiting.popleft()
                    self._recorder.refuse("no_room")
                    home.memory.end(turn.request, "stop", now_s=now_s)
                    continue
                break
            waiting.popleft()
            if turn.way == "local":
                home.computing.append(turn)
                if len(home.computing) == 1:
                    self._compute_here(home, now_s=now_s)
            else:
                self._decode(home, turn, num_done=0, lag_steps=self._rates.handover_steps, now_s=now_s)
        self._wake(home, now_s=now_s)

    def _can_change(self, home: DecodeEngine, *, now_s: float) -> bool:
        """Tell whether something holds blocks that will give them back."""
        pool = home.memory.table.pool(now_s=now_s)
        return bool(home.batch.num_running or home.computing or pool.pending_ticket_blocks)

    def _compute_here(self, home: DecodeEngine, *, now_s: float) -> None:
        """Prefill the first of the queue on D, in chunks that share their steps with what decodes."""
        turn = home.computing[0]
        num_new = turn.prompt_tokens - turn.cached_tokens
        turn.compute_s = self._rates.prefill_s(turn.prompt_tokens, turn.cached_tokens)
        turn.idle_s += turn.compute_s
        num_steps = math.ceil(num_new / self._rates.step_tokens)
        duration_s = turn.compute_s + num_steps * home.batch.step_s
        home.batch.slow(turn.compute_s / num_steps, now_s=now_s)
        self._observe_step(home, num_new // num_steps)
        self._clock.after(duration_s, self._computed_here, home)

    def _computed_here(self, home: DecodeEngine) -> None:
        now_s, turn = self._clock.now_s, home.computing.popleft()
        home.batch.slow(0.0, now_s=now_s)
        # The last chunk's step has made the first token.
        self._decode(home, turn, num_done=1, lag_steps=0.0, now_s=now_s)
        turn.first_token_s = now_s
        if home.computing:
            self._compute_here(home, now_s=now_s)
        self._wake(home, now_s=now_s)

    def _decode(self, home: DecodeEngine, turn: Turn, *, num_done: int, lag_steps: float, now_s: float) -> None:
        num_steps = turn.plan.output_tokens - num_done
        context_tokens = turn.prompt_tokens + turn.plan.output_tokens // 2
        turn.first_token_s = home.batch.join(turn, num_steps, context_tokens, lag_steps=lag_steps, now_s=now_s)
        self._share(home.neighbour, home, now_s=now_s)
        self._observe_step(home, 0)

    def _observe_step(self, home: DecodeEngine, num_prompt_tokens: int) -> None:
        batch = home.batch
        if self._route == "auto" and batch.num_running:
            home.learned.observe_step(batch.step_s, num_decodes=batch.num_running, num_prompt_tokens=num_prompt_tokens)

    def _wake(self, home: DecodeEngine, *, now_s: float) -> None:
        """See to it that the batch is looked at when its next sequence ends, at the latest."""
        if home.batch.num_running:
            at_s = max(home.batch.next_end_s(), now_s)
            if at_s < home.wake_s:
                home.wake_s = at_s
                self._clock.after(at_s - now_s, self._step, home)

    def _step(self, home: DecodeEngine) -> None:
        """End what has its last token; an event that an earlier one made needless does nothing."""
        now_s = self._clock.now_s
        if home.wake_s > now_s:
            return
        home.wake_s = _NEVER
        for turn in home.batch.pop_ended(now_s=now_s):
            self._end(home, turn, now_s=now_s)
        if home.waiting:
            self._admit(home, now_s=now_s)
        else:
            self._wake(home, now_s=now_s)
        self._share(home.neighbour, home, now_s=now_s)

    def _end(self, home: DecodeEngine, turn: Turn, *, now_s: float) -> None:
        """Make the turn's blocks the lease, and come back after the gap."""
        session = turn.session
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
        self._clock.after(following.gap_s, self._begin_turn, session)
