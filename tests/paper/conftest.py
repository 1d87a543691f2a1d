"""Runs the scripts under ``examples/paper`` as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent


class Finished(NamedTuple):
    """What a script printed, and the numbers that it wrote; None if it failed."""

    code: int
    printed: str
    errors: str
    results: dict[str, Any] | None


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., Finished]:
    """Runs ``examples/paper/<name>.py --smoke`` in an empty folder, and reads ``<name>.json`` back."""

    def run(name: str, *arguments: str) -> Finished:
        command = [sys.executable, str(ROOT / "examples" / "paper" / f"{name}.py"), "--smoke"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "--out", str(tmp_path), *arguments], capture_output=True, text=True, env=environment, timeout=300
        )
        file = tmp_path / f"{name}.json"
        results = json.loads(file.read_text()) if file.exists() else None
        return Finished(done.returncode, done.stdout, done.stderr, results)

    return run
