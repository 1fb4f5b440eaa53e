"""Turn messages into token ids, continuing exactly what D has in its cache.

The text that a model produced is never tokenized again: its ids are known. Two texts are rendered: the history (A), and
history plus delta (B). Where A begins with the last turn's prompt, as its hash tells, holds behind that all that the
model said and then what the template writes after a reply, and B begins with A, only the rest of B is tokenized and
appended to D's ids. Elsewhere (new tools, a template that rewrites its history) everything is rendered afresh and the
lease serves the common prefix. So a prompt is always what the template says, but for the model's own text, which stays
as generated. Where the turn's options are others than the last one's, its prompt is rendered as well: they may write
something before the reply that D's ids lack.

Terms: the *closing* is what the template writes after an assistant's text (such as `<|im_end|>` and a newline); the
*pending text* is the end of a reply that D's ids do not cover (a stop string may end inside a token).
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from bisect import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server_ext.engine.compat import ChatCompletionRequest
from server_ext.http.errors import Refused, refused_by_vllm, vllm_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

# A text that no template rewrites and no model says: it marks where an assistant's text stands in a rendering.
_MARK = "bidikv-mark-5f1c"
_REPLACEMENT = "\ufffd"
# Options that are remembered; few servers see more than some sets of tools at a time.
_MAX_CLOSINGS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt.

    - `token_ids`: [num_tokens], int32.
    - `exact`: True where it begins with D's own ids unchanged.
    - `text_hash`: of the text that the template gave for it, with its length and a hash of the options that it was
      given with: another text is asked whether it begins with this one.
    """

    token_ids: array[int]
    exact: bool
    text_hash: str


@dataclass(frozen=True, slots=True)
class History:
    """What D knows of a session before a turn.

    - `messages`: OpenAI messages of all completed turns.
    - `token_ids`: [num_tokens], ids of the last completed turn's prompt and reply; empty for a session without one.
    - `pending_text`: end of the last reply's text that `token_ids` does not cover.
    - `prompt_hash`: `Prompt.text_hash` of the last completed turn; empty for a session without one.
    """

    messages: list[dict[str, Any]]
    token_ids: array[int]
    pending_text: str
    prompt_hash: str


class TurnRenderer:
    """Renders turns with vLLM's own chat rendering, so that a session's prompt is what stock serving would build."""

    def __init__(self, serving_chat: Any) -> None:
        """Take the parts of vLLM's chat serving object.

        Args:
            serving_chat: `app.state.openai_serving_chat`.
        """
        self._online = serving_chat.online_renderer
        self._renderer = self._online.renderer
        self._model_config = self._online.model_config
        self._closings: dict[str, str] = {}

    async def render(self, request: Any, history: History, delta: Sequence[dict[str, Any]]) -> Prompt:
        """Render history and delta into a prompt that ends where the model's reply begins.

        Args:
            request: the turn as a vLLM `ChatCompletionRequest` (tools, template arguments, token limits).
            history: what D knows.
            delta: the turn's new messages.

        Returns:
            The prompt.

        Raises:
            Refused: `context_length_exceeded`, or the template fails on these messages.
        """
        with vllm_errors():
            # Before vLLM's serving does: a foreign template must not even be run.
            untrusted = self._online.validate_chat_template(
                request.chat_template, request.chat_template_kwargs, self._online.trust_request_chat_template
            )
            if untrusted is not None:
                raise refused_by_vllm(untrusted.error.code, untrusted.error.message)
            params = self._chat_params(request)
            whole = await self._text([*history.messages, *delta], params)
            options = _options(params)
            continued = await self._continue(whole, history, params, options) if history.token_ids else None
            token_ids = await self._tokenize(whole) if continued is None else continued
        self._check_length(request, len(token_ids))
        return Prompt(token_ids, exact=continued is not None, text_hash=_hash(whole, options))

    async def appends(self) -> bool:
        """Tell whether the model's chat template only ever appends, so that plain turns continue exactly.

        Raises:
            Refused: the template renders no text, or fails on the plainest conversation.
        """
        asked = [{"role": "user", "content": "."}]
        replied = [*asked, {"role": "assistant", "content": _MARK}]
        with vllm_errors():
            params = self._chat_params(ChatCompletionRequest(messages=asked))
            options = _options(params)
            prompt_hash = _hash(await self._text(asked, params), options)
            history = History(replied, token_ids=array("i", [0]), pending_text="", prompt_hash=prompt_hash)
            whole = await self._text([*replied, *asked], params)
            return await self._continue(whole, history, params, options) is not None

    def reply_ids(self, token_ids: Sequence[int], text: str, *, skip_special_tokens: bool) -> tuple[int, str]:
        """Find how many of a reply's generated ids its text contains.

        Args:
            token_ids: [num_generated], the ids that the engine generated.
            text: the reply's text as the client got it; a stop string cuts it short of the ids.
            skip_special_tokens: whether that text was decoded without special tokens.

        Returns:
            The number of leading ids whose text lies within `text`, and the rest of `text` behind them. A special token
            at the end is not counted: the model's own end of turn was never fed back, and the template writes one too,
            perhaps another.
        """
        tokenizer = self._renderer.get_tokenizer()

        def text_of(num_ids: int) -> str:
            return tokenizer.decode(list(token_ids[:num_ids]), skip_special_tokens=skip_special_tokens)

        def is_beyond(num_ids: int) -> bool:
            # A character of which only some bytes are there decodes to the replacement character: not beyond yet.
            return not text.startswith(text_of(num_ids).rstrip(_REPLACEMENT))

        num_kept = len(token_ids)
        if is_beyond(num_kept):  # nearly never
            num_kept = bisect(range(1, num_kept), 0, key=is_beyond)
        while not text.startswith(text_of(num_kept)):
            num_kept -= 1
        if num_kept and token_ids[num_kept - 1] in tokenizer.all_special_ids:
            num_kept -= 1
        return num_kept, text[len(text_of(num_kept)) :]

    def _chat_params(self, request: Any) -> Any:
        online = self._online
        hide_tools = request.tool_choice == "none" and online.exclude_tools_when_tool_choice_none
        tools = None if request.tools is None or hide_tools else [tool.model_dump() for tool in request.tools]
        defaults = {**(online.default_chat_template_kwargs or {}), "tools": tools, "tokenize": False}
        params = request.build_chat_params(online.chat_template, online.chat_template_content_format)
        return params.with_defaults(defaults)

    async def _text(self, messages: list[dict[str, Any]], params: Any) -> str:
        _, prompt = await self._renderer.render_messages_async(messages, params)
        text = prompt.get("prompt")
        if not isinstance(text, str):
            msg = "this model's chat template gives no text; sessions need one that renders to text"
            raise Refused(msg, param="messages")
        return text

    async def _continue(self, whole: str, history: History, params: Any, options: str) -> array[int] | None:
        """Return D's ids with the rest of the text appended, or None where the template does not just append."""
        still = dataclasses.replace(
            params, chat_template_kwargs={**params.chat_template_kwargs, "add_generation_prompt": False}
        )
        *prompted, reply = history.messages
        before = await self._text(history.messages, still)
        closing = await self._closing(still, options)
        told_options = history.prompt_hash.rpartition(":")[2]
        if told_options == options:
            prompt = before[: int(history.prompt_hash.partition(":")[0])]
        else:
            prompt = await self._text(prompted, params)
        appends = (
            _hash(prompt, told_options) == history.prompt_hash
            and before.startswith(prompt)
            and whole.startswith(before)
            and closing
            and before.endswith(closing)
            and _says_all(before[len(prompt) :], reply)
        )
        if not appends:
            return None
        rest = history.pending_text + closing + whole[len(before) :]
        return history.token_ids + await self._tokenize(rest)

    async def _closing(self, params: Any, options: str) -> str:
        """Return what the template writes after an assistant's text, or nothing where that cannot be told."""
        if options not in self._closings:
            if len(self._closings) >= _MAX_CLOSINGS:
                self._closings.clear()
            self._closings[options] = await self._find_closing(params)
        return self._closings[options]

    async def _find_closing(self, params: Any) -> str:
        probe = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
        _, found, closing = (await self._text(probe, params)).rpartition(_MARK)
        return closing if found else ""

    async def _tokenize(self, text: str) -> array[int]:
        # Through vLLM's own pool: a fast tokenizer must not be used by two threads at once.
        prompt = await self._renderer.tokenize_prompt_async({"prompt": text}, self._tok_params)
        return array("i", prompt["prompt_token_ids"])

    @property
    def _tok_params(self) -> Any:
        # Without a length of its own: the whole prompt is checked, not this piece of it.
        return dataclasses.replace(
            self._renderer.default_chat_tok_params, max_total_tokens=None, add_special_tokens=False
        )

    def _check_length(self, request: Any, num_tokens: int) -> None:
        max_model_len = self._model_config.max_model_len
        # Not by attribute: OpenAI's older name is marked as deprecated, and reading it would warn.
        asked = request.max_completion_tokens or request.__dict__.get("max_tokens")
        if num_tokens + (asked or 1) > max_model_len:
            msg = (
                f"the prompt has {num_tokens} tokens and {asked or 1} more are asked for, but the model's context "
                f"is {max_model_len}; shorten the history or lower max_completion_tokens"
            )
            raise Refused(msg, code="context_length_exceeded", param="messages")


def _hash(text: str, options: str) -> str:
    return f"{len(text)}:{hashlib.sha256(text.encode()).hexdigest()}:{options}"


def _options(params: Any) -> str:
    """Return a hash of all that a template is given beside messages, the tools among it."""
    return hashlib.sha256(repr(params).encode()).hexdigest()


def _says_all(rendered: str, reply: dict[str, Any]) -> bool:
    """Tell whether a template left nothing out of a reply; it may trim it, and write tool calls in its own way."""
    return all((reply.get(name) or "").strip() in rendered for name in ("reasoning", "content"))
