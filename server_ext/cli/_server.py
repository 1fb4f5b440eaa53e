"""Where the server is, and what to tell the user when it does not do as asked.

`find_base_url` -> `connected` (a client; what it raises becomes one line on standard error). Uses the SDK alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from bidikv_sdk import BidiKV

USAGE_ERROR = 2
# Piped tables are read by programs as well: ids must not be cut at the 80 columns that no terminal has.
_PIPE_COLUMNS = 160
# A control call waits for the step that runs; minutes are for turns only.
_TIMEOUT_S = 30.0

BaseUrl = Annotated[
    str | None,
    typer.Option(
        "--base-url", envvar="BIDIKV_BASE_URL", help="The decode engine (default: the stack that `bidikv up` started)."
    ),
]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="BIDIKV_API_KEY", help="Your key, if D asks for one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def local_base_url() -> str | None:
    """Return where the stack of `bidikv up` serves; None where none was started."""
    from server_ext.launch.stack import default_state_dir
    from server_ext.launch.state import read_state

    state = read_state(default_state_dir())
    return None if state is None else f"{state.url}/v1"


def find_base_url(given: str | None) -> str:
    """Return where the server's routes begin: what was given, else the local stack's. Ends the command without one."""
    base_url = given or local_base_url()
    if base_url is None:
        say_and_exit(
            "no server: give --base-url or BIDIKV_BASE_URL, as in http://127.0.0.1:8200/v1, or start a stack with "
            "`bidikv up`",
            USAGE_ERROR,
        )
    return with_version_path(base_url)


def with_version_path(base_url: str) -> str:
    """Return the URL with `/v1` behind a bare host, which is where everybody's routes begin."""
    base_url = base_url.rstrip("/")
    try:
        parts = urlsplit(base_url)
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in {"http", "https"} or not parts.hostname:
        say_and_exit(f"--base-url {base_url!r} is no URL; give one like http://127.0.0.1:8200/v1", USAGE_ERROR)
    return base_url if parts.path else f"{base_url}/v1"


def root_of(base_url: str) -> str:
    """Return where routes outside of `/v1` begin, such as `/metrics`."""
    return base_url.removesuffix("/v1")


@contextmanager
def connected(base_url: str, api_key: str | None) -> Iterator[BidiKV]:
    """A client for the length of a block; the SDK's errors end the command with one line and status 1."""
    from bidikv_sdk import BidiKV, BidiKVError

    # Whoever looks at a table or types a command can ask again, and wants to see what fails now.
    with BidiKV(base_url, api_key or None, timeout=_TIMEOUT_S, max_retries=0) as client:
        try:
            yield client
        except BidiKVError as error:
            say_and_exit(explain(error, base_url))
        except ValueError as error:  # an id that no header can carry
            say_and_exit(str(error), USAGE_ERROR)


def explain(error: Exception, base_url: str) -> str:
    """Return one line: what went wrong at `base_url`, and what to do about it."""
    import bidikv_sdk as sdk

    match error:
        case sdk.APITimeoutError():
            return f"{base_url} did not answer in time; is the engine busy, or stuck? `bidikv doctor` looks closer"
        case sdk.APIConnectionError():
            return f"no server at {base_url} ({error}); start one with `bidikv up`, or give --base-url"
        case sdk.ServerExtensionMissing():
            return (
                f"{base_url} has no session routes: vLLM without bidikv's plugins (start it with "
                "VLLM_PLUGINS=bidikv,bidikv_http), or not the URL of a decode engine"
            )
        case sdk.AuthenticationError():
            return f"{base_url} does not accept this API key; give one of its own with --api-key or BIDIKV_API_KEY"
        case sdk.SessionNotFound():
            return f"{error.message}; `bidikv session ls` shows the sessions of your key"
        case sdk.LeaseLost():
            return f"{error.message}; the session's next turn computes its prompt again and gets a new lease"
        case _:
            return str(error)


def make_console() -> Console:
    """Return the console for tables."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def say_and_exit(text: str, status: int = 1) -> NoReturn:
    """End the command with a line on standard error."""
    typer.echo(f"bidikv: {text}", err=True)
    raise typer.Exit(status)
