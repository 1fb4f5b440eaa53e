"""The page of a benchmark's run."""

from bench._report import report
from bench._result import Check
from server_ext.benchmark.suite import to_file
from tests.benchmark.test_summary import result


def test_the_page_says_what_was_missed():
    """Machine, versions and tables stand in it, and a bar that is missed is there to see."""
    content = to_file([result()], machine={"cores": 2, "cpu": "EPYC"}, versions={"vllm": "0.32"})
    page = report(content, [Check("as fast", True, "1.0"), Check("faster", False, "0.9")])
    assert "2 x EPYC" in page
    assert "vllm 0.32" in page
    assert "| `fetch` |" in page
    assert "| as fast | 1.0 | met |" in page
    assert "| faster | 0.9 | **missed** |" in page
