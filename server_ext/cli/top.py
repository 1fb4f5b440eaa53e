"""`bidikv top`: what D holds, for whom, and how turns go; a table that refreshes itself.

`collect` -> `render` (or JSON), once or until Ctrl-C. Sessions are those of the key; totals are of the whole engine.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server_ext.cli._server import (
    ApiKey,
    BaseUrl,
    connected,
    explain,
    find_base_url,
    make_console,
    root_of,
)
from server_ext.cli.session import make_table, share

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from bidikv_sdk import BidiKV, SessionInfo


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole engine, all tenants together; blocks may be leased and read at once."""

    total_blocks: int
    free_blocks: int
    leased_blocks: int
    read_blocks: int
    """Held for reads of P that may be under way."""
    pending_blocks: int
    """Of finished turns that are not settled yet."""
    sessions: int
    running: int
    turns: int
    fetched_tokens: int
    reused_tokens: int
    computed_tokens: int
    revocations: int

    def to_json(self) -> dict[str, Any]:
        """Return all of it as one object."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at D.

    - `totals`: None where `/metrics` is out of reach, as behind a proxy that passes `/v1` only.
    """

    sessions: list[SessionInfo]
    totals: Totals | None

    def to_json(self) -> dict[str, Any]:
        """Return both as one object."""
        return {
            "totals": None if self.totals is None else self.totals.to_json(),
            "sessions": [info.to_json() for info in self.sessions],
        }


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 2.0,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per look, a line each.")] = False,
) -> None:
    """Watch sessions, leases and the block pool of D."""
    url = find_base_url(base_url)
    console = make_console()
    with connected(url, api_key) as client:
        first = collect(client, root_of(url))
        if as_json:
            typer.echo(json.dumps(first.to_json()))
        if once and not as_json:
            console.print(render(first, url))
        if once:
            return
        try:
            if as_json:
                while True:
                    time.sleep(interval_s)
                    typer.echo(json.dumps(collect(client, root_of(url)).to_json()))
            watch(client, url, first, console, lambda: time.sleep(interval_s))
        except KeyboardInterrupt:
            return


def collect(client: BidiKV, root_url: str) -> Snapshot:
    """Ask D.

    Raises:
        BidiKVError: it does not answer, or refuses.
    """
    import httpx

    from server_ext.cli._metrics import scrape

    sessions = client.sessions()
    try:
        found = scrape(root_url)
    except httpx.HTTPError:
        return Snapshot(sessions, None)
    if not found:
        return Snapshot(sessions, None)

    def count(name: str, **labels: str) -> int:
        return int(found.total(f"bidikv_{name}", **labels))

    totals = Totals(
        total_blocks=count("blocks", state="total"),
        free_blocks=count("blocks", state="free"),
        leased_blocks=count("blocks", state="leased"),
        read_blocks=count("blocks", state="ticketed"),
        pending_blocks=count("blocks", state="provisional"),
        sessions=count("sessions"),
        running=count("sessions", state="running"),
        turns=count("turns_total"),
        fetched_tokens=count("prompt_tokens_total", source="fetched"),
        reused_tokens=count("prompt_tokens_total", source="reused"),
        computed_tokens=count("prompt_tokens_total", source="computed"),
        revocations=count("lease_revocations_total") + count("lease_clips_total", reason="lease_revoked"),
    )
    return Snapshot(sessions, totals)


def watch(client: BidiKV, url: str, first: Snapshot, console: Console, wait: Callable[[], None]) -> None:
    """Show what D holds, again after each `wait`, until that raises; a server that is gone is shown and asked again."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from bidikv_sdk import BidiKVError

    shown = render(first, url)
    with Live(shown, console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(shown, refresh=True)
            wait()
            try:
                shown = render(collect(client, root_of(url)), url)
            except BidiKVError as error:
                shown = Group(Text(f"not now: {explain(error, url)}", style="bold red"))


def render(snapshot: Snapshot, url: str) -> RenderableType:
    """Return totals and sessions for the terminal."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [Text(url, style="bold")]
    lines += [Text(line) for line in _totals(snapshot)]
    lines += [Text(""), make_table(snapshot.sessions) if snapshot.sessions else Text("no sessions of this key")]
    return Group(*lines)


def _totals(snapshot: Snapshot) -> list[str]:
    totals = snapshot.totals
    if totals is None:
        if not snapshot.sessions:
            return ["pool      unknown: this server's /metrics cannot be reached"]
        pool = snapshot.sessions[0].pool
        return [
            (
                f"pool      {pool.total_blocks} blocks: {pool.free_blocks} free, {pool.pending_ticket_blocks} being "
                "read (no /metrics here, so no more)"
            )
        ]
    num_tokens = totals.fetched_tokens + totals.reused_tokens + totals.computed_tokens
    return [
        (
            f"pool      {totals.total_blocks} blocks: {totals.free_blocks} free, {totals.leased_blocks} leased, "
            f"{totals.read_blocks} being read, {totals.pending_blocks} unsettled"
        ),
        f"sessions  {totals.sessions}, {totals.running} with a running turn; {len(snapshot.sessions)} of this key",
        (
            f"turns     {totals.turns}; of their prompt tokens {share(totals.fetched_tokens, num_tokens)} fetched, "
            f"{share(totals.reused_tokens, num_tokens)} reused, {share(totals.computed_tokens, num_tokens)} computed; "
            f"{totals.revocations} leases revoked or cut short"
        ),
    ]
