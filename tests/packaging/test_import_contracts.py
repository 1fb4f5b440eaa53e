import subprocess
import sys
from pathlib import Path


def test_imports_go_down_only():
    """The contracts of pyproject.toml hold: who may import whom, and who may touch vLLM."""
    lint_imports = Path(sys.executable).with_name("lint-imports")
    root = Path(__file__).parents[2]
    done = subprocess.run([lint_imports, "--no-cache"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
