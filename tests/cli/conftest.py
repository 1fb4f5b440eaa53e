"""A deployment behind a port, and a clean environment for commands that look for one."""

import pytest
from typer.testing import CliRunner

from server_ext.cli._app import app

from .deployment import Deployment, serving


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    """No server and no stack of the user running the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("BIDIKV_BASE_URL", "BIDIKV_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def deployment():
    """A healthy deployment, served."""
    with serving(Deployment()) as served:
        yield served


@pytest.fixture
def invoke():
    """Return a call of the command line: its exit code, standard output and standard error."""
    return lambda *argv: CliRunner().invoke(app, [str(word) for word in argv])
