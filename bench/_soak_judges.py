"""Who compares the answers of a soak: each with the history that it answers, and with what plain vLLM says to that.

`is_same_text` and `wrong_end` are pure; `Judges` are threads that ask a reference. May import `_reference` and the
agents' `Answer`.
"""

from __future__ import annotations

import queue
import re
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from tokenizers import Tokenizer

from bench._reference import judge
from server_ext.launch.tiny import ensure_tiny

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench._reference import Generated
    from bench._soak_agents import Answer

BAD: Final = "\ufffd"
"""What a tokenizer shows for a part of a character."""
_NUM_JUDGES: Final = 2
# The token of a bad character may begin with a space or a letter, and clients do not get these either.
_BAD_PARTS: Final = re.compile(f"((?:[^{BAD}]{{0,2}}{BAD})+)")


def is_same_text(ours: str, stock: str) -> bool:
    """Tell whether a prompt is that of a history, as text; bad characters, and the two before each, may be missing.

    A model that wrote only a part of a character has it in its tokens, and so on D, but not in the text that clients
    keep and that stock vLLM renders again.

    Args:
        ours: what D made the answer of.
        stock: what stock vLLM renders for the history.
    """
    if BAD not in ours:
        return ours == stock
    # Every second piece is bad: any of its characters may be missing.
    pieces = enumerate(_BAD_PARTS.split(ours))
    pattern = "".join("".join(f"{re.escape(c)}?" for c in piece) if i % 2 else re.escape(piece) for i, piece in pieces)
    return re.fullmatch(pattern, stock) is not None


def wrong_end(ids: Sequence[int], text: str, finish_reason: str | None, chat: Mapping[str, Any]) -> str:
    """Return what is wrong with the end of a whole answer, nothing where all is right.

    Comparing token by token does not tell that some are missing. The model never ends by itself: its special tokens
    are never the likeliest.

    Args:
        ids: [num_tokens] of the answer.
        text: of all these.
        finish_reason: that was given.
        chat: the request's `max_tokens`, and `stop` where it had one.
    """
    if finish_reason == "length" and len(ids) == chat["max_tokens"]:
        return ""
    if (
        finish_reason == "stop"
        and len(ids) <= chat["max_tokens"]
        and any(stop in text for stop in chat.get("stop", ()))
    ):
        return ""
    return f"{len(ids)} tokens of {chat['max_tokens']} came, and it ended by {finish_reason!r}"


class Judge(Protocol):
    """What is asked of the reference."""

    def generate(self, prompt_ids: list[int], num_tokens: int) -> list[Generated]:
        """Return the tokens behind a prompt."""

    def prompt_ids(self, messages: Sequence[Any]) -> list[int]:
        """Return the prompt of a history."""


@dataclass(frozen=True)
class Judged:
    """What came of one answer; `wrong` is empty where all is right."""

    wrong: str
    num_near_ties: int = 0
    has_bad_characters: bool = False


class Judges:
    """Threads that compare answers with the reference's."""

    def __init__(self, reference: Judge) -> None:
        self.num_answers = self.num_unfinished = self.num_wrong = self.num_near_ties = self.num_bad_characters = 0
        self.wrong: list[dict[str, Any]] = []
        self.counts = {name: Counter[str]() for name in ("outcomes", "reasons", "tokens")}
        self._reference = reference
        self._tokenizer = Tokenizer.from_file(str(ensure_tiny() / "tokenizer.json"))
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(_NUM_JUDGES)]
        for thread in self._threads:
            thread.start()

    def hand_in(self, answer: Answer) -> None:
        """Take an answer."""
        self._answers.put(answer)

    def join(self) -> None:
        """Return when all that was handed in has been judged."""
        for _ in self._threads:
            self._answers.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (answer := self._answers.get()) is not None:
            try:
                judged = self._judge(answer)
            except Exception as error:  # noqa: BLE001 - an answer that could not be judged is none that was right
                judged = Judged(f"not judged: {error!r}")
            with self._lock:
                self._count(answer, judged)

    def _judge(self, answer: Answer) -> Judged:
        ours, stock = map(self._text, (answer.prompt_ids, self._reference.prompt_ids(answer.messages)))
        has_bad = BAD in ours
        if not is_same_text(ours, stock):
            return Judged("the prompt is not that of the history", has_bad_characters=has_bad)
        if answer.cache is not None and (
            what := wrong_end(answer.ids, self._text(answer.ids), answer.finish_reason, answer.chat)
        ):
            return Judged(what, has_bad_characters=has_bad)
        verdict = judge(answer.prompt_ids, answer.ids, self._reference.generate)
        wrong = f"{verdict.num_wrong} tokens differ" if verdict.num_wrong else ""
        return Judged(wrong, verdict.num_near_ties, has_bad)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _count(self, answer: Answer, judged: Judged) -> None:
        cache = answer.cache
        self.num_near_ties += judged.num_near_ties
        if cache is None:
            self.num_unfinished += 1
        else:
            self.num_answers += 1
            self.num_bad_characters += judged.has_bad_characters
            self.counts["outcomes"][cache["outcome"]] += 1
            self.counts["reasons"][cache["reason"]] += 1
            for name in ("reused", "fetched", "computed"):
                self.counts["tokens"][name] += cache[f"{name}_tokens"]
        if judged.wrong:
            self.num_wrong += 1
            self.wrong.append({"session": answer.session, "turn": answer.turn, "what": judged.wrong, "cache": cache})
            print(f"WRONG: {self.wrong[-1]}", flush=True)
