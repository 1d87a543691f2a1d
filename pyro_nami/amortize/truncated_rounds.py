"""Simulation in rounds for one data set: later rounds draw from the prior where the last guide has its mass.

Let the region R hold the posterior at data x. Simulations with latents from the prior truncated to
R have the same posterior at x, so a guide may be trained on them as on simulations from the whole
prior. Simulations of earlier rounds whose latents lie in R are kept.

References:
    Deistler, Goncalves and Macke 2022, "Truncated proposals for scalable and hassle-free
    simulation-based inference".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.inference.observations import as_mapping
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.simulator_model import SimulatorModel
from pyro_nami.inference.site_messages import Values
from pyro_nami.inference.target import Target
from pyro_nami.program.runner import Runner

__all__ = ["Region", "next_round"]

DRAWS = 10_000  # of the guide, all of which the region holds; of the prior at a time


class Region:
    """The region where a guide's density at one data set is at least that at each of 10,000 of its draws.

    Args:
        simulator: of a model whose data have no density.
        guide: as it was compiled.
        data: observed site -> value, of one data set.

    Raises:
        ValueError: several data sets.
    """

    @torch.no_grad()
    def __init__(self, simulator: Simulator, guide: Callable, data: Mapping[str, Any]) -> None:
        assert isinstance(simulator.model, SimulatorModel)
        target = Target(simulator.program._replace(model=simulator.model.without_data()), guide)
        self.target, _ = target.observing(as_mapping(data))
        if self.target.data.num is not None:
            raise ValueError(
                f"Expected one data set, of the site's shape, for rounds; got {self.target.data.num}."
            )
        self.names = simulator.latent
        drawn = self.target.run_guide(self.target.extent(DRAWS), Runner({}))
        own = self._log_prob({name: drawn[name]["value"] for name in self.names})
        prior = self._log_prob(self._prior())
        # a region of less than a thousandth of the prior is enlarged, as drawing from it would take long
        self.least = min(float(own.min()), float(prior.quantile(0.999)))

    @torch.no_grad()
    def holds(self, latents: Values) -> Tensor:
        """Returns which of some latents ``(draws, *plates, *event)`` lie inside, ``(draws,)``."""
        return self._log_prob(latents) >= self.least

    @torch.no_grad()
    def draw(self, num: int) -> Values:
        """Returns draws of the prior inside, latent -> ``(num, *plates, *event)``; no data are simulated for them."""
        found = {name: value[:0] for name, value in self._prior().items()}
        while len(found[self.names[0]]) < num:
            latents = self._prior()
            inside = self.holds(latents)
            found = {name: torch.cat((found[name], latents[name][inside])) for name in found}
        return {name: value[:num] for name, value in found.items()}

    def _prior(self) -> Values:
        extent = self.target.extent(DRAWS)
        sites = self.target.run_model(extent, Runner(extent.data))
        return {name: sites[name]["value"].expand(sites[name]["fn"].shape()) for name in self.names}

    def _log_prob(self, latents: Values) -> Tensor:
        return self.target.guide_log_prob(self.target.extent(len(latents[self.names[0]])), latents)


def next_round(
    simulator: Simulator, guide: Callable, data: Mapping[str, Any], draws: JointDraws, num: int
) -> JointDraws:
    """Returns the simulations so far that lie in the guide's region, and ``num`` new ones there."""
    region = Region(simulator, guide, data)
    kept = draws.select(region.holds(draws.latents))
    new = simulator.draw(num, latents=region.draw(num))
    latents = {name: torch.cat((kept.latents[name], new.latents[name])) for name in new.latents}
    observed = {name: torch.cat((kept.observed[name], new.observed[name])) for name in new.observed}
    return JointDraws(latents, observed, draws.nesting)
