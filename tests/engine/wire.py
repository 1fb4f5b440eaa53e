"""The wire between D and P, carrying bytes as they are until it is told to fail: late, cut, reset or silent."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing_extensions import Self

_CHUNK_BYTES = 65536
_NO_LINGER = struct.pack("ii", 1, 0)


Way = Literal["cut", "reset", "hold"]


@dataclass
class Break:
    """What happens to one direction: after so many bytes the wire is cut, reset, or holds the rest back.

    * **reached** - set when it has happened.
    * **go_on** - ends a hold.
    """

    after_bytes: int
    then: Way
    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


class Wire:
    """A TCP proxy on this machine; each direction may break, once.

    Args:
        port: where it listens.
        target_port: where it leads.
        request: what happens on the way there.
        reply: what happens on the way back.
    """

    def __init__(
        self, port: int, target_port: int, *, request: Break | None = None, reply: Break | None = None
    ) -> None:
        self._target = ("127.0.0.1", target_port)
        self._breaks = {"request": request, "reply": reply}
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        # A thread in accept() keeps the port until it is woken.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for wanted in self._breaks.values():
            if wanted is not None:
                wanted.go_on.set()
        for sock in self._sockets:
            _end(sock)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                called = socket.create_connection(self._target)
                self._sockets += [caller, called]
                for source, sink, way in ((caller, called, "request"), (called, caller, "reply")):
                    threading.Thread(target=self._carry, args=(source, sink, way), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        num_left = None if (wanted := self._breaks[way]) is None else wanted.after_bytes
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if wanted is None or num_left is None or wanted.reached.is_set():
                    pass
                elif len(data) < num_left:
                    num_left -= len(data)
                else:
                    sink.sendall(data[:num_left])
                    data = data[num_left:]
                    wanted.reached.set()
                    if wanted.then != "hold":
                        for sock in (source, sink):
                            (_reset if wanted.then == "reset" else _end)(sock)
                        return
                    wanted.go_on.wait()
                sink.sendall(data)
        if not self._is_reset():
            _end(sink)

    def _is_reset(self) -> bool:
        return any(b is not None and b.then == "reset" and b.reached.is_set() for b in self._breaks.values())


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    # Wakes the other direction's thread, without which the socket would outlive its closing.
    sock.shutdown(socket.SHUT_RD)
    sock.close()


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
