"""Turns that choose their own way, on real engines: whatever is taken is right, and is explained."""

import pytest

from .rig import Rig
from .talk import words


@pytest.mark.parametrize("stream", [False, True])
def test_auto_is_right_and_learns(rig: Rig, stream: bool) -> None:
    """Each of twelve turns has the tokens of a recompute, and after the first few the estimates fit the times."""
    talk = rig.talk()
    misses = []
    for turn in range(12):
        said = talk.right_turn(words(150) if turn == 0 else f"And number {turn}?", route="auto", stream=stream)
        cache = said.cache
        choice, timings = cache["choice"], cache["timings_s"]
        way = "local" if timings["prefill"] is None else "fetch" if cache["fetched_tokens"] else "prefill"
        taken_s = timings["ttft"] - timings["render"] - timings["begin"]
        assert taken_s > 0
        misses.append(abs(choice[way] - taken_s) / taken_s)
        if choice["by"] == "cheapest":
            assert choice[way] == min(seconds for name, seconds in choice.items() if name != "by" and seconds)
    # The machine is noisy, and nobody waits for it to be quiet: half of the later estimates within a factor of two.
    assert sorted(misses[4:])[3] < 1


def test_auto_learns_from_turns_that_were_forced(rig: Rig) -> None:
    """After turns on each way all three have estimates, and the best of them is taken."""
    talk = rig.talk()
    talk.right_turn(words(150))
    for route in ("local", "fetch", "prefill") * 2:
        talk.right_turn(f"By {route}?", route=route)
    said = talk.right_turn("And now?", route="auto")
    choice = said.cache["choice"]
    assert None not in (choice["local"], choice["fetch"], choice["prefill"])
    assert said.cache["reason"] == "cheapest"
