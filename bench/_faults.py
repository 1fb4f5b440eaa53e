"""The faults of the matrix: each brings a scene's turns to their points, does what goes wrong, and makes it good again.

What a fault is to cause is checked (`require`), so that no row is written for one that did not happen.
"""

from __future__ import annotations

import secrets
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from bench._scene import Scene, require
from server_ext.launch.command import ROLES
from server_ext.launch.tiny import TINY
from tests.engine.common import BLOCK_SIZE, POOL_BLOCKS, PREFILL_LEASE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import httpx

    from server_ext.launch.command import Role
    from tests.engine.rig import Rig
    from tests.engine.wire import Break


# ---------------------------------------------------------------- clients


def client_gone(aborts: Role | None = None) -> Callable[[Scene], None]:
    """Hang up; where an engine is at work for the turn, its request must end by an abort."""

    def run(scene: Scene) -> None:
        with scene.at_points() as holds:
            for turn in scene.turns:
                turn.leave()
            if aborts is not None:
                for hold in holds:
                    hold.crawl()
                eventually(lambda: scene.has_aborted(aborts), f"an abort on the {aborts} engine")
            elif scene.points[0] in ("after begin", "P answered"):
                scene.talks[0].wait_until_idle()
        scene.wait()

    return run


def clients_gone(scene: Scene) -> None:
    """Hang up on two turns while P reads for one and D for the other."""
    with scene.at_points():
        for turn in scene.turns:
            turn.leave()
        for role in ROLES:
            eventually(partial(scene.has_aborted, role), f"an abort on the {role} engine")
    scene.wait()


# ---------------------------------------------------------------- engines


def p_killed(scene: Scene) -> None:
    """Kill P, finish without it, and start it again."""
    with scene.at_points():
        scene.rig.kill("prefill")
        scene.let_go()
        scene.ask_rest()
        scene.wait()
    scene.rig.brakes.forget()
    scene.restart("prefill")


def d_killed(scene: Scene) -> None:
    """Kill D, lose the turns, and start it again."""
    with scene.at_points():
        scene.rig.kill("decode")
        scene.ask_rest()
        scene.wait()
    scene.rig.brakes.forget()
    scene.restart("decode")


def killed_in_a_read(dies: Role, reader: Role) -> Callable[[Scene], None]:
    """Kill an engine while bytes are on their way: the other side of the read stands still, so that none arrives."""
    source: Role = "decode" if reader == "prefill" else "prefill"

    def run(scene: Scene) -> None:
        rig = scene.rig
        with scene.at_points(), rig.brakes.held(f"{reader}-read") as posted:
            with rig.frozen(source):
                scene.let_go()
                posted.wait()
                rig.kill(dies)
            posted.let_go()
            scene.wait()
        rig.brakes.forget()
        scene.restart(dies)

    return run


def p_stopped(scene: Scene) -> None:
    """Stop P's processes, have D's turn end without it, and let P go on."""
    with scene.at_points(), scene.rig.frozen("prefill"):
        scene.ask_rest()
        scene.wait()
        for turn in scene.turns:
            require(turn.end().reason == "prefill_unavailable", "the turn did not wait for P in vain")


def p_stopped_while_d_reads(scene: Scene) -> None:
    """Stop P's processes, have D post its read, and let P go on."""
    with scene.at_points(), scene.rig.brakes.held("decode-read") as posted:
        with scene.rig.frozen("prefill"):
            scene.let_go()
            posted.wait()
        posted.let_go()
        scene.wait()


def d_stopped_while_p_reads(scene: Scene) -> None:
    """Stop D's processes, have P post its read, and let D go on."""
    with scene.at_points(), scene.rig.brakes.held("prefill-read") as posted:
        with scene.rig.frozen("decode"):
            scene.let_go()
            posted.wait()
        posted.let_go()
        scene.wait()


def d_stopped_while_p_computes(scene: Scene) -> None:
    """Stop D's processes until P has done its part."""
    with scene.at_points(), scene.rig.frozen("decode"):
        scene.let_go()
        ended = "FINISHED_LENGTH_CAPPED"
        eventually(lambda: ended in scene.rig.brakes.finished("prefill"), "the end of P's work")
    scene.wait()


def d_stopped(scene: Scene) -> None:
    """Stop D's processes, and let them go on."""
    with scene.at_points():
        with scene.rig.frozen("decode"):
            scene.let_go()
            scene.ask_rest()
            for turn in scene.turns:
                require(turn.sent.wait(60), "a turn was not sent")
                require(not turn.is_over(), "a turn was over before D had stopped")
        scene.wait()


# ---------------------------------------------------------------- the wire between D and P


def wire(**breaks: Break) -> Callable[[Scene], None]:
    """Break one direction of the call to P."""

    def run(scene: Scene) -> None:
        with scene.wire(**breaks):
            turn = scene.ask(0)
            for wanted in breaks.values():
                require(wanted.reached.wait(60), "nothing came over the wire")
            turn.end()

    return run


def delayed(scene: Scene) -> None:
    """Hold what is on the wire until the rest of the turn has come to a stand, and then let it pass."""
    with scene.at_points():
        eventually(lambda: scene.rig.pool()["pending_ticket_blocks"], "an open ticket")
        scene.let_go()
        scene.wait()
    (turn,) = scene.turns
    require(turn.end().outcome == "fetched", "the delay was more than a delay")


# ---------------------------------------------------------------- P's hold on what it has computed


def hold_over(scene: Scene) -> None:
    """Keep D from reading until P's hold is over, and all of P's blocks have been given to others."""
    _outlive_hold(scene, stops_decode=False)


def d_stopped_until_hold_over(scene: Scene) -> None:
    """Stop D's processes until P's hold is over, and all of P's blocks have been given to others."""
    _outlive_hold(scene, stops_decode=True)


def _outlive_hold(scene: Scene, *, stops_decode: bool) -> None:
    rig = scene.rig
    before, num_late = _num_released(rig), _num_late(rig)
    with scene.at_points():
        with rig.frozen("decode") if stops_decode else nullcontext():
            eventually(lambda: _num_released(rig, step=True) > before, "the end of P's hold")
            fill_prefill(rig)
        scene.let_go()
        scene.wait()
    (turn,) = scene.turns
    require(turn.end().reason != "prefill_unavailable", "D did not wait for P's answer")
    require(_num_late(rig) == num_late + 1, "D relied on blocks that P had given away")


def queued_longer_than_hold(scene: Scene) -> None:
    """Keep a turn in D's queue for twice as long as P's hold: D's heartbeats prolong it, and nothing is lost."""
    rig = scene.rig
    before, num_late = _num_released(rig), _num_late(rig)
    with scene.at_points():
        until_s = time.monotonic() + 2 * PREFILL_LEASE_S
        eventually(lambda: _num_released(rig, step=True) > before or time.monotonic() > until_s, "twice P's hold")
        fill_prefill(rig)
        scene.let_go()
        scene.wait()
    (turn,) = scene.turns
    require(_num_released(rig) == before, "P let go of what D was waiting for")
    require(_num_late(rig) == num_late, "D did not rely on what P had kept")
    require(turn.end().outcome == "fetched", "the wait was more than a wait")


def p_stopped_until_hold_over(scene: Scene) -> None:
    """Stop P's processes behind D's posted read for longer than P's hold, and have others want its blocks at once."""
    rig = scene.rig
    with scene.at_points(), rig.brakes.held("decode-read") as posted:
        with rig.frozen("prefill"):
            scene.let_go()
            posted.wait()
            until_s = time.monotonic() + 2 * PREFILL_LEASE_S
            eventually(lambda: time.monotonic() > until_s, "twice P's hold")
        fill_prefill(rig)
        posted.let_go()
        scene.wait()


def fill_prefill(rig: Rig) -> None:
    """Have P compute as many blocks as it has, for requests without a session."""
    for request in crowding(rig, "prefill", num_blocks=rig.prefill_pool_blocks, num_decoded=1):
        request.result().raise_for_status()


def _num_late(rig: Rig) -> int:
    """Return how often D has read in vain."""
    return rig.log("decode").count("ended too late to be relied on")


def _num_released(rig: Rig, *, step: bool = False) -> int:
    """Return how often P has let go of blocks that nobody came for; it looks when it steps."""
    if step:
        rig.step("prefill")
    return rig.log("prefill").count("Releasing expired KV blocks")


# ---------------------------------------------------------------- caches and leases


def reset(role: Role, *, running: bool, answer: bool | None) -> Callable[[Scene], None]:
    """Reset an engine's prefix cache, with all that runs where `running`.

    `answer` is what the engine must say; None where it may fail.
    """

    def run(scene: Scene) -> None:
        rig = scene.rig
        before = rig.metric(role, "vllm:num_preemptions_total")
        with scene.at_points() as holds:
            call = rig.threads.submit(_reset, rig, role, running=running)
            eventually(lambda: call.running() or call.done(), "the reset to be sent")
            for hold in holds:
                hold.crawl()
            reply = call.result()
            scene.let_go()
            if answer is not None:
                require(reply.json() == {"success": answer}, f"the reset was answered {reply.text}")
        scene.ask_rest()
        scene.wait()
        rig.step(role)
        if running and any(point.endswith(("computes", "decodes")) for point in scene.points):
            require(rig.metric(role, "vllm:num_preemptions_total") > before, "nothing was preempted")

    return run


def _reset(rig: Rig, role: Role, *, running: bool) -> httpx.Response:
    client = rig.prefill if role == "prefill" else rig.decode
    params = {"reset_running_requests": running}
    return client.post("/reset_prefix_cache", params=params, headers={"Connection": "close"})


def released(verb: str) -> Callable[[Scene], None]:
    """Release the lease, or end the session, by its owner's other hand."""

    def run(scene: Scene) -> None:
        with scene.at_points():
            for talk in scene.talks:
                talk.post(verb).raise_for_status()
            scene.let_go()
            scene.ask_rest()
            scene.wait()

    return run


def expired(scene: Scene) -> None:
    """Let the lease run out."""
    (talk,) = scene.talks
    talk.turn("Shortly.", ttl_s=1.5)
    eventually(lambda: talk.lease()["reason"] == "lease_expired", "the lease's end")
    run = scene.ask(0, turn=3)
    require(run.end().reason == "lease_expired", "the lease had not expired")


def revoked(scene: Scene) -> None:
    """Have plain requests take a part of the lease's blocks."""
    rig = scene.rig
    with scene.at_points():
        crowd = crowding(rig, num_blocks=rig.pool()["free_blocks"] + 2)
        eventually(lambda: scene.talks[0].lease()["reason"] == "lease_revoked", "a revoked lease")
        for request in crowd:
            request.result().raise_for_status()
        scene.let_go()
        scene.ask_rest()
        scene.wait()


def crowded(scene: Scene) -> None:
    """Have plain requests want more than there is while a ticket keeps some; they wait for it, and all are answered."""
    with scene.at_points():
        crowd = crowding(scene.rig, num_blocks=POOL_BLOCKS)
        require(scene.rig.pool()["pending_ticket_blocks"], "no ticket is open")
        scene.let_go()
        scene.wait()
        for request in crowd:
            request.result().raise_for_status()


def crowding(
    rig: Rig, role: Role = "decode", *, num_blocks: int, num_decoded: int = 6 * BLOCK_SIZE
) -> list[Future[httpx.Response]]:
    """Ask an engine for so many blocks at once, with requests that have no session."""
    client = rig.prefill if role == "prefill" else rig.decode
    num_requests = 3

    def ask() -> httpx.Response:
        num_prompt = -(-num_blocks // num_requests) * BLOCK_SIZE - num_decoded
        prompt = [1000 + secrets.randbelow(1000) for _ in range(num_prompt)]
        body = {"model": TINY, "prompt": prompt, "max_tokens": num_decoded, "temperature": 0, "ignore_eos": True}
        return client.post("/v1/completions", json=body)

    return [rig.threads.submit(ask) for _ in range(num_requests)]


# ---------------------------------------------------------------- time


def turn_too_long(scene: Scene) -> None:
    """Keep the turns until their home has given them up."""
    with scene.at_points():
        for talk in scene.talks:
            talk.wait_until_idle()
        scene.let_go()
        scene.wait()
    for turn in scene.turns:
        require(turn.end().said is None, "a turn that was given up was answered")


def ticket_late(scene: Scene) -> None:
    """Keep the request in P's queue until its ticket is over."""
    with scene.at_points():
        eventually(lambda: not scene.rig.pool()["pending_ticket_blocks"], "the ticket's end")
        scene.let_go()
        scene.wait()
    (turn,) = scene.turns
    require(turn.end().reason in {"ticket_late", "read_failed"}, "the ticket was not late")


def control_late(scene: Scene) -> None:
    """Keep a control call until nobody waits for it any more."""
    with scene.at_points():
        scene.wait()
        (turn,) = scene.turns
        require(turn.end().reason == "engine_unavailable", "the call was not late")


def refused(reason: str) -> Callable[[Scene], None]:
    """Ask for what cannot be done."""

    def run(scene: Scene) -> None:
        require(scene.ask(0).end().reason == reason, f"the turn was not refused as {reason}")

    return run
