"""Draws of a guide that lie within priors of one's own, whose supports the guide may not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.inference.importance import weighted_draws
from pyro_nami.inference.priors import OwnPrior
from pyro_nami.inference.simulator_model import SimulatorModel
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import WeightedSamples, over
from pyro_nami.messages import quoted, warn

__all__ = ["within_priors"]

# Rounds of draws, each of as many as are asked for. At ten times more, a guide of which nothing lies within the prior
# takes long to tell; at ten times less, one of which a third does lacks draws.
MOST_ROUNDS = 20


def within_priors(
    target: Target, model: SimulatorModel, data: Mapping[str, Any], num: int
) -> WeightedSamples:
    """Returns draws of a guide where the priors' densities are positive.

    Args:
        target: the guide, and the model without data.
        model: with its priors.
        data: observed site -> value.
        num: of draws, for each data set.

    Raises:
        ValueError: hardly any draw lies there.
    """
    drawn = weighted_draws(target, data, num)
    priors = getattr(model.model, "priors", {})
    own = {name: prior for name, prior in priors.items() if isinstance(prior, OwnPrior)}
    if not own:
        return drawn
    samples, inside = drawn.samples, _inside(own, drawn.samples)
    for _ in range(MOST_ROUNDS):
        if inside.sum(0).min() >= num:
            break
        more = weighted_draws(target, data, num).samples
        inside = torch.cat([inside, _inside(own, more)])
        samples = {name: torch.cat([value, more[name]]) for name, value in samples.items()}
    found = inside.sum(0)
    if found.min() == 0:
        raise ValueError(
            f"Expected draws where the prior of {quoted(own)} has a density; the guide makes none there. Train on more "
            "simulations, or check that the prior's sample and log_prob, and the data, belong together."
        )
    if found.min() < num:
        warn(
            f"Only {int(found.min())} of {len(inside)} draws lie where the prior of {quoted(own)} has a density; some "
            "are repeated. Give the prior its `support`, or train on more simulations."
        )
    first = (~inside).to(torch.uint8).argsort(dim=0, stable=True)
    rows = torch.arange(num).reshape(-1, *(1,) * (inside.dim() - 1)) % found
    index = first.gather(0, rows)
    kept = {
        name: value.gather(0, over(index, value).expand(num, *value.shape[1:]))
        for name, value in samples.items()
    }
    return WeightedSamples(kept, drawn.log_weights, drawn.plates)


def _inside(own: Mapping[str, OwnPrior], samples: Mapping[str, Tensor]) -> Tensor:
    """Returns which draws lie within all priors, ``(draws, *data sets)``."""
    return torch.stack([prior.contains(samples[name]) for name, prior in own.items()]).all(0)
