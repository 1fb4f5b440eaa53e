"""The commands of `bidikv`: `up`, `down`, `status`, `logs`, and those with modules of their own.

Each imports what it needs when it runs, so that `bidikv --help` is instant. Results go to standard output
(JSON with `--json`), progress and errors to standard error.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from server_ext.cli import session
from server_ext.cli._server import say_and_exit
from server_ext.cli.analyze import analyze
from server_ext.cli.bench import bench
from server_ext.cli.doctor import doctor
from server_ext.cli.rates import rates
from server_ext.cli.simulate import simulate
from server_ext.cli.top import top
from server_ext.launch.command import ROLES, Role
from server_ext.launch.model import SMOLLM2

if TYPE_CHECKING:
    from typing import TextIO

    from server_ext.launch.stack import Progress, Stack
    from server_ext.launch.state import StackState

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with local variables would print keys
    help="Keep agents' KV caches alive across turns: a local stack of one prefill and one decode engine.",
)

_FOLLOW_POLL_S = 0.25


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def up(
    model: Annotated[str, typer.Option(help="A model folder, or a name that vLLM knows.")] = SMOLLM2,
    platform: Annotated[
        Literal["cpu", "gpu"] | None, typer.Option(help="What to run on (default: what this machine has).")
    ] = None,
    gpus: Annotated[str, typer.Option(help="CUDA devices of P and D.")] = "0,1",
    gpu_memory: Annotated[float | None, typer.Option(help="Share of a GPU's memory, for each engine.")] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="KV cache of each engine (default: 1 on CPUs).")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus answer, in tokens.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(envvar="BIDIKV_API_KEY", help="A key to ask for.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="A setting of D, as NAME=VALUE.")] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay; Ctrl-C ends the stack.")] = False,
    as_json: Json = False,
) -> None:
    """Start the stack and wait until it has answered (about a minute on two cores)."""
    from server_ext.cli._up import Options, make_config, warn_disabled_plugins
    from server_ext.launch.model import ModelError
    from server_ext.launch.stack import StackError, default_state_dir, running_stack

    options = Options(
        model=model,
        platform=platform,
        gpus=gpus,
        gpu_memory=gpu_memory,
        kv_cache_gib=kv_cache_gib,
        max_model_len=max_model_len,
        api_keys=tuple(api_key or ()),
        settings=tuple(setting or ()),
    )
    try:
        config = make_config(options, default_state_dir(), _say)
        warn_disabled_plugins(_say)
        with running_stack(config, on_progress=_say_progress, keep=not foreground) as stack:
            _announce(stack, as_json=as_json)
            if foreground:
                _wait_while_alive(stack)
    except (ModelError, StackError, ValueError) as error:
        say_and_exit(str(error))


@app.command()
def down() -> None:
    """End the stack that `up` started, and nothing else."""
    from server_ext.launch.stack import default_state_dir
    from server_ext.launch.state import forget_state, stop

    state = _read_state()
    if state is None:
        _say("no stack is running")
        return
    stop(state.engines)
    forget_state(default_state_dir())
    _say("stopped")


@app.command()
def status(as_json: Json = False) -> None:
    """Show what runs; the exit status is 1 where the stack is not complete and ready."""
    state = _read_state()
    engines = [] if state is None else [_engine_status(engine) for engine in state.engines]
    ready = state is not None and state.ready and all(engine["alive"] for engine in engines)
    if as_json:
        report = {
            "ready": ready,
            "url": state and state.url,
            "model": state and state.served_name,
            "engines": engines,
        }
        typer.echo(json.dumps(report))
    elif state is None:
        typer.echo("no stack is running; start one with `bidikv up`")
    else:
        typer.echo(f"{state.served_name} at {state.url}: {'ready' if ready else 'not ready'}")
        for engine in engines:
            typer.echo(f"  {engine['role']:8} {'running' if engine['alive'] else 'ended':8} {engine['url']}")
    raise typer.Exit(0 if ready else 1)


@app.command()
def logs(
    role: Annotated[Role | None, typer.Argument(help="Which engine (default: both).")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Print the engines' logs."""
    from contextlib import ExitStack

    from server_ext.launch.stack import default_state_dir

    roles = [role] if role else ROLES
    with ExitStack() as opened:
        files: list[tuple[Role, TextIO]] = []
        for one in roles:
            path = default_state_dir() / f"{one}.log"
            if path.exists():
                files.append((one, opened.enter_context(path.open(encoding="utf-8", errors="replace"))))
        if not files:
            say_and_exit("there is no log yet; start a stack with `bidikv up`")
        while True:
            for one, file in files:
                prefix = "" if role else f"{one:8}| "
                for line in file:
                    text = line.rstrip("\n")
                    typer.echo(json.dumps({"role": one, "line": text}) if as_json else prefix + text)
            if not follow:
                return
            time.sleep(_FOLLOW_POLL_S)


# The help lists commands in this order.
app.command()(top)
app.command()(doctor)
app.command()(analyze)
app.command()(simulate)
app.command()(rates)
app.command()(bench)
app.add_typer(session.app, name="session")


def _read_state() -> StackState | None:
    from server_ext.launch.stack import default_state_dir
    from server_ext.launch.state import read_state

    return read_state(default_state_dir())


def _engine_status(engine: Any) -> dict[str, Any]:
    return {"role": engine.role, "url": engine.url, "pid": engine.pid, "alive": engine.is_alive()}


def _announce(stack: Stack, *, as_json: bool) -> None:
    if as_json:
        report = {"url": stack.url, "prefill_url": stack.prefill_url, "model": stack.config.served_name}
        typer.echo(json.dumps(report))
        return
    typer.echo(f"ready: {stack.config.served_name} at {stack.url}")
    body = json.dumps({"session_id": "s1", "turn": 1, "messages": [{"role": "user", "content": "Hello"}]})
    headers = "-H 'Content-Type: application/json' -H 'X-Session-ID: s1'"
    typer.echo(f"try:   curl {stack.url}/v1/sessions/s1/turns {headers} -d '{body}'")


def _wait_while_alive(stack: Stack) -> None:
    _say("Ctrl-C ends the stack")
    try:
        role = stack.wait_any_end()
    except KeyboardInterrupt:
        return
    say_and_exit(f"the {role} engine ended; its log is {stack.log_file(role)}")


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _say_progress(progress: Progress) -> None:
    _say(f"{progress.elapsed_s:5.0f} s  {progress.role:8} {progress.stage}")
