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


def python(
    *command: object, path: tuple = (ROOT,), cwd: Path | None = None, **environment: str
) -> Finished:
    """Runs Python in a process of its own, on one thread."""
    on_path = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, **on_path, **environment},
        cwd=cwd,
        timeout=600,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def run_session(code: str, *arguments: object) -> str:
    """Runs a text as a program that may import our tests, without a GPU; returns what it printed."""
    done = python("-c", code, *arguments, path=(ROOT, ROOT / "tests"), CUDA_VISIBLE_DEVICES="")
    assert done.code == 0, done.errors
    return done.printed


def run(script: str, *arguments: str, own_process: bool = False) -> Finished:
    """Runs a script under the root of the repository; errors other than an exit are raised or, by ``code``, told."""
    path = ROOT / script
    if own_process:
        return python(path, *arguments)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
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
