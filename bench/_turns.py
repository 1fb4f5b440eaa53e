"""Turns as the client sees them: when the first text came, and which tokens.

`Recorder.ask` runs one turn and keeps a `MeasuredTurn`. May import the SDK only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv_sdk import CacheReport, Session, Turn


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """One turn of an arm."""

    turn: int
    cache: CacheReport
    ttft_s: float
    """Seconds from sending the turn to the first piece of text, at the client."""
    text: str
    generated_tokens: int
    prompt_ids: list[int] = field(repr=False)
    """[prompt_tokens]; empty where the server does not tell."""
    token_ids: list[int] = field(repr=False)
    """[generated_tokens]; empty where the server does not tell."""

    def same_tokens(self, other: MeasuredTurn) -> bool:
        """Whether both turns had the same prompt and the same answer, token for token."""
        return (self.text, self.token_ids, self.prompt_ids) == (other.text, other.token_ids, other.prompt_ids)

    def to_json(self) -> dict[str, Any]:
        """Return the turn's numbers as they stand in `out/demo.json`."""
        report = self.cache.to_json()
        names = ("outcome", "reason", "held_tokens", "reused_tokens", "fetched_tokens", "computed_tokens")
        return {
            "turn": self.turn,
            "prompt_tokens": self.cache.prompt_tokens,
            **{name: report[name] for name in names},
            "generated_tokens": self.generated_tokens,
            "ttft_s": self.ttft_s,
            "timings_s": report["timings_s"],
        }


class Recorder:
    """Asks like an agent, and measures.

    * **on_turn** - called with each turn when it is complete.
    * **now_s** - the clock, in seconds.
    """

    def __init__(self, on_turn: Callable[[MeasuredTurn], None], now_s: Callable[[], float] = time.perf_counter) -> None:
        self.turns: list[MeasuredTurn] = []
        self._on_turn = on_turn
        self._now_s = now_s

    def ask(self, session: Session, delta: str) -> Turn:
        """Run one streaming turn.

        Raises:
            ValueError: It had no text, so there is no first token to time.
        """
        prompt_ids: list[int] = []
        token_ids: list[int] = []
        ttft_s: float | None = None
        started_s = self._now_s()
        with session.stream(delta, return_token_ids=True) as stream:
            for chunk in stream:
                extra: dict[str, Any] = dict(chunk)  # vLLM adds the ids to OpenAI's chunks
                prompt_ids += extra.get("prompt_token_ids") or []
                for choice in extra["choices"]:
                    token_ids += choice.get("token_ids") or []
                    if ttft_s is None and choice["delta"].get("content"):
                        ttft_s = self._now_s() - started_s
            turn = stream.final_turn()
        if ttft_s is None:
            msg = f"turn {turn.turn} has no text: {turn.message!r}"
            raise ValueError(msg)
        usage = turn.completion.get("usage") or {"completion_tokens": len(token_ids)}
        num_generated = usage["completion_tokens"]
        self.turns.append(MeasuredTurn(turn.turn, turn.cache, ttft_s, turn.text, num_generated, prompt_ids, token_ids))
        self._on_turn(self.turns[-1])
        return turn
