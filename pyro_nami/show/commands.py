"""The commands ``fit``, ``inspect``, ``invert`` and ``verify``, with their options and exit codes."""

from __future__ import annotations

__all__ = ["main"]

import argparse
import contextlib
import io
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pyro import poutine

from pyro_nami.fit import fit
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.inversion_methods import DIRECTIONS, INVERSIONS, nami_steps
from pyro_nami.graph.verification import verify_inverse
from pyro_nami.guide.first_call import with_hidden_evidence, with_latent_blocks
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.guide.order import invert
from pyro_nami.reading.interventions import is_blocked
from pyro_nami.show.model_file import Failure, FoundModel, find, loaded, told
from pyro_nami.show.report import COMMENTS, Report, inverse_report, network_report, verdict_report

_PROGRAM = "pyro-nami"
_FORMATS = {".txt": "text", ".mmd": "mermaid", ".dot": "dot", ".json": "json"}
_HELP = """\
examples:
  python -m pyro_nami fit model.py:model --args "data()" -o posterior.nc
  python -m pyro_nami inspect model.py:model --args "data()"
  python -m pyro_nami invert model.py:model --inverse forward --steps
  python -m pyro_nami verify model.py:model --inverse mean_field -o verdict.json

exit codes:
  0  all is well
  1  verify finds the inverse not faithful (with --minimal: or not minimal); draws of fit are not to be trusted
  2  no answer: an option, file, name, argument or model does not work; stderr says why, in one line

JSON is one object. Plates, parents and sites come in a fixed order; keys may be added, not changed:
  command, model    as given
  warnings          of the extraction
  sites             in model order: name, plates, observed, marginalized, support_parents
  edges             pairs [parent, child]
  plate_sizes       plate -> number of instances
  nesting           plate -> the plates whose index it determines
inspect adds:
  index_maps        plate, outer, and map: the instance of outer to which each instance of plate belongs
  escaped           sites whose values left torch for Python
  hidden_randomness sites that differ between runs at equal values of all sites
invert and verify add:
  inverse           its name
  factors           in sampling order: latent, parents, joint (plates), predictive; a parent has its site, and over,
                    the plates of which all instances are read
  levels            lists of latents that can be sampled together
  num_edges, num_grounded_edges    plates counted once; between instances
invert adds:
  rules             latent -> rule ("exact", "learned" or "prior"), reads, and the reason why it is not exact; of a
                    guide with these options, if one can be made
invert --steps adds:
  steps             in order of elimination: site, frontier, parents, joint, fill (pairs), cost, predictive
verify adds:
  faithful, minimal booleans
  missing, redundant    dependencies: parent, latent, across (plates)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; ``argv`` is by default that of the process.

    Raises:
        SystemExit: by argparse, after ``--help`` (code 0) or an option that it does not know (code 2).
    """
    options = _parser().parse_args(argv)
    try:
        if options.command == "fit":
            return _fit(options)
        format = _format(options)
        found = find(
            options.target,
            options.args,
            options.kwargs,
            observed=options.observed,
            seed=options.seed,
            checks=options.checks,
        )
        for message in found.warnings:
            print(f"{_PROGRAM}: warning: {message}", file=sys.stderr)
        report, code = options.run(options, found)
        header = {
            "command": options.command,
            "model": options.target,
            "warnings": list(found.warnings),
        }
        _write(options.output, report.written(format, header))
    except Failure as failure:
        print(f"{_PROGRAM}: error: {failure}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="The posterior of a Pyro model, its Bayesian network, and its inverses.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        required=True, metavar="{fit,inspect,invert,verify}", dest="command"
    )
    _add_fit(commands)
    common, of_inverse = _common_options(), _inverse_options()
    command = commands.add_parser(
        "inspect", help="the Bayesian network of a model", parents=[common]
    )
    command.set_defaults(run=_inspect)
    command = commands.add_parser(
        "invert", help="its inverse, as a guide has it", parents=[common, of_inverse]
    )
    command.set_defaults(run=_invert)
    command.add_argument(
        "--steps", action="store_true", help="the elimination, step by step (text, json)"
    )
    command = commands.add_parser(
        "verify",
        help="whether the inverse is faithful, and minimal",
        parents=[common, of_inverse],
    )
    command.set_defaults(run=_verify)
    command.add_argument(
        "--minimal", action="store_true", help="exit code 1 also if it is not minimal"
    )
    return parser


def _add_fit(commands: Any) -> None:
    command = commands.add_parser(
        "fit", help="its posterior given data", parents=[_model_options()]
    )
    add = command.add_argument
    add("--draws", type=int, default=4000, help="number of draws (4000)")
    add("--prob", type=float, default=0.9, help="of the intervals in the table (0.9)")
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="for the draws: .nc for ArviZ, .pt for Posterior.load",
    )


def _model_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("target", metavar="MODEL", help="path/to/file.py:name or package.module:name")
    add(
        "--args",
        metavar="EXPRESSION",
        help="the model's arguments, in Python: a tuple, or the only argument. torch, numpy (np) and all names of the "
        "file are known; by default the file's <name>_args, if it has that, else none",
    )
    add("--kwargs", metavar="EXPRESSION", help="its keyword arguments: a dict")
    add("--seed", type=int, default=0, help="of all random numbers (0)")
    return parser


def _common_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, parents=[_model_options()])
    parser.set_defaults(steps=False)
    add = parser.add_argument
    add(
        "--observed",
        metavar="A,B",
        type=_names,
        default=[],
        help="sites that this call samples, but that inference will condition on",
    )
    add(
        "--checks",
        type=int,
        default=200,
        help="the most runs of the model to spend on interventions (200)",
    )
    add("--format", choices=_FORMATS.values(), help="by default that of FILE, else text")
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help=f"in place of stdout; {' '.join(_FORMATS)}",
    )
    return parser


def _inverse_options() -> argparse.ArgumentParser:
    names = [*DIRECTIONS, *INVERSIONS]
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--inverse",
        choices=names,
        default="auto",
        metavar="NAME",
        help=f"{', '.join(names)} (auto)",
    )
    parser.add_argument(
        "--blocks",
        metavar="A,B;C",
        type=_blocks,
        help="an order of groups of latents; the last is sampled first",
    )
    return parser


def _format(options: argparse.Namespace) -> str:
    """Returns the format asked for, or that of the file's name, after a check of options that exclude each other."""
    ending = options.output.suffix.lower() if options.output else ".txt"
    format = options.format or _FORMATS.get(ending)
    if format is None:
        endings = ", ".join(_FORMATS)
        raise Failure(
            f"Expected a file that ends in one of {endings}; got {str(options.output)!r}. Give --format."
        )
    if options.steps and format in COMMENTS:
        raise Failure(f"Expected --steps with --format text or json; got {format}.")
    if options.steps and options.inverse not in DIRECTIONS:
        directions = ", ".join(DIRECTIONS)
        raise Failure(f"Expected --steps with --inverse {directions}; got {options.inverse}.")
    return format


def _write(path: Path | None, text: str) -> None:
    if path is None:
        print(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise Failure(f"Expected to write the output; got {told(error)}.") from error


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _blocks(text: str) -> list[list[str]]:
    return [_names(block) for block in text.split(";")]


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


# Each command on networks returns its report and the exit code.


def _inspect(options: argparse.Namespace, found: FoundModel) -> tuple[Report, int]:
    return network_report(found.extraction), 0


def _invert(options: argparse.Namespace, found: FoundModel) -> tuple[Report, int]:
    inverse, guide = _inverse(options, found)
    direction, blocks = options.inverse, options.blocks
    if guide is not None and direction == "auto":
        direction, blocks = "reverse", [[name] for name in inverse.order]
    steps = nami_steps(inverse.net, direction=direction, blocks=blocks) if options.steps else None
    rules = None if guide is None else guide.rules
    return inverse_report(options.inverse, inverse, steps, rules), 0


def _verify(options: argparse.Namespace, found: FoundModel) -> tuple[Report, int]:
    inverse, _ = _inverse(options, found)
    verdict = verify_inverse(inverse.net, inverse)
    well = verdict.minimal if options.minimal else bool(verdict)
    title = f"{options.target}, inverse {options.inverse}"
    return verdict_report(title, options.inverse, inverse, verdict), 0 if well else 1


def _inverse(
    options: argparse.Namespace, found: FoundModel
) -> tuple[Inverse, AutoNaMIGuide | None]:
    """Returns the inverse that a guide with these options has, and the guide if it can be called.

    The guide of the inverse ``auto`` chooses an order in which more latents are exact.
    """
    net = with_latent_blocks(found.extraction.bayesnet, options.blocks)
    if not net.latent:
        names = ", ".join(map(repr, net.observed))
        raise Failure(
            f"Expected a model with at least one latent; got observed sites only: {names}. "
            "Pass no data for a site that shall be inferred, or name it in --blocks."
        )
    model, args, kwargs, _ = found.loaded
    if is_blocked(model):
        net = with_hidden_evidence(net)
    try:
        inverse = invert(net, options.inverse, options.blocks)
    except ValueError as error:
        raise Failure(str(error)) from error
    guide = AutoNaMIGuide(
        model, inverse=options.inverse, blocks=options.blocks, observed=options.observed
    )
    quiet = contextlib.redirect_stdout(io.StringIO())
    try:
        with warnings.catch_warnings(), quiet, poutine.block(), torch.no_grad():
            warnings.simplefilter("ignore")
            guide(*args, **kwargs)
    except Exception:  # noqa: BLE001  whatever a model does in runs that its network did not need
        return inverse, None
    return guide.inverse if options.inverse == "auto" else inverse, guide
