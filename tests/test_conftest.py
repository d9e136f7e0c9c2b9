"""The rule that a run without a passed test fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = "import pytest\ndef test_a():\n    pytest.skip('x')\n"
PASSES = SKIPS + "def test_b():\n    pass\n"


@pytest.mark.parametrize(("text", "workers", "code"), [(SKIPS, "1", 1), (PASSES, "0", 0)])
def test_all_skipped_fails(tmp_path: Path, text: str, workers: str, code: int) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-n", workers, "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert "1 skipped" in done.stdout.splitlines()[-1]
