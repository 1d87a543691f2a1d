"""`LocatedData`: data that a model computes from latents, as zeros whose location the latents move.

``pyro.sample("r", Normal(0, s), obs=y - z)`` has the density of ``Normal(z - y, s)`` at 0, up to rounding. In the
second form the data stay what they are whatever the latents are, as closed forms and searches ask for.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.factors.wrappers import rewrapped
from pyro_nami.program.distribution_parts import arguments_of

__all__ = ["LocatedData", "located"]


class LocatedData(Messenger):
    """Shows observed sites of some names as `located` has them, where they are of a location family.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro import poutine
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("r", dist.Normal(0.0, 2.0), obs=5.0 - z)
        >>> run = poutine.condition(LocatedData(["r"])(model), {"z": torch.tensor(3.0)})
        >>> site = poutine.trace(run).get_trace().nodes["r"]
        >>> site["value"], site["fn"].loc
        (tensor(0.), tensor(-2.))
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] and msg["name"] in self.names:
            msg.update(located(msg))


def located(site: Any) -> dict[str, Any]:
    """Returns data of zeros, and the distribution moved by as much; empty where it is not one of a location."""
    fn, value = site["fn"], site["value"]
    moved = rewrapped(fn, partial(_moved, value=value))
    return {} if moved is None else {"fn": moved, "value": torch.zeros_like(value)}


def _moved(fn: Any, value: Tensor) -> Any:
    """Returns a distribution with a location that is less by a value; None if it is of no location family."""
    is_real = fn.support is constraints.real or fn.support is constraints.real_vector
    if not is_real or "loc" not in fn.arg_constraints:
        return None
    arguments = arguments_of(fn)
    return type(fn)(**{**arguments, "loc": fn.loc - value}, validate_args=False)
