"""The package from outside: what it exports, what importing it costs, and that the two flavours agree."""

import inspect
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import bidikv_sdk

TWINS = [
    (bidikv_sdk.BidiKV, bidikv_sdk.AsyncBidiKV),
    (bidikv_sdk.Session, bidikv_sdk.AsyncSession),
    (bidikv_sdk.TurnStream, bidikv_sdk.AsyncTurnStream),
    (bidikv_sdk.LeaseHold, bidikv_sdk.AsyncLeaseHold),
]
RENAMED = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__", "__anext__": "__next__"}


def run_python(code):
    """Run code in a fresh interpreter and return what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def members(cls):
    """Return a class's public members and its protocol methods, by the synchronous name."""
    own = {
        name: value
        for base in cls.__mro__[:-1]
        for name, value in vars(base).items()
        if not name.startswith("_") or name in {*RENAMED, *RENAMED.values(), "__init__"}
    }
    return {RENAMED.get(name, name): getattr(value, "fget", value) for name, value in own.items()}


def as_sync(text):
    """Spell annotations and docstrings of the asynchronous flavour like those of the synchronous one."""
    if not isinstance(text, str):
        return text
    text = re.sub(r"Awaitable\[([^\]]+)\]", r"\1", text)
    return re.sub(r"Async(?=[A-Z])", "", text)


@pytest.mark.parametrize(("sync", "twin"), TWINS, ids=lambda cls: cls.__name__)
def test_sync_and_async_agree(sync, twin):
    """Public names, parameters, defaults, annotations and docstrings are the same."""
    assert as_sync(inspect.getdoc(twin)) == inspect.getdoc(sync)
    sync_members, twin_members = members(sync), members(twin)
    assert sync_members.keys() == twin_members.keys()
    for name, member in sync_members.items():
        other = twin_members[name]
        assert (member.__doc__ or "") == as_sync(other.__doc__ or "")
        mine, its = inspect.signature(member), inspect.signature(other)
        described = [(p.name, p.kind, p.default, as_sync(p.annotation)) for p in its.parameters.values()]
        assert [(p.name, p.kind, p.default, p.annotation) for p in mine.parameters.values()] == described, name
        assert mine.return_annotation == as_sync(its.return_annotation), name


def test_exports_are_sorted_complete_and_documented():
    """`__all__` is sorted, holds every public name of the root, and each has a docstring."""
    names = bidikv_sdk.__all__
    assert names == sorted(names)
    public = {
        name for name, value in vars(bidikv_sdk).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(names)
    for name in names:
        value = getattr(bidikv_sdk, name)
        if inspect.isclass(value):
            assert value.__doc__, name


def test_public_methods_are_documented():
    """A public method without a contract is not public."""
    for cls in (cls for pair in TWINS for cls in pair):
        for name, member in members(cls).items():
            assert name.startswith("__") or inspect.getdoc(member), f"{cls.__name__}.{name}"


def test_the_package_is_typed():
    """Type checkers look for this file."""
    assert (pathlib.Path(bidikv_sdk.__file__).parent / "py.typed").exists()


def test_importing_loads_nothing_heavy():
    """The client installs beside any agent: no engine, no web framework, no arrays, and not its own test double."""
    loaded = run_python("""
        import sys, bidikv_sdk
        heavy = {"vllm", "torch", "numpy", "fastapi", "pydantic", "openai", "asyncio", "server_ext"}
        print(sorted(heavy & set(sys.modules)), "bidikv_sdk.testing" in sys.modules)
    """)
    assert loaded == "[] False"


def test_importing_is_fast():
    """On top of its dependencies the package costs at most 0.1 s."""
    cost_s = min(
        float(
            run_python("""
                import time, httpx, tenacity
                start_s = time.process_time()
                import bidikv_sdk
                print(time.process_time() - start_s)
            """)
        )
        for _ in range(3)
    )
    assert cost_s <= 0.1


def test_httpx_and_tenacity_stay_behind_one_module_each():
    """Another HTTP library or retry policy would change one file."""
    folder = pathlib.Path(bidikv_sdk.__file__).parent
    importers = {
        name: {
            path.stem
            for path in folder.glob("*.py")
            if re.search(rf"^\s*(import|from) {name}\b", path.read_text(), re.MULTILINE)
        }
        for name in ("httpx", "tenacity")
    }
    assert importers == {"httpx": {"_transport", "testing"}, "tenacity": {"_retry"}}


def test_logging_is_left_to_the_program():
    """Without a logging set-up nothing is printed."""
    assert run_python("import bidikv_sdk, logging; print(logging.getLogger('bidikv').handlers)").startswith("[<Null")
