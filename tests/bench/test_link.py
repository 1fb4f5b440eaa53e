"""A link that is slow on purpose."""

from types import SimpleNamespace

from bench._link import Link, slow_down


def test_a_read_takes_as_long_as_its_bytes():
    """A hundred bytes at ten a second are through after ten seconds, and not before."""
    link = Link(10.0)
    assert not link.is_through("a", 100, now_s=5.0)
    assert not link.is_through("a", 100, now_s=14.9)
    assert link.is_through("a", 100, now_s=15.0)


def test_reads_share_the_link():
    """The second read waits for the first one; a read behind an idle time does not."""
    link = Link(10.0)
    assert not link.is_through("a", 100, now_s=0.0)
    assert not link.is_through("b", 50, now_s=0.0)
    assert not link.is_through("b", 50, now_s=14.9)
    assert link.is_through("b", 50, now_s=15.0)
    assert not link.is_through("c", 50, now_s=100.0)
    assert link.is_through("c", 50, now_s=105.0)


def test_an_id_can_be_used_again():
    """A read that has ended is forgotten."""
    link = Link(10.0)
    assert link.is_through("a", 0, now_s=0.0)
    link.forget({"a"})
    assert not link.is_through("a", 10, now_s=50.0)


def test_a_worker_sees_the_end_when_the_link_is_through():
    """What is through for NIXL stays in progress for the engine until the link is through, and nothing is lost."""
    asked, clock = [], [0.0]

    def pop(transfers):
        asked.append(sorted(transfers))
        done = set(transfers) - {"stuck"}
        for read_id in done:
            del transfers[read_id]
        return done, set()

    worker = SimpleNamespace(_pop_done_transfers=pop)
    slow_down(worker, Link(10.0), lambda read_id: 100 if read_id == "big" else 0, lambda: clock[0])
    pop_slowly = worker._pop_done_transfers  # noqa: SLF001 - what vLLM calls
    transfers = {"small": [1], "big": [2], "stuck": [3]}
    assert pop_slowly(transfers) == ({"small"}, set())
    assert transfers == {"big": [2], "stuck": [3]}
    clock[0] = 10.0
    assert pop_slowly(transfers) == ({"big"}, set())
    assert transfers == {"stuck": [3]}
    assert asked == [["small"], ["big", "stuck"]]
