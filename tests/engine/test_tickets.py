"""A ticket's way back on real engines, where P's answer does not come."""

import threading
from typing import Any

from .common import eventually
from .gate import Call, Gate
from .rig import Rig
from .talk import words


def test_a_readers_note_returns_its_ticket(rig: Rig) -> None:
    """While P's answer is still on its way, the first step of D after the read gives the ticket's blocks back."""
    talk = rig.talk()
    talk.right_turn(words(200))
    was_read, go_on = threading.Event(), threading.Event()

    def hold_the_answer(gate: Gate, call: Call) -> Any:
        answer = gate.pass_on(call)
        was_read.set()
        assert go_on.wait(60)
        return answer

    with Gate(rig, hold_the_answer):
        running = talk.in_background("And now?")
        assert was_read.wait(60)
        assert talk.info()["pool"]["pending_ticket_blocks"] == talk.lease()["num_blocks"]

        def is_back() -> bool:
            rig.step("decode")
            return talk.info()["pool"]["pending_ticket_blocks"] == 0

        # Its deadline is 12 s away; a note takes a step or two.
        eventually(is_back, "the ticket", deadline_s=6)
        go_on.set()
        said = running.result()
    assert said.cache["fetched_tokens"] == said.cache["held_tokens"] > 0
    assert said.ids == rig.recomputed(said.prompt_ids, len(said.ids))
    assert rig.metric("decode", "bidikv_stale_reads_total") == 0
