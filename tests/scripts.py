"""Runs a script as ``python script.py`` would, by default in this process: importing torch takes longer than most."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pyro
import torch

ROOT = Path(__file__).parent.parent


class Finished(NamedTuple):
    """How a script ended, and what it printed."""

    code: int
    printed: str
    errors: str


def run(script: str, *arguments: str, own_process: bool = False) -> Finished:
    """Runs a script under the root of the repository; errors other than an exit are raised or, by ``code``, told."""
    path = ROOT / script
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if own_process:
        command = [sys.executable, str(path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        return Finished(done.returncode, done.stdout, done.stderr)
    out, errors, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    pyro.clear_param_store()
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
            code = 0
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
            if isinstance(exit.code, str):
                errors.write(exit.code)
        finally:
            torch.set_num_threads(threads)
            if "matplotlib.pyplot" in sys.modules:
                sys.modules["matplotlib.pyplot"].close("all")
    return Finished(code, out.getvalue(), errors.getvalue())
