"""Observed values as users give them, ``observations={site: value}``: of one data set, or a batch of several.

Names and shapes are checked here for everything that takes observations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.inference.site_messages import Sites, Values, with_idle_dims
from pyro_nami.messages import quoted
from pyro_nami.program.runner import is_fixed

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

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> trace = pyro.poutine.trace(lambda: pyro.sample("x", dist.Normal(torch.zeros(3), 1.0))).get_trace()
        >>> batch = Observations({"x": torch.ones(5, 3)}, {"x": trace.nodes["x"]}, nesting=1)
        >>> batch.num, batch.one()
        (5, {'x': tensor([1., 1., 1.])})
    """

    def __init__(self, given: Mapping[str, Any], sites: Sites, nesting: int) -> None:
        self.num: int | None = None
        self._values: dict[
            str, Tensor
        ] = {}  # of the own shape for all data sets, or (data sets, *plates, *event)
        self._shapes = {
            name: site["fn"].shape() for name, site in sites.items() if not is_fixed(site)
        }
        for name, value in given.items():
            if name not in self._shapes:
                raise ValueError(
                    f"Expected observations of the model's sites, {quoted(self._shapes)}; got one of '{name}'."
                )
            value = as_tensor(name, value, sites[name]["value"])
            if value.shape != self._shapes[name]:
                value = self._batch(name, value, sites[name], nesting)
            self._values[name] = value

    def _batch(self, name: str, value: Tensor, site: Any, nesting: int) -> Tensor:
        try:
            wide = with_idle_dims(value, site, nesting, 1)
        except ValueError as error:
            own = self._shapes[name]
            several = ", ".join(("data sets", *map(str, own)))
            raise ValueError(
                f"Expected observations of site '{name}' of shape {tuple(own)}, or ({several}); got "
                f"{tuple(value.shape)}. Other numbers of rows need other arguments of the model, as in posterior.at()."
            ) from error
        if len(wide) != (self.num or len(wide)) or len(wide) == 0:
            raise ValueError(
                "Expected observations of the same number of data sets at all sites, at least one; got "
                f"{len(wide)} at '{name}'" + (f" and {self.num} before it." if self.num else ".")
            )
        self.num = len(wide)
        return wide

    def one(self, index: int = 0) -> Values:
        """Returns the values of one data set, of the sites' own shapes."""
        rows = self.batch(slice(index, index + 1))
        return {name: value.reshape(self._shapes[name]) for name, value in rows.items()}

    def batch(self, rows: slice | Tensor = slice(None)) -> Values:
        """Returns the values of some data sets: ``(data sets, *plates, *event)``, or the own shape if of all."""
        return {
            name: value if value.shape == self._shapes[name] else value[rows]
            for name, value in self._values.items()
        }


def as_mapping(observations: Any) -> Mapping[str, Any]:
    """Returns observations as a mapping, empty for None.

    Raises:
        TypeError: anything else.
    """
    if observations is None:
        return {}
    if not isinstance(observations, Mapping):
        raise TypeError(
            f"Expected data as a mapping from observed sites to values; got a {type(observations).__name__}. "
            "Pass {'site': value}."
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
        raise TypeError(
            f"Expected a tensor as the value of site '{name}'; got {type(given).__name__}."
        ) from error
    return value.to(like.dtype) if value.is_floating_point() and like.is_floating_point() else value


def observed_names(
    observed: str | Iterable[str], guide: Any = None, observations: Iterable[str] = ()
) -> tuple[str, ...]:
    """Returns the sites to condition on: the sites named, the sites that a guide was built for, the sites observed."""
    named = (observed,) if isinstance(observed, str) else observed
    return tuple(dict.fromkeys((*named, *getattr(guide, "observed", ()), *observations)))
