"""bidikv's connector with brakes: an engine stops at a named point of a turn while a test wants it to.

Only engines load this module (`Plan.braked`); `brakes` is the test's end. A point is a file `<role>-<point>.hold` in
the folder that BIDIKV_BRAKES names, and the engine answers with `<role>-<point>.reached`, which names the request. Two
kinds of points: where the whole engine stands still ("stop"), and where one request is kept while the engine runs on
("keep"). A file that says `crawl` lets a stopping point pass, but slowly. `<role>.finished` lists the ends of requests.

Points: `load`, `begin`, `settle` (a control call has come), `settle-done` (it has been answered, inside), `transfer`
(a read is about to be posted), `compute` (a request is about to take a step that is not its first): stop.
`queue` (a request waits to be looked at), `read` (a read is posted, its end unseen): keep.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from server_ext.engine.connector import BidiKVConnector

_POLL_S = 0.005
_CRAWL_S = 0.1
# Rather a test that fails than an engine that stands still for ever.
_LONGEST_S = 180.0


class Brakes:
    """The engine's end of the brakes."""

    def __init__(self, role: str) -> None:
        self._folder = Path(os.environ["BIDIKV_BRAKES"])
        self._role = role
        self._kept: dict[str, str] = {}

    def stop(self, point: str, who: str) -> None:
        """Stand still while the point is held."""
        end_s = time.monotonic() + _LONGEST_S
        while (said := self._said(point)) is not None and time.monotonic() < end_s:
            if said == "crawl":
                time.sleep(_CRAWL_S)
                return
            self._reach(point, who)
            time.sleep(_POLL_S)

    def keep(self, point: str, who: str) -> bool:
        """Tell whether this request is to be kept here: the first one that comes is."""
        if self._said(point) is None:
            self._kept.pop(point, None)
            return False
        if self._kept.setdefault(point, who) != who:
            return False
        self._reach(point, who)
        return True

    def finished(self, who: str, how: str) -> None:
        """Write down that a request has ended."""
        with (self._folder / f"{self._role}.finished").open("a") as file:
            file.write(f"{who} {how}\n")

    def _said(self, point: str) -> str | None:
        try:
            return (self._folder / f"{self._role}-{point}.hold").read_text()
        except FileNotFoundError:
            return None

    def _reach(self, point: str, who: str) -> None:
        path = self._folder / f"{self._role}-{point}.reached"
        if not path.exists():
            path.write_text(who)


class BrakedConnector(BidiKVConnector):
    """bidikv's connector, unchanged but for the brakes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._brakes = Brakes(extra["bidikv"]["role"])
        if self.connector_worker is not None:
            brake_worker(self.connector_worker, self._brakes)

    def control(self, op: str, arg: dict[str, Any]) -> dict[str, Any]:
        """Stop in front of a control call, and behind it."""
        self._brakes.stop(op, op)
        reply = super().control(op, arg)
        self._brakes.stop(f"{op}-done", op)
        return reply

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Keep a request in the queue."""
        # Plain requests carry no signed parameters, and are none of a turn's.
        if (request.session_id or request.kv_transfer_params) and self._brakes.keep("queue", request.request_id):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Stop in front of a step that continues a request."""
        for req_id in scheduler_output.scheduled_cached_reqs.req_ids:
            self._brakes.stop("compute", req_id)
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """Write down how a request ended."""
        self._brakes.finished(request.request_id, request.status.name)
        return super().request_finished_all_groups(request, block_ids)


def brake_worker(worker: Any, brakes: Brakes) -> None:
    """Put brakes on the reads of one worker."""
    pop, transfer = worker._pop_done_transfers, worker.nixl_wrapper.transfer  # noqa: SLF001 - the only hook there

    def pop_done_transfers(transfers: dict[str, list[int]]) -> Any:
        kept = {req_id for req_id in transfers if brakes.keep("read", req_id)}
        free = {req_id: handles for req_id, handles in transfers.items() if req_id not in kept}
        done, failed = pop(free)
        for req_id in list(transfers):
            if req_id not in kept:
                del transfers[req_id]
        transfers.update(free)
        return done, failed

    def stop_and_transfer(handle: Any) -> Any:
        brakes.stop("transfer", str(handle))
        return transfer(handle)

    worker._pop_done_transfers = pop_done_transfers  # noqa: SLF001
    worker.nixl_wrapper.transfer = stop_and_transfer
