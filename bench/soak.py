"""The soak: tens of agents on two engines for minutes, with faults, and every answer compared with a plain engine's.

`make soak MINUTES=10 SEED=1 TRACES=DIR`: sessions are read from traces where a folder is given, else made up by seed.
Everything that is drawn comes from the seed; what meets what is up to the machine. Writes `out/soak.json`, prints a
short table, and ends with status 1 where an answer was wrong, a block leaked, or an engine's memory grew.

Order: `main` -> `soak` (engines, agents, faults, and then rest) -> `SoakResult`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import httpx
import psutil

from bench import _soak_faults
from bench._machine import versions
from bench._reference import Reference
from bench._scene import num_leaked
from bench._soak_agents import Agents
from bench._soak_judges import Judges
from bench._soak_plan import TIME_DIVISOR, kills, leaves_time, made_up, measured_from_s, other_faults, recorded
from bench._soak_result import YOUNG_S, Sample, SoakResult, curves, slopes
from bench.faults import leave_in_order
from server_ext.analysis.problems import Problems
from server_ext.launch.command import ROLES
from server_ext.traffic import read_sessions
from tests.engine.rig import Plan, Rig

if TYPE_CHECKING:
    from collections.abc import Callable

    from server_ext.launch.command import Role

OUT: Final = Path(__file__).resolve().parents[1] / "out"
PLAN: Final = Plan(
    settings={
        # bidikv's own defaults, divided as the gaps are.
        "default_ttl_s": 60.0 / TIME_DIVISOR,
        "max_ttl_s": 900.0 / TIME_DIVISOR,
        "session_retention_s": 3600.0 / TIME_DIVISOR,
        "turn_timeout_s": 120.0,
        # Readers keep 5 s in hand, whatever anything is divided by.
        "ticket_ttl_s": 10.0,
        "ticket_grace_s": 0.5,
        "prefill_timeout_s": 8.0,
        "provisional_ttl_s": 3.0,
    },
    gated=True,
    max_model_len=3072,
    pool_blocks=599,
    # As one P of many, which has served others since: it holds the history of a few sessions only.
    prefill_pool_blocks=199,
    prefill_step_tokens=512,
    fresh_prefill_salt=False,
    # On CPUs oneDNN keeps compiled kernels for each number of tokens that a step of vLLM ever had: half a gigabyte in
    # the end, but not within minutes, and no leak of ours could be seen in it. So all three engines keep few.
    env={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"},
)
REFERENCE_KV_BYTES: Final = 32 << 20
_SAMPLE_S: Final = 2.0
_MEAN_FAULT_GAP_S: Final = 4.0
_MAX_SHOWN: Final = 10


class Soak:
    """One run, while it runs."""

    def __init__(self, rig: Rig, reference: Reference, seed: int, duration_s: float) -> None:
        self.rig = rig
        self.samples: list[Sample] = []
        self.faults: Counter[str] = Counter()
        self.stale_reads = 0
        self.ready_s: dict[int, float] = {reference.pid: -YOUNG_S}
        self.ready_s |= {rig.stack.child(role).pid: -YOUNG_S for role in ROLES}
        self.is_over = threading.Event()
        self._reference = reference
        self._seed = seed
        self._duration_s = duration_s
        self._started_s = time.monotonic()
        self._engines = threading.RLock()
        self.failures: list[BaseException] = []

    @property
    def at_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def run(self, agents: Agents) -> None:
        """Let agents, faults and the watch run for the planned time.

        Raises:
            BaseException: what ended one of the threads early.
        """
        threads = [
            threading.Thread(target=self._guarded, args=(task,)) for task in (self._kill, self._trouble, self._watch)
        ]
        for thread in threads:
            thread.start()
        agents.start()
        try:
            self.is_over.wait(self._duration_s)
        finally:
            self.is_over.set()
            for thread in threads:
                thread.join()
            agents.join()
        if failures := self.failures + agents.failures:
            raise failures[0]

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            self.failures.append(error)
            self.is_over.set()

    def _kill(self) -> None:
        longest_start_s = 0.0
        for kill in kills(Random(f"{self._seed}-kills"), self._duration_s):
            if self.is_over.wait(max(0.0, kill.at_s - self.at_s)):
                return
            if not leaves_time(self.at_s, longest_start_s, self._duration_s):
                self._say(f"{kill.role} is not killed: on this machine the starts before took too long")
                return
            with self._engines:
                self._say(f"kill -9 {kill.role}")
                with suppress(httpx.TransportError, LookupError):  # too busy to say, or to have said it even once
                    self.count_stale_reads()
                killed_s = self.at_s
                self.rig.kill(kill.role)
                self.rig.restart(kill.role)
                longest_start_s = max(longest_start_s, self.at_s - killed_s)
                self.ready_s[self.rig.stack.child(kill.role).pid] = self.at_s
                self._say(f"{kill.role} is back")
            self.faults[f"{_letter(kill.role)} killed"] += 1

    def _trouble(self) -> None:
        random = Random(f"{self._seed}-faults")
        for gap_s, name in other_faults(random, _MEAN_FAULT_GAP_S):
            if self.is_over.wait(gap_s):
                return
            # Nothing can be done to an engine that is not there; and one may be too busy to have it done.
            with self._engines, suppress(httpx.TransportError):
                if _soak_faults.do(name, self.rig, random):
                    self.faults[name] += 1

    def _watch(self) -> None:
        while not self.is_over.wait(_SAMPLE_S):
            pids = {role: self.rig.stack.child(role).pid for role in ROLES} | {"reference": self._reference.pid}
            for engine, pid in pids.items():
                with suppress(psutil.NoSuchProcess):  # it is being killed
                    self.samples.append(Sample(engine, pid, self.at_s, rss_bytes(pid)))

    def count_stale_reads(self) -> None:
        """Look at what D has counted in this life; any count in any life is one too many.

        Raises:
            LookupError: D does not serve the count: that is not none.
        """
        self.stale_reads = max(self.stale_reads, int(self.rig.metric("decode", "bidikv_stale_reads_total")))

    def _say(self, what: str) -> None:
        print(f"{self.at_s:6.1f} s  {what}", flush=True)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process with all its descendants.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    root = psutil.Process(pid)
    total: int = root.memory_info().rss
    for process in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def soak(rig: Rig, reference: Reference, args: argparse.Namespace) -> SoakResult:
    """Run one on engines that are ready."""
    duration_s = 60 * args.minutes
    plans = made_up(args.seed) if args.traces is None else recorded(read_sessions([args.traces], Problems()))
    judges = Judges(reference)
    run = Soak(rig, reference, args.seed, duration_s)
    agents = Agents(rig.stack.url, plans, judges.hand_in, num_agents=args.sessions, seed=args.seed, is_over=run.is_over)
    try:
        run.run(agents)
    finally:
        judges.join()
    rig.end_sessions()
    leaked = num_leaked(rig)
    run.count_stale_reads()
    return _result(run, agents, judges, leaked, _settings(args, measured_from_s(duration_s)))


def _result(run: Soak, agents: Agents, judges: Judges, leaked: int, settings: dict[str, Any]) -> SoakResult:
    found = slopes(run.samples, settings["memory_watched_from_s"], run.ready_s)
    return SoakResult(
        settings=settings,
        versions=versions(),
        turns=judges.num_answers,
        wrong_answers=judges.num_wrong,
        near_ties=judges.num_near_ties,
        unfinished_answers=judges.num_unfinished,
        prompts_with_bad_characters=judges.num_bad_characters,
        faults_by_kind=dict(run.faults + agents.tally.faults),
        errors=dict(agents.tally.errors),
        outcomes=dict(judges.counts["outcomes"]),
        reasons=dict(judges.counts["reasons"]),
        tokens=dict(judges.counts["tokens"]),
        stale_reads=run.stale_reads,
        blocks_leaked=leaked,
        rss_slope_mb_per_min_by_engine={role: found[role] for role in ROLES if role in found},
        rss_mb=curves(run.samples),
        reference_rss_slope_mb_per_min=found.get("reference"),
        engines_alive=_are_alive(run.rig),
        wrong=judges.wrong[:_MAX_SHOWN],
    )


def _settings(args: argparse.Namespace, from_s: float) -> dict[str, Any]:
    return {
        "minutes": args.minutes,
        "seed": args.seed,
        "traces": args.traces is not None,
        "sessions_at_a_time": args.sessions,
        "time_divisor": TIME_DIVISOR,
        "memory_watched_from_s": from_s,
        "mean_fault_gap_s": _MEAN_FAULT_GAP_S,
        "pool_blocks": PLAN.pool_blocks,
        "prefill_pool_blocks": PLAN.prefill_pool_blocks,
        "max_model_len": PLAN.max_model_len,
        "env": dict(PLAN.env),
        "bidikv": PLAN.settings,
    }


def _are_alive(rig: Rig) -> bool:
    clients = {"prefill": rig.prefill, "decode": rig.decode}
    return all(rig.stack.child(role).poll() is None and clients[role].get("/health").is_success for role in ROLES)


def _letter(role: Role) -> str:
    return "P" if role == "prefill" else "D"


def main() -> int:
    """Run, write, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, beside the starts of the engines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", help="a file or folder of recorded sessions, as `bidikv analyze` reads them")
    parser.add_argument("--sessions", type=int, default=24, help="so many at a time")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, leave_in_order)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rig = Rig.start(folder, PLAN)
        try:
            with Reference(rig.stack.config, folder, REFERENCE_KV_BYTES) as reference:
                reference.wait_ready()
                result = soak(rig, reference, args)
        finally:
            rig.close()
    OUT.mkdir(exist_ok=True)
    (OUT / "soak.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", "utf-8")
    print(result.table())
    for what in result.missed():
        print(f"MISSED: {what}")
    return 1 if result.missed() else 0


if __name__ == "__main__":
    sys.exit(main())
