"""The agents of a soak: threads that live one planned session after the other, and hand in every answer."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any, Final

import httpx
from tokenizers import Tokenizer

from bench._soak_plan import MAX_TOKENS, kept, text_of
from bidikv_sdk import BidiKV, BidiKVError
from server_ext.launch.tiny import TINY, ensure_tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bidikv_sdk import Session
    from server_ext.traffic import PlannedSession, PlannedTurn

_CALL_TIMEOUT_S: Final = 60.0
_MAX_TRIES: Final = 6
_STREAM_SHARE, _STOP_SHARE, _LEAVING_SHARE = 0.5, 0.2, 0.03
# A client that leaves has read so many chunks at most.
_LONGEST_LOOK: Final = 8
_STOPS: Final = ("a", "e", "i", "1", " ")
# The template's own words around a message.
_MESSAGE_TOKENS: Final = 5


@dataclass
class Answer:
    """One answer that a client got: the whole history before it, the prompt that D made of it, and what came."""

    session: str
    turn: int
    messages: list[dict[str, Any]]
    chat: dict[str, Any]
    """The request's `max_tokens`, and `stop` where it had one."""
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cache: dict[str, Any] | None = None
    """None: the client left, or the stream broke; what came must be right as far as it goes."""

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk of a stream."""
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        for choice in chunk["choices"]:
            self.ids += choice.get("token_ids") or ()
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


@dataclass
class Tally:
    """What all agents together have seen."""

    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, counter: str, name: str) -> None:
        """Count something."""
        with self.lock:
            getattr(self, counter)[name] += 1


class Agents:
    """So many sessions at a time.

    Args:
        base_url: of D, without a slash at its end.
        plans: sessions without end.
        hand_in: takes every answer.
        seed: of all that agents draw.
        is_over: set when they shall stop.
    """

    def __init__(
        self,
        base_url: str,
        plans: Iterator[PlannedSession],
        hand_in: Callable[[Answer], None],
        *,
        num_agents: int,
        seed: int,
        is_over: threading.Event,
    ) -> None:
        self.tally = Tally()
        self.failures: list[BaseException] = []
        self._base_url = base_url
        self._plans = plans
        self._plans_lock = threading.Lock()
        self._hand_in = hand_in
        self._is_over = is_over
        self._tokenizer = Tokenizer.from_file(str(ensure_tiny() / "tokenizer.json"))
        self._threads = [
            threading.Thread(target=self._live, args=(Random(f"{seed}-{index}"),)) for index in range(num_agents)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Return when all have ended; `is_over` must be set."""
        for thread in self._threads:
            thread.join()

    def _live(self, random: Random) -> None:
        try:
            self._live_on(random)
        except BaseException as error:  # noqa: BLE001 - a bug of this script, for whoever started the agents
            self.failures.append(error)
            self._is_over.set()

    def _live_on(self, random: Random) -> None:
        # Nobody begins at the same moment as all the others.
        self._is_over.wait(random.uniform(0, 2))
        with BidiKV(f"{self._base_url}/v1", model=TINY, timeout=_CALL_TIMEOUT_S) as client:
            while not self._is_over.is_set():
                with self._plans_lock:
                    plan = next(self._plans)
                try:
                    self._live_one(client, plan, random)
                except BidiKVError as error:  # as an agent that gives up
                    self.tally.add("errors", f"session given up: {type(error).__name__}")

    def _live_one(self, client: BidiKV, plan: PlannedSession, random: Random) -> None:
        system = f"You are number {random.randrange(10**6)}. {text_of(random, 40)}"
        with client.session(system=system, temperature=0, return_token_ids=True) as session:
            for turn in plan.turns:
                # A tool is waited for with the lease kept alive, a human is not.
                with session.hold() if turn.after_tool and session.turn else nullcontext():
                    self._is_over.wait(turn.gap_s)
                if self._is_over.is_set():
                    return
                self._shorten(session, turn)
                self._turn(session, turn, random)

    def _shorten(self, session: Session, turn: PlannedTurn) -> None:
        """Edit or compact the history where the plan says so, or where it has outgrown the model."""
        messages: list[dict[str, Any]] = list(session.transcript)
        contents = [message.get("content") or "" for message in messages]
        num_of = [len(self._tokenizer.encode(content).ids) + _MESSAGE_TOKENS for content in contents]
        num_kept = turn.kept_tokens
        if sum(num_of) + turn.delta_tokens + turn.output_tokens > MAX_TOKENS + 100:
            num_kept = num_of[0]
        if num_kept is not None and num_kept < sum(num_of) and session.turn:
            self._try(lambda: session.replace_history(kept(messages, num_kept, num_of) or messages[:1]))

    def _turn(self, session: Session, planned: PlannedTurn, random: Random) -> None:
        text = text_of(random, planned.delta_tokens)
        chat: dict[str, Any] = {"max_tokens": planned.output_tokens}
        if random.random() < _STOP_SHARE:
            chat["stop"] = [random.choice(_STOPS)]
        ask = self._send
        if random.random() < _STREAM_SHARE:
            ask = self._read
            if random.random() < _LEAVING_SHARE:
                # Not near the last chunk, with which the turn would be complete.
                num_chunks = random.randint(1, max(1, min(_LONGEST_LOOK, planned.output_tokens // 2)))
                self._try(lambda: self._leave(session, text, chat, num_chunks))
        self._hand_in(self._try(lambda: ask(session, text, chat)))

    def _send(self, session: Session, text: str, chat: dict[str, Any]) -> Answer:
        turn = session.send(text, **chat)
        completion: dict[str, Any] = dict(turn.completion)
        (choice,) = completion["choices"]
        asked = list(session.transcript)[:-1]
        return Answer(
            session.id,
            turn.turn,
            asked,
            chat,
            completion["prompt_token_ids"],
            choice["token_ids"],
            choice["finish_reason"],
            turn.cache.to_json(),
        )

    def _read(self, session: Session, text: str, chat: dict[str, Any]) -> Answer:
        with self._part(session, text, chat) as answer, session.stream(text, **chat) as stream:
            for chunk in stream:
                answer.take(chunk)
            answer.cache = stream.final_turn().cache.to_json()
        return answer

    def _leave(self, session: Session, text: str, chat: dict[str, Any], num_chunks: int) -> None:
        with self._part(session, text, chat) as answer, session.stream(text, **chat) as stream:
            for chunk in islice(stream, num_chunks):
                answer.take(chunk)
        self.tally.add("faults", "client gone")

    @contextmanager
    def _part(self, session: Session, text: str, chat: dict[str, Any]) -> Iterator[Answer]:
        """Yield an answer to be filled; one that does not get its report is handed in as far as it came."""
        messages = [*session.transcript, {"role": "user", "content": text}]
        answer = Answer(session.id, session.turn + 1, messages, chat)
        try:
            yield answer
        finally:
            if answer.cache is None and answer.prompt_ids:
                self._hand_in(answer)

    def _try(self, call: Callable[[], Any]) -> Any:
        """Call until it works; a client whose server is away waits and asks again.

        Raises:
            BidiKVError: it has not worked for long.
        """
        for number in range(_MAX_TRIES):
            try:
                return call()
            except BidiKVError as error:  # noqa: PERF203 - calls take far longer than the try
                self.tally.add("errors", type(error).__name__)
                if number == _MAX_TRIES - 1 or self._is_over.is_set():
                    raise
                self._wait_for_server()
        msg = "unreachable: the last try returns or raises"
        raise AssertionError(msg)

    def _wait_for_server(self) -> None:
        while not self._is_over.wait(0.3):
            with suppress(httpx.TransportError):
                if httpx.get(f"{self._base_url}/health", timeout=5, trust_env=False).is_success:
                    return
