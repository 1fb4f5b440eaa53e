"""Run the tests and print one line for each: `python check.py`, or `python check.py stock` for some of them.

A test is a function `test_*` in tests/ that returns what it got and what it expected. Exit status 1 where one fails.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path


def run_test(test: Callable[[], tuple[object, object]]) -> str | None:
    """Return what went wrong, or None."""
    try:
        got, expected = test()
    except Exception as error:  # noqa: BLE001 - whatever a test raises is its result
        return f"raised {type(error).__name__}: {error}"
    return None if got == expected else f"got {got}, expected {expected}"


def main(word: str = "") -> int:
    """Run the tests of the files whose module begins with the word."""
    failed = 0
    for path in sorted(Path("tests").glob(f"test_{word}*.py")):
        tests = {name: value for name, value in runpy.run_path(str(path)).items() if name.startswith("test_")}
        for name, test in tests.items():
            problem = run_test(test)
            failed += problem is not None
            print(f"ok    {name}" if problem is None else f"FAIL  {name}: {problem}")
    print(f"{failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
