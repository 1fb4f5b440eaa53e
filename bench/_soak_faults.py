"""The faults of a soak, as things that are done to two running engines; each returns whether it has happened."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from bench._faults import crowding
from tests.engine.common import BLOCK_SIZE
from tests.engine.wire import Break, Wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random
    from typing import TypeAlias

    from server_ext.launch.command import Role
    from tests.engine.rig import Rig
    from tests.engine.wire import Way

    Fault: TypeAlias = Callable[[Rig, Random], bool]

# A call with a prompt of 2,000 tokens has some 15 KB, its answer 1 KB: cut anywhere in them.
_LONGEST_CALL_BYTES: Final = 12_000
_LONGEST_ANSWER_BYTES: Final = 400
# The wire waits this long for a turn to come by.
_PATIENCE_S: Final = 10.0
_LONGEST_STALL_S: Final = 4.0


def do(name: str, rig: Rig, random: Random) -> bool:
    """Do what a fault's name says."""
    return FAULTS[name](rig, random)


def _wire(direction: str, way: Way) -> Fault:
    def run(rig: Rig, random: Random) -> bool:
        longest = _LONGEST_CALL_BYTES if direction == "request" else _LONGEST_ANSWER_BYTES
        rest = Break(random.randint(1, longest), way)
        with Wire(rig.gate_port, rig.stack.config.prefill.http, **{direction: rest}):
            happened = rest.reached.wait(_PATIENCE_S)
            if happened and way == "hold":
                time.sleep(random.uniform(0, _LONGEST_STALL_S))
        return happened

    return run


def _another_hand(verb: str) -> Fault:
    """Return a call on some session by another holder of its id."""

    def run(rig: Rig, random: Random) -> bool:
        sessions = [session["session"] for session in rig.sessions()]
        if not sessions:
            return False
        name = random.choice(sessions)
        return bool(rig.decode.post(f"/v1/sessions/{name}/{verb}", headers={"X-Session-ID": name}).is_success)

    return run


def _reset(role: Role) -> Fault:
    def run(rig: Rig, random: Random) -> bool:  # noqa: ARG001 - as every fault
        client = rig.prefill if role == "prefill" else rig.decode
        return bool(client.post("/reset_prefix_cache").is_success)

    return run


def _stopped(role: Role) -> Fault:
    def run(rig: Rig, random: Random) -> bool:
        with rig.frozen(role):
            time.sleep(random.uniform(0.5, _LONGEST_STALL_S))
        return True

    return run


def _crowd(rig: Rig, random: Random) -> bool:
    # Three requests, each as long as the model takes at most.
    num_blocks = random.randint(50, 3 * (rig.max_model_len // BLOCK_SIZE - 1))
    return all(request.result().is_success for request in crowding(rig, num_blocks=num_blocks))


FAULTS: Final[dict[str, Fault]] = {
    "call to P cut": _wire("request", "cut"),
    "call to P reset": _wire("request", "reset"),
    "call to P stalled": _wire("request", "hold"),
    "answer of P cut": _wire("reply", "cut"),
    "answer of P reset": _wire("reply", "reset"),
    "answer of P stalled": _wire("reply", "hold"),
    "lease released": _another_hand("release"),
    "session ended": _another_hand("end"),
    "cache reset on P": _reset("prefill"),
    "cache reset on D": _reset("decode"),
    "crowd on D": _crowd,
    "P stopped": _stopped("prefill"),
    "D stopped": _stopped("decode"),
}
"""Every fault by its name."""
