"""Which lease gives way first under memory pressure. Policies decide, the table counts."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Protocol

from .records import Lease


class RevocationOrder(Protocol):
    """An order of revocation."""

    def __call__(self, leases: Iterable[Lease], *, now_s: float) -> Iterable[Lease]:
        """Return all of `leases`, the first to be revoked first, and change none.

        The table takes them only as far as it must, and keeps those of running turns for the end.
        """
        ...


def least_remaining_first(leases: Iterable[Lease], *, now_s: float) -> list[Lease]:  # noqa: ARG001 (protocol)
    """Order by remaining time: the lease that its owner renewed last, or for longest, is kept longest.

    It needs no knowledge of what a lease is worth. Sorting is cheap, for leases come in about this order
    already.
    """
    return sorted(leases, key=attrgetter("due_s"))
