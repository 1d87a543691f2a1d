"""The density of a guide given data: that of a posterior whose data have no density themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor

from pyro_nami.factors.bijections import bijection_to
from pyro_nami.inference.importance import weighted_draws
from pyro_nami.inference.priors import OwnPrior
from pyro_nami.inference.simulator_model import SimulatorModel
from pyro_nami.inference.site_messages import plate_nesting, with_idle_dims
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import over
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner

__all__ = ["GuideDensity"]

# Draws by which the share of a guide within its priors is told, to 3% of it where that is a half.
SHARE_DRAWS = 1_000


class GuideDensity(NamedTuple):
    """The density of a guide given one data set, within the supports of the priors.

    Attributes:
        target: the model, the guide and the data.
        sites: of a run of the model at one draw.
        draw: latent -> value in its support.
        log_share: nats, of the guide within priors that have a support of their own.
    """

    target: Target
    sites: Mapping[str, Any]
    draw: Mapping[str, Tensor]
    log_share: float

    @classmethod
    def of(cls, target: Target, draws: Mapping[str, Tensor]) -> GuideDensity:
        """Returns the density of a target's guide, some draws of which are ``(num, *site shape)``."""
        one = target.one()
        draw = {name: value[0] for name, value in draws.items()}
        sites = target.run_model(one, Runner({**draw, **one.data}))
        nesting = plate_nesting(sites.values())
        found = cls(replace(target, nesting=nesting), sites, draw, 0.0)
        if not any(isinstance(sites[name]["fn"], OwnPrior) for name in draw):
            return found
        model: Any = target.program.model
        assert isinstance(model, SimulatorModel)
        program = Program(model.without_data(), *target.program[1:3])
        made = weighted_draws(replace(target, program=program), one.data, SHARE_DRAWS).samples
        share = max(float(found.inside(made).double().mean()), 1 / SHARE_DRAWS)
        return found._replace(log_share=math.log(share))

    def inside(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns which values ``(num, *site shape)`` lie in the supports of the priors, ``(num,)``."""
        found = []
        for name, value in values.items():
            fn = self.sites[name]["fn"]
            own = fn.contains(value) if isinstance(fn, OwnPrior) else fn.support.check(value)
            found.append(own.reshape(len(value), -1).all(-1))
        return torch.stack(found).all(0)

    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the log density at values ``(num, *site shape)``, in nats; minus infinity outside of a support."""
        inside = self.inside(values)
        held = {
            name: torch.where(over(inside, value), value, self.draw[name].to(value))
            for name, value in values.items()
        }
        nesting = self.target.nesting
        wide = {n: with_idle_dims(value, self.sites[n], nesting, 1) for n, value in held.items()}
        with pyro.validation_enabled(False):
            found = self.target.guide_log_prob(self.target.extent(len(inside)), wide)
        return (found - self.log_share).where(inside, -torch.inf)

    def mode(self, draw: Mapping[str, Tensor], *, steps: int = 100) -> dict[str, Tensor]:
        """Returns the values at the mode of the density of the values, by a search uphill from a draw.

        Raises:
            NotImplementedError: discrete latents, or that no bijection is known for.
        """
        maps = {name: bijection_to(self.sites[name]["fn"].support) for name in draw}
        start = [maps[name].inv(value).detach() for name, value in draw.items()]
        free = [each.clone().requires_grad_() for each in start]
        optimizer = torch.optim.LBFGS(free, max_iter=steps, line_search_fn="strong_wolfe")

        def values() -> dict[str, Tensor]:
            return {name: maps[name](each) for name, each in zip(draw, free)}

        def loss() -> Tensor:
            optimizer.zero_grad()
            found = -self.log_prob({name: value[None] for name, value in values().items()})[0]
            found.backward()  # type: ignore[no-untyped-call]
            return found

        with torch.enable_grad():
            optimizer.step(loss)
        with torch.no_grad():
            ends = [draw, values()]
            both = {name: torch.stack([end[name] for end in ends]) for name in draw}
            best = int(self.log_prob(both).nan_to_num(-torch.inf).argmax())
            return {name: value[best] for name, value in both.items()}
