"""The commands ``inspect``, ``invert`` and ``verify``, their options and their exit codes.

Change this module to add a command or an option; how a model is found and run is in `target.py`, and what is said of a
network, an inverse or a verdict in `telling.py`.
"""

from __future__ import annotations

__all__ = ["main"]

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.inversions import DIRECTIONS, nami_steps
from pyro_nami.graph.verification import verify_inverse
from pyro_nami.guide.inversion import invert, with_hidden_evidence, with_latent_blocks
from pyro_nami.reading.network import is_blocked
from pyro_nami.show.render import render
from pyro_nami.show.report import (
    factors_object,
    inverse_lines,
    network_lines,
    network_object,
    notes_object,
    steps_object,
    verdict_lines,
    verdict_object,
    written,
)
from pyro_nami.show.target import Failure, Found, find, told

_PROGRAM = "pyro-nami"
_INVERSES = (*DIRECTIONS, "stuhlmueller", "mean_field", "fully_connected")
_FORMATS = {".txt": "text", ".mmd": "mermaid", ".dot": "dot", ".json": "json"}
_COMMENTS = {"mermaid": "%%", "dot": "//"}
_HELP = """\
examples:
  python -m pyro_nami inspect model.py:model --args "data()"
  python -m pyro_nami invert model.py:model --inverse forward --steps
  python -m pyro_nami verify model.py:model --inverse mean_field -o verdict.json

exit codes:
  0  all is well
  1  verify finds the inverse not faithful (with --minimal: or not minimal)
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
        format = _format(options)
        found = find(
            options.target,
            options.args,
            options.kwargs,
            observed=_names(options.observed),
            seed=options.seed,
            checks=options.checks,
        )
        for message in found.warnings:
            print(f"{_PROGRAM}: warning: {message}", file=sys.stderr)
        text, code = options.run(options, found, format)
        if options.output is None:
            print(text)
        else:
            _write(options.output, text)
    except Failure as failure:
        print(f"{_PROGRAM}: error: {failure}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="The Bayesian network of a Pyro model, and its inverses.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{inspect,invert,verify}", dest="command")
    common, inverting = _common_options(), _inverse_options()
    inspection = commands.add_parser("inspect", parents=[common], help="the Bayesian network of a model")
    inspection.set_defaults(run=_inspect)
    inversion = commands.add_parser(
        "invert", parents=[common, inverting], help="its inverse, as a guide has it"
    )
    inversion.add_argument("--steps", action="store_true", help="the elimination, step by step (text, json)")
    inversion.set_defaults(run=_invert)
    verification = commands.add_parser(
        "verify", parents=[common, inverting], help="whether the inverse is faithful, and minimal"
    )
    verification.add_argument("--minimal", action="store_true", help="exit code 1 also if it is not minimal")
    verification.set_defaults(run=_verify)
    return parser


def _common_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    add = options.add_argument
    add("target", metavar="MODEL", help="path/to/file.py:name or package.module:name")
    known = "torch, numpy (np) and all names of the file are known"
    default = "by default the file's <name>_args, if it has that, else none"
    a_tuple = "the model's arguments, in Python: a tuple, or the only argument"
    add("--args", metavar="EXPRESSION", help=f"{a_tuple}. {known}; {default}")
    add("--kwargs", metavar="EXPRESSION", help="its keyword arguments: a dict")
    add(
        "--observed", metavar="A,B", help="sites that this call samples, but that inference will condition on"
    )
    add("--seed", type=int, default=0, help="of all random numbers (0)")
    add("--checks", type=int, default=200, help="the most runs of the model to spend on interventions (200)")
    add("--format", choices=_FORMATS.values(), help="by default that of FILE, else text")
    add("-o", "--output", metavar="FILE", type=Path, help=f"in place of stdout; {' '.join(_FORMATS)}")
    return options


def _inverse_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    names = ", ".join(_INVERSES)
    options.add_argument(
        "--inverse", choices=_INVERSES, default="auto", metavar="NAME", help=f"{names} (auto)"
    )
    options.add_argument(
        "--blocks", metavar="A,B;C", help="an order of groups of latents; the last is sampled first"
    )
    return options


def _format(options: argparse.Namespace) -> str:
    """The format asked for, or that of the file's name; checks, before any work, what does not go together."""
    format = options.format or _FORMATS.get(options.output.suffix.lower() if options.output else ".txt")
    if format is None:
        endings = ", ".join(_FORMATS)
        raise Failure(
            f"Expected a file that ends in one of {endings}; got {str(options.output)!r}. Give --format."
        )
    if getattr(options, "steps", False):
        if format in _COMMENTS:
            raise Failure(f"Expected --steps with --format text or json; got {format}.")
        if options.inverse not in DIRECTIONS:
            raise Failure(f"Expected --steps with --inverse {', '.join(DIRECTIONS)}; got {options.inverse}.")
    return format


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise Failure(f"Expected to write the output; got {told(error)}.") from error


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


# Each command returns what it has to say, and the exit code.


def _inspect(options: argparse.Namespace, found: Found, format: str) -> tuple[str, int]:
    net = found.extraction.bayesnet
    if format == "json":
        return written(_header(options, found), network_object(net), notes_object(found.extraction)), 0
    return "\n".join(network_lines(found.extraction)) if format == "text" else str(render(net, format)), 0


def _invert(options: argparse.Namespace, found: Found, format: str) -> tuple[str, int]:
    net, inverse, blocks = _inverted(options, found)
    steps = nami_steps(net, direction=options.inverse, blocks=blocks) if options.steps else []
    if format == "json":
        parts = [network_object(net), factors_object(options.inverse, inverse)]
        parts += [steps_object(steps)] if options.steps else []
        return written(_header(options, found), *parts), 0
    return "\n".join(inverse_lines(inverse, steps)) if format == "text" else str(render(inverse, format)), 0


def _verify(options: argparse.Namespace, found: Found, format: str) -> tuple[str, int]:
    net, inverse, _ = _inverted(options, found)
    verdict = verify_inverse(net, inverse)
    code = 0 if verdict.minimal or (verdict and not options.minimal) else 1
    if format == "json":
        parts = network_object(net), factors_object(options.inverse, inverse), verdict_object(net, verdict)
        return written(_header(options, found), *parts), code
    lines = [
        f"{options.target}, inverse {options.inverse}: {next(said := verdict_lines(inverse, verdict))}",
        *said,
    ]
    if format != "text":
        lines = [*(f"{_COMMENTS[format]} {line}" for line in lines), str(render(inverse, format))]
    return "\n".join(lines), code


class _Inverted(NamedTuple):
    """The network that a guide with these options inverts, its inverse, and the blocks."""

    net: BayesNet
    inverse: Inverse
    blocks: list[list[str]] | None


def _inverted(options: argparse.Namespace, found: Found) -> _Inverted:
    blocks = None if options.blocks is None else [_names(block) for block in options.blocks.split(";")]
    net = with_latent_blocks(found.extraction.bayesnet, blocks)
    if not net.latent:
        names = ", ".join(map(repr, net.observed))
        raise Failure(
            f"Expected a model with at least one latent; got observed sites only: {names}. "
            "Pass no data for a site that shall be inferred, or name it in --blocks."
        )
    if is_blocked(found.model):
        net = with_hidden_evidence(net)
    try:
        return _Inverted(net, invert(net, options.inverse, blocks), blocks)
    except ValueError as error:
        raise Failure(str(error)) from error


def _header(options: argparse.Namespace, found: Found) -> dict[str, object]:
    return {"command": options.command, "model": options.target, "warnings": list(found.warnings)}
