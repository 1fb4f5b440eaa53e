"""A turn in flight, and the session that it belongs to."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server_ext.analysis.memory import Request
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
        "cached_tokens",
        "compute_s",
        "fetched_tokens",
        "first_token_s",
        "idle_s",
        "is_ticket_late",
        "kept_tokens",
        "number",
        "plan",
        "prefill",
        "prompt_tokens",
        "request",
        "session",
        "started_s",
    )

    def __init__(self, session: Session, plan: "PlannedTurn", number: int, started_s: float) -> None:
        history = session.history_tokens
        self.session = session
        self.plan = plan
        self.number = number
        self.started_s = started_s
        self.kept_tokens = history if plan.kept_tokens is None else min(plan.kept_tokens, history)
        self.prompt_tokens = self.kept_tokens + plan.delta_tokens
        self.prefill: PrefillEngine | None = None
        self.request: Request
        self.cached_tokens = 0
        self.fetched_tokens = 0
        self.compute_s = 0.0
        self.idle_s = 0.0
        self.is_ticket_late = False
        self.first_token_s = 0.0
