"""What the fault matrix is made of, without engines: its table, its judgement, and the wire that fails."""

import socket
import threading

import pytest

from bench._fault_table import table
from bench._scene import Row
from bench.faults import matrix
from tests.engine.wire import Break, Wire

GOOD = Row("P killed", "P reads", "local", "prefill_unavailable", "fetched", "cheapest", 0, 0, True, 1.0)


def test_the_matrix_has_no_pair_twice_and_enough_of_them():
    """Every pair of fault and point is one of its own."""
    assert sum(len(case.points) for case in matrix()) >= 40


@pytest.mark.parametrize("change", [{"tokens_wrong": 1}, {"blocks_leaked": 1}, {"engines_alive": False}])
def test_a_wrong_token_a_lost_block_and_a_dead_engine_are_bad(change):
    """Any one of them spoils a row."""
    assert GOOD.is_good()
    assert not Row(**{**GOOD.to_json(), **change}).is_good()


def test_the_page_shows_every_row_and_counts_what_is_bad():
    """A reader sees at the end whether anything went wrong."""
    page = table([GOOD, Row(**{**GOOD.to_json(), "point": "P computes", "blocks_leaked": 3, "engines_alive": False})])
    assert "| P killed | P reads | local: `prefill_unavailable` | fetched: `cheapest` | 0 | 0 | yes |" in page
    assert page.endswith("2 pairs: 0 wrong tokens, 3 leaked blocks, 1 with an engine that died of it.\n")


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
