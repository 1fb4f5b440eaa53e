"""`bidikv session`: look at sessions, keep or give back their leases, end them. The SDK does it all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from server_ext.cli._server import ApiKey, BaseUrl, Json, connected, find_base_url, make_console

if TYPE_CHECKING:
    from rich.table import Table

    from bidikv_sdk import CacheReport, SessionInfo

app = typer.Typer(no_args_is_help=True, help="Look at sessions on D, keep or give back their leases, end them.")

# One in 64 ids that the SDK makes begins with a dash.
_DASHED_IDS = {"ignore_unknown_options": True}

SessionId = Annotated[str, typer.Argument(metavar="ID", help="The session's id.")]
SessionIds = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of sessions.")]


@app.command("ls")
def list_sessions(base_url: BaseUrl = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """List the sessions of your key."""
    with connected(find_base_url(base_url), api_key) as client:
        sessions = client.sessions()
    if as_json:
        typer.echo(json.dumps({"sessions": [info.to_json() for info in sessions]}))
    elif not sessions:
        typer.echo("no sessions")
    else:
        make_console().print(make_table(sessions))


@app.command(context_settings=_DASHED_IDS)
def show(session_id: SessionId, base_url: BaseUrl = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show one session: its lease, and what its last turn's cache did."""
    with connected(find_base_url(base_url), api_key) as client:
        info = client.session(session_id).status()
    if as_json:
        typer.echo(json.dumps(info.to_json()))
        return
    lease, pool = info.lease, info.pool
    rows = [
        ("session", info.session),
        ("completed turns", str(info.turn)),
        ("lease", lease.state if lease.reason is None else f"{lease.state} ({lease.reason})"),
        ("lease left", seconds(lease.remaining_s) if lease.state == "active" else "-"),
        ("held", f"{lease.num_tokens} tokens in {lease.num_blocks} blocks"),
        ("last turn", last_turn(info.last_turn)),
        ("pool", f"{pool.free_blocks} of {pool.total_blocks} blocks free, {pool.pending_ticket_blocks} being read"),
    ]
    for name, value in rows:
        typer.echo(f"{name:16} {value}")


@app.command(context_settings=_DASHED_IDS)
def extend(
    session_id: SessionId,
    ttl_s: Annotated[
        float | None, typer.Option("--ttl-s", min=0.001, help="Seconds from now (default: the server's).")
    ] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Keep a lease for longer; never shortens it."""
    with connected(find_base_url(base_url), api_key) as client:
        lease = client.session(session_id).extend(ttl_s)
    if as_json:
        typer.echo(json.dumps({"session": session_id, "lease": lease.to_json()}))
    else:
        typer.echo(f"{session_id}: {lease.num_blocks} blocks are kept for {seconds(lease.remaining_s)}")


@app.command(context_settings=_DASHED_IDS)
def release(session_ids: SessionIds, base_url: BaseUrl = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Give caches back and keep the sessions: their next turns compute again."""
    with connected(find_base_url(base_url), api_key) as client:
        for session_id in session_ids:
            info = client.session(session_id).release()
            if as_json:
                typer.echo(json.dumps(info.to_json()))
            else:
                free = f"{info.pool.free_blocks} of {info.pool.total_blocks} blocks are free"
                typer.echo(f"{session_id}: lease {info.lease.state}; {free}")


@app.command(context_settings=_DASHED_IDS)
def end(session_ids: SessionIds, base_url: BaseUrl = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Give caches back and forget the sessions."""
    with connected(find_base_url(base_url), api_key) as client:
        for session_id in session_ids:
            session = client.session(session_id)
            session.status()  # `end` is fine with a session that is gone; whoever mistyped an id is not
            session.end()
            typer.echo(json.dumps({"session": session_id, "ended": True}) if as_json else f"{session_id}: ended")


def make_table(sessions: list[SessionInfo]) -> Table:
    """Return a table of sessions, those that hold most first."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("session", "turns", "lease", "left", "tokens", "blocks", "last turn", "reuse"):
        is_text = head in {"session", "lease", "last turn"}
        table.add_column(head, justify="left" if is_text else "right", no_wrap=head != "last turn", overflow="fold")
    for info in sorted(sessions, key=lambda info: (-info.lease.num_blocks, info.session)):
        lease, report = info.lease, info.last_turn
        table.add_row(
            escape(info.session),
            str(info.turn),
            lease.state,
            seconds(lease.remaining_s) if lease.state == "active" else "-",
            str(lease.num_tokens),
            str(lease.num_blocks),
            last_turn(report),
            "-" if report is None else share(report.reused_tokens + report.fetched_tokens, report.prompt_tokens),
            style={"active": None, "revoked": "yellow"}.get(lease.state, "dim"),
        )
    return table


def last_turn(report: CacheReport | None) -> str:
    """Return what the last turn's cache did, and why, in a few words."""
    return "-" if report is None else f"{report.outcome}: {report.reason}"


def share(part: float, whole: float) -> str:
    """Return a part as a percentage of the whole; `-` of nothing."""
    return f"{part / whole:.0%}" if whole else "-"


def seconds(value_s: float) -> str:
    """Return a time as people read it."""
    return f"{value_s:.1f} s" if value_s < 100 else f"{value_s / 60:.1f} min"  # noqa: PLR2004 - three digits at most
