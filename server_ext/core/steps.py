"""What D's scheduler shows of its steps: who generates now, and how long they take with and without prompts in them.

`scheduled` at every step, `finished` when a request ends. Pure; imports `rates` for its type.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rates import LearnedRates


class StepWatch:
    """Times steps by when the next one is scheduled: an engine with work goes from one to the next.

    Args:
        rates: told of each step.
    """

    def __init__(self, rates: "LearnedRates") -> None:
        self._rates = rates
        self._running: dict[str, int] = {}
        self._num_decodes = self._num_prompt_tokens = 0
        self._is_busy = False
        self._scheduled_s = 0.0

    def count_running(self) -> int:
        """Return how many requests are under way: those of the last step that have not ended since."""
        return len(self._running)

    def scheduled(self, num_tokens: Mapping[str, int], *, now_s: float) -> None:
        """Note a step, with the number of tokens of each request: one where it generates, else of its prompt."""
        if self._is_busy:
            self._rates.observe_step(
                now_s - self._scheduled_s,
                num_decodes=self._num_decodes,
                num_prompt_tokens=self._num_prompt_tokens,
            )
        prompts = [count for count in num_tokens.values() if count > 1]
        self._num_decodes, self._num_prompt_tokens = len(num_tokens) - len(prompts), sum(prompts)
        self._running = dict(num_tokens)
        self._is_busy, self._scheduled_s = bool(num_tokens), now_s

    def finished(self, request_id: str) -> None:
        """Note the end of a request; without any the engine sleeps, and its next step tells nothing of the last."""
        self._running.pop(request_id, None)
        self._is_busy = self._is_busy and bool(self._running)
