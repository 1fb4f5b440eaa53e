"""What the lease table costs with 1,000 leases of 4,096 tokens: `python bench/lease_table.py`.

Prints a table, writes `out/lease_table.json` (with `--doc` also `docs/lease-table.md`), and exits with 1 where a bar is
missed. Verbs and ops run on a pool that only counts, so that our own code alone is timed; the last rows are vLLM's own
block pool, without an engine. All is measured several times over. Each row is the median of its quietest run, as
Python's own `timeit` advises: what makes a run slower is other work on the machine, and that comes and goes within
seconds. Beside it stands the run in the middle, which tells how quiet the machine was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from collections import defaultdict
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._machine import versions
from server_ext.core.cost import Observed, Start
from server_ext.core.cost_model import CostModel
from server_ext.core.home import Home
from server_ext.core.rates import LearnedRates
from server_ext.core.settings import HomeSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NUM_LEASES: Final = 1000
LEASE_TOKENS: Final = 4096
TURN_TOKENS: Final = 862
"""What a turn adds to its history, at the median of recorded coding agents: 646 of a delta, 216 of a reply."""
BLOCK_SIZES: Final = (16, 32)
NUM_POOL_BLOCKS: Final = 1000
NUM_REPEATS: Final = 100
NUM_RUNS: Final = 7
REVOKED_BLOCKS: Final = 16
NUM_RUNNING: Final = 256
"""Requests in a step, vLLM's default `max_num_seqs` on most machines; one of them is a piece of a prompt."""
OUT: Final = Path("out/lease_table.json")
DOC: Final = Path("docs/lease-table.md")

BARS_US: Final[Mapping[str, float]] = {
    "begin": 50,
    "grant": 50,
    "settle": 50,
    "extend": 50,
    "release": 50,
    "idle sweep": 50,
    "scheduler step": 100,
    "choose": 50,
    "learn": 50,
    "pin and release": 1000,
}
"""Most microseconds (p50) of each row; rows without one are for information.

That of a step is for one in which no allocation fails: revoking has rows of its own.
"""
_TURN_CHARS: Final = 4 * TURN_TOKENS
_TURN_S: Final = 0.4
"""Between two turns of the fleet: all leases of 900 s stay."""
_PREFILL_URL: Final = "http://10.0.0.1:8000"
_OBSERVED: Final[Mapping[str, Any]] = {
    "prompt_tokens": LEASE_TOKENS + TURN_TOKENS,
    "reused_tokens": 0,
    "fetched_tokens": LEASE_TOKENS,
    "prefill_s": 0.3,
    "fetch_s": 0.05,
    "handover_s": 0.05,
}
"""What a turn shows of its way."""


class Row(NamedTuple):
    """What one call takes, in microseconds: the median of its calls in a run, of so many runs."""

    quietest: float
    middle: float


class CountingPins:
    """A block pool without blocks: it knows who holds what, and does nothing else."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take references."""

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give references back."""

    def num_references(self, block_id: int) -> int:  # noqa: ARG002 (a pool's question)
        """Return one: every block has one lease, and nothing else."""
        return 1

    def seals(self, block_ids: Sequence[int]) -> list[object | None]:
        """Return seals that never break."""
        return list(block_ids)

    def num_free_blocks(self) -> int:
        """Return the size of the pool."""
        return self._num_blocks

    def num_total_blocks(self) -> int:
        """Return the size of the pool."""
        return self._num_blocks


class Stopwatch:
    """Collects microseconds by name."""

    def __init__(self) -> None:
        self.samples_us: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a call, note how long it took, and return its result."""
        started_ns = time.perf_counter_ns()
        result = call(*args, **options)
        self.samples_us[name].append((time.perf_counter_ns() - started_ns) / 1000)
        return result

    def p50_us(self) -> dict[str, float]:
        """Return the median of each name."""
        return {name: round(median(samples), 1) for name, samples in self.samples_us.items()}


def _address(deadline_s: float) -> dict[str, Any]:
    """Return a D's address as long as those of engines are: all of it is signed."""
    return {
        "remote_engine_id": "01234567-89ab-cdef-0123-456789abcdef",
        "remote_host": "10.0.0.2",
        "remote_port": 5600,
        "remote_blocks_expiry_time": deadline_s,
        "bidikv_ttl_s": 30.0,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "transfer_mode": "pull",
    }


def make_home(block_size: int) -> Home:
    """Return a home over a pool that fits all leases twice."""
    num_blocks = 2 * NUM_LEASES * (LEASE_TOKENS + TURN_TOKENS) // block_size
    names = map("nonce-{}".format, count())
    return Home(
        CountingPins(num_blocks),
        HomeSettings(budget_fraction=1.0, default_ttl_s=900),
        block_size=block_size,
        max_request_blocks=LEASE_TOKENS // block_size,
        incarnation="bench",
        secret=b"a secret of this benchmark",
        make_address=_address,
        new_nonce=lambda: next(names),
    )


def measure_table(block_size: int) -> dict[str, float]:
    """Return the p50 of each verb of the table in microseconds: two turns of every session, and its end.

    Every second session ends by a release, the others by their time.
    """
    watch, home = Stopwatch(), make_home(block_size)
    table = home.leases
    num_turn_blocks = (LEASE_TOKENS + TURN_TOKENS) // block_size + 1
    keys = [("tenant", f"session-{i}") for i in range(NUM_LEASES)]
    ids = [array("i", range(i, i + LEASE_TOKENS + TURN_TOKENS)) for i in range(NUM_LEASES)]
    blocks = [list(range(i * num_turn_blocks, (i + 1) * num_turn_blocks)) for i in range(NUM_LEASES)]
    now_s = 0.0

    def run_turn(index: int, num_tokens: int, names: tuple[str, str, str]) -> None:
        token_ids, nonce = ids[index][:num_tokens], f"{names[2]}-{index}"
        begin, finish, settle = names
        common: dict[str, Any] = {"now_s": now_s}
        begun = watch.time(begin, table.begin, keys[index], token_ids, "model", want_ticket=True, nonce=nonce, **common)
        if begun.ticket is not None:
            watch.time("return ticket", table.return_ticket, begun.ticket.ticket_id, **common)
        watch.time(finish, table.finish, nonce, blocks[index], num_tokens, token_ids, **common)
        watch.time(settle, table.settle, nonce, num_tokens, ttl_s=None, token_ids=token_ids, **common)

    for index in range(NUM_LEASES):
        run_turn(index, LEASE_TOKENS, ("first begin", "first finish", "grant"))
    for key in keys:
        now_s += 1e-3
        watch.time("extend", table.extend, key, 60.0, now_s=now_s)
        watch.time("idle sweep", table.sweep, now_s=now_s)
    for index in range(NUM_LEASES):
        now_s += 1e-3
        run_turn(index, LEASE_TOKENS + TURN_TOKENS, ("begin", "finish", "settle"))
    for index, key in enumerate(keys):
        home._gaps.ended(key, "tool:bash" if index % 7 else "stop", now_s=now_s + index / 100)  # noqa: SLF001
    now_s += NUM_LEASES / 100
    for _ in range(NUM_REPEATS):
        now_s += 2  # what leases are worth is computed anew, and kept for the next call
        watch.time("scrape", home.metrics, now_s=now_s)
        watch.time("revoke, first", table.revoke, REVOKED_BLOCKS, now_s=now_s, all_or_nothing=True)
        watch.time("revoke, again", table.revoke, REVOKED_BLOCKS, now_s=now_s, all_or_nothing=True)
    for key in keys[::2]:
        watch.time("release", table.release, key, now_s=now_s)
    for key in keys[1::2]:
        now_s += table.info(key, now_s=now_s).remaining_s
        watch.time("sweep, one expires", home.sweep, now_s=now_s)
    return watch.p50_us()


def measure_home(block_size: int) -> dict[str, float]:
    """Return the p50 in microseconds of a turn's ops, as API processes send them, and of a step of D's scheduler.

    Every session has two turns, and in the second one P reads its lease. The steps come between the two.
    """
    from bench._lease_step import make_step  # noqa: PLC0415 (imports vLLM, which takes seconds)

    watch, home = Stopwatch(), make_home(block_size)
    num_turn_blocks = (LEASE_TOKENS + TURN_TOKENS) // block_size + 1
    now_s = time.perf_counter()  # as the connector's own hooks ask for it

    def handle(row: str, op: str, arg: Mapping[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = watch.time(row, home.handle, op, arg, now_s=now_s)
        return reply

    def run_turn(index: int, turn: int, num_tokens: int, rows: tuple[str, str, str]) -> None:
        load, begin, settle = rows
        token_ids = array("i", range(index, index + num_tokens))
        named = {"tenant": "tenant", "session_id": f"session-{index}", "turn": turn, "idempotency_key": f"key-{turn}"}
        loaded = handle(load, "load", named)
        begun = handle(
            begin,
            "begin",
            {
                **named,
                "prompt_ids": token_ids.tobytes(),
                "fingerprint": "0123456789abcdef",
                "route": "fetch",
                "prefill_urls": [_PREFILL_URL],
                "revision": loaded["revision"],
                "num_kept": turn,
            },
        )
        if begun["ticket"] is not None:
            handle("return ticket op", "return_ticket", {"ticket_id": begun["ticket_id"]})
        blocks = range(index * num_turn_blocks, (index + 1) * num_turn_blocks)
        home.leases.finish(begun["nonce"], blocks, num_tokens, token_ids, now_s=now_s)
        handle(
            settle,
            "settle",
            {
                "nonce": begun["nonce"],
                "num_tokens_kept": num_tokens,
                "token_ids": token_ids.tobytes(),
                "chunk": b"x" * _TURN_CHARS,
                "reply": b"x" * _TURN_CHARS,
                "report": b"x" * 500,
                "ttl_s": None,
                "ended_by": "tool:bash",
                "observed": {**_OBSERVED, "pair": _PREFILL_URL},
            },
        )

    for index in range(NUM_LEASES):
        now_s += _TURN_S
        run_turn(index, 1, LEASE_TOKENS, ("first load op", "first begin op", "grant op"))
    step, without = make_step(home, NUM_RUNNING)
    for _ in range(NUM_LEASES):
        watch.time("with", step)
        watch.time("without", without)
    pairs = zip(watch.samples_us.pop("with"), watch.samples_us.pop("without"), strict=True)
    watch.samples_us["scheduler step"] = [with_ours - without_it for with_ours, without_it in pairs]
    for index in range(NUM_LEASES):
        now_s += _TURN_S
        run_turn(index, 2, LEASE_TOKENS + TURN_TOKENS, ("load op", "begin op", "settle op"))
    return watch.p50_us()


def measure_choices() -> dict[str, float]:
    """Return what choosing a turn's way and learning from it cost, in microseconds (p50), with so many sessions."""
    watch, model = Stopwatch(), CostModel(LearnedRates(), token_bytes=46_080)
    shown = Observed(**_OBSERVED, pair="")
    for number in range(3 * NUM_LEASES):
        key = "tenant", f"session-{number % NUM_LEASES}"
        start = Start(key=key, prompt_tokens=shown.prompt_tokens, matched_tokens=LEASE_TOKENS, num_running=8)
        watch.time("choose", model.choose, str(number), start, now_s=float(number))
        watch.time("learn", model.settle, str(number), shown, now_s=number + 0.5)
    return watch.p50_us()


def measure_block_pool() -> dict[str, float]:
    """Return what pinning and releasing 1,000 blocks costs in vLLM's own pool, in microseconds (p50)."""
    from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415 (takes seconds, and only this needs it)

    from server_ext.engine.pins import BlockPoolPins  # noqa: PLC0415

    pool = BlockPool(num_gpu_blocks=4 * NUM_POOL_BLOCKS, enable_caching=True, hash_block_size=16)
    pins = BlockPoolPins(pool)
    block_ids = array("i", (block.block_id for block in pool.get_new_blocks(NUM_POOL_BLOCKS)))
    pins.unpin(block_ids[::-1])
    watch = Stopwatch()
    for _ in range(NUM_REPEATS):
        watch.time("pin", pins.pin, block_ids)
        watch.time("unpin", pins.unpin, block_ids[::-1])
    pairs = zip(watch.samples_us["pin"], watch.samples_us["unpin"], strict=True)
    watch.samples_us["pin and release"] = [pin + release for pin, release in pairs]
    return watch.p50_us()


def measure() -> dict[str, dict[str, Row]]:
    """Return each table's rows: the p50 of the quietest of several runs, chosen row by row, and of the one between."""
    tables: dict[str, Callable[[], dict[str, float]]] = {
        **{f"block size {size}": partial(measure_table, size) for size in BLOCK_SIZES},
        **{f"a turn's ops and a step, block size {size}": partial(measure_home, size) for size in BLOCK_SIZES},
        "a turn's way": measure_choices,
        f"vLLM's pool, {NUM_POOL_BLOCKS} blocks": measure_block_pool,
    }
    runs = [{title: table() for title, table in tables.items()} for _ in range(NUM_RUNS)]
    p50s_us = {title: {name: [run[title][name] for run in runs] for name in row} for title, row in runs[0].items()}
    return {
        title: {name: Row(min(found), round(median(found), 1)) for name, found in row.items()}
        for title, row in p50s_us.items()
    }


def is_missed(name: str, row: Row) -> bool:
    """Return whether a row's quietest run is above its bar; False where it has none."""
    return row.quietest > BARS_US.get(name, float("inf"))


_HEAD: Final = """\
# What the lease table costs

Written by `python bench/lease_table.py --doc` on {cpu} (Python {python}, vLLM {vllm}). All of this happens on D's
scheduler thread, between or within its steps, with {num_leases:,} leases of {lease_tokens:,} tokens that then grow by
{turn_tokens}, the median turn of recorded coding agents. Each number is a median in microseconds. All is run
{num_runs} times: `quietest` is the least of the runs, for each row by itself, and what the limits are for; `middle` is
their median. Where the two are far apart, the machine was busy with something else. Verbs and ops run on a pool that
only counts; the last table is vLLM's own block pool, without an engine. Rows without a limit are for information.

**The table's verbs** are what the limit of 50 us is for. `grant` ends a session's first turn and `settle` every later
one. `revoke` takes {revoked_blocks} blocks within an allocation that would fail without them: `first` where all
{num_leases:,} leases must be ranked by what they are worth, `again` within a second of that, while ranks are kept.

**A turn's ops** are all that an API server's call does on that thread, from its argument to its reply; the verbs are
part of them. `load op` hands out the history, and `begin op` copies the prompt's ids, notes the turn's way, hashes the
ids that the lease covers and signs the ticket with all its block ids. `settle op` copies the ids again, keeps the
turn's record and learns from it. In `begin op` the way is asked for, so that every turn has a ticket; otherwise
`choose` comes on top. A turn calls each once, so they have no limit of their own, but what they take delays a step.

**A scheduler step** is all that our connector adds to a step of D with {num_running} running requests in which nothing
is revoked: the guard around the allocation of each, noting the step's time and requests, looking for what is due, and
the hooks of one new request and one that ends, neither of them a turn's. It is the connector's own code, and the
difference to the same calls without it. A step that has to revoke is longer by `revoke`, one in which a lease expires
by `sweep, one expires`, and the end of a turn's request by `finish`.
"""


def page(rows: Mapping[str, Mapping[str, Row]], installed: Mapping[str, str]) -> str:
    """Return the page of the documentation."""
    head = _HEAD.format(
        **installed,
        num_leases=NUM_LEASES,
        lease_tokens=LEASE_TOKENS,
        turn_tokens=TURN_TOKENS,
        num_runs=NUM_RUNS,
        num_running=NUM_RUNNING,
        revoked_blocks=REVOKED_BLOCKS,
    )
    lines = [head]
    for title, table in rows.items():
        lines += [f"**{title}**\n", "| us | quietest | middle | at most | |", "|---|---:|---:|---:|---|"]
        for name, row in table.items():
            found = "**missed**" if is_missed(name, row) else "met"
            limit = f"{BARS_US[name]:.0f} | {found} |" if name in BARS_US else "| |"
            lines.append(f"| {name} | {row.quietest:.1f} | {row.middle:.1f} | {limit}")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--doc", action="store_true", help=f"write {DOC} as well")
    args = parser.parse_args()
    rows, installed = measure(), versions()
    missed = [
        f"{title}: {name}" for title, table in rows.items() for name, row in table.items() if is_missed(name, row)
    ]
    for title, table in rows.items():
        print(f"\n{title}\n{'us':20}{'quietest':>10}{'middle':>10}{'at most':>9}")
        for name, row in table.items():
            bar = f"{BARS_US[name]:9.0f}" if name in BARS_US else ""
            print(f"  {name:18}{row.quietest:10.1f}{row.middle:10.1f}{bar}{'  missed' * is_missed(name, row)}")
    OUT.parent.mkdir(exist_ok=True)
    result = {
        "runs": NUM_RUNS,
        "p50_us": {title: {name: row.quietest for name, row in table.items()} for title, table in rows.items()},
        "middle_p50_us": {title: {name: row.middle for name, row in table.items()} for title, table in rows.items()},
        "bars_us": dict(BARS_US),
        "missed": missed,
        "versions": installed,
    }
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.doc:
        DOC.write_text(page(rows, installed), encoding="utf-8")
    print(f"\n{'missed: ' + ', '.join(missed) if missed else 'all bars met'}; see {OUT}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
