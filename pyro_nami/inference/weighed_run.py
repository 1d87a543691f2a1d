"""A run of a guide, and a run of the model at the guide's draws, with log densities, which are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro
import torch
from pyro.poutine.util import site_is_factor
from torch import Tensor

from pyro_nami.inference.target import Extent, Target, log_densities, per_draw
from pyro_nami.program.isolation import rng_state, set_rng_state
from pyro_nami.program.runner import Runner

__all__ = [
    "CHECK",
    "BadDensity",
    "Weigh",
    "Weighed",
    "fault_of",
    "lost_draws",
    "summed",
    "weighed",
    "weighed_run",
    "whole",
]

CHECK = "Check the site's parameters and the data that it sees."


class BadDensity(ValueError):
    """A log density that no weight can be made of; the message names the site."""


class Weighed(NamedTuple):
    """The sites of a run of the guide, and of one of the model at its values, with their log densities."""

    extent: Extent
    guide: dict[str, Any]
    model: dict[str, Any]
    log_q: dict[str, Tensor]
    log_p: dict[str, Tensor]


# Runs guide and model of a target for an extent, at given values of latents; see `weighed`.
Weigh = Callable[[Target, Extent, Mapping[str, Tensor]], Weighed]


def summed(log_probs: Mapping[str, Tensor], extent: Extent) -> Tensor:
    total: Any = sum(per_draw(log_probs, extent).values())
    return total


def whole(site: Any) -> Tensor:
    return site["value"].expand(site["fn"].shape())


def weighed_run(
    target: Target,
    extent: Extent,
    values: Mapping[str, Tensor] | None = None,
    weigh: Weigh | None = None,
) -> Weighed:
    """Runs the guide, at its own draws or at given values, and the model at the guide's; or runs ``weigh``.

    Where distributions refuse some draws, the run is repeated without validation, and the model's log density is NaN
    or minus infinity there.

    Raises:
        BadDensity: a distribution refuses NaN of the guide.
    """
    weigh, state = weigh or weighed, rng_state()
    try:
        return weigh(target, extent, values or {})
    except ValueError as error:
        # Only the global switch keeps distributions that a model makes from refusing NaN. Without validation the run
        # reaches a log density, which has a site to name.
        with pyro.validation_enabled(False):
            try:
                set_rng_state(state)  # so that the refused values are drawn again
                run = weigh(target, extent, values or {})
                fault_of(run)
            except BadDensity as bad:
                raise bad from error
            except Exception:  # the same error, or what follows from it
                raise error from None
    return run


def lost_draws(run: Weighed) -> Tensor:
    """Returns the draws at which the model's log density is NaN."""
    flags = {name: part.isnan() for name, part in run.log_p.items()}
    return torch.stack([count > 0 for count in per_draw(flags, run.extent).values()]).any(0)


def weighed(target: Target, extent: Extent, values: Mapping[str, Tensor]) -> Weighed:
    guide = target.run_guide(extent, Runner(values))
    # What the guide observes is no part of its density, but what it weights by a factor is.
    guide = {
        name: site
        for name, site in guide.items()
        if not site["is_observed"] or site_is_factor(site)
    }
    drawn = {name: site["value"] for name, site in guide.items() if not site["is_observed"]}
    model = target.run_model(extent, Runner({**drawn, **extent.data}))
    return Weighed(extent, guide, model, log_densities(guide), log_densities(model))


def fault_of(run: Weighed) -> str:
    """Returns where the model's log density is NaN.

    Raises:
        BadDensity: it is +inf, or the guide's is NaN, or infinite where it drew.
    """
    roles = {"guide": per_draw(run.log_q, run.extent), "model": per_draw(run.log_p, run.extent)}
    fault = ""
    for kind, bad in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        for role, log_probs in roles.items():
            for name, log_prob in log_probs.items():
                found = int(bad(log_prob).sum())
                told = f"a finite log density at site '{name}' of the {role}; got {kind}"
                if found and (kind, role) == ("NaN", "model"):
                    fault = fault or told
                elif found and not (kind == "-inf" and (role == "model" or not run.guide)):
                    raise BadDensity(
                        f"Expected {told} for {found} of {log_prob.numel()} draws. {CHECK}"
                    )
    return fault
