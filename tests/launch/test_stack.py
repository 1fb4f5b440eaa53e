import os
import signal
import socket
import stat
import subprocess
import sys

import psutil
import pytest

from server_ext.launch import stack
from server_ext.launch.stack import StackError, ensure_secret, free_ports
from server_ext.launch.state import EngineRecord, StackState, read_state, stop, write_state


def engines_of(state_dir):
    """The records of the stack that runs in `state_dir`."""
    return {engine.role: engine for engine in read_state(state_dir).engines}


@pytest.fixture
def bystander():
    """A process that has nothing to do with the stack."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_stack_is_ready_when_both_engines_have_answered(make_stack, tmp_path):
    """Each engine passes its stages in order, ends with a real answer, and the state says ready."""
    stack, seen = make_stack(), []
    stack.start()
    assert not read_state(tmp_path / "state").ready
    stack.wait_ready(timeout_s=30, on_progress=seen.append)
    for role in ("prefill", "decode"):
        stages = [progress.stage for progress in seen if progress.role == role]
        assert stages[-1] == "answered"
        assert stages == sorted(stages, key=["started", "model loaded", "serving", "answered"].index)
    state = read_state(tmp_path / "state")
    assert state.ready
    assert state.url == stack.url


def test_a_second_start_is_refused_and_leaves_the_first_alone(make_stack, tmp_path):
    """Starting again from the same folder names the running stack and its remedy."""
    stack = make_stack()
    stack.start()
    second = make_stack()
    with pytest.raises(StackError, match=r"already runs at .*bidikv down"):
        second.start()
    second.stop()
    assert read_state(tmp_path / "state").is_running()


def test_stop_ends_both_engines_and_forgets_them(make_stack, tmp_path):
    """After `stop` nothing of the stack runs, and a new one may start."""
    stack = make_stack()
    stack.start()
    records = engines_of(tmp_path / "state").values()
    stack.stop()
    assert not any(record.processes() for record in records)
    assert read_state(tmp_path / "state") is None
    stack.start()


def test_an_engine_that_dies_fails_the_start_with_the_end_of_its_log(make_stack):
    """The error names the engine, its exit code, and what it said last."""
    stack = make_stack(decode="die")
    stack.start()
    with pytest.raises(StackError, match=r"(?s)decode engine ended with exit code 1.*no memory for 1 GiB"):
        stack.wait_ready(timeout_s=30)


def test_an_engine_that_answers_no_request_fails_the_start(make_stack):
    """`/health` alone does not make an engine ready."""
    stack = make_stack(prefill="refuse")
    stack.start()
    with pytest.raises(StackError, match="prefill engine did not answer its first request: HTTP 500"):
        stack.wait_ready(timeout_s=30)


def test_a_start_that_takes_too_long_is_given_up(make_stack):
    """The error says how long was waited and for whom."""
    stack = make_stack(prefill="deaf")
    stack.start()
    with pytest.raises(StackError, match="prefill engine was not ready after 0 s"):
        stack.wait_ready(timeout_s=0)


def test_children_that_ignore_sigterm_are_killed(make_stack, tmp_path):
    """`stop` ends the whole group, also members that outlive their leader."""
    stack = make_stack(decode="orphan")
    stack.start()
    stack.wait_ready(timeout_s=30)
    record = engines_of(tmp_path / "state")["decode"]
    members = record.processes()
    assert len(members) == 2
    stop([record], grace_s=0.5)
    assert not any(process.is_running() and process.status() != "zombie" for process in members)


def test_down_spares_a_process_that_got_a_recycled_id(bystander):
    """A record whose creation time does not fit names nobody."""
    created_s = psutil.Process(bystander.pid).create_time()
    stale = EngineRecord("decode", bystander.pid, created_s - 1000, "http://127.0.0.1:1", "log")
    assert not stale.is_alive()
    stop([stale], grace_s=0.1)
    assert bystander.poll() is None


def test_a_stale_state_does_not_block_a_start(make_stack, tmp_path, bystander):
    """A state whose processes are gone, their ids recycled, counts as no stack."""
    (tmp_path / "state").mkdir()
    engines = tuple(EngineRecord(role, bystander.pid, 1.0, "http://127.0.0.1:1", "l") for role in ("prefill", "decode"))
    write_state(tmp_path / "state", StackState("m", "old", engines, ready=True))
    make_stack().start()
    assert engines_of(tmp_path / "state")["decode"].pid != bystander.pid
    assert bystander.poll() is None


def test_restart_brings_back_a_killed_engine_on_its_ports(make_stack, tmp_path):
    """One engine dies and returns under the same URL, the other is not touched."""
    stack = make_stack()
    stack.start()
    stack.wait_ready(timeout_s=30)
    before = engines_of(tmp_path / "state")
    stack.kill("prefill")
    assert not before["prefill"].is_alive()
    assert stack.wait_any_end() == "prefill"
    stack.restart("prefill", timeout_s=30)
    after = engines_of(tmp_path / "state")
    assert after["decode"] == before["decode"]
    assert after["prefill"].pid != before["prefill"].pid
    assert after["prefill"].url == before["prefill"].url
    assert read_state(tmp_path / "state").ready


def test_a_frozen_engine_can_be_thawed(make_stack):
    """`kill` sends any signal: SIGSTOP freezes an engine, SIGCONT wakes it."""
    stack = make_stack()
    stack.start()
    stack.wait_ready(timeout_s=30)
    pid = stack.child("decode").pid
    stack.kill("decode", signal.SIGSTOP)
    assert os.waitid(os.P_PID, pid, os.WSTOPPED).si_status == signal.SIGSTOP
    stack.kill("decode", signal.SIGCONT)
    assert os.waitid(os.P_PID, pid, os.WCONTINUED).si_status == signal.SIGCONT


def test_the_secret_is_random_private_and_made_once(tmp_path):
    """32 bytes that only the user can read, the same on every call."""
    path = ensure_secret(tmp_path / "a")
    first = path.read_bytes()
    assert len(first) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_secret(tmp_path / "a").read_bytes() == first
    assert ensure_secret(tmp_path / "b").read_bytes() != first


def test_free_ports_are_four_different_ones():
    """P and D never share a port."""
    prefill, decode = free_ports()
    assert len({prefill.http, prefill.side_channel, decode.http, decode.side_channel}) == 4


def test_free_ports_are_not_taken_by_outgoing_connections():
    """Between the choice and the engine's listening, no connection of anybody's can come to have one of them."""
    for _ in range(20):
        for ports in free_ports():
            assert max(ports.http, ports.side_channel) < 32768


def test_free_ports_leave_out_those_in_use(monkeypatch):
    """A port that somebody listens on is not handed out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(stack, "_PORTS", range(taken - 9, taken + 1))
        for _ in range(20):
            assert taken not in {port for ports in free_ports() for port in (ports.http, ports.side_channel)}


def test_state_is_private_and_survives_a_round_trip(tmp_path):
    """What is written is what is read, by this user only."""
    state = StackState(
        "m", "name", (EngineRecord("decode", os.getpid(), 1.5, "http://127.0.0.1:1", "log"),), ready=True
    )
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert stat.S_IMODE((tmp_path / "stack.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["stack.json"]


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import server_ext.launch.stack as module
from server_ext.launch.command import EngineCommand, StackConfig
ports = module.free_ports()
config = StackConfig(model="m", served_name="fake", prefill=ports[0], decode=ports[1], secret_file=Path("s"))
def command(config, role, env):
    return EngineCommand((sys.executable, {engine!r}, str(config.ports(role).http), "serve"), dict(env))
real = module.Stack
module.Stack = lambda config, state_dir: real(config, state_dir, command=command)
with module.running_stack(config, Path({state!r}), keep={keep}) as stack:
    print("ready", flush=True)
    if not {keep}:
        sys.stdin.read()
"""


def run_script(tmp_path, *, keep):
    """A process that runs a stack through `running_stack`, after it has said that the stack is ready."""
    here = os.path.dirname(__file__)  # noqa: PTH120  # pasted into the script as text
    text = SCRIPT.format(tests=here, engine=f"{here}/fake_engine.py", state=str(tmp_path / "state"), keep=keep)
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_running_stack_ends_with_its_program(tmp_path, sig):
    """Ctrl-C and SIGTERM end the engines before the program."""
    with run_script(tmp_path, keep=False) as process:
        engines = engines_of(tmp_path / "state").values()
        process.send_signal(sig)
        assert process.wait(30) != 0
    assert not any(engine.processes() for engine in engines)
    assert read_state(tmp_path / "state") is None


def test_a_kept_stack_outlives_its_program(tmp_path):
    """`keep` leaves the engines to a later `stop`, from any process."""
    with run_script(tmp_path, keep=True) as process:
        assert process.wait(30) == 0
    engines = engines_of(tmp_path / "state")
    assert all(engine.is_alive() for engine in engines.values())
    stop(list(engines.values()), grace_s=5)
    assert not any(engine.processes() for engine in engines.values())
