"""The first token that differs from what D holds, and what has changed: named alike on both routes."""

import copy

import pytest

from bidikv_sdk.wire import SessionInfo

from .fakes import BLOCK_SIZE, Script, turn_body
from .families import FAMILIES, KEPT_IN_A_TOOL_LOOP
from .templates import CHATML, OPTIONS, THINKING

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

ROUTES = pytest.mark.parametrize("route", ["turns", "chat"])
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
LONG = "A text that is long enough for a block or two. " * 6
SYSTEM = "Be terse. " * 30


class Conversation:
    """A session that is continued, or whose history is changed, through one of the two routes."""

    def __init__(self, stack, client, route):
        self.stack, self.client, self.route = stack, client, route
        self.messages = [{"role": "system", "content": SYSTEM}]
        self.tools = None
        self.fields = {}
        self.num_turns = 0
        self.held_ids = []

    async def say(self, text, *, reply="Hello there.", role="user"):
        """Run a turn; return its cache report, whose `diverged_at` is checked against the ids."""
        self.stack.engine.script = Script(reply)
        delta = [{"role": role, "content": text, **({"tool_call_id": "c"} if role == "tool" else {})}]
        if self.route == "chat":
            self.messages += delta
            body = {"messages": self.messages, "session_id": "s", "tools": self.tools, **self.fields}
            reply = await self.client.post("/v1/chat/completions", json=body)
        else:
            delta = delta if self.num_turns else [*self.messages, *delta]
            self.messages += delta[-1:]
            body = turn_body(self.num_turns + 1) | {"messages": delta}
            reply = await self.client.post("/v1/sessions/s/turns", json=body | {"tools": self.tools, **self.fields})
        assert reply.status_code == 200, reply.text
        self.num_turns += 1
        self.messages.append(reply.json()["choices"][0]["message"])
        cache = SessionInfo.from_json(reply.json()["bidikv"]).cache
        prompt_ids = self.stack.engine.requests[-1][0]
        held_ids = self.held_ids[: cache.held_tokens]
        pairs = enumerate(zip(held_ids, prompt_ids, strict=False))
        assert cache.diverged_at == next((i for i, (held, now) in pairs if held != now), None)
        tokenizer = self.stack.engine.renderer.get_tokenizer()
        self.held_ids = [*prompt_ids, *tokenizer.encode(self.stack.engine.script.text)]
        return cache

    async def change(self, edit):
        """Edit the history: the client of the chat route sends another one, that of the turns opens it anew."""
        self.messages = copy.deepcopy(self.messages)
        edit(self)
        if self.route == "turns":
            body = {"messages": self.messages, "turn": self.num_turns, "replace": True, "tools": self.tools}
            assert (await self.client.post("/v1/sessions", json={"session_id": "s", **body})).status_code == 200


def edit_system(talk):
    """Change the last word of the system prompt."""
    talk.messages[0]["content"] = SYSTEM + "And kind."


def edit_system_early(talk):
    """Change the first word of the system prompt."""
    talk.messages[0]["content"] = "Do " + SYSTEM


def edit_message(talk):
    """Change the last word of the first message."""
    talk.messages[1]["content"] = LONG + "Or three."


def drop_system(talk):
    """Take the system prompt out."""
    del talk.messages[0]


def compact(talk):
    """Sum the history up."""
    talk.messages[1:] = [{"role": "user", "content": "All that."}, {"role": "assistant", "content": "Yes."}]


def give_tools(talk):
    """Name other tools, and change a message as well."""
    talk.tools = TOOLS
    edit_message(talk)


@ROUTES
@pytest.mark.parametrize("min_fetch_tokens", [1, 64])
@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (edit_system, "system_changed"),
        (edit_system_early, "system_changed"),
        (drop_system, "system_changed"),
        (edit_message, "messages_changed"),
        (compact, "messages_changed"),
        (give_tools, "tools_changed"),
    ],
)
def test_the_cause_of_a_divergence_is_named(stack, route, edit, reason, min_fetch_tokens):
    """What was changed is the reason, however little it leaves to fetch; the turn behind it goes on as ever."""

    async def scenario(client):
        stack.configure(template=OPTIONS if edit is give_tools else CHATML)
        stack.engine.home = stack.engine.make_home(min_fetch_tokens=min_fetch_tokens)
        talk = Conversation(stack, client, route)
        await talk.say(LONG)
        assert (await talk.say("More")).reason == "cheapest"
        await talk.change(edit)
        cache = await talk.say("Now this.")
        assert (cache.reason, cache.diverged_at is not None) == (reason, True)
        assert cache.fetched_tokens == (cache.diverged_at if cache.diverged_at >= min_fetch_tokens else 0)
        cache = await talk.say("On.")
        assert (cache.reason, cache.diverged_at) == ("cheapest", None)

    stack.run(scenario)


@ROUTES
def test_a_template_that_strips_reasoning_changes_the_messages(stack, route):
    """The prompt leaves what D holds where the reasoning began, within a block, and all before it is fetched."""

    async def scenario(client):
        stack.configure(template=THINKING)
        talk = Conversation(stack, client, route)
        await talk.say(LONG, reply="<think>\nhm, hm, hm\n</think>\n\nHello.")
        cache = await talk.say("More")
        assert (cache.outcome, cache.reason) == ("fetched", "messages_changed")
        assert cache.fetched_tokens == cache.diverged_at < cache.held_tokens
        assert cache.diverged_at % BLOCK_SIZE
        assert (await talk.say("On.")).reason == "cheapest"

    stack.run(scenario)


@pytest.mark.parametrize(
    ("route", "tools", "behind"),
    [("turns", None, "user"), ("chat", TOOLS, "user"), ("turns", TOOLS, "tool"), ("chat", TOOLS, "tool")],
    ids=["plain", "tools", "tool loop", "tool loop in a chat"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_says_what_it_rewrites(stack, family, route, tools, behind):
    """With and without thinking, tools and a tool loop: all that was held, or all up to the first token that differs.

    That is the model's reply, or the thought that the prompt had begun for it; never anything before.
    """
    template, enable_thinking, said, is_kept = FAMILIES[family]
    if behind == "tool":
        is_kept = family in KEPT_IN_A_TOOL_LOOP

    async def scenario(client):
        stack.configure(template=template)
        talk = Conversation(stack, client, route)
        talk.tools, talk.fields = tools, {"chat_template_kwargs": {"enable_thinking": enable_thinking}}
        await talk.say(LONG, reply=said)
        num_before = len(stack.engine.requests[-1][0])
        cache = await talk.say("More", reply=said, role=behind)
        assert cache.outcome == "fetched"
        if is_kept:
            assert (cache.reason, cache.diverged_at, cache.fetched_tokens) == ("cheapest", None, cache.held_tokens)
        else:
            assert (cache.reason, cache.fetched_tokens) == ("messages_changed", cache.diverged_at)
            assert num_before - 12 < cache.diverged_at < cache.held_tokens

    stack.run(scenario)


@ROUTES
@pytest.mark.parametrize("num_words", range(6))
def test_a_partly_filled_last_block_is_compared_token_by_token(stack, route, num_words):
    """Whatever the lease's last block contains, a reply that its client changed at the end diverges exactly there."""

    async def scenario(client):
        stack.configure(template=CHATML)
        talk = Conversation(stack, client, route)
        await talk.say(LONG + "and on " * num_words)

        def change_the_last_word(talk):
            talk.messages[-1] = {"role": "assistant", "content": "Hello here."}

        await talk.change(change_the_last_word)
        cache = await talk.say("More")
        assert (cache.outcome, cache.reason) == ("fetched", "messages_changed")
        assert cache.held_tokens - 4 < cache.diverged_at == cache.fetched_tokens < cache.held_tokens

    stack.run(scenario)


@ROUTES
@pytest.mark.parametrize(("num_revoked", "reason"), [(1, "messages_changed"), (100, "lease_revoked")])
def test_a_clipped_lease_and_an_edited_history(stack, route, num_revoked, reason):
    """The reason is what ended the match: the edit where the lease reached up to it, its loss where it did not."""

    async def scenario(client):
        stack.configure(template=CHATML)
        talk = Conversation(stack, client, route)
        await talk.say(LONG)
        await talk.say(LONG)
        await talk.change(edit_message)
        num_kept = 3 if num_revoked > 1 else 100
        lease = stack.engine.home.get(tenant="", session_id="s", now_s=0)["info"]["lease"]
        stack.engine.home.leases.revoke(max(1, lease["num_blocks"] - num_kept), now_s=0)
        cache = await talk.say("Now this.")
        assert (cache.outcome, cache.reason) == ("fetched", reason)
        assert (cache.diverged_at is None) == (reason == "lease_revoked")

    stack.run(scenario)


def test_a_system_message_within_a_delta(stack):
    """A template that moves it to the front rewrites the history, and that is the reason."""

    async def scenario(client):
        front = "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
        stack.configure(template=front + CHATML)
        talk = Conversation(stack, client, "turns")
        await talk.say(LONG)
        delta = [{"role": "system", "content": "Now in French."}, {"role": "user", "content": "Go on."}]
        reply = await client.post("/v1/sessions/s/turns", json={"turn": 2, "messages": delta})
        cache = SessionInfo.from_json(reply.json()["bidikv"]).cache
        assert (cache.reason, cache.diverged_at is not None) == ("system_changed", True)

    stack.run(scenario)


def test_a_history_that_is_replaced_twice_is_compared_with_what_was_held(stack):
    """Only what a lease was computed from tells what has changed."""

    async def scenario(client):
        stack.configure(template=CHATML)
        talk = Conversation(stack, client, "turns")
        await talk.say(LONG)
        await talk.change(edit_system)
        await talk.change(edit_message)
        assert (await talk.say("Now this.")).reason == "system_changed"

    stack.run(scenario)
