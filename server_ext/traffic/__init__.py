"""Planned sessions: what agents will send, and when; made up by seed (`generate`) or read from traces (`read`).

The one description of load that the simulator, the benchmarks and the soak share. Imports `analysis` (to read logs)
and numpy; no engine, no clock.
"""

from .fit import fitted
from .generate import AGENT, SMALL, LogNormal, Workload, generate
from .plan import PlannedSession, PlannedTurn, prompts
from .read import read_sessions

__all__ = [
    "AGENT",
    "SMALL",
    "LogNormal",
    "PlannedSession",
    "PlannedTurn",
    "Workload",
    "fitted",
    "generate",
    "prompts",
    "read_sessions",
]
