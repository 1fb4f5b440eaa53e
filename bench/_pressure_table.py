"""The pressure run as a page of the documentation. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench._pressure import ARMS, BIDIKV, NO_LEASES, itl_ratio, itl_ratios, pooled_itl_ratio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench._pressure import Report

_HEAD: Final = """\
# Leases under memory pressure

Written by `make pressure`, which runs one prefill and one decode engine (vLLM {vllm}) on {machine}. Sessions come
that would hold more than D has, while other requests run on D. Does holding hurt those others?

## What is compared

| arm | what it is |
|---|---|
| `no_leases` | stock vLLM P/D: its own NIXL connector, nothing is held after a turn, a proxy in the benchmark |
| `bidikv` | this project: leases take at most half of D's blocks (the default), all turns go by P (not the default) |
| `stock_bidirectional` | stock engines with `bidirectional_kv_xfer`; D holds each turn for its default, 480 s |
| `stock_bidirectional_tuned` | the same, but D holds as long as our leases last: {ttl_s} s |

All arms have the same model (random weights; decoding costs what it costs, answers are compared token by token, and a
token that an answer lacks is a wrong one),
the same pools ({pool_blocks} blocks of 32 tokens on D and on P), the same flags otherwise, empty caches at the
start, and the same load, drawn from seeds:

- **Sessions**: as many at a time as hold 120, 200 or 400 % of D's pool after their first turns ({slots}). Turns
  come at a fixed rate, {rate:g} a second, so that only what is held grows with the load; it is the rate at which 0.8
  turns run at a time on this machine where nothing is held. A session has up to four
  turns, of some 300 tokens and then about 50 more each, then ends, and another begins.
- **Others**: {others} streams of completions without a session on D, one request after the other, each of 304
  tokens and {other_tokens} more in the answer; 256 of the 304 are the prompt of one of eight apps, so their
  prefix-cache hit rate means something.

Each measurement takes {seconds:g} s, and {grace:g} s more for what is still running. `no_leases` and `bidikv`
take turns, {rounds} rounds each, while the engines of the other one are frozen; inter-token times in the tables are of
all rounds together, the first two seconds left out. The bar is for the median of the rounds' ratios: within a round
the two arms were measured right after each other, and what disturbs the machine for a while falls on one of them in
one round, where it moves the percentile of all rounds together as a real cost would; what leases cost is in every
round. All of these ratios stand below each table. The stock arms run once per load, each time on new engines, for
nothing but their end gives back what D holds for eight minutes. A
lease lives as long as 60 turns take to come, here {ttl_s} s, in place of 60 s at the gaps of real agents. The hold time
at the default stays 480 s.

One setting of ours is not the one that we ship: `default_route` is `fetch` here, so that all turns go by P as in the
other arms, and `auto` by default, which would compute some of them on D. This page says nothing of `auto`.

What favours whom: `no_leases` and the stock arms have their proxy in the benchmark's process, while our turns are
conducted by D's API server, which also serves the others' streams: that counts against us. Where P reads a lease it
computes less, and on two cores that leaves more for D: that counts for us. Stock engines get our pause of NIXL's
polling thread, without which each would burn a core. D's engine has one core to itself in all arms, and everything
else shares the rest. The proxy drops a handle before P would decline it, as vLLM's
own example does. P's prefix cache is on everywhere, and as small as D's.

## What was found

Inter-token times (ITL) and the hit rate are the others'. *Held* is the most of D's blocks that was held between
turns, *tickets* the most in open tickets: those blocks no request can take back, so they are counted apart.

*Held* may be more than the budget of leases, which is half of the pool ({budget_blocks} blocks): it adds to the
leases what turns that have just ended hold until they are settled, and counts a block twice that a turn has in its
session's lease as well. No budget caps these pins, settling does; and a request that needs their blocks takes them
back as it takes a lease's.

Where our turns take longer than those without leases: each calls D's scheduler (begin, settle, and load where D's API
server does not know the session), and each call waits for the end of a step of D, which is busy with the others. Where
sessions would hold far more than D has, few turns still find a lease, and few are fetched: what is shown there is what
leases cost where they hardly help. Below each table stands how many were fetched, and how much longer turns took.
"""

_COLUMNS: Final = (
    ("ITL p50", "itl_p50_ms", "{:.1f} ms"),
    ("ITL p95", "itl_p95_ms", "{:.1f} ms"),
    ("ITL p99", "itl_p99_ms", "{:.1f} ms"),
    ("tokens/s", "others_tokens_per_s", "{:.0f}"),
    ("TTFT p50", "ttft_p50_s", "{:.2f} s"),
    ("hit rate", "others_hit_rate", "{:.0%}"),
    ("preemptions", "preemptions", "{}"),
    ("held", "held_blocks_peak", "{}"),
    ("tickets", "ticket_blocks_peak", "{}"),
    ("turn p50", "turn_p50_s", "{:.2f} s"),
    ("turns answered", "turns_answered", "{}"),
    ("unanswered", "unanswered", "{}"),
    ("errors", "errors", "{}"),
    ("wrong tokens", "tokens_wrong", "{}"),
)


def page(report: Report) -> str:
    """Return the page."""
    setup = report.setup
    head = _HEAD.format(
        vllm=report.versions["vllm"],
        machine=report.machine,
        pool_blocks=setup["pool_blocks"],
        slots=", ".join(str(slots) for slots in setup["sessions_at_a_time"].values()),
        rate=setup["turns_per_s"],
        others=setup["others_at_a_time"],
        other_tokens=setup["others_answer_tokens"],
        seconds=setup["duration_s"],
        grace=setup["grace_s"],
        rounds=setup["rounds"],
        ttl_s=setup["lease_ttl_s"],
        budget_blocks=setup["pool_blocks"] // 2,
    )
    parts = [head]
    for percent, arms in report.load.items():
        parts += [
            f"\n### {percent} % of the pool\n",
            _table(arms),
            _ratios(arms),
            _leases(arms[BIDIKV]),
            _outcomes(arms),
        ]
    return "\n".join([*parts, "## The bars\n", *_bars(report)]) + "\n"


def _table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| arm | " + " | ".join(title for title, _, _ in _COLUMNS) + " |"]
    lines.append("|---|" + "---:|" * len(_COLUMNS))
    for name in ARMS:
        if name in arms:
            found = arms[name]
            found = {**found, "unanswered": found["others_unanswered"] + found["turns_unanswered"]}
            cells = (_cell(found[key], form) for _, key, form in _COLUMNS)
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _ratios(arms: Mapping[str, Mapping[str, Any]]) -> str:
    ours, without = arms[BIDIKV], arms[NO_LEASES]
    rounds = ", ".join(f"{ratio:.3f}" for ratio in itl_ratios(ours, without))
    return (
        f"\nITL p95 of `{BIDIKV}`, of that of `{NO_LEASES}`: {rounds} in the rounds, "
        f"median {itl_ratio(ours, without):.3f}; of all rounds together {pooled_itl_ratio(ours, without):.3f}."
    )


def _leases(ours: Mapping[str, Any]) -> str:
    shed = ", ".join(
        f"{kind} {number} (`{reason}`)"
        for kind, reasons in ours["leases_shed"].items()
        for reason, number in reasons.items()
        if number
    )
    return (
        f"\nOur leases: {ours['leases_granted']} granted, {ours['leases_expired']} expired; shed: {shed or 'none'}; "
        f"{ours['revoked_blocks']} blocks taken back for requests; {ours['tickets_opened']} tickets, "
        f"{ours['tickets_refused'].get('over_budget', 0)} refused over their cap.\n"
    )


def _outcomes(arms: Mapping[str, Mapping[str, Any]]) -> str:
    ours, without = arms[BIDIKV], arms[NO_LEASES]
    outcomes: Mapping[str, int] = ours["outcomes"]
    came = ", ".join(f"{number} {name}" for name, number in outcomes.items())
    num_fetched = sum(number for name, number in outcomes.items() if name.startswith("fetched"))
    lines = [f"Our turns: {came}. So {num_fetched} of {ours['turns_answered']} were fetched."]
    if ours["turn_p50_s"] and without["turn_p50_s"] and ours["itl_p50_ms"]:
        longer_s = ours["turn_p50_s"] - without["turn_p50_s"]
        lines.append(
            f"Their median is {longer_s:+.2f} s ({longer_s / without['turn_p50_s']:+.0%}) from that without leases; "
            f"three steps of D, by the others' ITL p50, are {3 * ours['itl_p50_ms'] / 1000:.2f} s."
        )
    return " ".join(lines) + "\n"


def _bars(report: Report) -> list[str]:
    lines = ["| expected | found | limit | |", "|---|---:|---:|---|"]
    lines += [
        f"| {bar.name} | {bar.value:g} | {'at least' if bar.at_least else 'at most'} {bar.limit:g} "
        f"| {'met' if bar.passed else '**missed**'} |"
        for bar in report.bars()
    ]
    return lines
