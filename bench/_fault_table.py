"""The fault matrix as a page of the documentation. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench._scene import Row

LONGEST_S: Final = 20 * 60.0
"""How long the whole matrix may take."""

_HEAD: Final = """\
# Faults in the middle of a turn

Written by `make faults`, which produces each row on two real engines (a tiny random model, CPU): a session's turn is
held at the *point*, the *fault* happens there, and the turn goes on or ends as it can. Then, once both engines have
come to rest, all blocks must be accounted for (D: free = total - leased, no ticket open; P: nothing in use), no read
may have been stale (`bidikv_stale_reads_total`, since D's last start), both engines must be alive, and the session's
*next* turn must fetch the history; where D was killed or the session was ended, there is none, and it must be
recomputed for that reason (`home_lost`, `first_turn`). The tokens of every turn that was answered, this one and the
next, are compared with a cold recompute of the same prompt.

Blocks are counted after each engine has been made to take a step, for a request of one token: an engine gives up some
of what is over only when it steps. What one that nobody asks for anything keeps until then does not count as leaked.

This run: {took_s:,.0f} s from the start of the engines to their end, of {longest_s:,.0f} s that it may take, on
{machine}, with {versions}.

*Outcome* is what the client got: where the prompt's KV cache came from and why (see [http.md](http.md)), or how the
call ended. An engine that was killed was started again on its ports; a stopped one was resumed.

| fault | point | outcome | next turn | wrong tokens | leaked blocks | stale reads | engines alive |
|---|---|---|---|---:|---:|---:|---|
"""


def table(rows: Sequence[Row], took_s: float, installed: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        rows: all of the matrix.
        took_s: how long they took.
        installed: what they depend on; `cpu` is the machine, all others are versions.
    """
    versions = ", ".join(f"{name} {version}" for name, version in installed.items() if name != "cpu")
    head = _HEAD.format(took_s=took_s, longest_s=LONGEST_S, machine=installed["cpu"], versions=versions)
    pairs = len({(row.fault, row.point) for row in rows})
    wrong, leaked = sum(row.tokens_wrong for row in rows), sum(row.blocks_leaked for row in rows)
    stale = max(row.stale_reads for row in rows)
    astray, dead = sum(not row.is_next_right() for row in rows), sum(not row.engines_alive for row in rows)
    total = (
        f"\n{pairs} pairs: {wrong} wrong tokens, {leaked} leaked blocks, {stale} stale reads, {astray} next turns that "
        f"went a wrong way, {dead} with an engine that died of it.\n"
    )
    return head + "\n".join(map(_line, rows)) + "\n" + total


def _line(row: Row) -> str:
    following = f"{row.next_outcome}: `{row.next_reason}`"
    cells = (
        row.fault,
        row.point,
        f"{row.outcome}: `{row.reason}`",
        following if row.is_next_right() else f"**{following}**",
        row.tokens_wrong,
        row.blocks_leaked,
        row.stale_reads,
        "yes" if row.engines_alive else "**no**",
    )
    return f"| {' | '.join(map(str, cells))} |"
