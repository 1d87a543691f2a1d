"""Trains the learned factors of a guide on one data set, until more steps cost more than the draws they would save."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam

from pyro_nami.fit.at_draws import AtDraws
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import K_MAX, WeightedSamples
from pyro_nami.program.many_draws import FEWEST_DRAWS

__all__ = ["train"]


@pyro.validation_enabled(
    False
)  # a draw outside of a support has an infinite loss, and ends nothing
def train(
    target: Target,
    drawn: WeightedSamples,
    num: int,
    weigh: Callable[[], WeightedSamples],
    seconds: float,
    tick: Callable[[], Any],
    *,
    steps: int = 200,
    rate: float = 0.02,
    particles: int | None = None,
) -> None:
    """Trains a guide in rounds, and leaves it as it was after the round with the lowest loss.

    Each round has twice as many steps as the round before, at half the rate. A round is made while it costs less time
    than the draws that the weights waste: with an effective share s of the draws, n effective draws cost n / s draws.

    Args:
        target: the model with its data, and its guide.
        drawn: weighted draws of the guide as it is.
        num: how many draws are wanted.
        weigh: returns new weighted draws of the guide.
        seconds: of processor time, in which the last round is to end.
        tick: called after each step.
        steps, rate: number of steps of the first round, and their learning rate.
        particles: draws in each step; by default 16, or 2 if the model takes one draw at a time.
    """
    guide: Any = target.guide
    model = AtDraws.of(target, drawn.resample(FEWEST_DRAWS))
    particles = particles or (16 if model.is_at_once else 2)
    elbo = Trace_ELBO(particles, model.target.nesting, vectorize_particles=model.is_at_once)
    _, args, kwargs, *_ = target.program
    held = poutine.block(model.target.program.model, hide_types=["param"])  # which stay as they are
    loss = functools.partial(_loss, elbo, held, target)
    end, a_round = time.process_time() + seconds, 0.0
    best, weights = loss(), copy.deepcopy(guide.state_dict())
    while time.process_time() + 2 * a_round <= end:
        before = time.process_time()
        # within a round the rate falls to a tenth
        svi = SVI(held, guide, ClippedAdam({"lr": rate, "lrd": 0.1 ** (1 / steps)}), elbo)
        for _ in range(steps):
            svi.step(*args, **kwargs)
            tick()
            if time.process_time() > end:
                break
        a_round = time.process_time() - before
        now = loss()
        if now <= best:
            best, weights = now, copy.deepcopy(guide.state_dict())
        if math.isinf(now):
            break  # a draw has left a support that latents move, and no gradient leads back
        before, found = time.process_time(), weigh()
        per_effective = (time.process_time() - before) / float(found.effective_sample_size)
        if found.pareto_k <= K_MAX and num * per_effective < 2 * a_round:
            break
        steps, rate = 2 * steps, rate / 2
    guide.load_state_dict(weights)


@torch.no_grad()
def _loss(elbo: Trace_ELBO, model: Callable, target: Target, *, count: int = 20) -> float:
    """Returns the average of some losses of a target's guide in nats; infinite where one is no number."""
    _, args, kwargs, *_ = target.program
    mean = fmean(elbo.loss(model, target.guide, *args, **kwargs) for _ in range(count))
    return math.inf if math.isnan(mean) else mean
