"""The `bidikv` command. `main` is what the console script calls; the commands are in `_app`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; without the `cli` extra, say how to install it and exit with status 1."""
    try:
        from server_ext.cli._app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich", "psutil"}:
            raise
        sys.exit(f"bidikv needs {error.name}: pip install 'bidikv-sdk[cli]'")
    app()
