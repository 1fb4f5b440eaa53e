"""Several turns of a session, on every route."""

import pytest

from .harness import Rig, words


@pytest.mark.parametrize("stream", [True, False])
def test_every_later_turn_fetches_all_that_is_held(rig: Rig, stream: bool) -> None:
    """From the second turn on P fetches all that D holds, and the tokens are those of a recompute."""
    talk = rig.talk()
    first = talk.right_turn(words(200), stream=stream)
    assert first.came == ("recomputed", "first_turn")
    for number in range(2, 6):
        before = talk.last
        said = talk.fetched_turn(f"Question {number}?", stream=stream)
        assert said.cache["held_tokens"] == before.lease["num_tokens"]
        assert said.cache["fetched_tokens"] >= 0.95 * before.lease["num_tokens"]
        assert said.cache["computed_tokens"] < 64
        assert said.cache["reason"] == "cheapest"
