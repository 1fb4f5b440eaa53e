"""Measuring engines, as far as that needs none."""

import pytest
from typer.testing import CliRunner

from bidikv_sdk.testing import FakeServer
from server_ext.cli._app import app
from server_ext.cli._measure import Measurement, block_size_of, words


@pytest.fixture
def anyio_backend():
    """The command runs on asyncio."""
    return "asyncio"


@pytest.mark.parametrize(
    ("leases", "size"),
    [
        ([(100, 4), (33, 2), (512, 16)], 32),
        ([(100, 7), (33, 3), (0, 0)], 16),
        ([(100, 100)], 1),
        ([(0, 0)], 0),
        ([], 0),
        ([(100, 4), (100, 5)], 0),
    ],
)
def test_leases_tell_the_size_of_a_block(leases, size):
    """The power of two that explains all of them; 0 where there is none, or no lease."""
    assert block_size_of(leases) == size


def test_no_two_texts_begin_alike():
    """Otherwise one measurement would find another's blocks in a prefix cache."""
    assert len({words(20)[:8] for _ in range(100)}) == 100


@pytest.mark.anyio
async def test_what_a_server_does_not_time_is_left_out():
    """Every point is asked for; turns of which P had no part teach nothing of P, and answers still count."""
    server, steps = FakeServer(), []
    async with server.async_client() as client:
        measured = Measurement(client, 500, 1, steps.append)
        await measured.run()
    assert measured.turns == []
    assert [one.num_sequences for one in measured.decodes] == [1] * 6 + [1, 2, 4]
    assert len(steps) == 1 + 5 + 6 + 3 + 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--url", "http://127.0.0.1:9"], "is the address right"),
        (["--max-tokens", "5"], "--max-tokens"),
    ],
)
def test_a_bad_option_is_named_with_its_fix(arguments, named):
    """An engine that is not there, and a prompt that is none, are errors of one line."""
    said = CliRunner().invoke(app, ["rates", *arguments], env={"NO_PROXY": "127.0.0.1", "COLUMNS": "200"})
    assert said.exit_code != 0
    assert named in said.stderr
    assert "Traceback" not in said.stderr
