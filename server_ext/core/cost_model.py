"""Chooses which way each turn goes: the least expected time to first token, under a guard for the streams on D.

A turn: `choose` (or `take`, where the caller forces a way) when it begins, then `settle` with what was observed, or
`abandon`. Three rules beside the least estimate:

- Guard: turns that are appended on D hold up what generates there. On the mean of about half a minute they may do so
  for no more than a set share of the time.
- Trials: what is not taken is not measured, so a way that would win were its rates at their best is tried again now
  and then: one turn in so many at the most, and only from a credit that is a small share of all turns' time. A trial
  is charged what it really cost, so they are bounded whatever they find.
- A P that does not answer is left alone for a while, longer each time.

Pure; imports `cost`, and `rates` and `records` for their types.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .cost import WAYS, Choice, Observed, Situation, Start, Way, estimate_s

if TYPE_CHECKING:
    from .rates import LearnedRates
    from .records import Key

_GUARD_WINDOW_S: Final = 30.0
# At most one turn in so many is a trial: too few to be seen in a 95th percentile.
_TRIAL_TURNS: Final = 32
_TRIAL_SHARE: Final = 0.02
# The better way must be better by more than what nobody notices.
_TRIAL_GAIN: Final = 0.9
# Of one turn in the share of P's cache that survives between a session's turns.
_SHARE_WEIGHT: Final = 0.3
_FIRST_PAUSE_S: Final = 2.0
_MAX_PAUSE_S: Final = 60.0
_MAX_FAILURES: Final = 5


@dataclass(slots=True)
class _Peer:
    """What is known of one P beside its rates."""

    busy_until_s: float = -math.inf
    cached_share: float = 0.5
    num_failures: int = 0
    paused_until_s: float = -math.inf


@dataclass(slots=True)
class _Trials:
    """When each way was taken last, and what trials may cost."""

    num_turns: int = 0
    last_turns: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    """The number of the last turn of each way."""
    last_trial: int = 0
    credit_s: float = 0.0


class CostModel:
    """Chooses the way of each turn of one decode engine, and learns from how it went.

    Deterministic, bounded memory, O(1) per turn. Not thread-safe.

    Args:
        rates: learned from the turns that are settled here.
        token_bytes: KV bytes of one token.
        itl_guard: by what share the inter-token latency on D may rise through turns that are appended there; 0 keeps
            them off D while anything generates.
        max_sessions: most sessions remembered.
        min_fetch_tokens: fewer are never fetched.
    """

    def __init__(
        self,
        rates: "LearnedRates",
        *,
        token_bytes: float,
        itl_guard: float = 0.25,
        max_sessions: int = 100_000,
        min_fetch_tokens: int = 64,
    ) -> None:
        self.rates = rates
        self._token_bytes = token_bytes
        self._itl_guard = itl_guard
        self._max_sessions = max_sessions
        self._min_fetch_tokens = max(min_fetch_tokens, 1)
        self._peers: dict[str, _Peer] = {}
        self._prefilled: OrderedDict[Key, tuple[str, int]] = OrderedDict()
        self._open: OrderedDict[str, tuple[Key, Choice, Situation]] = OrderedDict()
        self._decode_busy_until_s = -math.inf
        self._stall_s, self._stalled_s = 0.0, -math.inf
        self._trials = _Trials()

    # ---------------------------------------------------------------- a turn

    def choose(self, nonce: str, start: Start, *, now_s: float, ways: Collection[Way] = WAYS) -> Choice:
        """Choose the way of a turn that begins.

        Args:
            nonce: the turn's name, for `settle` and `abandon`.
            start: what the turn finds.
            now_s: monotonic seconds.
            ways: that may be taken; where none of them is possible the turn goes `local`.
        """
        pair = self._first_ready(start.pairs, now_s=now_s)
        situation = self._situation(start, pair or "", now_s=now_s)
        possible = self._possible(situation, ways, has_pair=pair is not None)
        estimates_s = {way: self._estimate_s(way, situation) for way in possible}
        choice = self._pick(estimates_s, situation, now_s=now_s)
        self._begin(nonce, start.key, choice, situation, now_s=now_s)
        return choice

    def take(self, nonce: str, start: Start, way: Way, *, now_s: float) -> Choice:
        """Note that a turn goes a way that was forced (see `choose`)."""
        situation = self._situation(start, self._first_ready(start.pairs, now_s=now_s) or "", now_s=now_s)
        choice = Choice(way, {way: self._estimate_s(way, situation)}, "forced")
        self._begin(nonce, start.key, choice, situation, now_s=now_s)
        return choice

    def settle(self, nonce: str, observed: Observed, *, now_s: float) -> None:
        """Learn from a turn that has ended; one that did not begin here is ignored."""
        opened = self._open.pop(nonce, None)
        if opened is None:
            return
        key, choice, situation = opened
        if choice.reason == "trial":
            taken_s = (observed.prefill_s or 0.0) + (observed.handover_s or 0.0)
            self._trials.credit_s -= taken_s - min(choice.estimates_s.values())
        for pair in observed.failed_pairs:
            self._pause(pair, now_s=now_s)
        if observed.pair is None:
            self._learn_append(observed, situation)
            return
        is_recompute = choice.way == "recompute"  # its blocks lie under salts of their own, on P and on D
        self._learn_pair(observed.pair, observed, situation, learns_handover=not is_recompute)
        if not is_recompute:
            self._learn_share(observed.pair, observed, situation)
            self._prefilled[key] = observed.pair, observed.prompt_tokens
            self._prefilled.move_to_end(key)
            if len(self._prefilled) > self._max_sessions:
                self._prefilled.popitem(last=False)

    def abandon(self, nonce: str) -> None:
        """Forget a turn that showed nothing (idempotent)."""
        self._open.pop(nonce, None)

    def forget(self, key: "Key") -> None:
        """Forget a session (idempotent)."""
        self._prefilled.pop(key, None)

    # ---------------------------------------------------------------- choosing

    def _estimate_s(self, way: Way, situation: Situation) -> float:
        return estimate_s(way, situation, self.rates, token_bytes=self._token_bytes)

    def _situation(self, start: Start, pair: str, *, now_s: float) -> Situation:
        peer = self._peers.get(pair, _NEW_PEER)
        last_pair, num_cached = self._prefilled.get(start.key, (pair, 0))
        if last_pair != pair:
            num_cached = 0
        if start.diverged_at is not None:
            num_cached = min(num_cached, start.diverged_at)
        return Situation(
            prompt_tokens=start.prompt_tokens,
            matched_tokens=start.matched_tokens,
            cached_tokens=num_cached,
            cached_share=peer.cached_share,
            num_running=start.num_running,
            decode_wait_s=max(self._decode_busy_until_s - now_s, 0.0),
            prefill_wait_s=max(peer.busy_until_s - now_s, 0.0),
            pair=pair,
        )

    def _first_ready(self, pairs: Collection[str], *, now_s: float) -> str | None:
        """Return the first P that is not left alone; None where all are."""
        for pair in pairs:
            if self._peers.get(pair, _NEW_PEER).paused_until_s <= now_s:
                return pair
        return None

    def _possible(self, situation: Situation, ways: Collection[Way], *, has_pair: bool) -> list[Way]:
        possible: list[Way] = ["local"] if "local" in ways else []
        if has_pair:
            if "fetch" in ways and situation.held_tokens >= self._min_fetch_tokens:
                possible.append("fetch")
            if "prefill" in ways:
                possible.append("prefill")
        return possible or ["local"]

    def _pick(self, estimates_s: Mapping[Way, float], situation: Situation, *, now_s: float) -> Choice:
        ranked = sorted(estimates_s, key=estimates_s.__getitem__)
        if len(ranked) == 1:
            return Choice(ranked[0], estimates_s, "only")
        allowed = [way for way in ranked if way != "local" or self._may_stall(situation, now_s=now_s)]
        trials, best = self._trials, allowed[0]
        for way in allowed[1:] if trials.num_turns - trials.last_trial >= _TRIAL_TURNS else ():
            is_due = trials.num_turns - trials.last_turns[way] >= _TRIAL_TURNS
            if is_due and estimates_s[way] - estimates_s[best] <= trials.credit_s:
                hoped_s = estimate_s(way, situation, self.rates.hoped(), token_bytes=self._token_bytes)
                if hoped_s < _TRIAL_GAIN * estimates_s[best]:
                    return Choice(way, estimates_s, "trial")
        return Choice(best, estimates_s, "cheapest" if best == ranked[0] else "guard")

    def _may_stall(self, situation: Situation, *, now_s: float) -> bool:
        if not situation.num_running:
            return True
        stall_s = self._stalled(now_s=now_s) + self._stall_of(situation)
        return stall_s <= self._itl_guard * _GUARD_WINDOW_S

    def _stall_of(self, situation: Situation) -> float:
        return self.rates.stall_s(situation.new_tokens, num_cached=situation.held_tokens)

    def _stalled(self, *, now_s: float) -> float:
        """Return for how much of the window streams on D waited for appended turns; older waits fade."""
        return self._stall_s * math.exp(min(self._stalled_s - now_s, 0.0) / _GUARD_WINDOW_S)

    def _begin(self, nonce: str, key: "Key", choice: Choice, situation: Situation, *, now_s: float) -> None:
        self._queue(choice, situation, now_s=now_s)
        trials = self._trials
        trials.num_turns += 1
        trials.last_turns[choice.way] = trials.num_turns
        trials.credit_s += _TRIAL_SHARE * min(choice.estimates_s.values())
        if choice.reason == "trial":
            trials.last_trial = trials.num_turns
        self._open[nonce] = key, choice, situation
        if len(self._open) > self._max_sessions:
            self._open.popitem(last=False)  # its turn timed out long ago

    def _queue(self, choice: Choice, situation: Situation, *, now_s: float) -> None:
        """Count what this turn puts before the next one."""
        num_new, num_held = situation.new_tokens, situation.held_tokens
        if choice.way == "local":
            work_s = self.rates.append_s(num_new, num_cached=num_held)
            self._decode_busy_until_s = max(self._decode_busy_until_s, now_s) + work_s
            if situation.num_running:
                self._stall_s = self._stalled(now_s=now_s) + self._stall_of(situation)
                self._stalled_s = now_s
            return
        peer = self._peers.setdefault(situation.pair, _Peer())
        num_before = num_held if choice.way == "fetch" else 0
        if choice.way != "recompute":
            num_before = max(num_before, round(situation.cached_share * min(situation.cached_tokens, num_held)))
        work_s = self.rates.prefill_s(situation.prompt_tokens - num_before, num_cached=num_before)
        peer.busy_until_s = max(peer.busy_until_s, now_s) + work_s

    # ---------------------------------------------------------------- learning

    def _pause(self, pair: str, *, now_s: float) -> None:
        """Leave a P alone that did not answer."""
        peer = self._peers.setdefault(pair, _Peer())
        peer.paused_until_s = now_s + min(_FIRST_PAUSE_S * 2**peer.num_failures, _MAX_PAUSE_S)
        peer.num_failures = min(peer.num_failures + 1, _MAX_FAILURES)
        peer.busy_until_s = now_s

    def _learn_share(self, pair: str, observed: Observed, situation: Situation) -> None:
        peer = self._peers.setdefault(pair, _Peer())
        if situation.cached_tokens > 0 and situation.pair == pair:
            share = min(observed.reused_tokens / situation.cached_tokens, 1.0)
            peer.cached_share += _SHARE_WEIGHT * (share - peer.cached_share)

    def _learn_append(self, observed: Observed, situation: Situation) -> None:
        if observed.handover_s is not None:
            seconds = _without(observed.handover_s, situation.decode_wait_s)
            num_cached = min(observed.reused_tokens, observed.prompt_tokens - 1)
            self.rates.observe_append(seconds, observed.prompt_tokens - num_cached, num_cached=num_cached)

    def _learn_pair(self, pair: str, observed: Observed, situation: Situation, *, learns_handover: bool) -> None:
        rates, peer = self.rates, self._peers.setdefault(pair, _Peer())
        peer.num_failures, peer.paused_until_s = 0, -math.inf
        num_cached = min(observed.reused_tokens + observed.fetched_tokens, observed.prompt_tokens - 1)
        num_computed = observed.prompt_tokens - num_cached
        num_bytes = round(observed.fetched_tokens * self._token_bytes)
        if observed.prefill_s is not None:
            seconds = _without(observed.prefill_s - (observed.fetch_s or 0.0), situation.prefill_wait_s)
            if observed.is_read_failed:
                # What the read would have spared was lost waiting for it: it cost all but the computing.
                num_bytes = round(situation.held_tokens * self._token_bytes)
                lost_s = seconds - rates.prefill_s(num_computed, num_cached=num_cached)
                rates.observe_fetch(lost_s, num_bytes, pair=pair)
            else:
                rates.observe_prefill(seconds, num_computed, num_cached=num_cached)
        if observed.fetch_s is not None and num_bytes:
            rates.observe_fetch(observed.fetch_s, num_bytes, pair=pair)
        if learns_handover and observed.handover_s is not None:
            num_bytes = round(situation.new_tokens * self._token_bytes)
            rates.observe_handover(observed.handover_s, num_bytes, pair=pair)


_NEW_PEER: Final = _Peer()
"""Stands for a P that was never asked; nobody changes it."""


def _without(seconds: float, wait_s: float) -> float:
    """Return what remains of a time when a foreseen wait is taken off, half at least: it may have been shorter."""
    return seconds - min(wait_s, seconds / 2)
