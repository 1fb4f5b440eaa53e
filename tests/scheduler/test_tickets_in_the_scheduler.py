"""A ticket's way back: by the conductor, by its reader's note, by its deadline; in any order."""

import pytest

from server_ext.engine.notes import ReadTickets, TicketNotes

from .harness import ids


@pytest.fixture
def d(make_harness):
    """A scheduler of D that gives tickets on any number of tokens."""
    return make_harness("decode", num_blocks=24, min_fetch_tokens=0)


def open_ticket(d, *, num_tokens=40, session_id="s", turn=2):
    """Begin a turn on a session's lease; return its ticket's id."""
    begun = d.begin(ids(num_tokens + 20), turn=turn, session_id=session_id, want_ticket=True)
    return begun["ticket"]["remote_request_id"]


def num_ticketed(d):
    """Return the blocks that tickets hold, as the home says."""
    return d.control("get")["info"]["pool"]["pending_ticket_blocks"]


def test_a_readers_note_returns_its_ticket(d):
    """The first step after a read gives the ticket's blocks back, while the turn goes on."""
    d.lease(ids(40), "s")
    ticket_id = open_ticket(d)
    d.control("release", session_id="s")
    assert (num_ticketed(d), d.num_free) == (2, 22)
    live = d.add("live", ids(40, 9000), max_tokens=1)
    d.answer(d.step(), kv_connector_worker_meta=ReadTickets(frozenset({ticket_id})))
    assert live.is_finished()
    assert (num_ticketed(d), d.num_free) == (0, 24)


def test_every_way_back_may_be_taken_again(d):
    """A note behind the conductor's return, a conductor behind a note, and notes of nobody's change nothing."""
    d.lease(ids(40), "s")
    ticket_id = open_ticket(d)
    note = ReadTickets(frozenset({ticket_id, "bidikv-ticket-of-nobody"}))
    d.add("live", ids(40, 9000), max_tokens=4)
    d.answer(d.step(), kv_connector_worker_meta=note)
    assert not d.control("return_ticket", ticket_id=ticket_id)["was_open"]
    d.answer(d.step(), kv_connector_worker_meta=note)
    assert (num_ticketed(d), d.control("get")["info"]["lease"]["num_blocks"]) == (0, 2)


def test_a_note_returns_one_readers_ticket_only(d):
    """Two readers of two sessions: the note of one leaves the blocks of the other."""
    d.lease(ids(40), "s")
    d.lease(ids(70), "t")
    first, second = open_ticket(d), open_ticket(d, num_tokens=70, session_id="t")
    d.add("live", ids(40, 9000), max_tokens=2)
    d.answer(d.step(), kv_connector_worker_meta=ReadTickets(frozenset({first})))
    assert num_ticketed(d) == 3
    assert d.control("return_ticket", ticket_id=second)["was_open"]


def test_each_life_of_an_engine_signs_tickets_of_its_own(make_harness, d):
    """A D that was started again knows no session of before, and its tickets name another engine.

    NIXL's handshake asks for exactly the engine that the ticket names.
    """
    d.lease(ids(40), "s")
    reborn = make_harness("decode", num_blocks=24, min_fetch_tokens=0)
    assert reborn.control("get")["error"]["code"] == "session_not_found"
    reborn.lease(ids(40), "s")
    lives = []
    for life in (d, reborn):
        begun = life.begin(ids(60), turn=2, want_ticket=True)
        lives.append(begun["ticket"]["remote_engine_id"])
        assert lives[-1] == life.scheduler.connector.engine_id
    assert lives[0] != lives[1]


def test_notes_of_tickets_are_kept_from_stock_code():
    """Stock code sees the notes of its own requests, and the lease table those of tickets, each of them once."""
    polls = iter(
        [
            {"p1": [b"cmpl-1:1", b"bidikv-ticket-a:1"], "p2": [b"bidikv-ticket-b:1", b"bidikv-ticket-\xff:1"]},
            {},
            {"p1": [b"HB:cmpl-2"]},
        ]
    )
    notes = TicketNotes(lambda: next(polls))
    assert notes.take() is None
    assert notes() == {"p1": [b"cmpl-1:1"], "p2": []}
    assert notes() == {}
    assert notes.take().ticket_ids == {"bidikv-ticket-a", "bidikv-ticket-b", "bidikv-ticket-\ufffd"}
    assert notes() == {"p1": [b"HB:cmpl-2"]}
    assert notes.take() is None


def test_what_two_workers_say_is_added_up():
    """What all workers say in a step reaches the table as one."""
    both = ReadTickets(frozenset("a")).aggregate(ReadTickets(frozenset("b")))
    assert both == ReadTickets(frozenset("ab"))
