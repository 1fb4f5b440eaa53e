"""The records of the lease table: what is held, for whom, until when.

Plain data; only `leases` changes them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from bidikv_sdk.wire import LeaseState, Reason

from .deadlines import Dated

if TYPE_CHECKING:
    from array import array

Key: TypeAlias = tuple[str, str]
"""A session: (tenant, session id)."""


@dataclass(slots=True, eq=False, kw_only=True)
class Lease(Dated):
    """References on the blocks of a session's prefix; provisional until its turn is settled."""

    key: Key
    block_ids: "array[int]"
    """[num_blocks], in the order of the tokens."""
    num_tokens: int
    """Tokens whose KV lies in the blocks; the last block may be partly filled."""
    token_ids: "array[int]"
    """At least the first `num_tokens` ids; what lies behind is not held."""
    fingerprint: str
    """Of the model, weights, adapter and salt that computed the blocks."""
    ttl_s: float
    """What a turn renews it by."""
    is_provisional: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket(Dated):
    """References for one reader, until it is returned or `due_s` comes (its deadline plus the grace)."""

    ticket_id: str
    block_ids: "array[int]"
    """[num_blocks], the first blocks of the lease."""
    num_tokens: int
    deadline_s: float
    """The reader must have finished by then (monotonic seconds of the home)."""


@dataclass(slots=True, eq=False, kw_only=True)
class Turn(Dated):
    """A turn that has begun and is neither settled nor abandoned."""

    key: Key
    nonce: str
    fingerprint: str
    ticket_id: str | None = None
    pin: Lease | None = None
    """The provisional lease of its finished request."""
    pin_reason: Reason | None = None
    """Why the pin is smaller than the turn, or gone."""
    has_old_weights: bool = False
    """Whether the engine's weights have changed since it began: then it pins nothing, for no turn could use it."""


@dataclass(slots=True, eq=False)
class Slot:
    """What the table remembers of a session, lease or not, until it is forgotten."""

    turn: Turn | None = None
    state: LeaseState = "none"
    reason: Reason | None = None
    """Why the lease is smaller than its turn, or gone; None while there never was one."""


@dataclass(slots=True)
class Begun:
    """What a turn finds when it begins. Nobody changes it; it is not frozen, for that takes three times as long."""

    held_tokens: int
    """Tokens in the lease; 0 without one."""
    matched_tokens: int
    """Length of the common prefix of the lease and the prompt; 0 where the fingerprints differ."""
    diverged_at: int | None
    """Index of the first prompt token that differs from the lease; None where nothing diverged."""
    lease_reason: Reason | None
    """Why the lease is gone, smaller than the last turn, or of no use; None where it is whole."""
    ticket: Ticket | None
    ticket_reason: Reason | None
    """Why a wanted ticket was refused although tokens matched."""
