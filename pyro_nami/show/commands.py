"""The command ``fit``, with its options and exit codes."""

from __future__ import annotations

__all__ = ["main"]

import argparse
import contextlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from pyro_nami.fit import fit
from pyro_nami.show.model_file import Failure, loaded, told

_PROGRAM = "pyro-nami"
_HELP = """\
example:
  python -m pyro_nami fit model.py:model --args "data()" -o posterior.nc

exit codes:
  0  all is well
  1  the draws are not to be trusted
  2  no answer: an option, file, name, argument or model does not work; stderr says why, in one line
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; ``argv`` is by default that of the process.

    Raises:
        SystemExit: by argparse, after ``--help`` (code 0) or an option that it does not know (code 2).
    """
    options = _parser().parse_args(argv)
    try:
        return _fit(options)
    except Failure as failure:
        print(f"{_PROGRAM}: error: {failure}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="The posterior of a Pyro model.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{fit}", dest="command")
    add = commands.add_parser("fit", help="the posterior of a model given data").add_argument
    add("target", metavar="MODEL", help="path/to/file.py:name or package.module:name")
    add(
        "--args",
        metavar="EXPRESSION",
        help="the model's arguments, in Python: a tuple, or the only argument. torch, numpy (np) and all names of the "
        "file are known; by default the file's <name>_args, if it has that, else none",
    )
    add("--kwargs", metavar="EXPRESSION", help="its keyword arguments: a dict")
    add("--seed", type=int, default=0, help="of all random numbers (0)")
    add("--draws", type=int, default=4000, help="number of draws (4000)")
    add("--prob", type=float, default=0.9, help="of the intervals in the table (0.9)")
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="for the draws: .nc for ArviZ, .pt for Posterior.load",
    )
    return parser


def _fit(options: argparse.Namespace) -> int:
    """Prints the posterior's summary, and writes its draws; returns 1 for draws that are not to be trusted."""
    path = options.output
    if path is not None and path.suffix not in (".nc", ".pt"):
        raise Failure(f"Expected a file that ends in .nc or .pt; got {str(path)!r}.")
    with loaded(options.target, options.args, options.kwargs, options.seed) as found:
        try:
            with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The posterior is not to be trusted")
                posterior = fit(
                    found.model, *found.args, draws=options.draws, seed=options.seed, **found.kwargs
                )
            table = posterior.summary(options.prob)
        except Exception as error:
            raise found.failure(error, options.target) from error
    print(table)
    if path is not None:
        try:
            posterior.save(path) if path.suffix == ".pt" else posterior.to_arviz().to_netcdf(path)
        except (ImportError, OSError, ValueError) as error:
            raise Failure(f"Expected to write the output; got {told(error)}.") from error
    return 0 if posterior.verdict.is_trusted else 1
