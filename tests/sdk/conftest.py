"""One scenario, two flavours: tests are async, and the synchronous client is made awaitable for them."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bidikv_sdk.testing import FakeServer


class Awaitable:
    """A synchronous object that can be awaited, entered with `async with` and iterated with `async for`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.value, name)
        if callable(value):
            return lambda *args, **options: Awaitable(value(*args, **options))
        return Awaitable(value) if isinstance(value, Iterator) else value

    def __await__(self) -> Any:
        return self.value
        yield

    async def __aenter__(self) -> Any:
        self.value.__enter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.value.__exit__(*exc_info)

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self.value)
        except StopIteration:
            raise StopAsyncIteration from None


@pytest.fixture
def anyio_backend() -> str:
    """The SDK's background task is asyncio's."""
    return "asyncio"


@pytest.fixture
def server() -> FakeServer:
    """A fake server; its sessions expire by a clock that stands still."""
    return FakeServer()


@pytest.fixture(params=["sync", "async"])
def flavour(request: Any) -> str:
    """Which client a scenario runs with."""
    return request.param


@pytest.fixture
def make_client(flavour: str) -> Callable[..., Any]:
    """Make a client of a server: both flavours are used in the asynchronous way."""

    def make(server: FakeServer, **options: Any) -> Any:
        if flavour == "sync":
            return Awaitable(server.client(**options))
        return server.async_client(**options)

    return make


@pytest.fixture
def client(make_client: Callable[..., Any], server: FakeServer) -> Any:
    """A client of `server`, in both flavours."""
    return make_client(server)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Any]:
    """Wait until something that a background thread or task does has happened."""

    async def wait(condition: Callable[[], bool]) -> None:
        async def poll() -> None:
            while not condition():  # noqa: ASYNC110 - a thread cannot set an asyncio.Event
                await asyncio.sleep(0.001)

        await asyncio.wait_for(poll(), 10)

    return wait


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BIDIKV_BASE_URL", "BIDIKV_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
