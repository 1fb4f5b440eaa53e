"""The real clock: the only tests that let real time pass, by a millisecond."""

import asyncio
import threading

import pytest

from bidikv_sdk._clock import Clock

pytestmark = pytest.mark.anyio


async def test_waiting_ends_when_the_time_is_over():
    """Both ways of sleeping and of waiting come back after their delay."""
    clock = Clock()
    start_s = clock.now_s()
    clock.sleep(0.001)
    await clock.sleep_async(0.001)
    clock.wait(threading.Event(), 0.001)
    await clock.wait_async(asyncio.Event(), 0.001)
    assert clock.now_s() - start_s >= 0.003


async def test_waiting_ends_at_once_when_stopped():
    """A set event beats any delay."""
    stop, stop_async = threading.Event(), asyncio.Event()
    stop.set()
    stop_async.set()
    Clock().wait(stop, 3600)
    await Clock().wait_async(stop_async, 3600)
