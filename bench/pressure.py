"""Memory pressure: sessions that would hold more than D has, while other requests run (`make pressure`).

Four arms under the same load: stock P/D that holds nothing (`no_leases`), ours (`bidikv`), and stock
`bidirectional_kv_xfer` with its hold time at the default and as short as our leases. The first two take turns, round
by round, while the engines of the one that is not measured are frozen. Writes `out/pressure.json`; of a whole run also
`docs/pressure.json` and `docs/pressure.md`. The exit status is 1 where a bar is missed.

Order: `main` -> `Run.find_pace` -> `Run.compare` (the bars), `Run.stock` (beside them) -> `Run.judge` -> `report`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer

from bench._cores import kept_off, share_out
from bench._machine import versions
from bench._others import Others
from bench._pressure import ARMS, BIDIKV, NO_LEASES, STOCK, STOCK_TUNED, Report, summary
from bench._pressure_arms import BidiKVArm, Pair, StockArm, our_config
from bench._pressure_cell import measure
from bench._pressure_load import FIRST_PACE, NUM_OTHERS, OTHER_TOKENS, PERCENTS, POOL_BLOCKS, Pace, num_slots
from bench._pressure_reference import References, answers
from bench._pressure_table import page
from bench._reference import Verdict
from bench._stock import DEFAULT_HOLD_S, stock_config
from bench.faults import leave_in_order
from server_ext.launch.stack import running_stack
from server_ext.launch.tiny import WIDE, ensure_tiny

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench._pressure_arms import Arm
    from bench._pressure_cell import Cell

ROOT: Final = Path(__file__).parents[1]
ROUNDS: Final = 3
_WARM_UP_DEADLINE_S: Final = 60.0


class Run:
    """The whole run: its engines and its measurements.

    Args:
        folder: for the engines' logs.
        others: the process of the other requests.
        percents: the loads.
    """

    def __init__(self, folder: Path, others: Others, percents: Sequence[int]) -> None:
        self._folder = folder
        self._others = others
        self._percents = percents
        self._pace = FIRST_PACE
        self._tokenizer = Tokenizer.from_file(str(ensure_tiny(print, WIDE) / "tokenizer.json"))
        self.cells: list[Cell] = []

    async def find_pace(self, without: StockArm) -> None:
        """Let requests come as fast as this machine can serve them where nothing is held."""
        await self.measure(without, self._percents[0])
        found = self.cells.pop()
        turn_s = median(one.ended_s - one.sent_s for one in found.asked if one.ended_s is not None)
        other_s = median(one.chunk_s[-1] - one.sent_s for one in found.others if one.cached_tokens is not None)
        self._pace = Pace.of(turn_s, other_s)
        print(f"a turn takes {turn_s:.2f} s here, another request {other_s:.1f} s: {self._pace}", flush=True)

    async def compare(self, ours: BidiKVArm, without: StockArm, rounds: int) -> None:
        """Measure our arm and the one without leases in turns."""
        for percent in self._percents:
            for number in range(rounds):
                arms = (without, ours) if number % 2 == 0 else (ours, without)
                for arm in arms:
                    await self.measure(arm, percent)

    async def stock(self, stacks: ExitStack) -> None:
        """Measure stock `bidirectional_kv_xfer` with either hold time, on new engines: only their end frees all."""
        for percent in self._percents:
            for name, hold_s in ((STOCK, None), (STOCK_TUNED, self._pace.ttl_s)):
                arm = await self.start_stock(stacks, name, hold_s=hold_s)
                await self.measure(arm, percent, comes_to_rest=False)
                arm.pair.stop()

    async def start_ours(self, stacks: ExitStack) -> BidiKVArm:
        """Start our engines; they are frozen when this returns."""
        arm = BidiKVArm(self._pair(stacks, BIDIKV))
        await self._warm_up(arm)
        return arm

    async def start_stock(self, stacks: ExitStack, name: str, hold_s: int | None = None) -> StockArm:
        """Start stock engines; they are frozen when this returns."""
        is_plain = name == NO_LEASES
        pair = self._pair(stacks, name, bidirectional=not is_plain, hold_s=hold_s)
        arm = StockArm(name, pair, hold_s=0 if is_plain else hold_s or DEFAULT_HOLD_S)
        await self._warm_up(arm)
        return arm

    def _pair(self, stacks: ExitStack, name: str, **stock: Any) -> Pair:
        print(f"starting the engines of {name}", flush=True)
        folder = self._folder / f"{name}-{len(self.cells)}"
        config = our_config(folder, self._pace.ttl_s)
        pair = Pair(stacks.enter_context(running_stack(stock_config(config, **stock) if stock else config, folder)))
        stacks.callback(pair.wake)
        return pair

    async def _warm_up(self, arm: Arm) -> None:
        # A pair that cannot hand anything over must not take hours to say so.
        await asyncio.wait_for(arm.warm_up(self.tokenize("warm " * 100)), _WARM_UP_DEADLINE_S)
        share_out(arm.pair.stack)
        arm.pair.freeze()

    async def measure(self, arm: Arm, percent: int, *, comes_to_rest: bool = True) -> None:
        """Measure one arm under one load, beginning with empty caches."""
        load = percent, num_slots(percent, self.tokenize), self._pace
        arm.pair.wake()
        if comes_to_rest:
            await arm.pair.rest()
            await arm.pair.forget()
        with kept_off():
            cell = await measure(arm, self._others, load, self.tokenize, comes_to_rest=comes_to_rest)
        arm.pair.freeze()
        self.cells.append(cell)
        print(f"{percent} % {arm.name}: {json.dumps(summary([cell], lambda *_: Verdict(0, 0)))}", flush=True)

    async def judge(self, judge: Pair, rounds: int) -> Report:
        """Compare all answers with those of a cold recompute, and return what was found."""
        judge.wake()
        print("computing the right answers", flush=True)
        references = await References.compute(judge, answers(self.cells))
        load: dict[int, dict[str, dict[str, Any]]] = {}
        for percent in self._percents:
            cells = {name: [c for c in self.cells if (c.percent, c.arm) == (percent, name)] for name in ARMS}
            load[percent] = {name: summary(found, references.verdict) for name, found in cells.items() if found}
        setup = {
            "model": WIDE.name,
            "pool_blocks": POOL_BLOCKS,
            "sessions_at_a_time": {str(percent): num_slots(percent, self.tokenize) for percent in self._percents},
            "turns_per_s": round(self._pace.turns_per_s, 2),
            "others_at_a_time": NUM_OTHERS,
            "others_answer_tokens": OTHER_TOKENS,
            "duration_s": round(self._pace.duration_s, 1),
            "grace_s": round(self._pace.grace_s, 1),
            "rounds": rounds,
            "lease_ttl_s": self._pace.ttl_s,
            "hold_s": {STOCK: DEFAULT_HOLD_S, STOCK_TUNED: self._pace.ttl_s},
        }
        installed = versions()
        return Report(load, setup, machine=installed.pop("cpu"), versions=installed)

    def tokenize(self, text: str) -> list[int]:
        """Return a text's token ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


async def run_all(percents: Sequence[int], rounds: int, *, with_stock: bool) -> Report:
    """Run everything."""
    with tempfile.TemporaryDirectory() as folder, Others() as others, ExitStack() as stacks:
        run = Run(Path(folder), others, percents)
        without = await run.start_stock(stacks, NO_LEASES)
        await run.find_pace(without)
        ours = await run.start_ours(stacks)
        await run.compare(ours, without, rounds)
        ours.pair.stop()
        if with_stock:
            await run.stock(stacks)
        return await run.judge(without.pair, rounds)


def report(found: Report, *, is_whole: bool) -> int:
    """Write the files, print the bars, and return the exit status."""
    text = json.dumps(found.to_json(), indent=1) + "\n"
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "pressure.json").write_text(text, "utf-8")
    if is_whole:
        write_page(found)
    bars = found.bars()
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        print(f"{'PASS' if bar.passed else 'FAIL'}  {bar.name}: {bar.value:g} ({sign} {bar.limit:g})")
    return 0 if all(bar.passed for bar in bars) else 1


def write_page(found: Report) -> None:
    """Write what the documentation has of a whole run."""
    (ROOT / "docs" / "pressure.json").write_text(json.dumps(found.to_json(), indent=1) + "\n", "utf-8")
    (ROOT / "docs" / "pressure.md").write_text(page(found), "utf-8")


def main() -> int:
    """Run all of it, or a part, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--percent", type=int, action="append", help="only this load; may be given several times")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of our arm and the one without leases")
    parser.add_argument("--without-stock", action="store_true", help="leave out stock bidirectional_kv_xfer")
    parser.add_argument("--page", action="store_true", help="run nothing; judge and write docs/pressure.json again")
    args = parser.parse_args()
    if args.page:
        write_page(Report.from_json(json.loads((ROOT / "docs" / "pressure.json").read_text("utf-8"))))
        return 0
    signal.signal(signal.SIGTERM, leave_in_order)  # engines that stand still would stay so for ever
    percents = args.percent or PERCENTS
    found = asyncio.run(run_all(percents, args.rounds, with_stock=not args.without_stock))
    return report(found, is_whole=args.percent is None and not args.without_stock)


if __name__ == "__main__":
    sys.exit(main())
