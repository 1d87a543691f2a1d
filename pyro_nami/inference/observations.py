"""Observed values as the user gives them, ``observations={site: value}``: one data set, or a batch of several.

Checks of names and shapes are here, so that all that takes observations takes the same. Change this module when data
may come in other shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pyro.poutine.util import site_is_factor
from torch import Tensor

from pyro_nami.inference.sites import with_plate_dims

__all__ = ["Observations", "as_mapping", "as_tensor", "observed_names"]


class Observations:
    """Values of observed sites, checked against a run of the model.

    Args:
        given: site -> value: of the site's own shape in that run, or of several data sets, ``(data sets, *own shape)``,
            also with all plate dims of the model (as in `JointDraws`). A site without that dim has the same value in
            all data sets. Floats get the dtype of the site.
        sites: the sites of a run without batch dims.
        nesting: number of plate dims of the model.

    Attributes:
        num: number of data sets; None where there is one, without a dim.

    Raises:
        ValueError: an unknown site, another shape, or different numbers of data sets.
        TypeError: a value that is no tensor and cannot be made one.
    """

    def __init__(self, given: Mapping[str, Any], sites: Mapping[str, Any], nesting: int) -> None:
        self.num: int | None = None
        self._own: dict[str, Tensor] = {}  # of all data sets
        self._wide: dict[str, Tensor] = {}  # (data sets, *plates, *event)
        self._shapes: dict[str, torch.Size] = {}
        known = [name for name, site in sites.items() if _has_values(site)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(
                    f"Expected observations of the model's sites, {', '.join(map(repr, known))}; got one of '{name}'."
                )
            self._read(name, as_tensor(name, value, sites[name]["value"]), sites[name], nesting)

    def _read(self, name: str, value: Tensor, site: Any, nesting: int) -> None:
        own = self._shapes[name] = site["fn"].shape()
        if value.shape == own:
            self._own[name] = value
            return
        try:
            value = with_plate_dims(value, site, nesting, 1)
        except ValueError as error:
            several = ", ".join(("data sets", *map(str, own)))
            raise ValueError(
                f"Expected observations of site '{name}' of shape {tuple(own)}, or ({several}); got "
                f"{tuple(value.shape)}."
            ) from error
        if len(value) != (self.num or len(value)) or len(value) == 0:
            raise ValueError(
                "Expected observations of the same number of data sets at all sites, at least one; got "
                f"{len(value)} at '{name}'" + (f" and {self.num} before it." if self.num else ".")
            )
        self.num = len(value)
        self._wide[name] = value

    def one(self, index: int = 0) -> dict[str, Tensor]:
        """Returns the values of one data set, of the sites' own shapes."""
        batched = {name: value[index].reshape(self._shapes[name]) for name, value in self._wide.items()}
        return {**self._own, **batched}

    def batch(self, rows: slice = slice(None)) -> dict[str, Tensor]:
        """Returns the values of some data sets: ``(data sets, *plates, *event)``, or the own shape if of all."""
        return {**self._own, **{name: value[rows] for name, value in self._wide.items()}}


def as_mapping(observations: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns observations as a mapping, empty for None.

    Raises:
        TypeError: anything else.
    """
    if observations is None:
        return {}
    if not isinstance(observations, Mapping):
        raise TypeError(
            f"Expected observations as a mapping from sites to values; got {type(observations).__name__}."
        )
    return observations


def as_tensor(name: str, given: Any, like: Tensor) -> Tensor:
    """Returns a site's given value on the device of another one, and if both are floats in its dtype.

    Raises:
        TypeError: it is no tensor and cannot be made one.
    """
    try:
        value = torch.as_tensor(given, device=like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"Expected a tensor as the value of site '{name}'; got {given!r}.") from error
    if value.is_floating_point() and like.is_floating_point():
        value = value.to(like.dtype)
    return value


def observed_names(
    observed: str | Iterable[str], guide: Any = None, observations: Iterable[str] = ()
) -> tuple[str, ...]:
    """Returns the sites to condition on: those named, those that a guide was built for, and those with a value."""
    named = (observed,) if isinstance(observed, str) else observed
    return tuple(dict.fromkeys((*named, *getattr(guide, "observed", ()), *observations)))


def _has_values(site: Any) -> bool:
    return not (site_is_factor(site) or site["infer"].get("_deterministic"))
