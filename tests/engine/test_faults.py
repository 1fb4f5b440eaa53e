"""Test number one: a read that is declined, fails or is preempted ends in a right answer, and no block is lost.

D waits for P no longer than its `prefill_timeout_s`, and says `prefill_unavailable` then: each reason below shows that
P answered within it. That both engines end with no block in use is checked behind every test of this suite.
"""

import base64
import secrets
import threading
from array import array
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from server_ext.core.tickets import sign

from .common import eventually
from .gate import Call, Gate, ticket_of
from .rig import Rig
from .talk import Talk, words

Tamper = Callable[[dict[str, Any]], dict[str, Any]]


def too_late(ticket: dict[str, Any]) -> dict[str, Any]:
    """Leave no time for a read, by the time that P counts itself."""
    return {"bidikv_ttl_s": 4.0}


def past_deadline(ticket: dict[str, Any]) -> dict[str, Any]:
    """Put the deadline on D's clock into the past."""
    return {"remote_blocks_expiry_time": ticket["remote_blocks_expiry_time"] - 1000.0}


def unknown_engine_at_a_dead_port(ticket: dict[str, Any]) -> dict[str, Any]:
    """Name an engine that does not exist."""
    return {"remote_engine_id": secrets.token_hex(8), "remote_port": 1}


def blocks_out_of_range(ticket: dict[str, Any]) -> dict[str, Any]:
    """Name blocks that D does not have."""
    return {"remote_block_ids": [[block_id + 100_000 for block_id in ticket["remote_block_ids"][0]]]}


def too_few_blocks(ticket: dict[str, Any]) -> dict[str, Any]:
    """Name fewer blocks than the tokens take."""
    return {"remote_block_ids": [ticket["remote_block_ids"][0][:-1]]}


def another_prompt(ticket: dict[str, Any]) -> dict[str, Any]:
    """Be for another prompt."""
    return {"bidikv": {**ticket["bidikv"], "prompt_hash": secrets.token_hex(32)}}


def another_model(ticket: dict[str, Any]) -> dict[str, Any]:
    """Be of another model."""
    return {"bidikv": {**ticket["bidikv"], "fingerprint": "another"}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (too_late, "ticket_late"),
        (past_deadline, "read_failed"),
        (unknown_engine_at_a_dead_port, "read_failed"),
        (blocks_out_of_range, "read_failed"),
        (too_few_blocks, "read_failed"),
        (another_prompt, "read_failed"),
        (another_model, "model_changed"),
    ],
)
def test_a_bad_ticket_costs_time_and_nothing_else(rig: Rig, tamper: Tamper, reason: str, stream: bool) -> None:
    """P computes what it may not or cannot read; the answer is right, and the next turn fetches again."""
    talk = rig.talk()
    talk.right_turn(words(200))

    def change(gate: Gate, call: Call) -> Any:
        ticket = ticket_of(call)
        return gate.pass_on({**call, "kv_transfer_params": sign({**ticket, **tamper(ticket)}, rig.secret)})

    with Gate(rig, change):
        said = talk.right_turn("And now?", stream=stream)
    assert said.came == ("recomputed", reason)
    talk.fetched_turn("And then?")


def test_what_p_may_have_given_away_is_not_relied_on(rig: Rig) -> None:
    """A read of D's that ends after P's hold counts as failed, and D computes the prompt itself.

    `make faults` lets the hold really end and P's blocks go to others; here its end is only said to be over.
    """
    talk = rig.talk()
    talk.right_turn(words(200))

    def long_ago(gate: Gate, call: Call) -> Any:
        answer = gate.pass_on(call).json()
        answer["kv_transfer_params"]["remote_blocks_expiry_time"] -= 1000.0
        return httpx.Response(200, json=answer)

    with Gate(rig, long_ago):
        said = talk.right_turn("And now?")
    assert said.came == ("local", "read_failed")
    talk.fetched_turn("And then?")


def test_a_ticket_is_for_one_read(rig: Rig) -> None:
    """A ticket that P has used is refused when it comes again, and its prompt is computed."""
    talk = rig.talk()
    talk.right_turn(words(200))

    def twice(gate: Gate, call: Call) -> Any:
        assert gate.pass_on(call).json()["kv_transfer_params"]["bidikv"]["fetched_tokens"] > 0
        return gate.pass_on({**call, "cache_salt": secrets.token_hex(8)})

    with Gate(rig, twice):
        said = talk.right_turn("And now?")
    assert said.came == ("recomputed", "read_failed")
    talk.fetched_turn("And then?")


def test_a_read_whose_request_is_preempted(rig: Rig) -> None:
    """P preempts a request that has fetched, in the middle of its remaining prefill: it computes all, and is right."""
    num_before = rig.metric("prefill", "vllm:num_preemptions_total")

    def reset_often(gate: Gate, call: Call) -> Any:
        passed = rig.threads.submit(gate.pass_on, call)
        # One of them meets the prefill, which takes many steps; vLLM answers one that comes during the read with an
        # error, and hangs up, hence one connection each.
        for _ in range(30):
            rig.prefill.post(
                "/reset_prefix_cache", params={"reset_running_requests": True}, headers={"Connection": "close"}
            )
        return passed.result()

    def preempted_turn() -> Talk | None:
        talk = rig.talk()
        talk.right_turn(words(120))
        with Gate(rig, reset_often):
            talk.right_turn(words(320, "plums"))
        rig.step("prefill")
        return talk if rig.metric("prefill", "vllm:num_preemptions_total") > num_before else talk.post("end") and None

    # On a busy machine all resets may come too early or too late.
    talk = eventually(preempted_turn, "a preemption in the middle of a prefill")
    assert talk.last.came == ("recomputed", "read_failed")
    talk.fetched_turn("And then?")


def test_a_prefill_that_is_given_up_during_its_read(rig: Rig) -> None:
    """A client that leaves while P is at work leaves no block behind on either side."""
    talk = rig.talk()
    talk.right_turn(words(200))
    arrived, go_on = threading.Event(), threading.Event()

    def hold(gate: Gate, call: Call) -> Any:
        arrived.set()
        assert go_on.wait(60)
        return gate.pass_on(call)

    with Gate(rig, hold):
        with talk.asked(talk.request("And now?")):
            assert arrived.wait(60)
        talk.wait_until_idle()
        # P may still read: the blocks are spoken for, and said to be.
        assert talk.info()["pool"]["pending_ticket_blocks"] == talk.lease()["num_blocks"]
        go_on.set()
    talk.fetched_turn("And then?")


def test_a_home_that_dies_while_p_reads_from_it(rig: Rig) -> None:
    """P answers a call whose ticket leads to a dead D, and works with the D that is started in its place."""
    talk = rig.talk()
    talk.right_turn(words(200))
    talk.fetched_turn("Go on.")
    answers: list[Any] = []
    done = threading.Event()

    def kill_first(gate: Gate, call: Call) -> None:
        rig.kill("decode")
        answers.append(gate.pass_on(call))
        done.set()

    with Gate(rig, kill_first):
        running = talk.in_background("And now?")
        assert done.wait(60)
        assert running.exception() is not None
    (answer,) = answers
    assert answer.status_code == 200
    report = answer.json()["kv_transfer_params"]["bidikv"]
    assert (report["reason"], report["fetched_tokens"], report["local_tokens"]) == ("read_failed", 0, 0)
    rig.restart("decode")
    again = rig.talk()
    again.right_turn(words(200))
    again.fetched_turn("Better?")


def test_a_prefill_node_that_gives_nonsense(rig: Rig) -> None:
    """An answer that is for another prompt is not used: D computes itself, and says that no P was there."""
    talk: Talk = rig.talk()
    talk.right_turn(words(200))

    def cut(gate: Gate, call: Call) -> Any:
        return gate.pass_on({**call, "token_ids": base64.b64encode(array("i", range(40)).tobytes()).decode()})

    with Gate(rig, cut):
        said = talk.right_turn("And now?")
    assert said.came == ("local", "prefill_unavailable")
    talk.fetched_turn("And then?")
