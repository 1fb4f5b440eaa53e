"""The home's side of choosing: from what a caller asks for to the way that a turn goes, and what the reply says of it.

`Routing.begin` when a turn begins; the lease table asks its `Routed` whether a reader is to read what matches
(`wants_ticket`), and `Routed.settled` says which way it is, ticket or not. Then `Routing.settle` or `abandon`.
Pure; may import the standard library, `bidikv_sdk.wire` and its neighbours.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from bidikv_sdk.wire import Choice as ChoiceInfo

from .cost import WAYS, Choice, Observed, Start, Way
from .cost_model import CostModel

if TYPE_CHECKING:
    from bidikv_sdk.wire import Route

    from .leases import WantsTicket
    from .rates import LearnedRates
    from .records import Key, Ticket
    from .settings import HomeSettings

_WITHOUT_TICKET: Final[tuple[Way, ...]] = ("local", "prefill")


class Routing:
    """Chooses ways for a home.

    Args:
        rates: what is known at the start; settled turns teach them.
        settings: of the home.
        token_bytes: KV bytes of one token.
        count_running: how many requests generate on D at this moment.
    """

    def __init__(
        self, rates: "LearnedRates", settings: "HomeSettings", *, token_bytes: float, count_running: Callable[[], int]
    ) -> None:
        self._model = CostModel(
            rates,
            token_bytes=token_bytes,
            itl_guard=settings.itl_guard,
            max_sessions=settings.max_sessions,
            min_fetch_tokens=settings.min_fetch_tokens,
        )
        self._count_running = count_running

    def begin(
        self, nonce: str, key: "Key", route: "Route", prompt_tokens: int, *, pairs: tuple[str, ...], now_s: float
    ) -> "Routed":
        """Return the way of a turn that begins, still open.

        Args:
            nonce: the turn's name.
            key: its session.
            route: asked for by the caller or by a setting.
            prompt_tokens: of the whole prompt.
            pairs: the Ps, in the order in which they are asked.
            now_s: monotonic seconds.
        """

        def start(matched_tokens: int, diverged_at: int | None) -> Start:
            return Start(
                key=key,
                prompt_tokens=max(prompt_tokens, 1),
                matched_tokens=matched_tokens,
                diverged_at=diverged_at,
                num_running=self._count_running(),
                pairs=pairs,
            )

        return Routed(self._model, nonce, route if pairs or route == "auto" else "local", start, now_s)

    def settle(self, nonce: str, observed: Observed | None, *, now_s: float) -> None:
        """Learn from a turn that has ended; from None nothing."""
        if observed is None:
            self._model.abandon(nonce)
        else:
            self._model.settle(nonce, observed, now_s=now_s)

    def abandon(self, nonce: str) -> None:
        """Forget a turn (idempotent)."""
        self._model.abandon(nonce)

    def forget(self, key: "Key") -> None:
        """Forget a session (idempotent)."""
        self._model.forget(key)


class Routed:
    """The way of one turn, from what was asked for to what it is."""

    def __init__(
        self,
        model: CostModel,
        nonce: str,
        route: "Route",
        start: Callable[[int, int | None], Start],
        now_s: float,
    ) -> None:
        self._model = model
        self._nonce = nonce
        self._route = route
        self._start = start
        self._now_s = now_s
        self._choice: Choice | None = None

    @property
    def wants_ticket(self) -> "bool | WantsTicket":
        """Whether a reader is to read what matches."""
        return self._wants_ticket if self._route == "auto" else self._route == "fetch"

    def _wants_ticket(self, matched_tokens: int, diverged_at: int | None) -> bool:
        self._choice = self._model.choose(self._nonce, self._start(matched_tokens, diverged_at), now_s=self._now_s)
        return self._choice.way == "fetch"

    def settled(self, ticket: "Ticket | None", matched_tokens: int, diverged_at: int | None) -> Choice:
        """Return the way that the turn goes, now that its ticket is there, or is not."""
        if self._route != "auto":
            way: Way = "prefill" if self._route == "fetch" and ticket is None else self._route
            start = self._start(matched_tokens, diverged_at)
            return self._model.take(self._nonce, start, way, now_s=self._now_s)
        if self._choice is not None and (self._choice.way != "fetch" or ticket is not None):
            return self._choice
        ways = WAYS if self._choice is None else _WITHOUT_TICKET
        self._model.abandon(self._nonce)
        return self._model.choose(self._nonce, self._start(matched_tokens, diverged_at), now_s=self._now_s, ways=ways)


def choice_info(choice: Choice) -> dict[str, Any] | None:
    """Return a choice as the wire has it; None where there was none."""
    if choice.reason == "forced":
        return None
    seconds: Mapping[Way, float] = choice.estimates_s
    rounded = {way: round(seconds[way], 6) for way in WAYS if way in seconds}
    return ChoiceInfo(by=choice.reason, **rounded).to_json()
