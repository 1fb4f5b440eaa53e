"""The fault matrix as a page of the documentation. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench._scene import Row

_HEAD = """\
# Faults in the middle of a turn

Written by `make faults`, which produces each row on two real engines (a tiny random model, CPU): a session's turn is
held at the *point*, the *fault* happens there, and the turn goes on or ends as it can. Then, once both engines have
come to rest, all blocks must be accounted for (D: free = total - leased, no ticket open; P: nothing in use), both
engines must be alive, and the session's *next* turn must run. The tokens of every turn that was answered, this one and
the next, are compared with a cold recompute of the same prompt.

*Outcome* is what the client got: where the prompt's KV cache came from and why (see [http.md](http.md)), or how the
call ended. An engine that was killed was started again on its ports; a stopped one was resumed.

| fault | point | outcome | next turn | wrong tokens | leaked blocks | engines alive |
|---|---|---|---|---:|---:|---|
"""


def table(rows: Sequence[Row]) -> str:
    """Return the page."""
    lines = [
        f"| {row.fault} | {row.point} | {row.outcome}: `{row.reason}` | {row.next_outcome}: `{row.next_reason}` "
        f"| {row.tokens_wrong} | {row.blocks_leaked} | {'yes' if row.engines_alive else '**no**'} |"
        for row in rows
    ]
    pairs = len({(row.fault, row.point) for row in rows})
    wrong, leaked = sum(row.tokens_wrong for row in rows), sum(row.blocks_leaked for row in rows)
    dead = sum(not row.engines_alive for row in rows)
    total = f"\n{pairs} pairs: {wrong} wrong tokens, {leaked} leaked blocks, {dead} with an engine that died of it.\n"
    return _HEAD + "\n".join(lines) + "\n" + total
