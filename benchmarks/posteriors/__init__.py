"""posteriordb in Pyro: a program for each reference posterior, its data, and where each number of the reference stands.

for posterior in posteriors(folder, flat=wide):
    guide = AutoNaMIGuide(posterior.model)
    ...
    mean, sd = posterior.errors(draws)
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posteriors import designs, programs
from posteriors.programs import Flat, improper, wide

__all__ = ["FLAT", "FOLDER", "Errors", "Posterior", "improper", "options", "posteriors", "wide"]

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "posteriordb"


FLAT = {"uniform": wide, "improper": improper}  # how flat priors are written


def options(doc: str) -> argparse.ArgumentParser:
    """Returns the options that all scripts on these posteriors have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="two posteriors, and no file")
    parser.add_argument(
        "--data", type=Path, default=FOLDER, help="posteriordb's summaries and data"
    )
    return parser


class Errors(NamedTuple):
    """How far draws are off the reference; the worst number, and its name in Stan."""

    mean: float  # the largest error of a mean, in reference standard deviations
    sd: float  # the largest relative error of a standard deviation
    worst: str  # the number with the larger of both, relative to 0.1


class Posterior(NamedTuple):
    """A reference posterior with its program."""

    name: str
    model: Callable[..., None]
    args: tuple[Any, ...]
    is_flat: bool  # whether some of its priors are
    names: tuple[str, ...]  # of the numbers, in Stan
    mean: Tensor
    sd: Tensor
    values: Callable[[Mapping[str, Tensor], str], Tensor]

    def errors(self, draws: Mapping[str, Tensor]) -> Errors:
        """Returns how far draws are off, ``(draws, *event)`` of each site."""
        found = torch.stack([self.number(draws, name) for name in self.names], -1)
        mean = ((found.mean(0) - self.mean) / self.sd).abs()
        sd = (found.std(0) / self.sd - 1).abs()
        worst = self.names[int(torch.maximum(mean, sd).argmax())]
        return Errors(float(mean.max()), float(sd.max()), worst)

    def number(self, draws: Mapping[str, Tensor], name: str) -> Tensor:
        """Returns the draws of one number, by its name in Stan."""
        base, *index = re.findall(r"\w+", name)
        value = self.values(draws, base).double()
        value = value.reshape(len(value), -1)
        return value[:, int(index[0]) - 1 if index else 0]


def _site(draws: Mapping[str, Tensor], name: str) -> Tensor:
    return draws[name]


def _of_garch(draws: Mapping[str, Tensor], name: str) -> Tensor:
    return (
        draws["weights"][..., ("alpha1", "beta1").index(name)]
        if name in ("alpha1", "beta1")
        else draws[name]
    )


def _of_surgical(draws: Mapping[str, Tensor], name: str) -> Tensor:
    return draws["sigmasq"].sqrt() if name == "sigma" else draws[name]


def _of_lotka_volterra(draws: Mapping[str, Tensor], name: str) -> Tensor:
    if name != "theta":
        return draws[name]
    return torch.stack([draws[f"theta{i}"].flatten() for i in range(1, 5)], -1)


def posteriors(folder: Path = FOLDER, flat: Flat = wide) -> Iterator[Posterior]:
    """Yields every reference posterior of a folder, with priors that are flat in the source made by ``flat``."""
    for path in sorted(folder.glob("*.summary.json")):
        name = path.name.removesuffix(".summary.json")
        summary = json.loads(path.read_text())
        data = json.loads((folder / summary.get("data_file", f"{name}.data.json")).read_text())
        model, args, is_flat, values = _program(name, data, flat)
        mean, sd = (torch.tensor(summary[key], dtype=torch.float64) for key in ("mean", "sd"))
        yield Posterior(name, model, args, is_flat, tuple(summary["names"]), mean, sd, values)


def _program(
    name: str, data: Mapping[str, Any], flat: Flat
) -> tuple[Callable[..., None], tuple[Any, ...], bool, Callable[..., Tensor]]:
    """Returns a posterior's model, its arguments, whether priors are flat, and how its numbers are read off draws."""
    kind = name.split("-")[1]
    if designs.is_regression(name):
        case = designs.regression(name, data)
        model = functools.partial(programs.regression, flat)
        return model, case, True, _site
    get = functools.partial(_tensors, data)
    if kind == "kilpisjarvi":
        of = [(data[f"pmu{each}"], data[f"ps{each}"]) for each in ("alpha", "beta")]
        (x, y), model = get("x", "y"), functools.partial(programs.kilpisjarvi, flat)
        return model, (x, *of, y), True, _site
    if kind == "rats_model":
        rat, x, y = get("rat", "x", "y")
        model = functools.partial(programs.rats, flat)
        return model, (rat.long() - 1, x - data["xbar"], y), True, _site
    if kind == "garch11":
        (y,) = get("y")
        model = functools.partial(programs.garch, flat)
        return model, (y[:-1], data["sigma1"], y), True, _of_garch
    model, args, values = _PROPER[kind](data)
    return model, args, False, values


def _tensors(data: Mapping[str, Any], *names: str) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(data[name], dtype=torch.float) for name in names)


def _ark(data: Mapping[str, Any]) -> tuple[Any, ...]:
    (y,), count = _tensors(data, "y"), data["K"]
    lags = torch.stack([y[count - k : len(y) - k] for k in range(1, count + 1)], -1)
    return programs.ark, (lags, y[count:]), _site


def _dogs(data: Mapping[str, Any]) -> tuple[Any, ...]:
    (y,) = _tensors(data, "y")
    shocked = y.cumsum(-1) - y
    avoided = torch.arange(y.shape[-1]) - shocked
    return programs.dogs, (avoided, shocked, y), _site


def _radon(model: Callable[..., None], data: Mapping[str, Any]) -> tuple[Any, ...]:
    county, floor, y = _tensors(data, "county_idx", "floor_measure", "log_radon")
    return model, (county.long() - 1, floor, y), _site


def _lotka_volterra(data: Mapping[str, Any]) -> tuple[Any, ...]:
    first, later = _tensors(data, "y_init", "y")
    y = torch.cat([first[None], later])
    return programs.lotka_volterra, (torch.tensor(data["ts"]), y), _of_lotka_volterra


def _plain(
    model: Callable[..., None], *names: str, values: Callable[..., Tensor] = _site
) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Returns a function from data to a program whose arguments are those fields."""
    return lambda data: (model, _tensors(data, *names), values)


# kind of posterior, all of whose priors are proper -> from its data to model, arguments, and how its numbers are read
_PROPER: dict[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]] = {
    "GLMM_Poisson_model": _plain(programs.glmm_poisson, "year", "C"),
    "arK": _ark,
    "blr": _plain(programs.proper_regression, "X", "y"),
    "dogs": _dogs,
    "eight_schools_noncentered": _plain(programs.eight_schools, "sigma", "y"),
    "gp_regr": _plain(programs.gaussian_process, "x", "y"),
    "hmm_example": _plain(programs.hmm, "y"),
    "lotka_volterra": _lotka_volterra,
    "low_dim_gauss_mix": _plain(programs.mixture, "y"),
    "radon_variable_intercept_noncentered": functools.partial(_radon, programs.radon_intercepts),
    "radon_variable_intercept_slope_noncentered": functools.partial(_radon, programs.radon_slopes),
    "seeds_stanified_model": _plain(programs.seeds, "N", "x1", "x2", "n"),
    "surgical_model": _plain(programs.surgical, "n", "r", values=_of_surgical),
}
