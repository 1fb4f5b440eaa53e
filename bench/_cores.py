"""Gives D's engine a core of its own, and all else the others (Linux).

Left to the kernel, an engine's thread was seen runnable beside an idle core for many seconds: then turns stand still,
and the others' decode steps, which have the machine to themselves, look better than they are.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import psutil

from server_ext.launch.command import ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_ext.launch.stack import Stack

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
"""Environment of engines that compute at the same time, as if each had a machine of its own."""
_ALL: Final = sorted(os.sched_getaffinity(0))
_OF_DECODE: Final = set(_ALL[:1])
_OF_OTHERS: Final = set(_ALL[1:] or _ALL)


def keep_off() -> None:
    """Keep the calling thread, and what it will start, off D's core."""
    os.sched_setaffinity(0, _OF_OTHERS)


@contextmanager
def kept_off() -> Iterator[None]:
    """Do so for the length of a block."""
    keep_off()
    try:
        yield
    finally:
        os.sched_setaffinity(0, _ALL)


def share_out(stack: Stack) -> None:
    """Put every thread of a running stack where it belongs; call it when both engines have served.

    Raises:
        RuntimeError: D's engine was not found.
    """
    num_found = 0
    for role in ROLES:
        root = psutil.Process(stack.child(role).pid)
        for process in [root, *root.children(recursive=True)]:
            for thread in process.threads():
                # The engine computes and schedules on its first thread; the rest waits for sockets and transfers.
                computes = role == "decode" and thread.id == process.pid and "EngineCore" in process.name()
                os.sched_setaffinity(thread.id, _OF_DECODE if computes else _OF_OTHERS)
                num_found += computes
    if num_found != 1:
        msg = f"{num_found} processes of D look like its engine core: one was expected"
        raise RuntimeError(msg)
