"""Runs the scripts under ``examples/paper``."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scripts import ROOT, run

sys.path.append(str(ROOT / "examples" / "paper"))


class Finished(NamedTuple):
    """What a script printed, and the numbers that it wrote; None if it failed."""

    code: int
    printed: str
    errors: str
    results: dict[str, Any] | None


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., Finished]:
    """Runs ``examples/paper/<name>.py --smoke`` in an empty folder, and reads ``<name>.json`` back."""

    def run_paper(name: str, *arguments: str, own_process: bool = False) -> Finished:
        script = f"examples/paper/{name}.py"
        done = run(script, "--smoke", "--out", str(tmp_path), *arguments, own_process=own_process)
        file = tmp_path / f"{name}.json"
        return Finished(*done, json.loads(file.read_text()) if file.exists() else None)

    return run_paper
