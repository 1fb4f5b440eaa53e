"""`bidikv doctor`: is this deployment set up so that turns fetch? `_examine` asks, `_checks` judges."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from server_ext.cli._server import ApiKey, BaseUrl, Json, local_base_url, with_version_path

if TYPE_CHECKING:
    from server_ext.cli._findings import Finding

_COLORS = {"PASS": typer.colors.GREEN, "WARN": typer.colors.YELLOW, "FAIL": typer.colors.RED}


def doctor(
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    strict: Annotated[bool, typer.Option("--strict", help="A warning fails as well.")] = False,
    as_json: Json = False,
) -> None:
    """Check a deployment through its D, and run two turns that must fetch; the exit status is 1 where a check fails."""
    findings = _find(base_url, api_key)
    bad = [one for one in findings if one.status == "FAIL" or (strict and one.status == "WARN")]
    if as_json:
        typer.echo(json.dumps({"ok": not bad, "findings": [one.to_json() for one in findings]}))
    else:
        for one in findings:
            _print(one)
    raise typer.Exit(1 if bad else 0)


def _find(base_url: str | None, api_key: str | None) -> list[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    from server_ext.cli._checks import judge
    from server_ext.cli._examine import examine
    from server_ext.cli._findings import failed
    from server_ext.cli._local import explain_from_logs

    is_local = base_url is None
    base_url = base_url or local_base_url()
    if base_url is None:
        fix = "start one with `bidikv up`, or give --base-url"
        return [*explain_from_logs(), failed("decode engine", "no stack of this user runs", fix)]
    try:
        own_version = version("bidikv-sdk")
    except PackageNotFoundError:
        own_version = "unknown"
    found = examine(with_version_path(base_url), api_key)
    findings = judge(found, own_version)
    is_whole = found.refusal != "unreachable" and all(one.get("state") != "unreachable" for one in found.prefill)
    return findings if is_whole or not is_local else [*explain_from_logs(), *findings]


def _print(one: Finding) -> None:
    typer.echo(f"{typer.style(one.status, fg=_COLORS[one.status], bold=True)}  {one.check}: {one.text}")
    if one.fix:
        typer.echo(f"      fix: {one.fix}")
