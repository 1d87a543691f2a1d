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
from pyro_nami.inference.target import Target
from pyro_nami.program.runner import Runner

__all__ = ["Region", "next_round"]

_DRAWS, _OUTSIDE = 10_000, 1e-4  # of the guide, and the share of them that may lie outside
_LEAST = 1e-3  # of the prior's draws that lie inside: other regions are enlarged


class Region:
    """Where a guide's density at one data set is no lower than at nearly all of its draws.

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
        target = Target(
            simulator.model.without_data(), guide, tuple(simulator.args), simulator.kwargs
        )
        self.target, _ = target.observing(as_mapping(data))
        if self.target.data.num is not None:
            raise ValueError(
                f"Expected one data set, of the site's shape, for rounds; got {self.target.data.num}."
            )
        self.names, self.least = simulator.latent, -torch.inf
        drawn = self.target.run_guide(self.target.extent(_DRAWS), Runner({}))
        own = self._log_prob({name: drawn[name]["value"] for name in self.names})
        prior = self._log_prob(self._prior())
        self.least = min(float(own.quantile(_OUTSIDE)), float(prior.quantile(1 - _LEAST)))

    @torch.no_grad()
    def holds(self, latents: Mapping[str, Tensor]) -> Tensor:
        """Returns which of some latents ``(draws, *plates, *event)`` lie inside, ``(draws,)``."""
        return self._log_prob(latents) >= self.least

    @torch.no_grad()
    def draw(self, num: int) -> dict[str, Tensor]:
        """Returns draws of the prior inside, latent -> ``(num, *plates, *event)``; no data are simulated for them."""
        parts: dict[str, list[Tensor]] = {name: [] for name in self.names}
        found = 0
        while found < num:
            latents = self._prior()
            inside = self.holds(latents)
            found += int(inside.sum())
            for name in self.names:
                parts[name].append(latents[name][inside])
        return {name: torch.cat(values)[:num] for name, values in parts.items()}

    def _prior(self) -> dict[str, Tensor]:
        extent = self.target.extent(_DRAWS)
        sites = self.target.run_model(extent, Runner(extent.data))
        return {name: sites[name]["value"].expand(sites[name]["fn"].shape()) for name in self.names}

    def _log_prob(self, latents: Mapping[str, Tensor]) -> Tensor:
        return self.target.guide_log_prob(self.target.extent(len(latents[self.names[0]])), latents)


def next_round(
    simulator: Simulator, guide: Callable, data: Mapping[str, Any], draws: JointDraws, num: int
) -> JointDraws:
    """Returns the simulations so far that lie in the guide's region, and ``num`` new ones there."""
    region = Region(simulator, guide, data)
    kept = draws.select(region.holds(draws.latents))
    new = simulator.draw(num, latents=region.draw(num))
    latents, observed = (
        {name: torch.cat((old[name], add[name])) for name in old}
        for old, add in zip(kept[:2], new[:2])
    )
    return JointDraws(latents, observed, draws.nesting)
