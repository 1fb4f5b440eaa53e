import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server_ext.cli._app import app
from tests.analysis.logs import agents, chat, growing, trace, user, write_log


def invoke(*argv, **more):
    """What the command printed and how it ended."""
    return CliRunner().invoke(app, ["analyze", *map(str, argv)], **more)


@pytest.fixture
def log(tmp_path):
    """A log of agents, and what else lies in a folder of logs."""
    path = tmp_path / "logs" / "agents.jsonl"
    path.parent.mkdir()
    lines = [line for line, _ in zip(agents(num_sessions=8), range(150), strict=False)]
    lines[100]["messages"][0] = {"role": "system", "content": "You fix other bugs. " * 50}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "broken {\n")
    return path


def test_text(log):
    """The four answers, the misses, what was odd, and the verdict."""
    result = invoke(log.parent)
    assert result.exit_code == 0, result.output
    for text in ("150 turns of", "a  What repeats", "b  Does the link", "c  How long", "d  Time to first token"):
        assert text in result.stdout
    assert "system_edited" in result.stdout
    assert "1 x unknown_format" in result.stdout
    assert "Adopt" in result.stdout


def test_json_on_standard_output_alone(log):
    """`--json -` prints the report and nothing else; it has no content of the log."""
    result = invoke(log, "--json", "-")
    report = json.loads(result.stdout)
    assert report["schema"] == 1
    assert report["input"]["formats"] == {"openai": 150}
    assert report["verdict"]["settings"]["default_route"] == "auto"
    assert "bugs" not in result.stdout


def test_contents_on_request(log):
    """`--show-content` quotes what changed."""
    result = invoke(log, "--json", "-", "--show-content")
    assert "You fix other bugs" in result.stdout


@pytest.mark.parametrize("is_asked", [False, True])
def test_contents_in_text_and_page_only_on_request(log, tmp_path, is_asked):
    """The text and the page quote nothing of the log either, unless they are asked to."""
    page = tmp_path / "page.html"
    result = invoke(log, "--html", page, *["--show-content"][: int(is_asked)])
    assert ("bugs" in result.stdout, "bugs" in page.read_text()) == (is_asked, is_asked)


def test_standard_input(log):
    """A log may come through a pipe, beside other paths."""
    result = invoke("-", "--json", "-", input=log.read_text())
    assert json.loads(result.stdout)["reuse"]["num_turns"] == 150


def test_json_to_a_file(log, tmp_path):
    """`--json PATH` writes the file and prints the text."""
    result = invoke(log, "--json", tmp_path / "report.json")
    assert "a  What repeats" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["reuse"]["num_turns"] == 150


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["LOG", "--model", "x"], "--model 'x' is unknown"),
        (["LOG", "--gpu", "x"], "--gpu 'x' is unknown"),
        (["LOG", "--link", "fast"], "--link 'fast' is unknown"),
        (["LOG", "--budget", "much"], "--budget 'much' is not a list of numbers"),
        (["LOG", "--budget", "2"], "'budget_fraction' is 2.0"),
        (["LOG", "--ttl", "0"], "'default_ttl_s' is 0.0"),
        (["LOG", "--budget", "0.5,nan"], "'budget_fraction' is nan"),
        (["LOG", "--ttl", "inf"], "'default_ttl_s' is inf"),
        (["LOG", "--fixed-ms", "inf"], "--fixed-ms inf: give a number from 0.001 to 1,000,000"),
        (["LOG", "--fixed-ms", "nan"], "--fixed-ms nan: give"),
        (["LOG", "--efficiency", "nan"], "--efficiency nan: give a number from 0.001 to 1"),
        (["LOG", "--model", "llama-3.1-8b", "--gpu", "cpu-core", "--json", "/nowhere/x"], "cannot be written"),
    ],
)
def test_errors_name_the_thing_the_value_and_the_fix(log, argv, text):
    """A wrong option ends with one line on standard error and status 1."""
    result = invoke(*(log if part == "LOG" else part for part in argv))
    assert result.exit_code == 1
    assert text in result.stderr


def test_an_empty_folder(tmp_path):
    """Nothing to read is an error that lists the formats."""
    result = invoke(tmp_path)
    assert result.exit_code == 1
    assert "no request in the input (found: nothing at all)" in result.stderr


def child_peak_mib(path):
    """Peak memory of the command on a log, in MiB, from a process of its own."""
    code = (
        "import sys; from server_ext.cli import main\n"
        f"sys.argv = ['bidikv', 'analyze', '-q', {str(path)!r}, '--json', '-', '--ttl', '60', '--budget', '1']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)"
    )
    # Not getrusage: its peak counts what this process held when it forked.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stderr.splitlines()[-1]) / 1024


def test_memory_does_not_grow_with_the_log(tmp_path):
    """Twelve times the log takes at most a tenth more memory."""
    for name, num_bytes in (("small", 2e6), ("large", 24e6)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            write_log(file, num_bytes, num_sessions=6)
    small, large = child_peak_mib(tmp_path / "small.jsonl"), child_peak_mib(tmp_path / "large.jsonl")
    assert large < 400
    assert large < 1.1 * small


def test_help_loads_neither_numpy_nor_msgspec():
    """`bidikv --help` stays instant."""
    check = "import sys, server_ext.cli._app; print(sorted({'numpy', 'msgspec', 'sqlite3'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------- the page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
    "--dump-dom",
]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; .ci/run installs it")
@pytest.mark.parametrize("kind", ["agents", "one request", "no times", "subagents"])
def test_the_page_in_a_browser(log, tmp_path, kind):
    """Without network, every plot is drawn, and nothing is said on the console, whatever the log lacks."""
    if kind == "one request":
        log.write_text(json.dumps(chat([user("hi")])))
    elif kind == "no times":
        lines = growing([6400, 7000], [0, 10])
        log.write_text("".join(json.dumps({k: v for k, v in one.items() if k != "timestamp"}) + "\n" for one in lines))
    elif kind == "subagents":
        inner = [{"t": t, "in": 64_000, "out": 1, "hash_ids": list(range(1000))} for t in (0.0, 9.0)]
        log.write_text(json.dumps(trace([{"t": 1.0, "type": "subagent", "requests": inner}])))
    page = tmp_path / "page.html"
    assert invoke(log, "--html", page).exit_code == 0
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    num_plots = page.read_text().count('<svg class="plot"')
    assert num_plots >= (9 if kind == "agents" else 2)
    assert f'data-plots="{num_plots}" data-plots-drawn="{num_plots}"' in done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; .ci/run installs it")
def test_a_broken_page_would_be_seen(tmp_path):
    """The check above is no rubber stamp: an error on the console does arrive."""
    page = tmp_path / "page.html"
    page.write_text("<script>nothing.at.all()</script>")
    flags = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([CHROMIUM, *flags, page.as_uri()], capture_output=True, text=True, check=True, timeout=60)
    assert "CONSOLE" in done.stderr


def test_the_page_needs_no_network(log, tmp_path):
    """One file: no address of another one in it, and what the log says is escaped."""
    lines = [
        {**json.loads(line), "session_id": "<script>alert(1)</script>"} for line in log.read_text().splitlines()[:9]
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    invoke(log, "--html", tmp_path / "page.html")
    text = Path(tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not any(word in text for word in ("http://", "https://", "src=", "@import", "url("))
