"""Designs of the linear regressions of posteriordb whose priors are flat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Regression", "is_regression", "regression"]


class Regression(NamedTuple):
    """The arguments of `programs.regression`."""

    design: Tensor  # ``(rows, coefficients)``
    bound: float  # of flat priors that are wide `Uniform`s
    half_cauchy: bool  # whether the noise has that prior, as in the source; else it is flat
    outcomes: Tensor


def is_regression(name: str) -> bool:
    """Whether a posterior is a linear regression under flat priors."""
    return name.startswith(("kidiq", "earnings", "mesquite", "nes"))


def _columns(*columns: Any) -> Tensor:
    first = torch.as_tensor(columns[0], dtype=torch.float64)
    rows = [
        torch.ones_like(first),
        *(torch.as_tensor(each, dtype=torch.float64) for each in columns),
    ]
    return torch.stack(rows, -1).float()


def _centred(values: Any, unit: bool) -> Tensor:
    values = torch.as_tensor(values, dtype=torch.float64)
    return (values - values.mean()) / (2 * values.std() if unit else 1.0)


def _kidiq(data: Mapping[str, Any], kind: str) -> Tensor:
    school, iq = (torch.as_tensor(data[name], dtype=torch.float64) for name in ("mom_hs", "mom_iq"))
    if kind.startswith("interaction_"):
        school, iq = (_centred(each, kind == "interaction_z") for each in (school, iq))
    parts = {"momhs": [school], "momiq": [iq], "momhsiq": [school, iq]}
    return _columns(*parts.get(kind, [school, iq, school * iq]))


def _earnings(data: Mapping[str, Any], kind: str) -> Tensor:
    height = torch.as_tensor(data["height"], dtype=torch.float64)
    return (
        _columns(height.log(), data["male"])
        if kind == "logearn_logheight_male"
        else _columns(height)
    )


def _mesquite(data: Mapping[str, Any], kind: str) -> Tensor:
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    one, two, canopy, total, density = (
        torch.as_tensor(data[name], dtype=torch.float64) for name in names
    )
    volume, area, shape = (one * two * canopy).log(), (one * two).log(), (one / two).log()
    if kind == "logmesquite_logvas":
        return _columns(volume, area, shape, total.log(), density.log(), data["group"])
    if kind == "logmesquite_logvolume":
        return _columns(volume)
    parts = [one, two, canopy, total, density]
    return _columns(
        *(part.log() if kind == "logmesquite" else part for part in parts), data["group"]
    )


def _nes(data: Mapping[str, Any]) -> Tensor:
    age = torch.as_tensor(data["age_discrete"])
    groups = ((age == each).double() for each in (2, 3, 4))
    rest = (data[name] for name in ("educ1", "gender", "income"))
    return _columns(data["real_ideo"], data["race_adj"], *groups, *rest)


def regression(name: str, data: Mapping[str, Any]) -> Regression:
    """Returns the design and outcomes of a posterior of posteriordb."""
    data_of, kind = name.split("-")
    kind = kind.removeprefix("kidscore_")
    if data_of.startswith("kidiq"):
        outcomes = torch.tensor(data["kid_score"]).float()
        return Regression(_kidiq(data, kind), 1e3, "with" not in data_of, outcomes)
    if data_of == "earnings":
        return _in_logs(_earnings(data, kind), data["earn"], kind, 1e6)
    if data_of == "mesquite":
        return _in_logs(_mesquite(data, kind), data["weight"], kind, 1e4)
    return Regression(_nes(data), 1e3, False, torch.tensor(data["partyid7"]).float())


def _in_logs(design: Tensor, outcomes: Any, kind: str, bound: float) -> Regression:
    """Returns a regression of outcomes, or of their logarithms where its name says so."""
    y = torch.as_tensor(outcomes, dtype=torch.float64)
    if kind.startswith("log"):
        y, bound = y.log(), 1e3
    return Regression(design, bound, False, y.float())
