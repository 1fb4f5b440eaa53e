"""Streaming turns: bytes to events, events to chunks, chunks to one completion.

`EventDecoder` and `StreamCore` are pure; `TurnStream` and `AsyncTurnStream` are thin loops that
feed them: enter (the request is sent), feed until the turn is complete or broken, exit (where the turn is not
complete the connection is dropped, and the server aborts it). May import `_errors`,
`_requests` and `chunks`.
"""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING

from bidikv_sdk._errors import BidiKVError, StreamClosed, StreamInterrupted
from bidikv_sdk._requests import error_of
from bidikv_sdk.chunks import ChunkSum
from bidikv_sdk.wire import ERROR_STATUS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from typing_extensions import Self

    from bidikv_sdk._requests import Reply
    from bidikv_sdk._state import ActiveTurn
    from bidikv_sdk._transport import OpenReply
    from bidikv_sdk._turn import Turn
    from bidikv_sdk._types import ChatCompletion, ChatCompletionChunk


class EventDecoder:
    """Server-sent events from bytes: the data of each event, comments and other fields ignored.

    Lines are split here, on bytes: text splitters also break at U+2028 and U+0085, which JSON may contain.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes, cut anywhere, and return the data of the events that they complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events


class StreamCore:
    """One stream without I/O: takes bytes, hands out chunks, and completes or breaks the turn.

    `commit(completion)` is called once, when the chunk that carries `bidikv` has come.
    """

    def __init__(self, reply: Reply, commit: Callable[[ChatCompletion], Turn]) -> None:
        self._request_id = reply.request_id
        self._commit = commit
        self._decoder = EventDecoder()
        self._sum = ChunkSum()
        self._ready: deque[ChatCompletionChunk] = deque()
        self._failure: BidiKVError | None = None
        self.turn: Turn | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        for event in self._decoder.feed(data):
            if self.turn is None and self._failure is None and event != b"[DONE]":
                try:
                    self._take(event)
                except (BidiKVError, ValueError, LookupError, TypeError, AttributeError) as error:
                    self._failure = self._interrupted(error)

    def end(self, cause: BidiKVError | None = None) -> None:
        """Take the end of the body, a broken one with its cause; after a complete turn neither matters."""
        if self.turn is None and self._failure is None:
            self._failure = self._interrupted(cause)

    def pop(self, *, closed: bool) -> ChatCompletionChunk | None:
        """Return the next chunk, or None where more bytes are needed, or the turn is complete.

        Raises:
            StreamInterrupted: the stream broke, and all chunks before that were handed out.
            StreamClosed: the connection was closed by the caller before the turn was complete.
        """
        if self._ready:
            return self._ready.popleft()
        if self._failure is not None:
            raise self._failure
        if closed:
            self.completed()
        return None

    def completed(self) -> Turn:
        """Return the turn.

        Raises:
            StreamClosed: it is not complete.
        """
        if self.turn is None:
            raise _not_open()
        return self.turn

    def _take(self, event: bytes) -> None:
        chunk = json.loads(event)
        if "error" in chunk:
            code = chunk["error"].get("code")
            raise error_of(code if isinstance(code, int) else ERROR_STATUS.get(code, 500), {}, event, 0.0)
        self._sum.add(chunk)
        if chunk.get("bidikv") is not None:
            self.turn = self._commit(self._sum.completion())
        self._ready.append(chunk)

    def _interrupted(self, cause: Exception | None) -> StreamInterrupted:
        why = f"{type(cause).__name__}: {cause}" if cause else "the server closed the connection"
        msg = f"the stream ended before its turn was complete: {why}"
        error = StreamInterrupted(msg, partial_text=self._sum.text, request_id=self._request_id)
        error.__cause__ = cause
        return error


def text_of(chunk: ChatCompletionChunk) -> str:
    """Return the text that a chunk adds."""
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _not_open() -> StreamClosed:
    msg = "the stream is not open: read it inside `with session.stream(...) as stream`"
    return StreamClosed(msg)


class TurnStream:
    """A turn that arrives in pieces: a context manager, and an iterator over the chunks.

    Leaving the block before the turn is complete closes the connection: the server aborts the turn, and it is
    not in the transcript.
    """

    def __init__(self, begin: Callable[[], ActiveTurn], run: Callable[[ActiveTurn], OpenReply]) -> None:
        self._begin = begin
        self._run = run
        self._active: ActiveTurn | None = None
        self._core: StreamCore | None = None

    def __enter__(self) -> Self:
        active = self._begin()
        try:
            self._reply = self._run(active)
        except BaseException as error:
            active.finish(error)
            raise
        self._active = active
        self._core = StreamCore(self._reply, lambda completion: active.commit(completion, self._reply))
        self._chunks = self._reply.chunks()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ChatCompletionChunk:
        if self._core is None:
            raise _not_open()
        while (chunk := self._core.pop(closed=self._active is None)) is None:
            if self._active is None:
                raise StopIteration
            try:
                self._core.feed(next(self._chunks))
            except StopIteration:
                self._core.end()
                self.close()
            except BidiKVError as error:
                self._core.end(error)
                self.close()
        return chunk

    @property
    def text_stream(self) -> Iterator[str]:
        """The pieces of the assistant's text, as they arrive."""
        for chunk in self:
            if text := text_of(chunk):
                yield text

    def final_turn(self) -> Turn:
        """Read the rest of the stream and return the completed turn.

        Raises:
            StreamInterrupted: the stream broke before the turn was complete.
            StreamClosed: the stream was left before the turn was complete.
        """
        if self._core is None:
            raise _not_open()
        for _ in self:
            pass
        return self._core.completed()

    def close(self) -> None:
        """Close the connection; where the turn is not complete, the server aborts it. May be called twice."""
        active, self._active = self._active, None
        if active is not None:
            try:
                self._reply.close()
            finally:
                active.finish()


class AsyncTurnStream:
    """A turn that arrives in pieces: a context manager, and an iterator over the chunks.

    Leaving the block before the turn is complete closes the connection: the server aborts the turn, and it is
    not in the transcript.
    """

    def __init__(self, begin: Callable[[], ActiveTurn], run: Callable[[ActiveTurn], Awaitable[OpenReply]]) -> None:
        self._begin = begin
        self._run = run
        self._active: ActiveTurn | None = None
        self._core: StreamCore | None = None

    async def __aenter__(self) -> Self:
        active = self._begin()
        try:
            self._reply = await self._run(active)
        except BaseException as error:
            active.finish(error)
            raise
        self._active = active
        self._core = StreamCore(self._reply, lambda completion: active.commit(completion, self._reply))
        self._chunks = self._reply.chunks_async()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChatCompletionChunk:
        if self._core is None:
            raise _not_open()
        while (chunk := self._core.pop(closed=self._active is None)) is None:
            if self._active is None:
                raise StopAsyncIteration
            try:
                self._core.feed(await self._chunks.__anext__())
            except StopAsyncIteration:
                self._core.end()
                await self.close()
            except BidiKVError as error:
                self._core.end(error)
                await self.close()
        return chunk

    @property
    async def text_stream(self) -> AsyncIterator[str]:
        """The pieces of the assistant's text, as they arrive."""
        async for chunk in self:
            if text := text_of(chunk):
                yield text

    async def final_turn(self) -> Turn:
        """Read the rest of the stream and return the completed turn.

        Raises:
            StreamInterrupted: the stream broke before the turn was complete.
            StreamClosed: the stream was left before the turn was complete.
        """
        if self._core is None:
            raise _not_open()
        async for _ in self:
            pass
        return self._core.completed()

    async def close(self) -> None:
        """Close the connection; where the turn is not complete, the server aborts it. May be called twice."""
        active, self._active = self._active, None
        if active is not None:
            try:
                await self._reply.close_async()
            finally:
                active.finish()
