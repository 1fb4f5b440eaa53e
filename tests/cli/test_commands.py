import json
import os
import subprocess
import sys

import psutil
import pytest
from typer.testing import CliRunner

from server_ext.cli._app import app
from server_ext.cli._up import Options, make_config, parse_gpus, parse_settings
from server_ext.launch.stack import default_state_dir
from server_ext.launch.state import EngineRecord, StackState, read_state, write_state


@pytest.fixture(autouse=True)
def state_dir(tmp_path, monkeypatch):
    """The user's state folder, away from the real one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = default_state_dir()
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def running(state_dir):
    """A stack as `up` leaves it: two processes of their own sessions, and a state that says ready."""
    children, records = [], []
    for role, port in (("prefill", 1), ("decode", 2)):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        children.append(child)
        log = state_dir / f"{role}.log"
        log.write_text(f"{role} line 1\n{role} line 2\n")
        records.append(EngineRecord.of(child.pid, role=role, url=f"http://127.0.0.1:{port}", log_file=log))
    write_state(state_dir, StackState("m", "small", tuple(records), ready=True))
    yield children
    for child in children:
        child.kill()
        child.wait()


def invoke(*argv):
    """What the command printed and how it ended."""
    return CliRunner().invoke(app, argv)


def test_status_without_a_stack():
    """Nothing runs: exit status 1, and how to start."""
    result = invoke("status")
    assert result.exit_code == 1
    assert "bidikv up" in result.stdout
    report = json.loads(invoke("status", "--json").stdout)
    assert report == {"ready": False, "url": None, "model": None, "engines": []}


def test_status_of_a_running_stack(running):
    """Ready: exit status 0, D's URL, and both engines."""
    result = invoke("status", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ready"] is True
    assert report["url"] == "http://127.0.0.1:2"
    assert [engine["pid"] for engine in report["engines"]] == [child.pid for child in running]
    assert "small at http://127.0.0.1:2: ready" in invoke("status").stdout


def test_status_notices_a_dead_engine(running):
    """One engine ended: not ready, and which one."""
    running[0].kill()
    running[0].wait()
    result = invoke("status")
    assert result.exit_code == 1
    assert "prefill  ended" in result.stdout


def test_down_ends_the_stack(running, state_dir):
    """Both engines end, and a second `down` has nothing to do."""
    engines = read_state(state_dir).engines
    assert invoke("down").exit_code == 0
    assert not any(engine.processes() for engine in engines)
    assert read_state(state_dir) is None
    assert "no stack is running" in invoke("down").stderr


def test_down_touches_no_process_with_a_recycled_id(state_dir):
    """A state that names a living stranger ends nobody."""
    me = psutil.Process(os.getpid())
    strangers = tuple(EngineRecord(role, me.pid, me.create_time() - 60, "u", "l") for role in ("prefill", "decode"))
    write_state(state_dir, StackState("m", "small", strangers))
    assert invoke("down").exit_code == 0
    assert read_state(state_dir) is None


def test_logs_of_one_engine_and_of_both(running):
    """One engine's log is printed as it is; both are told apart."""
    assert invoke("logs", "decode").stdout == "decode line 1\ndecode line 2\n"
    assert "prefill | prefill line 1" in invoke("logs").stdout


def test_logs_as_json(running):
    """One object per line, with the engine that wrote it, also where only one is asked for."""
    both = [json.loads(line) for line in invoke("logs", "--json").stdout.splitlines()]
    assert both[0] == {"role": "prefill", "line": "prefill line 1"}
    assert [one["role"] for one in both] == ["prefill"] * 2 + ["decode"] * 2
    assert json.loads(invoke("logs", "decode", "--json").stdout.splitlines()[1])["line"] == "decode line 2"


def test_logs_before_the_first_start():
    """No log yet is an error that says what to do."""
    result = invoke("logs")
    assert result.exit_code == 1
    assert "bidikv up" in result.stderr


def test_up_refuses_a_malformed_option_before_it_starts_anything():
    """The message names the option, the value and the fix."""
    result = invoke("up", "--model", "/models/x", "--set", "ttl")
    assert result.exit_code == 1
    assert "--set 'ttl' is not NAME=VALUE" in result.stderr


def test_up_refuses_while_a_stack_runs(running):
    """A second `up` names the first one and leaves it alone."""
    result = invoke("up", "--model", "/models/x")
    assert result.exit_code == 1
    assert "already runs at http://127.0.0.1:2" in result.stderr
    assert all(child.poll() is None for child in running)


def test_options_become_a_configuration(state_dir):
    """A folder is served offline under its last name, without the tool parser of the default model."""
    options = Options(model=str(state_dir), platform="cpu", kv_cache_gib=0.5, settings=("default_ttl_s=90",))
    config = make_config(options, state_dir, print)
    assert config.served_name == state_dir.name
    assert config.offline
    assert config.tool_call_parser is None
    assert config.kv_cache_bytes == 1 << 29
    assert config.settings == {"default_ttl_s": 90}
    assert config.secret_file.exists()


def test_gpus_leave_the_cache_size_to_vllm(state_dir):
    """Only CPUs need a default size."""
    config = make_config(Options(model="org/name", platform="gpu", gpus="2,3"), state_dir, print)
    assert config.kv_cache_bytes is None
    assert config.gpus == ("2", "3")
    assert config.served_name == "name"
    assert not config.offline


def test_settings_are_json_or_text():
    """Numbers, booleans and lists are what they look like; all else is text."""
    parsed = parse_settings(["a=1.5", "b=true", "c=local", "d=x=y"])
    assert parsed == {"a": 1.5, "b": True, "c": "local", "d": "x=y"}


@pytest.mark.parametrize("text", ["0", "0,1,2", "0,", ""])
def test_gpus_are_two(text):
    """Anything but two devices is refused by name."""
    with pytest.raises(ValueError, match="--gpus"):
        parse_gpus(text)


def test_help_loads_no_http_client_and_no_launcher():
    """`bidikv --help` is instant because commands import when they run."""
    heavy = "{'httpx', 'psutil', 'torch', 'vllm'}"
    check = f"import sys, server_ext.cli._app; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"
