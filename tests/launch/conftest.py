import os
import sys
from pathlib import Path

import pytest

from server_ext.launch.command import EngineCommand, StackConfig
from server_ext.launch.stack import Stack, free_ports

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def make_stack(tmp_path):
    """Builds stacks whose engines are small servers; ends what a test leaves running."""
    stacks = []

    def make(prefill="serve", decode="serve", **changes):
        ports = free_ports()
        config = StackConfig(
            model="m",
            served_name="fake",
            prefill=ports[0],
            decode=ports[1],
            secret_file=tmp_path / "secret",
            **changes,
        )
        behaviours = {"prefill": prefill, "decode": decode}

        def command(config, role, env):
            argv = (sys.executable, str(FAKE_ENGINE), str(config.ports(role).http), behaviours[role])
            return EngineCommand(argv, dict(os.environ))

        stacks.append(Stack(config, tmp_path / "state", command=command))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.stop(grace_s=0.5)
