"""A turn in flight, and the session that it belongs to."""

from typing import TYPE_CHECKING

from server_ext.core.cost import Observed

if TYPE_CHECKING:
    from server_ext.analysis.memory import Request
    from server_ext.core.cost import Way
    from server_ext.traffic import PlannedSession, PlannedTurn

    from .engines import DecodeEngine, PrefillEngine


class Session:
    """One session on its way through its plan."""

    __slots__ = ("history_tokens", "home", "key", "next_turn", "number", "plan")

    def __init__(self, number: int, plan: "PlannedSession", home: "DecodeEngine") -> None:
        self.number = number
        self.plan = plan
        self.home = home
        self.key = ("fleet", str(number))
        self.next_turn = 0
        self.history_tokens = 0


class Turn:
    """One turn."""

    __slots__ = (
        "answered_s",
        "cached_tokens",
        "compute_s",
        "fetch_s",
        "fetched_tokens",
        "first_token_s",
        "idle_s",
        "is_ticket_late",
        "kept_tokens",
        "num_new",
        "number",
        "plan",
        "prefill",
        "prompt_tokens",
        "request",
        "session",
        "started_s",
        "way",
    )

    def __init__(self, session: Session, plan: "PlannedTurn", number: int, started_s: float, way: "Way") -> None:
        history = session.history_tokens
        self.session = session
        self.plan = plan
        self.number = number
        self.started_s = started_s
        self.way = way
        self.kept_tokens = history if plan.kept_tokens is None else min(plan.kept_tokens, history)
        self.prompt_tokens = self.kept_tokens + plan.delta_tokens
        self.prefill: PrefillEngine | None = None
        self.request: Request
        self.cached_tokens = 0
        self.fetched_tokens = 0
        self.num_new = 0
        self.compute_s = 0.0
        self.fetch_s: float | None = None
        self.answered_s: float | None = None
        self.idle_s = 0.0
        self.is_ticket_late = False
        self.first_token_s = 0.0

    def observed(self) -> Observed:
        """Return what the server's conductor tells of a turn that has ended."""
        began_s = self.started_s if self.answered_s is None else self.answered_s
        return Observed(
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.cached_tokens,
            fetched_tokens=self.fetched_tokens,
            prefill_s=None if self.answered_s is None else self.answered_s - self.started_s,
            fetch_s=self.fetch_s,
            handover_s=self.first_token_s - began_s,
            pair=None if self.answered_s is None or self.prefill is None else self.prefill.name,
            is_read_failed=self.is_ticket_late,
        )
