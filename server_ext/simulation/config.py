"""A fleet, how it is run, and which of its engines belong to which group."""

from dataclasses import dataclass
from hashlib import blake2b

from bidikv_sdk.wire import Route
from server_ext.core.settings import HomeSettings

from .rates import FleetRates


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """A fleet, and how it is run.

    Raises:
        ValueError: a value makes no sense; the text names it.
    """

    num_prefill: int
    """0: every turn is computed where it is decoded."""
    num_decode: int
    rates: FleetRates
    settings: HomeSettings
    route: Route = "fetch"
    has_prefill_cache: bool = True
    """Whether a prefill engine finds in its own prefix cache what it computed before, as far as its pool reaches."""
    holds_tools: bool = False
    """Whether agents keep their lease alive during tool calls (`session.hold`), up to the server's `max_ttl_s`."""
    chunk_tokens: int = 256
    """What leases are counted in; fewer is finer and slower."""
    seed: int = 0
    num_groups: int = 1
    """Parts of the fleet that have nothing to do with each other, each a `Fleet` of its own."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("num_prefill", self.num_prefill, 0),
            ("num_decode", self.num_decode, 1),
            ("chunk_tokens", self.chunk_tokens, 1),
            ("seed", self.seed, 0),
            ("num_groups", self.num_groups, 1),
        ):
            if value < least:
                msg = f"{name} is {value}; give at least {least}"
                raise ValueError(msg)
        most = min(self.num_decode, self.num_prefill or self.num_decode)
        if self.num_groups > most:
            msg = f"num_groups is {self.num_groups}; give at most {most}: each group has an engine of each kind"
            raise ValueError(msg)

    def homes(self, group: int) -> range:
        """Return the numbers of a group's decode engines."""
        return part(self.num_decode, group, self.num_groups)

    def home(self, number: int) -> int:
        """Return the number of the decode engine that is the home of a session."""
        # As even, and as deaf to load, as rendezvous hashing over the engines.
        digest = blake2b(b"%d" % number, digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.num_decode


def part(num: int, group: int, num_groups: int) -> range:
    """Return which of so many engines belong to a group."""
    return range(num * group // num_groups, num * (group + 1) // num_groups)
