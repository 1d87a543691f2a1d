"""Runs the guide on a second device without a GPU, where the check for that is at hand: `make test-device`.

A PyTorch backend on host memory applies CUDA's checks. First come the check's own cases, as users would write, then
our tests of the guide with that device as the default.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECK = ROOT.parent / "shared" / "second_device" / "check_device.py"
# The check knows a room, and an option, by their old names.
START = """
import runpy, sys
import pyro_nami.inference
sys.modules["pyro_nami.infer"] = pyro_nami.inference
start = pyro_nami.AutoNaMIGuide.__init__
def translated(self, model, conjugate=True, **options):
    start(self, model, **{"exact": conjugate, **options})
pyro_nami.AutoNaMIGuide.__init__ = translated
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FILES = ("test_random_programs", "guide/test_log_prob", "guide/test_missing", "guide/test_plates")


def main() -> int:
    if not CHECK.is_file():
        print(f"{CHECK.name}: not here, so the checks on a second device are skipped")
        return 0
    subprocess.run(
        [sys.executable, "-m", "pip", "-qq", "install", "ninja", "setuptools"], check=True
    )
    command = [sys.executable, "-c", START, CHECK, "--lib", ROOT]
    status = subprocess.run(command, check=False).returncode
    ours = ["-m", "not cuda", *(f"tests/{name}.py" for name in FILES)]
    programs = {"PYRO_NAMI_DEVICE": "sim", "PYRO_NAMI_PROGRAMS": "100"}
    subprocess.run([*command, "--suite", *ours], check=False, env={**os.environ, **programs})
    return status


if __name__ == "__main__":
    sys.exit(main())
