"""`Program`: a model with its arguments, and joint draws from its prior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_nami.messages import warn
from pyro_nami.program.computed_data import LocatedData
from pyro_nami.program.loops import NO_LOOPS, Loops
from pyro_nami.program.runner import Runner

__all__ = ["Program"]


class Program(NamedTuple):
    """A model with the arguments of one call.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model(loc):
        ...     return pyro.sample("x", dist.Normal(loc, 1.0))
        >>> program = Program(model, (torch.tensor(3.0),), {})
        >>> program.run(Runner({}))["x"]["fn"].loc
        tensor(3.)
    """

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    loops: Loops = NO_LOOPS  # loops of the model, whose sites are held as one each
    computed: frozenset[str] = (
        frozenset()
    )  # observed sites that are shown as `LocatedData` has them

    @property
    def roots(self) -> tuple:
        """The model and its arguments, one by one."""
        return self.model, *self.args, *self.kwargs.values()

    def leaves(self) -> list[Any]:
        """Returns all that the arguments hold, and the names of those that have one."""
        return tree_leaves([*self.args, *self.kwargs.values(), *self.kwargs])

    def run(self, runner: Runner) -> dict[str, Any]:
        """Runs the model as the runner says; returns its sample sites as a trace holds them, loops as one site each."""
        self.play(runner)
        return (
            self.loops.messages(runner.sites, runner.until is None) if self.loops else runner.sites
        )

    def play(self, runner: Runner) -> None:
        """Runs the model as the runner says, which may show its sites, each by itself, to handlers outside."""
        self.loops.prepare(runner)
        model = LocatedData(self.computed)(self.model) if self.computed else self.model
        runner.run(model, self.args, self.kwargs)

    def prior_draws(self, count: int) -> list[dict[str, Tensor]]:
        """Returns up to ``count`` joint draws of all sites, observed ones as well; fewer where the model fails at some.

        Of improper priors any values stand for draws. Where the model fails at all draws, a warning tells how.
        """
        draws = []
        failed = None
        with torch.no_grad():
            for _ in range(count):
                try:
                    sites = self.run(Runner({}, simulated=True))
                    draws.append({name: site["value"] for name, site in sites.items()})
                except NotImplementedError:
                    return draws
                except Exception as error:  # noqa: BLE001  whatever a model does at values far out
                    failed = error
        if failed is not None and not draws:
            warn(
                f"The model fails at every one of {count} draws of its prior, the last time with "
                f"{type(failed).__name__}: {failed} Networks are standardized by the guide's first call alone, and "
                "covariates are not found. Change the model, or its prior, so that it runs at draws of the prior."
            )
        return draws
