"""The parts of a fleet: prefill engines, decode engines, and the ports of the links between them.

They know what they take and when they are free; `fleet` moves turns from one to the next. Time is `now_s`.
"""

import heapq
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from server_ext.analysis.memory import DecodeMemory
from server_ext.core.rates import ConstantRates, LearnedRates
from server_ext.core.routing import Routing

from .rates import FleetRates

if TYPE_CHECKING:
    from server_ext.core.settings import HomeSettings

    from .turn import Turn


class Port:
    """One direction of an engine's network port: transfers share its bandwidth, first come, first served."""

    __slots__ = ("busy_s", "free_s")

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0

    def reserve(self, duration_s: float, *, now_s: float) -> float:
        """Take the port for so long from when it is free; return when that ends."""
        self.free_s = max(self.free_s, now_s) + duration_s
        self.busy_s += duration_s
        return self.free_s


class PrefillEngine:
    """P: computes prompts in the order in which they come, and keeps the last in its prefix cache.

    As vLLM's scheduler: what waits goes into one step as far as that has room, and pays what a step costs at least only
    once. A prompt that fills more than a step is computed alone.
    """

    __slots__ = (
        "_at_s", "_cache", "_cached_tokens", "_left_s", "_pool_tokens", "_rates", "_speed", "_waiting_s", "busy_s",
        "computing", "inbound", "name", "neighbour", "num_changes", "outbound", "waiting",
    )  # fmt: skip

    def __init__(self, name: str, rates: FleetRates, pool_tokens: int) -> None:
        """Make an idle engine; with 0 tokens its prefix cache never hits."""
        self.name = name
        self.inbound, self.outbound = Port(), Port()
        self.computing: list[Turn] = []
        """Empty where nothing is to be done."""
        self.waiting: deque[Turn] = deque()
        self.neighbour: DecodeEngine | None = None
        """On the same machine."""
        self.num_changes = 0
        """Of when what is being computed will be."""
        self.busy_s = 0.0
        self._rates = rates
        self._left_s = self._waiting_s = self._at_s = 0.0
        self._speed = 1.0
        self._pool_tokens = pool_tokens
        self._cached_tokens = 0
        self._cache: OrderedDict[int, int] = OrderedDict()

    def add(self, turn: "Turn", *, now_s: float) -> bool:
        """Take a prompt; return whether it is computed at once."""
        self.advance(now_s=now_s)
        self.waiting.append(turn)
        self._waiting_s += turn.compute_s
        if self.computing:
            return False
        self._begin()
        return True

    def pop(self, *, now_s: float) -> "list[Turn]":
        """Take out what is computed, and begin with what waits."""
        self.advance(now_s=now_s)
        computed, self.computing = self.computing, []
        if self.waiting:
            self._begin()
        return computed

    def _begin(self) -> None:
        rates, waiting = self._rates, self.waiting
        turn = waiting.popleft()
        self.computing.append(turn)
        self._left_s = turn.compute_s
        self._waiting_s -= turn.compute_s
        left_tokens = rates.prefill_step_tokens - turn.num_new
        while waiting and waiting[0].num_new <= left_tokens:
            turn = waiting.popleft()
            self.computing.append(turn)
            left_tokens -= turn.num_new
            self._left_s += max(0.0, turn.compute_s - rates.step_least_s)
            self._waiting_s -= turn.compute_s

    def advance(self, *, now_s: float) -> None:
        """Compute until now."""
        if self.computing:
            elapsed_s = now_s - self._at_s
            self._left_s -= elapsed_s * self._speed
            self.busy_s += elapsed_s
        self._at_s = now_s

    def next_end_s(self) -> float:
        """Return when it looks at what waits, if nothing changes: the past where it has nothing to do."""
        return self._at_s + max(0.0, self._left_s) / self._speed if self.computing else self._at_s

    def free_s(self) -> float:
        """Return when all that is here now will be computed, at the latest; the past where there is nothing."""
        return self.next_end_s() + self._waiting_s

    def set_speed(self, speed: float, *, now_s: float) -> bool:
        """Compute at another speed from now on; return whether that is a change."""
        if speed == self._speed:
            return False
        self.advance(now_s=now_s)
        self._speed = speed
        return bool(self.computing)

    def num_cached(self, session: int, kept_tokens: int) -> int:
        """Return how many of the first `kept_tokens` of a session's prompt lie in the prefix cache."""
        return min(self._cache.get(session, 0), kept_tokens)

    def cache(self, session: int, num_tokens: int) -> None:
        """Keep a session's prompt; those that were used longest ago make room."""
        if not self._pool_tokens:
            return
        cache = self._cache
        self._cached_tokens += num_tokens - cache.pop(session, 0)
        cache[session] = num_tokens
        while self._cached_tokens > self._pool_tokens:
            self._cached_tokens -= cache.popitem(last=False)[1]


class Batch:
    """The sequences that a decode engine runs: each gets a token a step, and a step takes longer the more there are.

    Progress is counted in steps since the beginning, the same for all; so a sequence ends when that count reaches a
    number that is known when it joins.
    """

    __slots__ = (
        "_at_s",
        "_context_tokens",
        "_ends",
        "_extra_s",
        "_factor",
        "_num_joined",
        "_rates",
        "_steps",
        "busy_s",
        "num_running",
        "step_s",
    )

    def __init__(self, rates: FleetRates) -> None:
        self.busy_s = 0.0
        self.num_running = 0
        """Sequences."""
        self.step_s = 0.0
        """Seconds of the step that runs; 0 where none does."""
        self._rates = rates
        self._context_tokens = 0
        self._extra_s = 0.0
        self._factor = 1.0
        self._steps = 0.0
        self._at_s = 0.0
        self._num_joined = 0
        self._ends: list[tuple[float, int, int, Turn]] = []

    def advance(self, *, now_s: float) -> None:
        """Count the steps until now."""
        elapsed_s = now_s - self._at_s
        if self._ends:
            self._steps += elapsed_s / self.step_s
        if self._ends or self._extra_s:
            self.busy_s += elapsed_s
        self._at_s = now_s

    def join(self, turn: "Turn", num_steps: int, context_tokens: int, *, lag_steps: float, now_s: float) -> float:
        """Add a sequence that lasts so many steps; return when its first token comes.

        Args:
            turn: whose it is.
            num_steps: tokens of its answer.
            context_tokens: that it attends to, on average.
            lag_steps: that it waits for before its first, where others run.
            now_s: simulated seconds.
        """
        self.advance(now_s=now_s)
        lag_steps = lag_steps if self._ends else 0.0
        self._num_joined += 1
        heapq.heappush(self._ends, (self._steps + lag_steps + num_steps, self._num_joined, context_tokens, turn))
        self._context_tokens += context_tokens
        self._change()
        return now_s + (lag_steps + 1) * self.step_s

    def pop_ended(self, *, now_s: float) -> "list[Turn]":
        """Remove and return the sequences that have ended."""
        self.advance(now_s=now_s)
        # The clock's last digits must not keep a sequence from ending.
        reached = self._steps + 1e-6
        ended = []
        while self._ends and self._ends[0][0] <= reached:
            _, _, context_tokens, turn = heapq.heappop(self._ends)
            self._context_tokens -= context_tokens
            ended.append(turn)
        if ended:
            self._change()
        return ended

    def next_end_s(self) -> float:
        """Return when the next sequence ends if nothing changes; there must be one."""
        left = self._ends[0][0] - self._steps
        return self._at_s + left * self.step_s if left > 0.0 else self._at_s

    def slow(self, extra_s: float, *, now_s: float) -> None:
        """Let every step take so much longer from now on: it prefills a chunk too."""
        self.advance(now_s=now_s)
        self._extra_s = extra_s
        self._change()

    def stretch(self, factor: float, *, now_s: float) -> None:
        """Let every step take so many times as long from now on: something else uses the machine too."""
        if factor != self._factor:
            self.advance(now_s=now_s)
            self._factor = factor
            self._change()

    def _change(self) -> None:
        num = self.num_running = len(self._ends)
        self.step_s = self._extra_s
        if num:
            alone_s = self._rates.step_s(num, self._context_tokens)
            self.step_s = alone_s * self._factor + self._extra_s


class DecodeEngine:
    """D: the home of its sessions. What waits for blocks waits in order; so does what it computes itself."""

    __slots__ = (
        "batch", "computing", "inbound", "learned", "memory", "neighbour", "outbound", "routing", "waiting", "wake_s",
    )  # fmt: skip

    def __init__(self, memory: DecodeMemory, rates: FleetRates, settings: "HomeSettings") -> None:
        self.memory = memory
        batch = self.batch = Batch(rates)
        # As the server: it knows the model's shape, and learns everything else.
        self.learned = LearnedRates(ConstantRates(attention_tokens=rates.attention_tokens))
        self.routing = Routing(
            self.learned, settings, token_bytes=rates.kv_bytes_per_token, count_running=lambda: batch.num_running
        )
        self.inbound, self.outbound = Port(), Port()
        self.neighbour: PrefillEngine | None = None
        """On the same machine."""
        self.waiting: deque[Turn] = deque()
        self.computing: deque[Turn] = deque()
        self.wake_s = float("inf")
        """When the batch is looked at next."""
