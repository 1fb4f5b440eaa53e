"""Runs a local stack, one P and one D: start both at once, wait until both have answered a token, end both.

`Stack.start` -> `Stack.wait_ready` -> (`restart`, `kill`) -> `Stack.stop`; or `with running_stack(config)`.
The engines are processes of their own sessions, seen only through their logs and HTTP; no vLLM here.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from itertools import islice
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import httpx
import psutil

from server_ext.launch.command import ROLES, EnginePorts, engine_command
from server_ext.launch.model import cache_dir
from server_ext.launch.stages import LogFollower
from server_ext.launch.state import (
    EngineRecord,
    StackState,
    forget_state,
    read_state,
    send_signal,
    stop,
    write_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from server_ext.launch.command import EngineCommand, Role, StackConfig

READY_TIMEOUT_S = 600.0
"""Start-up takes about a minute on two cores, mostly imports; a loaded machine may need several."""

_POLL_S = 0.25
_HEALTH_TIMEOUT_S = 2.0
_SECRET_BYTES = 32
# Below what Linux uses for outgoing connections, 32768 and up.
_PORTS = range(20000, 32768)


class StackError(RuntimeError):
    """The stack did not start, or another one runs already; the message holds the engine's last log lines."""


class Progress(NamedTuple):
    """An engine reached a stage of its start (see `stages.STAGES`)."""

    role: Role
    stage: str
    elapsed_s: float


def default_state_dir() -> Path:
    """Where the user's one stack keeps its state, secret and logs."""
    return cache_dir() / "stack"


def free_ports() -> tuple[EnginePorts, EnginePorts]:
    """Ports for P and D that nobody listens on right now.

    An engine takes half a minute to listen on its own. So none is among those that the kernel gives to outgoing
    connections: one of these may be gone by then, and an engine without its side channel serves, but hands over
    nothing.
    """
    with ExitStack() as held:
        sockets = (held.enter_context(socket.socket()) for _ in _PORTS)
        tried = zip(sockets, secrets.SystemRandom().sample(_PORTS, len(_PORTS)), strict=True)
        a, b, c, d = islice((port for sock, port in tried if _takes(sock, port)), 4)
    return EnginePorts(http=a, side_channel=b), EnginePorts(http=c, side_channel=d)


def _takes(sock: socket.socket, port: int) -> bool:
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def ensure_secret(state_dir: Path) -> Path:
    """The file of the secret that P and D share: random, readable by the user alone, made on first use."""
    path = state_dir / "secret"
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_SECRET_BYTES))
    return path


class Stack:
    """One P and one D on this machine.

    * **config** - the stack.
    * **state_dir** - where state and logs lie; one folder holds one stack at a time.
    * **command** - what to run for an engine; tests put something small here.
    """

    def __init__(
        self,
        config: StackConfig,
        state_dir: Path,
        *,
        command: Callable[[StackConfig, Role, Mapping[str, str]], EngineCommand] = engine_command,
    ) -> None:
        self.config = config
        self._state_dir = state_dir
        self._command = command
        self._children: dict[Role, subprocess.Popen[bytes]] = {}
        self._records: dict[Role, EngineRecord] = {}

    @property
    def url(self) -> str:
        """Where clients go: D's base URL."""
        return self.config.url("decode")

    @property
    def prefill_url(self) -> str:
        """P's base URL."""
        return self.config.url("prefill")

    def log_file(self, role: Role) -> Path:
        """The log of one engine; it begins anew at each start."""
        return self._state_dir / f"{role}.log"

    def start(self) -> None:
        """Start both engines and return at once.

        Raises:
            StackError: A stack that was started from the same folder still runs.
        """
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._state_dir / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two starts at the same time: the second one sees the first one's state
            state = read_state(self._state_dir)
            if state is not None and state.is_running():
                msg = f"a stack already runs at {state.url} ({state.served_name}); end it with `bidikv down`"
                raise StackError(msg)
            for role in ROLES:
                self._spawn(role)

    def wait_ready(
        self,
        timeout_s: float = READY_TIMEOUT_S,
        on_progress: Callable[[Progress], None] = lambda _: None,
        roles: Sequence[Role] = ROLES,
    ) -> None:
        """Return when each engine has answered one real token.

        Args:
            timeout_s: Longest wait in seconds.
            on_progress: Called once per engine and stage.
            roles: The engines to wait for.

        Raises:
            StackError: An engine ended, or the time is over; the engines that run are left to the caller.
        """
        started_s = time.monotonic()
        with ExitStack() as opened:
            opening = [_Opening(self, role, opened) for role in roles]
            while opening:
                elapsed_s = time.monotonic() - started_s
                for engine in opening:
                    for stage in engine.poll():
                        on_progress(Progress(engine.role, stage, elapsed_s))
                opening = [engine for engine in opening if not engine.done]
                if opening and elapsed_s > timeout_s:
                    opening[0].fail(f"was not ready after {timeout_s:.0f} s")
                if opening:
                    time.sleep(_POLL_S)
        if set(self._records) == {role for role in ROLES if self._children[role].poll() is None}:
            self._remember(ready=True)

    def stop(self, grace_s: float = 10.0) -> None:
        """End both engines, and nothing else; harmless where they have ended already, or never started."""
        if not self._records:
            return
        stop(list(self._records.values()), grace_s)
        for child in self._children.values():
            child.wait()
        self._records.clear()
        self._children.clear()
        forget_state(self._state_dir)

    def kill(self, role: Role, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one engine with all its processes; after SIGKILL, return when they are gone."""
        processes = send_signal([self._records[role]], sig)
        if sig == signal.SIGKILL:
            psutil.wait_procs(processes)
            self._children[role].wait()

    def restart(self, role: Role, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start one engine anew, on the same ports, whether it runs or not, and wait until it is ready."""
        stop([self._records[role]])
        self._children[role].wait()
        self._spawn(role)
        self.wait_ready(timeout_s, roles=[role])

    def wait_any_end(self) -> Role:
        """Return when an engine has ended, with its role."""
        while True:
            for role, child in self._children.items():
                if child.poll() is not None:
                    return role
            time.sleep(_POLL_S)

    def child(self, role: Role) -> subprocess.Popen[bytes]:
        """The process of one engine."""
        return self._children[role]

    def _spawn(self, role: Role) -> None:
        command = self._command(self.config, role, os.environ)
        with self.log_file(role).open("wb") as log:
            child = subprocess.Popen(
                command.argv,
                env=command.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group to end as a whole, and deaf to the terminal's Ctrl-C
            )
        self._children[role] = child
        self._records[role] = EngineRecord.of(
            child.pid, role=role, url=self.config.url(role), log_file=self.log_file(role)
        )
        self._remember(ready=False)

    def _remember(self, *, ready: bool) -> None:
        engines = tuple(self._records.values())
        write_state(self._state_dir, StackState(self.config.model, self.config.served_name, engines, ready))


class _Opening:
    """One engine on its way from started to answered."""

    def __init__(self, stack: Stack, role: Role, opened: ExitStack) -> None:
        self.role = role
        self._stack = stack
        self._config = stack.config
        self._follower = LogFollower()
        self._seen = ""
        self._first_token: Thread | None = None
        self._refusal: str | None = None
        self._log = opened.enter_context(stack.log_file(role).open(encoding="utf-8", errors="replace"))
        # No proxy of the environment may stand between us and our own machine.
        self._http = opened.enter_context(httpx.Client(trust_env=False, timeout=_HEALTH_TIMEOUT_S))

    @property
    def done(self) -> bool:
        """Whether the engine has answered."""
        return self._seen == "answered"

    def poll(self) -> list[str]:
        """Look once; [the stage reached since the last look], or [].

        Raises:
            StackError: The engine ended, or refused the first request.
        """
        code = self._stack.child(self.role).poll()
        self._follower.feed(self._log.read())
        if code is not None:
            self.fail(f"ended with exit code {code}")
        if self._first_token is not None:
            if self._refusal is not None:
                self.fail(f"did not answer its first request: {self._refusal}")
            if not self._first_token.is_alive():
                self._follower.advance("answered")
        elif self._is_healthy():
            self._follower.advance("serving")
            # In the background: the first request is slow, and the other engine's shall not wait for it.
            self._first_token = Thread(target=self._ask, daemon=True)
            self._first_token.start()
        if self._follower.stage == self._seen:
            return []
        self._seen = self._follower.stage
        return [self._seen]

    def fail(self, what: str) -> NoReturn:
        """Raise with the last lines of the log."""
        log_file = self._stack.log_file(self.role)
        msg = f"the {self.role} engine {what}; the end of {log_file}:\n{self._follower.tail()}"
        raise StackError(msg)

    def _is_healthy(self) -> bool:
        try:
            return self._http.get(self._config.url(self.role) + "/health").is_success
        except httpx.TransportError:
            return False

    def _ask(self) -> None:
        keys = self._config.api_keys if self.role == "decode" else ()
        try:
            reply = httpx.post(
                self._config.url(self.role) + "/v1/completions",
                json={
                    "model": self._config.served_name,
                    "prompt": "Hello",
                    "max_tokens": 1,
                    "temperature": 0,
                },
                headers={"Authorization": f"Bearer {keys[0]}"} if keys else {},
                timeout=READY_TIMEOUT_S,
                trust_env=False,
            )
        except httpx.TransportError as error:
            self._refusal = repr(error)
            return
        if not reply.is_success:
            self._refusal = f"HTTP {reply.status_code}: {reply.text[:500]}"


@contextmanager
def running_stack(
    config: StackConfig,
    state_dir: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    *,
    keep: bool = False,
) -> Iterator[Stack]:
    """A stack that is ready; it is ended on the way out, also after an error, Ctrl-C or SIGTERM.

    Args:
        config: The stack; its `secret_file` must exist (see `ensure_secret`).
        state_dir: Where state and logs lie; `default_state_dir()` where None.
        on_progress: Called once per engine and stage of the start.
        keep: Leave it running where nothing went wrong; `state.stop` ends it later.

    Raises:
        StackError: It did not start, or another one runs already.
    """
    stack = Stack(config, state_dir or default_state_dir())
    with _sigterm_as_exit():
        try:
            stack.start()
            stack.wait_ready(on_progress=on_progress)
            yield stack
        except BaseException:
            stack.stop()
            raise
        if not keep:
            stack.stop()


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that `finally` runs; only the main thread may ask for that."""
    if current_thread() is not main_thread():
        yield
        return

    def leave(signum: int, _frame: object) -> NoReturn:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
