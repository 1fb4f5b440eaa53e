"""Writes a report as one HTML page: no network, no library; its charts are inline SVG.

A few lines of script look at every chart once it is laid out, and set `data-drawn` on each and
`data-plots-drawn` on the page, so that a test, or a reader's bug report, can tell a chart that was not drawn.
"""

from html import escape
from typing import Any, Final

from . import svg
from .misses import CAUSES
from .problems import PROBLEMS
from .replay import Replayed
from .report import NOT_MODELLED, Report
from .svg import Axis, write_time, write_value

_STYLE: Final = """
:root{--ink:#1b1f27;--soft:#5d6675;--line:#e3e7ee;--page:#f6f7fa;--card:#fff;--hot:#2456c8;
--c0:#2456c8;--c1:#d9622b;--c2:#2a9d6f;--c3:#8a4fc4;--c4:#c29a1c;--c5:#5d6675;--good:#1d7f55;--mixed:#a9720a;--bad:#a33}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebf2;--soft:#9aa4b5;--line:#2c3340;--page:#12151b;--card:#1a1f28;
--hot:#5b8cff;--c0:#6d9bff;--c1:#ff8f5a;--c2:#4fce9a;--c3:#b98af0;--c4:#e4c04a;--c5:#9aa4b5;--good:#4fce9a;
--mixed:#e4c04a;--bad:#ff7b7b}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 20px 60px}h1{font-size:20px;margin:0 0 4px}
h2{font-size:18px;margin:34px 0 10px}h3{font-size:14px;margin:0 0 8px}p{margin:6px 0}.soft{color:var(--soft)}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px;min-width:0}
.grid2{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));gap:16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:16px 0}
.tile b{display:block;font-size:24px;line-height:1.2;font-weight:650}.tile span{color:var(--soft);font-size:13px}
.verdict{border-left:6px solid var(--tone);margin-top:18px}.verdict strong{font-size:26px;color:var(--tone)}
.verdict ul{margin:10px 0 0;padding-left:20px}.card+.card{margin-top:16px}.grid2 .card,.tiles .card{margin-top:0}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{text-align:left;font-weight:600;color:var(--soft)}td,th{padding:5px 8px;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}tr.on td{font-weight:650}.scroll{overflow-x:auto}
code,pre{font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace}pre{background:var(--page);padding:12px;
border-radius:8px;overflow-x:auto;margin:8px 0}figure{margin:0}.plot{width:100%;height:auto;display:block}
.plot text{fill:var(--soft);font-size:12px}.plot .title{text-anchor:middle}.plot .mid{text-anchor:middle}
.plot .end{text-anchor:end}.plot .grid{stroke:var(--line)}.plot .axis{stroke:var(--soft)}
.plot .rule{stroke:var(--soft);stroke-dasharray:4 3}.plot .line{fill:none;stroke:var(--c);stroke-width:2}
.plot .band{fill:var(--c0);opacity:.16}.plot .dot{fill:var(--c);opacity:0}.plot .dot:hover{opacity:1}
.plot .fill{fill:var(--c)}.plot .heat{fill:color-mix(in srgb,var(--hot) var(--heat),var(--card));stroke:var(--line)}
.plot .chosen{stroke:var(--c1);stroke-width:3}.plot .cell{text-anchor:middle;font-variant-numeric:tabular-nums}
.plot .over{fill:#fff}.plot .under{fill:var(--ink)}.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}
.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}.legend{display:flex;flex-wrap:wrap;gap:4px 16px;
font-size:13px;color:var(--soft);margin-top:6px}.legend i{display:inline-block;width:12px;height:12px;
border-radius:3px;background:var(--c);margin-right:6px;vertical-align:-1px}
"""

_SCRIPT: Final = """
const plots=[...document.querySelectorAll('svg.plot')];
for(const plot of plots){const marks=[...plot.querySelectorAll('.mark')];
plot.dataset.drawn=String(marks.length>0&&plot.getBoundingClientRect().width>0&&marks.some(m=>{const b=m.getBBox();
return b.width+b.height>0&&Number.isFinite(b.width+b.height)}))}
document.documentElement.dataset.plots=plots.length;
document.documentElement.dataset.plotsDrawn=plots.filter(p=>p.dataset.drawn==='true').length;
"""

_TONES: Final = {"adopt": "--good", "adopt for these sessions": "--mixed", "do not bother": "--bad"}


def to_html(report: Report) -> str:
    """Return the page."""
    body = "".join(
        [
            _head(report),
            _reuse(report),
            _link(report),
            _holding(report),
            _ttft(report),
            _misses(report),
            _fine_print(report),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>bidikv analyze: {report.verdict.decision}</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main><script>{_SCRIPT}</script></body></html>\n"
    )


# -------------------------------------------------------------------- sections


def _head(report: Report) -> str:
    verdict, reuse, limits = report.verdict, report.reuse, report.options.limits
    formats = ", ".join(f"{count:,} requests of {name}" for name, count in report.formats.items())
    tiles = [
        (f"{reuse.num_sessions:,}", "sessions"),
        (f"{reuse.num_turns:,}", "turns"),
        (_p(reuse.prompt_tokens, "p50", "tokens"), "tokens in the median prompt"),
        (f"{reuse.total_held_share:.0%}", "of later prompts is there already"),
        (f"{report.link.break_even_tokens:,.0f}", f"tokens: break-even over {limits.link.name}"),
        (f"{verdict.total_gain[verdict.basis]:.0%}", f"of TTFT saved (P's cache {verdict.basis})"),
    ]
    settings = ""
    if verdict.settings is not None:
        lines = ",\n".join(f' "{name}": {_json(value)}' for name, value in verdict.settings.items())
        settings = (
            '<div class="card"><h3>Settings to begin with (<code>kv_connector_extra_config.bidikv</code>)</h3>'
            f"<pre>{escape('{' + lines[1:] + '}')}</pre></div>"
        )
    rule = ""
    if verdict.rule is not None:
        rule = f"<p>Which sessions: {escape(verdict.rule)}. These save the most: {escape(verdict.which)}.</p>"
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in verdict.reasons)
    return (
        f'<h1>Does decode-to-prefill reuse pay on this traffic?</h1><p class="soft">{escape(formats)} · '
        f"{escape(limits.model.name)} on {escape(limits.hardware)}</p>"
        f'<section class="card verdict" style="--tone:var({_TONES[verdict.decision]})">'
        f"<strong>{escape(verdict.headline)}</strong>{rule}<ul>{reasons}</ul>"
        f'</section><div class="tiles">'
        + "".join(f'<div class="card tile"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in tiles)
        + f"</div>{settings}"
    )


def _reuse(report: Report) -> str:
    reuse = report.reuse
    bins = reuse.by_turn
    share = svg.lines(
        {"median": [(one["first"], one["held_share_p50"]) for one in bins]},
        Axis("turn of the session"),
        Axis("share that is there already", unit="%", low=0.0, high=1.0),
        band=(
            [(one["first"], one["held_share_p25"]) for one in bins],
            [(one["first"], one["held_share_p75"]) for one in bins],
        ),
    )
    growth = svg.stacked_bars(
        [_turns(one) for one in bins],
        {
            "there already": [one["held_tokens_p50"] for one in bins],
            "new": [max(0.0, one["prompt_tokens_p50"] - one["held_tokens_p50"]) for one in bins],
        },
        "turn of the session",
        Axis("tokens in the median prompt", unit="tokens"),
    )
    facts = (
        f"Of the prompt tokens of {reuse.num_repeat_turns:,} later turns {reuse.total_repeated_share:.1%} repeat the "
        f"prompt before; with its answer, which D holds too, {reuse.total_held_share:.1%}. "
        f"{reuse.append_only_share:.1%} of these turns only append."
    )
    return _section(
        "a · What repeats",
        facts,
        [
            ("What of a prompt is there already, by turn (band: middle half of the turns)", share),
            ("How prompts grow", growth),
        ]
        if bins
        else [],
    )


def _link(report: Report) -> str:
    link, limits = report.link, report.options.limits
    curves = svg.lines(
        link.curves,
        Axis("tokens of history", is_log=True, unit="tokens"),
        Axis("seconds", is_log=True, unit="s"),
        marks={f"break-even over {limits.link.name}": link.break_even_tokens}
        if link.break_even_tokens < 2 * limits.model.max_context_tokens
        else None,
    )
    fetched = svg.lines(
        {"turns": link.fetch_cdf},
        Axis("KV cache fetched by a turn", is_log=True, unit="B"),
        Axis("later turns up to it", unit="%", low=0.0, high=1.0),
    )
    rows = []
    links = list(dict.fromkeys(row["link"] for row in link.table))
    for name in dict.fromkeys(row["model"] for row in link.table):
        cells = {row["link"]: row for row in link.table if row["model"] == name}
        first = cells[links[0]]
        values = [f"<td class=n>{_even(cells[one])}</td>" for one in links]
        on = ' class="on"' if name == limits.model.name else ""
        rows.append(
            f"<tr{on}><td>{escape(name)}</td><td class=n>{first['num_gpus']}</td>"
            f"<td class=n>{first['kv_bytes_per_token'] / 1024:,.0f}</td>"
            f"<td class=n>{first['compute_us_per_token']:.1f}</td>{''.join(values)}</tr>"
        )
    heads = "".join(f"<th class=n>{escape(one)}</th>" for one in links)
    table = (
        '<div class="scroll"><table><tr><th>model</th><th class=n>GPUs</th><th class=n>KiB KV / token</th>'
        f"<th class=n>µs to compute a token</th>{heads}</tr>{''.join(rows)}</table></div>"
        '<p class="soft">Per link: tokens of history from which fetching is faster, and the median speed-up of later '
        "turns if all is held and P's cache is cold.</p>"
    )
    facts = (
        f"A later turn fetches {_p(link.fetch_bytes, 'p50', 'B')} (p95 {_p(link.fetch_bytes, 'p95', 'B')}), "
        f"which takes {_p(link.fetch_s, 'p50', 's')} (p95 {_p(link.fetch_s, 'p95', 's')}) over {limits.link.name}. "
        f"{link.above_break_even_share:.0%} of the later turns are above the break-even length."
    )
    return _section(
        "b · Does the link suffice",
        facts,
        [("Getting the history: computed, or fetched", curves)]
        + ([("What a later turn fetches", fetched)] if link.fetch_cdf else []),
        f'<div class="card"><h3>Models and links</h3>{table}</div>',
    )


def _holding(report: Report) -> str:
    holding = report.holding
    if holding.best is None:
        return _section("c · Holding the cache", "No turn has a time, or too few have, so nothing can be said.", [])
    budgets = sorted({cell.budget_fraction for cell in holding.grid})
    ttls = sorted({cell.ttl_s for cell in holding.grid})
    cells = {(cell.budget_fraction, cell.ttl_s): cell for cell in holding.grid}
    best = holding.best
    chosen = (budgets.index(best.budget_fraction), ttls.index(best.ttl_s))

    def map_of(value: Any, unit: str) -> str:
        return svg.heat_map(
            [f"{ttl:g} s" for ttl in ttls],
            [f"{budget:.0%}" for budget in budgets],
            [[value(cells[budget, ttl]) for ttl in ttls] for budget in budgets],
            ("life of a lease (default_ttl_s)", "budget, of D's cache"),
            unit=unit,
            chosen=chosen,
        )

    kv = report.options.limits.model.kv_bytes_per_token

    def gib(cell: Replayed) -> float:
        return cell.peak_leased_tokens * kv / holding.num_nodes / 2**30

    gaps = svg.lines(
        {"all turns": holding.gap_cdf},
        Axis("gap before a turn", is_log=True, unit="s"),
        Axis("turns up to it", unit="%", low=0.0, high=1.0),
        marks={f"{best.ttl_s:g} s": best.ttl_s},
    )
    why = ", ".join(f"{reason} {count:,}" for reason, count in best.reasons.most_common()) or "nothing"
    facts = (
        f"{holding.num_replayed:,} turns replayed through the server's lease table on {holding.num_nodes} decode "
        f"{'engine' if holding.num_nodes == 1 else 'engines'} with room for {holding.pool_tokens:,} tokens each. "
        f"With {best.ttl_s:g} s and {best.budget_fraction:.0%} (framed): {best.held_share:.1%} of what could be reused "
        f"is still there; it is gone before {best.gone_share:.1%} of the turns. Found less, by reason: {why}. "
        f"The median gap is {_p(holding.gap_s, 'p50', 's')}, p95 {_p(holding.gap_s, 'p95', 's')}"
        f"{_gap_kinds(report)}."
    )
    return _section(
        "c · How long, in how much memory, and how often it is gone",
        facts,
        [
            ("Reusable tokens that are still there at the next turn", map_of(lambda c: c.held_share, "%")),
            ("Peak of leased memory per decode engine, GiB", map_of(gib, "GiB")),
            ("Turns that find nothing", map_of(lambda c: c.gone_share, "%")),
        ]
        + ([("Gaps between turns", gaps)] if holding.gap_cdf else []),
    )


def _gap_kinds(report: Report) -> str:
    tool, stop = report.holding.gap_after_tool_s, report.holding.gap_after_stop_s
    if tool is None or stop is None:
        return ""
    after_tool = f"{_p(tool, 'p50', 's')} and {_p(tool, 'p95', 's')}"
    return f" (after a tool call {after_tool}, else {_p(stop, 'p50', 's')} and {_p(stop, 'p95', 's')})"


def _ttft(report: Report) -> str:
    ttft = report.ttft
    rows = []
    for name, one in ttft.baselines.items():
        for label, key in (("now", "now_s"), ("with reuse", "reuse_s")):
            values = "".join(f"<td class=n>{_p(one[key], p, 's')}</td>" for p in ("p50", "p95", "p99"))
            turns = f"{one['num_turns']:,} later turns"
            rows.append(f"<tr><td>{turns}, P's cache {name}</td><td>{label}</td>{values}</tr>")
    first = "".join(f"<td class=n>{_p(ttft.first_turn_s, p, 's')}</td>" for p in ("p50", "p95", "p99"))
    rows.insert(0, f"<tr><td>first turns</td><td>now and with reuse</td>{first}</tr>")
    if ttft.measured_s is not None:
        values = "".join(f"<td class=n>{_p(ttft.measured_s, p, 's')}</td>" for p in ("p50", "p95", "p99"))
        turns = f"{ttft.num_measured:,} later turns"
        rows.append(f"<tr><td>{turns}, as the log measured them</td><td>now</td>{values}</tr>")
    table = (
        '<div class="card"><h3>Time to first token</h3><div class="scroll"><table><tr><th></th><th></th>'
        f"<th class=n>p50</th><th class=n>p95</th><th class=n>p99</th></tr>{''.join(rows)}</table></div></div>"
    )
    plots = []
    if len(ttft.curves["cold, now"]) > 0:
        curves = svg.lines(
            {name: points for name, points in ttft.curves.items() if points},
            Axis("time to first token", is_log=True, unit="s"),
            Axis("later turns up to it", unit="%", low=0.0, high=1.0),
        )
        gains = svg.lines(
            {"sessions": ttft.session_gain},
            Axis("TTFT saved by a session", unit="%"),
            Axis("sessions up to it", unit="%", low=0.0, high=1.0),
        )
        plots = [("Time to first token of later turns", curves), ("What each session saves", gains)]
    facts = (
        "From the limit model, on idle engines: queueing is not modelled. “Cold”: P has lost the session; “warm”: P "
        "still has the whole prompt before, and only the answer can be fetched."
    )
    return _section("d · Time to first token", facts, plots, table)


def _misses(report: Report) -> str:
    found = report.misses.to_json()
    if not found["causes"]:
        return _section("Why does my cache miss", "It does not: every prompt keeps the one before it.", [])
    chart = svg.bars(
        [
            (
                one["cause"].replace("_", " "),
                float(one["lost_tokens"]),
                f"{write_value(one['lost_tokens'], '')}, {one['count']:,} turns",
            )
            for one in found["causes"]
        ]
    )
    causes = "".join(
        f"<tr><td>{escape(one['cause'].replace('_', ' '))}</td><td>{escape(one['meaning'])}</td>"
        f"<td>{escape(one['fix'])}</td></tr>"
        for one in found["causes"]
    )
    examples = "".join(
        f"<tr><td>{escape(one['session'])}, turn {one['turn']}</td><td>{escape(one['region'])}</td>"
        f"<td class=n>{one['at_token']:,}</td><td class=n>{one['lost_tokens']:,}</td>"
        f"<td>{escape(one['cause'].replace('_', ' '))}</td><td>{_change(one)}</td></tr>"
        for one in found["examples"]
    )
    tables = (
        f'<div class="card"><h3>Causes and fixes</h3><div class="scroll"><table><tr><th>cause</th><th>what happened'
        f"</th><th>fix</th></tr>{causes}</table></div></div>"
        '<div class="card"><h3>The costliest</h3><div class="scroll"><table><tr><th>where</th><th>first difference</th>'
        f"<th class=n>at token</th><th class=n>tokens lost</th><th>cause</th><th>from → to</th></tr>{examples}</table>"
        "</div></div>"
    )
    total = sum(report.misses.counts.values())
    facts = f"{total:,} turns repeat less than their session held; {len(CAUSES)} causes are told apart."
    return _section("Why does my cache miss", facts, [("Tokens lost, by cause, and in how many turns", chart)], tables)


def _change(one: dict[str, Any]) -> str:
    if one.get("old_content") is not None or one.get("new_content") is not None:
        return (
            f"<code>{escape(str(one.get('old_content')))}</code> → <code>{escape(str(one.get('new_content')))}</code>"
        )
    if one["old_hash"] is None and one["new_hash"] is None:
        return '<span class="soft">not in this log</span>'
    return f"<code>{(one['old_hash'] or '-')[:8]}</code> → <code>{(one['new_hash'] or '-')[:8]}</code>"


def _fine_print(report: Report) -> str:
    limits = report.options.limits
    problems = "".join(
        f"<tr><td class=n>{one['count']:,}</td><td><code>{one['name']}</code></td>"
        f"<td>{escape(PROBLEMS[one['name']])}</td><td>{escape(one['first_seen'])}</td></tr>"
        for one in report.problems.to_json()
    )
    table = (
        '<div class="scroll"><table><tr><th class=n>count</th><th>what</th><th>meaning</th><th>first</th></tr>'
        f"{problems}</table></div>"
    )
    missing = "".join(f"<li>{escape(one)}</li>" for one in NOT_MODELLED)
    return (
        f'<h2>The fine print</h2><div class="grid2"><div class="card"><h3>Assumed</h3><ul>'
        f"<li>{escape(limits.model.name)}: {escape(limits.model.source)}</li>"
        f"<li>{escape(limits.gpu.name)}: {limits.gpu.peak_flops / 1e12:,.0f} TFLOP/s at {limits.efficiency:.0%} "
        f"({escape(limits.gpu.source)})</li>"
        f"<li>{escape(limits.link.name)}: {limits.link.bytes_per_s / 1e9:g} GB/s ({escape(limits.link.source)}), and "
        f"{write_time(limits.fixed_s)} for each transfer</li></ul></div>"
        f'<div class="card"><h3>Not modelled</h3><ul>{missing}</ul></div></div>'
        f'<h2>What was odd in the input</h2><div class="card">{table if problems else "Nothing."}</div>'
    )


# -------------------------------------------------------------------- pieces


def _section(title: str, facts: str, plots: list[tuple[str, str]], extra: str = "") -> str:
    figures = "".join(f'<figure class="card"><h3>{escape(name)}</h3>{plot}</figure>' for name, plot in plots)
    return (
        f"<h2>{escape(title)}</h2><p>{escape(facts)}</p>"
        f'<div class="grid2">{figures}</div>{"<p></p>" if extra else ""}{extra}'
    )


def _p(found: dict[str, float] | None, name: str, unit: str) -> str:
    return "-" if found is None else write_value(found[name], unit)


def _even(row: dict[str, Any]) -> str:
    speedup = "" if row["speedup_p50"] is None else f" · {row['speedup_p50']:.1f}x"
    return f"{write_value(row['break_even_tokens'], 'tokens')}{speedup}"


def _turns(one: dict[str, float]) -> str:
    return f"{one['first']:g}" if one["first"] == one["last"] else f"{one['first']:g}-{one['last']:g}"


def _json(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value}"
