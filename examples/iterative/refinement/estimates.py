"""Runs a guide at given estimates, and the model at its draws: log weights and gradients for one refinement step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from gumbel_softmax import gumbel_softmax
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from relaxation import Drawn
from torch import Tensor

from pyro_nami.factors.wrappers import innermost
from pyro_nami.guide.call import Call
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.program.masks import log_density_of
from pyro_nami.program.plate_dims import frames_of, own_dims
from pyro_nami.program.runner import is_fixed
from refinement.updates import Refined, Refinement

__all__ = ["EstimateRun", "errors", "log_weights", "run_at"]


class EstimateRun(NamedTuple):
    """A guide and its model run by an estimate.

    Attributes:
        q: trace of the guide.
        sites: of the model, at its draws; ``relaxed`` are the densities of those that were relaxed.
        latents: names of all that the guide draws.
        nesting: number of plate dims of the model.
        num_particles: draws, along a dim to the left of these if there are several.
    """

    q: poutine.Trace
    sites: Mapping[str, Any]
    relaxed: Mapping[str, Any]
    latents: Collection[str]
    nesting: int
    num_particles: int


def run_at(
    guide: AutoNaMIGuide,
    call: Call,
    estimate: Refinement,
    num_particles: int,
    temperature: float | None,
) -> EstimateRun:
    """Runs a guide by an estimate, and the model at its draws; discrete draws are relaxed at a temperature."""
    plan = guide._made()
    nesting, drawn = plan.plates.nesting, None if temperature is None else Drawn(temperature)
    particles = (
        pyro.plate("_particles", num_particles, dim=-1 - nesting)
        if num_particles > 1
        else nullcontext()
    )
    with poutine.block(), own_dims(), particles, poutine.trace() as tracer, drawn or nullcontext():
        guide._drawn(call, estimate)
    q = tracer.trace
    values = {name: q.nodes[name]["value"] for name in q.stochastic_nodes if name in plan.rules}
    with poutine.block(), own_dims():
        sites = call.run({**call.held, **values})
    relaxed = {}
    if drawn is not None:
        relaxed = {
            name: gumbel_softmax(sites[name]["fn"], drawn.temperature) for name in drawn.names
        }
    return EstimateRun(q, sites, relaxed, plan.rules.keys() & sites.keys(), nesting, num_particles)


def log_weights(run: EstimateRun) -> Tensor:
    """Returns log p(data, latents) - log q(latents) in nats; see `AutoIterativeGuide.log_weights`."""
    run.q.compute_log_prob()
    terms = [(-site["log_prob"], site) for site in run.q.nodes.values() if site["type"] == "sample"]
    for name, site in run.sites.items():
        if not site_is_subsample(site):
            density = log_density_of({**site, "fn": run.relaxed.get(name, site["fn"])})
            terms.append((density * site["scale"], site))
    main, total = _main(run), torch.zeros(())
    for term, site in terms:
        term = term.reshape((1,) * (run.nesting + 1 - term.dim()) + term.shape)
        others = [dim for dim in range(-run.nesting, 0) if main is None or dim != main.dim]
        term = term.sum(others) if others else term  # draws, and instances if there are any
        term = term.unsqueeze(-1) if main is None else term
        inside = main is None or main.name in _plates(site)
        total = total.to(term) + (term if inside else term / main.size)
    return total.expand(run.num_particles, 1 if main is None else main.size)


def errors(run: EstimateRun, part: Refined) -> Tensor:
    """Returns (x - mean) / variance of all sites of a group's plates, latent and observed, ``(*plates, n)``.

    Of a Bernoulli it is x - mean, the slope by its logit.

    Raises:
        NotImplementedError: for a site of another kind, or in other plates as well.
    """
    batch, found = part.group.factors[0].batch, []
    for name, site in run.sites.items():
        plates = _plates(site)
        if site_is_subsample(site) or is_fixed(site) or not plates & batch:
            continue
        kind: Any = type(innermost(site["fn"]))
        is_normal = kind is dist.Normal
        if plates != batch or not (is_normal or site["is_observed"] and kind is dist.Bernoulli):
            raise NotImplementedError(
                "Expected a latent Gaussian model, with Normal or Bernoulli data, all in one plate, for "
                f'encode="errors"; got site \'{name}\', {kind.__name__}. Use encode="gradients".'
            )
        error = site["value"] - site["fn"].mean
        error = error / site["fn"].variance if is_normal else error
        error = error.unsqueeze(-1).flatten(-1 - site["fn"].event_dim)
        error = error.mean(0) if run.num_particles > 1 else error
        found.append(error.expand(*part.plates, -1))
    return torch.cat(found, -1)


def _main(run: EstimateRun) -> Any:
    """Returns the frame of the outermost plate that all latents are in, None if there is none."""
    latents = [run.sites[name] for name in run.latents]
    frames = [frame for site in latents for frame in frames_of(site)]
    shared = [frame for frame in frames if all(frame.name in _plates(site) for site in latents)]
    return min(shared, key=lambda frame: frame.dim, default=None)


def _plates(site: Any) -> set[str]:
    return {frame.name for frame in frames_of(site)}
