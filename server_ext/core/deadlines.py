"""A queue of deadlines that hands out what is due, and costs nothing while nothing is.

Deadlines only ever move later (a renewal never shortens), so renewing touches no queue: an item whose
deadline has moved on is put back when its old place comes up. Knows nothing of leases.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Generic, TypeVar

# Below this the queue is too small for tidying to be worth anything.
_MIN_DEAD_TO_TIDY = 64


@dataclass(slots=True, eq=False, kw_only=True)
class Dated:
    """Something that ends at `due_s`, unless it ends before."""

    due_s: float
    """Monotonic seconds; may only grow while the item is scheduled."""
    is_live: bool = True
    is_scheduled: bool = False


DatedT = TypeVar("DatedT", bound=Dated)


class Deadlines(Generic[DatedT]):
    """A heap with lazy deletion; scheduling, dropping and taking are O(log n) at worst, amortised."""

    def __init__(self) -> None:
        # The counter breaks ties, for items do not compare.
        self._heap: list[tuple[float, int, DatedT]] = []
        self._num_scheduled = 0
        self._num_dead = 0

    def __len__(self) -> int:
        """Return the number of places in use, those of dead items that still wait for tidying among them."""
        return len(self._heap)

    def schedule(self, item: DatedT) -> None:
        """Watch a live item's deadline; one that is watched already stays where it is."""
        if not item.is_scheduled:
            item.is_scheduled = True
            self._num_scheduled += 1
            heapq.heappush(self._heap, (item.due_s, self._num_scheduled, item))

    def drop(self, item: DatedT) -> None:
        """Mark an item as ended; it is never handed out again."""
        item.is_live = False
        if item.is_scheduled:
            self._num_dead += 1
            if self._num_dead > _MIN_DEAD_TO_TIDY and self._num_dead > len(self._heap) // 2:
                self._heap = [place for place in self._heap if place[2].is_live]
                heapq.heapify(self._heap)
                self._num_dead = 0

    def next_s(self) -> float:
        """Return when a live item may be due, at the earliest; infinity where none is watched."""
        heap = self._heap
        while heap and not heap[0][2].is_live:
            heapq.heappop(heap)[2].is_scheduled = False
            self._num_dead -= 1
        return heap[0][0] if heap else math.inf

    def pop_due(self, *, now_s: float) -> DatedT | None:
        """Take an item with `due_s <= now_s` and watch it no longer; None where nothing is due."""
        while self._heap and self._heap[0][0] <= now_s:
            item = heapq.heappop(self._heap)[2]
            item.is_scheduled = False
            if not item.is_live:
                self._num_dead -= 1
            elif item.due_s > now_s:
                self.schedule(item)
            else:
                return item
        return None
