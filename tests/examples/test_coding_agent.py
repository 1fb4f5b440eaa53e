"""The coding agent: what it does, and that its turns have the sizes that the demo's numbers rest on."""

from itertools import pairwise
from pathlib import Path

import pytest

from bidikv_sdk.testing import FakeServer
from examples.agents import coding_agent
from server_ext.launch.model import ensure_smollm2

REPLY = " word" * 32
"""An answer of as many tokens as the agent asks for."""


@pytest.fixture(scope="module")
def finished():
    """A server on which the agent has worked through its task: (server, transcript, completed turns)."""
    server = FakeServer()
    for _ in range(len(coding_agent.SCRIPT["steps"]) + 1):
        server.reply(REPLY)
    with server.client() as client, client.session(system=coding_agent.GUIDELINES, **coding_agent.CHAT) as session:
        turns = list(coding_agent.run(session))
        transcript = server.messages(session.id)
    return server, transcript, turns


@pytest.fixture(scope="module")
def count_tokens():
    """Counts the tokens of messages, as the real template of the demo's model renders them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(ensure_smollm2()))

    def count(messages, *, ask):
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=ask)["input_ids"])

    return count


@pytest.fixture(scope="module")
def prompts(finished, count_tokens):
    """Prompt lengths in tokens: of the system prompt, then of each turn."""
    messages = finished[1]
    ends = range(2, len(messages) + 1, 2)
    return [count_tokens(messages[:1], ask=False), *(count_tokens(messages[:end], ask=True) for end in ends)]


def test_every_turn_but_the_first_continues_a_lease(finished):
    """Each turn finds what the one before it left, and sends only what is new."""
    server, _, turns = finished
    assert [turn.cache.outcome for turn in turns] == ["recomputed"] + ["fetched"] * (len(turns) - 1)
    sent = [request.body["messages"] for request in server.requests if request.verb == "turns"]
    assert [len(messages) for messages in sent] == [2] + [1] * (len(turns) - 1)


def test_the_lease_is_held_while_a_tool_runs(finished):
    """Renewals are sent between turns, and none of them before there is a lease."""
    verbs = [request.verb for request in finished[0].requests]
    assert verbs[0] == "turns"
    assert "extend" in verbs


def test_tools_say_the_same_each_time():
    """The same command prints the same text, so that two runs of the agent can be compared token by token."""
    for command, _ in coding_agent.SCRIPT["steps"]:
        assert coding_agent.run_tool(command) == coding_agent.run_tool(command)


def test_the_sample_repository_has_its_two_bugs():
    """Exactly the two tests that the agent is asked about fail."""
    output = coding_agent.run_tool("python -B check.py")
    failed = [line.split(":")[0] for line in output.splitlines() if line.startswith("FAIL")]
    assert failed == ["FAIL  test_a_full_box_has_a_discount", "FAIL  test_the_last_piece_can_be_taken"]


def test_a_turn_adds_64_to_128_tokens(prompts, count_tokens):
    """The template's own tokens are counted; the answer before is not."""
    num_reply = len(REPLY.split())
    added = [prompts[1] - prompts[0], *(new - old - num_reply for old, new in pairwise(prompts[1:]))]
    assert len(added) >= 12
    assert 64 <= min(added) <= max(added) <= 128


def test_each_answer_has_32_tokens():
    """The model is neither allowed to stop before nor to go on after."""
    assert coding_agent.CHAT["min_tokens"] == coding_agent.CHAT["max_completion_tokens"] == 32


def test_the_history_grows_past_3000_tokens(prompts):
    """At least half of the turns begin with 2,000 tokens in the lease, and all fit into the model's context."""
    num_reply = len(REPLY.split())
    # The last generated token was never fed back, so its KV does not exist.
    held = [prompt + num_reply - 1 for prompt in prompts[1:-1]]
    assert sum(num_tokens >= 2000 for num_tokens in held) >= (len(prompts) - 1) / 2
    assert 3000 < prompts[-1] + num_reply < 8192


def test_the_example_is_short():
    """A reader sees all of it at once."""
    assert len(Path(coding_agent.__file__).read_text("utf-8").splitlines()) < 60
