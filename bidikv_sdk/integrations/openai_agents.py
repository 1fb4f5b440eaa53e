"""The OpenAI Agents SDK on bidikv: a session that wraps any of theirs, and run hooks that hold and branch.

    client = AsyncOpenAI(base_url="http://127.0.0.1:8200/v1", api_key="none", http_client=async_http_client())
    async with BidiKVSession(SQLiteSession("shelf-1")) as session:
        await Runner.run(agent, "Which test fails?", session=session, hooks=session.hooks)

A run goes `on_agent_start` (whose turn is it?) → the model's call, marked by the transport of `async_http_client` →
`on_llm_end` → `on_tool_start` … `on_tool_end` (the lease is held) or `on_handoff` (the next agent branches off). The
hooks run in tasks of their own, where a context variable cannot be changed for the run. So the session that is in it is
this one, and it speaks for whichever agent's turn it is. Needs the extra `openai-agents`. May import the SDK and what
that extra brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agents import RunHooks

from bidikv_sdk._current import CurrentSession
from bidikv_sdk.integrations._branches import branch_id, session_id_of
from bidikv_sdk.integrations.openai import async_http_client

if TYPE_CHECKING:
    from agents import Agent, ModelResponse, RunContextWrapper, TResponseInputItem
    from agents.memory import Session
    from agents.tool import Tool

    from bidikv_sdk._current import CurrentHold, OnExit, Server
    from bidikv_sdk.wire import Route

__all__ = ["BidiKVHooks", "BidiKVSession", "async_http_client"]

# Of no agent: an agent that serves as a tool runs without these hooks, and has a history of its own.
_TOOLS: Final = "\0tools"
_MADE_BY_THE_MODEL: Final = frozenset({"function_call", "reasoning", "custom_tool_call"})


class BidiKVSession(CurrentSession):
    """One of the Agents SDK's sessions, whose conversation is a session here as well.

    A context manager (`async with`, or `with` around `Runner.run_sync`): inside, the runs' completions belong to it. It
    goes to the runs as `session=`, and `hooks` as `hooks=`. The inner session keeps the history; here lies what becomes
    of the cache: `pop_item` shortens it, `clear_session` gives it back.

    Args:
        inner: Their session, as `SQLiteSession("shelf-1")`; its id is that of ours.
        route: How prompts get their cache; None: the server decides.
        ttl_s: Seconds that a lease lives after a turn or a renewal; None: the server's default.
        on_exit: What becomes of the cache at the end of the block, as in `current_session`.
    """

    def __init__(
        self, inner: Session, *, route: Route | None = None, ttl_s: float | None = None, on_exit: OnExit = "keep"
    ) -> None:
        super().__init__(session_id_of(inner.session_id), parent=None, route=route, ttl_s=ttl_s, on_exit=on_exit)
        self.inner = inner
        self.session_id = inner.session_id
        self.session_settings = inner.session_settings
        self.hooks = BidiKVHooks(self)
        """For the runs: they hold the lease while tools run, and branch at hand-offs."""
        self._branches: dict[str, CurrentSession] = {}
        self._speaking: CurrentSession | None = None
        self._said: list[tuple[CurrentSession, int]] = []

    # ---------------------------------------------------------------- their session

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Return the last `limit` items of the history; None: all."""
        return await self.inner.get_items(limit)

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Append to the history."""
        await self.inner.add_items(items)

    async def pop_item(self) -> TResponseInputItem | None:
        """Take the last item from the history; where it was part of an answer, the cache ends before that answer."""
        item = await self.inner.pop_item()
        if item is not None and self._said:
            num_answers = _num_answers(await self.inner.get_items())
            while len(self._said) > num_answers:
                session, turn = self._said.pop()
                await session.rewind_async(turn - 1)
        return item

    async def clear_session(self) -> None:
        """Forget the history, here and on the server, and give its cache back."""
        await self.inner.clear_session()
        for session in (self, *self._others()):
            await session.end_async()
        self._branches, self._speaking, self._said = {}, None, []

    # ---------------------------------------------------------------- whose turn it is

    @property
    def speaking(self) -> CurrentSession:
        """The session of the agent whose turn it is: a branch where that one was handed to, or where a tool asks."""
        if self.hooks.num_tools:
            return self._branch_of(_TOOLS)
        return self if self._speaking is None else self._speaking

    def begin(self, agent_name: str) -> None:
        """Let an agent speak: in its branch, or here where it has none."""
        self._speaking = self._branches.get(agent_name)

    def hand_off(self, from_name: str, to_name: str) -> None:
        """Let an agent that was handed to speak in a branch of its own, once and for all, unless it has spoken here."""
        self._branches.setdefault(from_name, self.speaking)
        self._branch_of(to_name)
        self.begin(to_name)

    def _branch_of(self, name: str) -> CurrentSession:
        if name not in self._branches:
            self._branches[name] = (self._speaking or self).fork(branch_id(self.id, name), on_exit=self._on_exit)
        return self._branches[name]

    def spoke(self) -> None:
        """Remember an answer, so that it can be taken back."""
        if (info := self.speaking.info) is not None:
            self._said.append((self.speaking, info.turn))

    # ---------------------------------------------------------------- what the transport asks

    @property
    def fields(self) -> dict[str, Any]:
        """What goes into a completion's body."""
        return super().fields if self.speaking is self else self.speaking.fields

    @property
    def headers(self) -> dict[str, str]:
        """What goes into a completion's headers."""
        return super().headers if self.speaking is self else self.speaking.headers

    def sent_to(self, server: Server) -> None:
        """Remember where a completion was sent."""
        super().sent_to(server)
        if self.speaking is not self:
            self.speaking.sent_to(server)

    def answered(self, content: bytes) -> None:
        """Take the report out of a completion."""
        if self.speaking is self:
            super().answered(content)
        else:
            self.speaking.answered(content)

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        for branch in self._others():
            branch.__exit__(*exc_info)

    async def __aexit__(self, *exc_info: object) -> None:
        await self.hooks.let_go()
        await super().__aexit__(*exc_info)
        for branch in self._others():
            await branch.__aexit__(*exc_info)

    def _others(self) -> list[CurrentSession]:
        return [branch for branch in self._branches.values() if branch is not self]


class BidiKVHooks(RunHooks[Any]):
    """Run hooks of a `BidiKVSession`: hold its lease while tools run, and branch it off where an agent hands over."""

    def __init__(self, session: BidiKVSession) -> None:
        self._session = session
        self._hold: CurrentHold | None = None
        self.num_tools = 0
        """Tools that are running."""

    async def on_agent_start(self, context: RunContextWrapper[Any], agent: Agent[Any]) -> None:
        """Speak for this agent from here on."""
        self._session.begin(agent.name)

    async def on_llm_start(
        self,
        context: RunContextWrapper[Any],
        agent: Agent[Any],
        system_prompt: str | None,
        input_items: list[TResponseInputItem],
    ) -> None:
        """Let go of the lease, whatever became of the tools: the turn itself renews it."""
        await self.let_go()

    async def on_llm_end(self, context: RunContextWrapper[Any], agent: Agent[Any], response: ModelResponse) -> None:
        """Remember the answer."""
        self._session.spoke()

    async def on_tool_start(self, context: RunContextWrapper[Any], agent: Agent[Any], tool: Tool) -> None:
        """Hold the lease while at least one tool runs."""
        if self._hold is None:
            self._hold = self._session.speaking.hold()
        self.num_tools += 1
        if self.num_tools == 1:
            await self._hold.__aenter__()

    async def on_tool_end(self, context: RunContextWrapper[Any], agent: Agent[Any], tool: Tool, result: object) -> None:
        """Let go of the lease when the last tool has ended."""
        self.num_tools -= 1
        if self.num_tools <= 0:
            await self.let_go()

    async def on_handoff(self, context: RunContextWrapper[Any], from_agent: Agent[Any], to_agent: Agent[Any]) -> None:
        """Branch off for the next agent."""
        await self.let_go()
        self._session.hand_off(from_agent.name, to_agent.name)

    async def let_go(self) -> None:
        """Stop holding the lease."""
        hold, self._hold, self.num_tools = self._hold, None, 0
        if hold is not None:
            await hold.__aexit__(None, None, None)


def _num_answers(items: list[TResponseInputItem]) -> int:
    """Return how many of the model's answers a history has: runs of items that one answer was made of."""
    is_answer = [item.get("role") == "assistant" or item.get("type") in _MADE_BY_THE_MODEL for item in items]
    return sum(now and not before for before, now in zip([False, *is_answer], is_answer, strict=False))
