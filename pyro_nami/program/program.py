"""`Program`: a model with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pyro_nami.program.runner import Runner

__all__ = ["Program"]


class Program(NamedTuple):
    """A model with the arguments of one call.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> def model(loc):
        ...     return pyro.sample("x", dist.Normal(loc, 1.0))
        >>> Program(model, (torch.tensor(3.0),), {}).run(Runner({}))["x"]["fn"].loc
        tensor(3.)
    """

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]

    def run(self, runner: Runner) -> dict[str, Any]:
        """Runs the model as the runner says; returns its sample sites, as a trace holds them."""
        return runner.run(*self)
