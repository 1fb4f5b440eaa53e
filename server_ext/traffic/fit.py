"""Makes planned sessions fit a model with a short context: tokens divided alike, so that shares of reuse stay."""

from dataclasses import replace

from .plan import PlannedSession, PlannedTurn, prompts


def fitted(
    session: PlannedSession, *, max_tokens: int, max_output_tokens: int, time_divisor: float = 1.0
) -> PlannedSession:
    """Return the session with its longest prompt and answer within `max_tokens`.

    Args:
        session: any.
        max_tokens: of a prompt with its answer; a session that is shorter keeps its tokens.
        max_output_tokens: that an answer is cut to, below `max_tokens`.
        time_divisor: of gaps; leases must be divided by it too.

    Raises:
        ValueError: a number makes no sense.
    """
    if not 0 < max_output_tokens < max_tokens or not time_divisor > 0:
        msg = f"max_tokens {max_tokens}, max_output_tokens {max_output_tokens}, time_divisor {time_divisor}: too small"
        raise ValueError(msg)
    longest = max(num_prompt for num_prompt, _ in prompts(session))
    divisor = max(1.0, longest / (max_tokens - max_output_tokens))

    def divided(turn: PlannedTurn) -> PlannedTurn:
        return replace(
            turn,
            gap_s=turn.gap_s / time_divisor,
            delta_tokens=max(1, int(turn.delta_tokens / divisor)),
            output_tokens=min(max(1, int(turn.output_tokens / divisor)), max_output_tokens),
            kept_tokens=None if turn.kept_tokens is None else int(turn.kept_tokens / divisor),
        )

    return PlannedSession(session.start_s / time_divisor, tuple(map(divided, session.turns)))
