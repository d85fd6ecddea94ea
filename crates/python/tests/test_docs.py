"""What the documents show runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[3] / "docs" / "python.md"


def test_the_first_example_runs(tmp_path: Path) -> None:
    block = next(
        block for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S) if "first.py" in block
    )
    script = tmp_path / "first.py"
    script.write_text(block)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0 and ended.stdout.count("back came") == ended.stdout.count("(5, 64)") == 4, (
        ended.stdout + ended.stderr
    )
