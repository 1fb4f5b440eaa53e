import os
import subprocess
import sys

import psutil
import pytest

from bench._machine import cpu_cores, cpu_seconds, versions

BURN = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


@pytest.fixture
def parent_of_busy_child():
    """A process that does nothing, whose child has used 0.2 s of CPU time."""
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.communicate(b"\n")


def test_the_time_of_children_counts(parent_of_busy_child):
    """An engine's work is done by the processes that it started; the kernel counts in hundredths of a second."""
    assert cpu_seconds([parent_of_busy_child.pid]) >= 0.15


def test_cores_are_cpu_time_over_time():
    """Half a second of work within two seconds is a quarter of a core, or a little more."""

    def work(duration_s):
        """Use a quarter of the time instead of sleeping."""
        start_s = cpu_seconds([os.getpid()])
        while cpu_seconds([os.getpid()]) - start_s < duration_s / 4:
            pass

    assert cpu_cores([os.getpid()], 2.0, work) == pytest.approx(0.25, abs=0.1)


def test_an_engine_that_ended_is_an_error():
    """No process is not an idle one."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(psutil.NoSuchProcess):
        cpu_cores([process.pid], 1.0, lambda _: None)


def test_versions_name_what_the_numbers_depend_on():
    """Packages, Python and the CPU."""
    found = versions()
    assert set(found) == {"bidikv", "vllm", "nixl", "torch", "python", "cpu"}
    assert found["bidikv"] != "not installed"
    assert found["cpu"]
