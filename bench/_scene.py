"""One scene of the fault matrix: sessions whose second turns are brought to given points, and how they went on.

`Scene.at_points` starts the turns and holds each where it shall be; the fault is the caller's. `Scene.rows` judges
what came of it. A point that is not reached, or a fault that does not happen, is an error of the driver: nothing here
reports a row for it.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import httpx

from bidikv_sdk import BidiKV
from server_ext.launch.command import ROLES
from server_ext.launch.tiny import TINY
from tests.engine.common import DEADLINE_S
from tests.engine.talk import Said, Talk, read_completion, read_stream, words
from tests.engine.wire import Break, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.engine.rig import Rig

BETWEEN_TURNS = "between turns"
_BRAKES = {
    "before load": "decode-load",
    "before begin": "decode-begin",
    "P has it queued": "prefill-queue",
    "P posts its read": "prefill-transfer",
    "P reads": "prefill-read",
    "P computes": "prefill-compute",
    "D has it queued": "decode-queue",
    "D posts its read": "decode-transfer",
    "D reads": "decode-read",
    "D decodes": "decode-compute",
    "at settle": "decode-settle",
    "settled": "decode-settle-done",
}
_WIRES = {"after begin": "request", "P answered": "reply"}
# Beyond the longest that anything of this stack is held for: tickets, provisional pins, P's own hold.
_REST_DEADLINE_S = 90.0


class NotProduced(Exception):
    """A fault did not happen where it was to happen: the matrix says nothing about it."""


def require(condition: object, what: str) -> None:
    """Go on only where `condition` is true.

    Raises:
        NotProduced: it is not; the text is `what`.
    """
    if not condition:
        raise NotProduced(what)


@dataclass
class Row:
    """One line of the table.

    `history_lost` is the reason for which the next turn must be recomputed; None where D still has the history, and the
    next turn must be fetched. `stale_reads` counts since D's last start, and is never to be anything but 0.
    """

    fault: str
    point: str
    outcome: str
    reason: str
    next_outcome: str
    next_reason: str
    history_lost: str | None
    tokens_wrong: int
    blocks_leaked: int
    stale_reads: int
    engines_alive: bool
    seconds: float

    def is_good(self) -> bool:
        """Tell whether nothing went wrong."""
        is_clean = not self.tokens_wrong and not self.blocks_leaked and not self.stale_reads
        return is_clean and self.engines_alive and self.is_next_right()

    def is_next_right(self) -> bool:
        """Tell whether the next turn went the way that is left to it."""
        if self.history_lost is None:
            return self.next_outcome == "fetched"
        return (self.next_outcome, self.next_reason) == ("recomputed", self.history_lost)

    def to_json(self) -> dict[str, Any]:
        """Return the row as the file has it."""
        return asdict(self)


@dataclass
class End:
    """How a turn ended for its client."""

    outcome: str
    reason: str
    said: Said | None = None


class Running:
    """A turn on its way, in a thread of its own."""

    def __init__(self, talk: Talk, body: dict[str, Any]) -> None:
        self._stream = body["stream"]
        self._has_left = False
        self.sent = threading.Event()
        url = talk.rig.decode.base_url
        self._connection = HTTPConnection(url.host, url.port or 80, timeout=4 * DEADLINE_S)
        headers = {**talk.headers, "Content-Type": "application/json"}
        self._end = talk.rig.threads.submit(self._run, f"/v1/sessions/{talk.id}/turns", json.dumps(body), headers)

    def leave(self) -> None:
        """Hang up, as a client that is gone."""
        self._has_left = True
        self._connection.sock.shutdown(2)

    def end(self) -> End:
        """Wait for the end."""
        return self._end.result(4 * DEADLINE_S)

    def is_over(self) -> bool:
        """Tell whether the client has its reply, or lost it."""
        return self._end.done()

    def _run(self, path: str, body: str, headers: dict[str, str]) -> End:
        try:
            self._connection.request("POST", path, body, headers)
            self.sent.set()
            response = self._connection.getresponse()
            text = response.read().decode()
        except (OSError, HTTPException) as error:
            self.sent.set()
            if self._has_left:
                return End("left", "client_gone")
            return End("connection lost", type(error).__name__)
        finally:
            self._connection.close()
        if self._has_left:
            return End("left", "client_gone")
        return self._read(response.status, text)

    def _read(self, status: int, text: str) -> End:
        if status != 200:
            return End(f"refused ({status})", json.loads(text)["error"]["code"])
        if self._stream:
            errors = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith('data: {"error"')]
            if errors:
                return End("error event", errors[0]["error"]["code"])
        said = read_stream(text) if self._stream else read_completion(json.loads(text))
        return End(*said.came, said)


class WireHold:
    """The wire between D and P, held at one place."""

    def __init__(self, rest: Break) -> None:
        self._rest = rest

    def wait(self) -> None:
        """Return when the wire holds something."""
        require(self._rest.reached.wait(DEADLINE_S), "nothing came over the wire")

    def let_go(self) -> None:
        """Let it pass."""
        self._rest.go_on.set()

    crawl = let_go


def num_leaked(rig: Rig) -> int:
    """Return the blocks that nothing accounts for once everything has had its time; waits no longer than needed."""
    end_s = time.monotonic() + _REST_DEADLINE_S
    while (number := _num_unaccounted(rig)) and time.monotonic() < end_s:
        time.sleep(0.1)
    return number


def _num_unaccounted(rig: Rig) -> int:
    total = 0
    for role in ROLES:
        rig.step(role)
        busy = ("num_requests_running", "num_requests_waiting")
        total += sum(int(rig.metric(role, f"vllm:{name}")) for name in busy)
    total += round(rig.metric("prefill", "vllm:kv_cache_usage_perc") * rig.prefill_pool_blocks)
    num_leased: int = sum(session["lease"]["num_blocks"] for session in rig.sessions())
    pool = rig.pool()
    total += pool["pending_ticket_blocks"]
    return total + abs(pool["total_blocks"] - pool["free_blocks"] - num_leased)


class Scene:
    """Sessions, each with a turn at a point.

    Args:
        rig: the running stack.
        fault: its name.
        points: where the turns shall be when it happens, those last at which an engine stands still.
        stream: ask for streams.
        by_sdk: open the sessions with the SDK, which opens them again on a home that has lost them.
        history_lost: why the next turns must be recomputed; None where D still has the history.
        turn: further parameters of the turn that meets the fault.
    """

    def __init__(
        self,
        rig: Rig,
        fault: str,
        points: Sequence[str],
        *,
        stream: bool = False,
        by_sdk: bool = False,
        history_lost: str | None = None,
        turn: dict[str, Any] | None = None,
    ) -> None:
        self.rig = rig
        self.fault = fault
        self.points = tuple(points)
        self.holds: list[Any] = []
        self._runs: dict[int, Running] = {}
        self._stream = stream
        self._history_lost = history_lost
        self._turn = turn or {}
        self._started_s = time.monotonic()
        self._sdk = BidiKV(f"{rig.stack.url}/v1", model=TINY) if by_sdk else None
        rig.brakes.forget()
        self.pids = {role: rig.stack.child(role).pid for role in ROLES}
        self._sessions: list[Any] = []
        self._firsts: dict[str, list[int]] = {}
        self.talks = [self._open(point) for point in self.points]

    def _open(self, point: str) -> Talk:
        talk = self.rig.talk()
        # A beginning of its own, so that no two sessions share a block.
        system, user = f"{talk.id} at {point}", words(200)
        if self._sdk is None:
            first = talk.right_turn([{"role": "system", "content": system}, {"role": "user", "content": user}])
            self._firsts[talk.id] = first.prompt_ids + first.ids
            return talk
        session = self._sdk.session(talk.id, system=system, temperature=0, max_tokens=12, return_token_ids=True)
        self._sessions.append(session)
        session.send(user)
        talk.num_turns = 1
        return talk

    # The turn that meets the fault

    @property
    def turns(self) -> list[Running]:
        """The turns that have been started, in the order of their points."""
        return [self._runs[index] for index in sorted(self._runs)]

    def ask(self, index: int, *, turn: int = 2) -> Running:
        """Start one session's turn."""
        talk = self.talks[index]
        delta = self._turn.get("delta", words(40, "plums"))
        chat = {name: value for name, value in self._turn.items() if name != "delta"}
        run = self._runs[index] = Running(talk, talk.request(delta, turn=turn, stream=self._stream, **chat))
        return run

    @contextmanager
    def at_points(self) -> Iterator[list[Any]]:
        """Bring every turn to its point and hold it there for the length of the block, or until it is let go."""
        with ExitStack() as stack:
            for index, point in enumerate(self.points):
                if point != BETWEEN_TURNS:
                    if point == "before load":
                        # A turn asks for its history only where somebody may have changed it.
                        self.talks[index].post("rewind", {"turn": 1}).raise_for_status()
                    hold = stack.enter_context(self._held(point))
                    self.holds.append(hold)
                    self.ask(index)
                    hold.wait()
            yield self.holds

    @contextmanager
    def _held(self, point: str) -> Iterator[Any]:
        if point in _BRAKES:
            with self.rig.brakes.held(_BRAKES[point]) as brake:
                yield brake
            return
        rest = Break(0, "hold")
        with self.wire(**{_WIRES[point]: rest}):
            yield WireHold(rest)
            # What is still on its way gets there before the wire ends.
            rest.go_on.set()
            for run in self.turns:
                run.end()

    def wire(self, **breaks: Break) -> Wire:
        """Return a wire between D and P; D finds it while the block lasts."""
        return Wire(self.rig.gate_port, self.rig.stack.config.prefill.http, **breaks)

    def let_go(self) -> None:
        """Let all turns go on."""
        for hold in self.holds:
            hold.let_go()

    def ask_rest(self) -> None:
        """Start the turns that were to come behind the fault."""
        for index in range(len(self.points)):
            if index not in self._runs:
                self.ask(index)

    def wait(self) -> None:
        """Wait for the end of all turns."""
        for turn in self.turns:
            turn.end()

    def has_aborted(self, role: str) -> bool:
        """Tell whether an engine has ended a request by an abort in this scene."""
        return "FINISHED_ABORTED" in self.rig.brakes.finished(role)

    def restart(self, role: Any) -> None:
        """Start a dead engine again, and let P and D meet."""
        self.rig.restart(role)
        self.pids[role] = self.rig.stack.child(role).pid
        talk = self.rig.talk()
        talk.turn(f"{talk.id}: " + words(100))
        talk.turn("Go on.")
        talk.post("end").raise_for_status()

    # What came of it

    def rows(self) -> list[Row]:
        """Judge every session, and leave none behind."""
        self.rig.brakes.forget()
        ends = [turn.end() for turn in self.turns]
        wrong = [0 if end.said is None else self._num_wrong(end.said) for end in ends]
        leaked = num_leaked(self.rig)
        nexts = []
        for index, talk in enumerate(self.talks):
            said = self._next_turn(index, talk)
            nexts.append(said.came)
            wrong[index] += self._num_wrong(said) + self._num_wrong_in_history(talk, said)
        leaked = max(leaked, num_leaked(self.rig))
        self._end_sessions()
        leaked = max(leaked, num_leaked(self.rig))
        num_stale = int(self.rig.metric("decode", "bidikv_stale_reads_total"))
        are_alive, seconds = self.are_alive(), self._seconds()
        return [
            Row(
                self.fault,
                point,
                end.outcome,
                end.reason,
                *following,
                history_lost=self._history_lost,
                tokens_wrong=num_wrong,
                blocks_leaked=leaked,
                stale_reads=num_stale,
                engines_alive=are_alive,
                seconds=seconds,
            )
            for point, end, following, num_wrong in zip(self.points, ends, nexts, wrong, strict=True)
        ]

    def _next_turn(self, index: int, talk: Talk) -> Said:
        if self._sdk is not None:
            turn = self._sessions[index].send("And then?")
            return read_completion({**turn.completion, "bidikv": turn.completion["bidikv"]})
        reply = self.rig.decode.get(f"/v1/sessions/{talk.id}", headers=talk.headers)
        if reply.status_code == 404:  # it was ended in the middle of its turn
            talk.num_turns, talk.last = 0, None
        else:
            talk.wait_until_idle()
            talk.num_turns = talk.info()["turn"]
        return talk.turn("And then?")

    def _num_wrong_in_history(self, talk: Talk, said: Said) -> int:
        """Return how many tokens of the session's beginning a later prompt has lost or changed."""
        if self._sdk is not None or talk.num_turns == 1:  # both began anew, from text
            return 0
        history = self._firsts[talk.id]
        return sum(a != b for a, b in zip_longest(said.prompt_ids[: len(history)], history))

    def _num_wrong(self, said: Said) -> int:
        right = self.rig.recomputed(said.prompt_ids, len(said.ids))
        return sum(a != b for a, b in zip(said.ids, right, strict=True))

    def _end_sessions(self) -> None:
        self.rig.end_sessions()
        if self._sdk is not None:
            self._sdk.close()

    def are_alive(self) -> bool:
        """Tell whether both engines run and answer, and are those that were left running."""
        for role in ROLES:
            child = self.rig.stack.child(role)
            client = self.rig.prefill if role == "prefill" else self.rig.decode
            if child.pid != self.pids[role] or child.poll() is not None:
                return False
            try:
                if not client.get("/health").is_success:
                    return False
            except httpx.TransportError:
                return False
        return True

    def rows_of_the_dead(self) -> list[Row]:
        """Return the rows of a scene that an engine did not survive."""
        seconds = self._seconds()
        return [
            Row(
                self.fault,
                point,
                "engine died",
                "internal_error",
                "none",
                "none",
                history_lost=self._history_lost,
                tokens_wrong=0,
                blocks_leaked=0,
                stale_reads=0,
                engines_alive=False,
                seconds=seconds,
            )
            for point in self.points
        ]

    def _seconds(self) -> float:
        return round(time.monotonic() - self._started_s, 1)
