"""What the fault matrix is made of, without engines: its table, its judgement, and the wire that fails."""

import json
import socket
import threading

import pytest

from bench._fault_table import LONGEST_S, table
from bench._scene import Row
from bench.faults import is_good, matrix
from tests.engine.wire import Break, Wire

GOOD = Row("P killed", "P reads", "local", "prefill_unavailable", "fetched", "cheapest", None, 0, 0, 0, True, 1.0)
INSTALLED = {"vllm": "1.2", "python": "3.4", "cpu": "2 x some processor"}


def changed(**change):
    """Return a good row with one thing changed."""
    return Row(**{**GOOD.to_json(), **change})


def test_the_matrix_has_no_pair_twice_and_enough_of_them():
    """Every pair of fault and point is one of its own."""
    assert sum(len(case.points) for case in matrix()) >= 40


def test_only_an_engine_or_a_session_that_is_gone_takes_the_history_along():
    """Where D lives and the session is open, the next turn must be fetched whatever went wrong."""
    lost = {(case.fault, case.options["history_lost"]) for case in matrix() if "history_lost" in case.options}
    killed = {(case.fault, "home_lost") for case in matrix() if case.fault.startswith("D killed")}
    assert lost == killed | {("session ended", "first_turn")}


@pytest.mark.parametrize(
    "change", [{"tokens_wrong": 1}, {"blocks_leaked": 1}, {"stale_reads": 1}, {"engines_alive": False}]
)
def test_a_wrong_token_a_lost_block_a_stale_read_and_a_dead_engine_are_bad(change):
    """Any one of them spoils a row."""
    assert GOOD.is_good()
    assert not changed(**change).is_good()


@pytest.mark.parametrize(
    ("lost", "outcome", "reason", "is_right"),
    [
        (None, "fetched", "lease_expired", True),
        (None, "recomputed", "read_failed", False),
        (None, "recomputed", "home_lost", False),
        (None, "local", "cheapest", False),
        ("home_lost", "recomputed", "home_lost", True),
        ("home_lost", "recomputed", "first_turn", False),
        ("home_lost", "fetched", "cheapest", False),
        ("first_turn", "recomputed", "first_turn", True),
    ],
)
def test_the_next_turn_must_go_the_way_that_the_fault_leaves_to_it(lost, outcome, reason, is_right):
    """It is fetched, or else recomputed for the one reason that the fault is."""
    assert changed(history_lost=lost, next_outcome=outcome, next_reason=reason).is_good() == is_right


def test_a_row_in_the_file_has_these_fields():
    """Others read them by name."""
    kinds = {name: type(value) for name, value in json.loads(json.dumps(GOOD.to_json())).items()}
    texts = dict.fromkeys(("fault", "point", "outcome", "reason", "next_outcome", "next_reason"), str)
    numbers = dict.fromkeys(("tokens_wrong", "blocks_leaked", "stale_reads"), int)
    assert kinds == {**texts, "history_lost": type(None), **numbers, "engines_alive": bool, "seconds": float}


def test_a_matrix_is_good_if_it_is_whole_without_harm_and_in_time():
    """Anything else ends with status 1."""
    assert is_good([GOOD], [], LONGEST_S)
    assert not is_good([GOOD, changed(tokens_wrong=1)], [], LONGEST_S)
    assert not is_good([GOOD], ["P killed @ P reads"], LONGEST_S)
    assert not is_good([GOOD], [], LONGEST_S + 1)


def test_the_page_shows_every_row_and_counts_what_is_bad():
    """A reader sees at the end whether anything went wrong."""
    bad = changed(point="P computes", next_outcome="local", blocks_leaked=3, stale_reads=2, engines_alive=False)
    page = table([GOOD, bad], 1156.4, INSTALLED)
    assert "| P killed | P reads | local: `prefill_unavailable` | fetched: `cheapest` | 0 | 0 | 0 | yes |\n" in page
    assert "| **local: `cheapest`** | 0 | 3 | 2 | **no** |\n" in page
    assert page.endswith(
        "2 pairs: 0 wrong tokens, 3 leaked blocks, 2 stale reads, 1 next turns that went a wrong way, "
        "1 with an engine that died of it.\n"
    )


def test_the_page_says_where_it_comes_from_and_what_it_forgives():
    """Machine, versions and time; and that blocks are counted behind a step."""
    page = table([GOOD], 1156.4, INSTALLED)
    assert "This run: 1,156 s from the start of the engines to their end, of 1,200 s that it may take, on" in page
    assert "2 x some processor, with vllm 1.2, python 3.4.\n" in page
    assert "each engine has been made to take a step" in page


@pytest.fixture
def echo():
    """The port of a server that sends everything back."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        try:
            while True:
                peer, _ = server.accept()
                with peer:
                    while data := peer.recv(1000):
                        peer.sendall(data)
        except OSError:
            return

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


@pytest.fixture
def port():
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def read_all(sock, num_bytes):
    """Return so many bytes, or what came before the end."""
    data = b""
    while len(data) < num_bytes and (more := sock.recv(num_bytes - len(data))):
        data += more
    return data


def test_a_whole_wire_carries_everything(port, echo):
    """Without a break bytes pass in both directions."""
    with Wire(port, echo), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"x" * 5000)
        assert read_all(sock, 5000) == b"x" * 5000


def test_a_wire_is_cut_after_so_many_bytes(port, echo):
    """What came before the cut arrives, and then the end."""
    cut = Break(3, "cut")
    with Wire(port, echo, reply=cut), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"abcdef")
        assert read_all(sock, 6) == b"abc"
        assert cut.reached.is_set()


def test_a_wire_is_reset(port, echo):
    """The peer gets an error, not an end."""
    with Wire(port, echo, request=Break(3, "reset")), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"abcdef")
        with pytest.raises(ConnectionResetError):
            read_all(sock, 6)


def test_a_wire_holds_back_until_it_may_go_on(port, echo):
    """Nothing is lost by a delay."""
    hold = Break(3, "hold")
    with Wire(port, echo, reply=hold), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"abcdef")
        assert read_all(sock, 3) == b"abc"
        assert hold.reached.wait(10)
        hold.go_on.set()
        assert read_all(sock, 3) == b"def"
