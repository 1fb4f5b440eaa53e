"""Until when P keeps what it has computed for D, as far as D can know.

P gives its blocks to others when its hold on them is over, read or not, and a read of D's that comes later finds what
others have put there: it ends well, and is wrong. P says in its answer when the hold ends, and a heartbeat of D's that
reaches P before that moves the end. D cannot see which one did, so it counts those that went out well before the end;
and a P that stood still first reads what has come meanwhile (`worker`). What this leaves is a network that keeps notes
back for longer than the margin and delivers them in the end. Pure; imports the standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Holds:
    """What D knows of P's holds. All times are seconds of D's own clock.

    Args:
        extension_s: for how long P holds the blocks at least when a heartbeat has come: two thirds of vLLM's
            `kv_lease_duration`, of which D's must not be above P's.
    """

    def __init__(self, extension_s: float) -> None:
        self._extension_s = extension_s
        self.margin_s = extension_s / 4
        """What a heartbeat may take on its way, and what the clocks may be apart: as long as from one to the next."""
        self._sent_s: dict[str, tuple[float, ...]] = {}

    def sent(self, request_ids: Iterable[str], *, waited_for: Iterable[str], now_s: float) -> None:
        """Note heartbeats.

        Args:
            request_ids: P's names of the requests for which one went out.
            waited_for: of all requests that D waits for; any other is forgotten.
            now_s: before the first was sent.
        """
        sent = dict.fromkeys(request_ids, (now_s,))
        self._sent_s = {name: (*self._sent_s.get(name, ()), *sent.get(name, ())) for name in waited_for}

    def is_over(self, request_id: str, end_s: float, *, now_s: float) -> bool:
        """Tell whether P may have given a request's blocks away by now.

        Args:
            request_id: P's name of it.
            end_s: of the hold, as P said in its answer.
            now_s: after the read.
        """
        for sent_s in self._sent_s.get(request_id, ()):
            if sent_s + self.margin_s <= end_s:
                end_s = max(end_s, sent_s + self._extension_s)
        return now_s + self.margin_s >= end_s
