"""The wheel as a user gets it: installed with the base dependencies alone, outside of this repository."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_BUDGET_S = 0.1
HEAVY = ("vllm", "torch", "numpy", "fastapi", "pydantic", "transformers")


def run(*argv):
    """Standard output of a program that must succeed, run away from the repository."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the working tree."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a fresh environment that holds the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=True)
    interpreter = str(folder / "bin" / "python")
    run(interpreter, "-m", "pip", "install", "--quiet", str(wheel))
    return interpreter


def test_the_wheel_holds_both_packages_and_nothing_else(wheel):
    """Code, type markers and the chat template travel; tests and benchmarks do not."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "bidikv_sdk",
        "server_ext",
        "bidikv_sdk-0.1.0.dist-info",
    }
    expected = {
        "bidikv_sdk/py.typed",
        "server_ext/py.typed",
        "server_ext/launch/templates/smollm2_tools.jinja",
    }
    assert expected <= set(names)


def test_vllm_finds_our_plugins(wheel):
    """The entry points by which vLLM loads us are in the wheel's metadata."""
    text = zipfile.ZipFile(wheel).read("bidikv_sdk-0.1.0.dist-info/entry_points.txt").decode()
    assert "[vllm.general_plugins]\nbidikv = server_ext.engine.plugin:register" in text
    assert "[vllm.endpoint_plugins]\nbidikv_http = server_ext.http.plugin:BidiKVPlugin" in text


def test_the_sdk_is_light(python):
    """`import bidikv_sdk` works with the base dependencies alone, and costs little beside them."""
    code = """
from time import process_time as now
import httpx, tenacity
start_s = now()
import bidikv_sdk
print(now() - start_s)
"""
    best_s = min(float(run(python, "-c", code)) for _ in range(5))
    assert best_s <= IMPORT_BUDGET_S


def test_the_command_says_what_it_lacks(python):
    """Without the `cli` extra, `bidikv` names the missing package and how to install it."""
    command = Path(python).with_name("bidikv")
    done = subprocess.run([command, "status"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "bidikv needs typer: pip install 'bidikv-sdk[cli]'"


@pytest.mark.parametrize("module", ["bidikv_sdk", "bidikv_sdk.wire", "server_ext.core", "server_ext.launch.stack"])
def test_importing_the_light_parts_loads_nothing_heavy(module):
    """Where vLLM and torch are installed, client, core and launcher still do not load them."""
    code = f"import sys, {module}; print(sorted(set({HEAVY}) & set(sys.modules)))"
    assert run(sys.executable, "-c", code) == "[]\n"
