"""Remembers what was started, and ends exactly that.

`EngineRecord.of` right after a start -> `write_state` -> (perhaps another process) `read_state` -> `stop`.
A process is ours only if its id *and* its creation time match, so a recycled id is never signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

from server_ext.launch.model import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from server_ext.launch.command import Role

STATE_FILE = "stack.json"

# The kernel counts creation times in hundredths of a second since boot, and the boot time itself is rounded.
_CREATED_TOLERANCE_S = 0.5


@dataclass(frozen=True)
class EngineRecord:
    """One engine that runs: its process leads a session and group of its own, with all its children in it."""

    role: Role
    pid: int
    created_s: float
    url: str
    log_file: str

    @classmethod
    def of(cls, pid: int, *, role: Role, url: str, log_file: Path) -> EngineRecord:
        """The record of a child that was just started and not waited for yet."""
        return cls(role, pid, psutil.Process(pid).create_time(), url, str(log_file))

    def is_alive(self) -> bool:
        """Whether the engine's first process still runs."""
        return any(process.pid == self.pid for process in self.processes())

    def processes(self) -> list[psutil.Process]:
        """The engine's processes that still run, its children included; [] once it is gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            created_s = psutil.Process(self.pid).create_time()
            if abs(created_s - self.created_s) > _CREATED_TOLERANCE_S:
                return []  # the id was given to somebody else, so the group it named is gone as well
        # A group's id is not given out while a member lives: children that outlived their leader are ours.
        return [process for process in psutil.process_iter() if self._owns(process)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return (
                os.getpgid(process.pid) == self.pid
                and process.create_time() >= self.created_s - _CREATED_TOLERANCE_S
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except (psutil.NoSuchProcess, ProcessLookupError):
            return False


@dataclass(frozen=True)
class StackState:
    """A stack that was started on this machine by this user."""

    model: str
    served_name: str
    engines: tuple[EngineRecord, ...]
    ready: bool = False

    @property
    def url(self) -> str:
        """Where clients go: D's base URL."""
        return next(engine.url for engine in self.engines if engine.role == "decode")

    def is_running(self) -> bool:
        """Whether any process of the stack still runs."""
        return any(engine.processes() for engine in self.engines)


def read_state(state_dir: Path) -> StackState | None:
    """What was started last in this folder and not ended by `stop`; None where nothing was."""
    try:
        raw = json.loads((state_dir / STATE_FILE).read_text("utf-8"))
        return StackState(**{**raw, "engines": tuple(EngineRecord(**engine) for engine in raw["engines"])})
    except FileNotFoundError:
        return None


def write_state(state_dir: Path, state: StackState) -> None:
    """Remember `state`; readers see it whole or not at all."""
    write_atomically(state_dir / STATE_FILE, json.dumps(asdict(state), indent=2), mode=0o600)


def forget_state(state_dir: Path) -> None:
    """Remember nothing; logs and the secret stay."""
    (state_dir / STATE_FILE).unlink(missing_ok=True)


def stop(engines: Sequence[EngineRecord], grace_s: float = 10.0) -> None:
    """End these engines and their children: SIGTERM, and SIGKILL for what is left after `grace_s` seconds."""
    for sig, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        processes = send_signal(engines, sig)
        if not processes:
            return
        psutil.wait_procs(processes, timeout=wait_s)


def send_signal(engines: Sequence[EngineRecord], sig: signal.Signals) -> list[psutil.Process]:
    """Send one signal to all processes of these engines; returns those that ran then."""
    signalled: list[psutil.Process] = []
    for engine in engines:
        if processes := engine.processes():
            signalled += processes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, sig)  # the group at once: a child forked just now is in it
    return signalled
