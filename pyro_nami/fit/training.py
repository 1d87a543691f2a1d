"""Trains the learned factors of a guide on one data set, until more steps cost more than the draws they would save."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam

from pyro_nami.fit.at_draws import AtDraws
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import K_MAX, WeightedSamples

__all__ = ["train"]

FIRST_ROUND = 200  # steps; each round has twice as many as the one before
MOST_ROUNDS = 7  # 25,400 steps
RATE = 0.02  # of the first round; each round has half the rate of the one before
DECAY = 0.1  # of the rate within a round
PARTICLES = 16  # draws in each step, at once
PARTICLES_ONE_BY_ONE = 2  # where the model takes one at a time
SHOWN = 10  # steps, after which progress is told
LOSSES = 20  # estimates, of `PARTICLES` draws each, whose mean is the loss after a round


def train(
    target: Target,
    guide: Any,
    drawn: WeightedSamples,
    num: int,
    weigh: Callable[[], WeightedSamples],
    seconds: float,
    tick: Callable[[str], None],
) -> None:
    """Trains a guide in rounds, and leaves it as it was after the one with the lowest loss.

    A round is made while it costs less time than the draws that the weights waste: with an effective share s of the
    draws, n effective ones cost n / s of them.

    Args:
        target: the model and its data.
        guide: its guide.
        drawn: weighted draws of the guide as it is.
        num: how many draws are wanted.
        weigh: makes some anew.
        seconds: of processor time, in which the last round is to end.
        tick: called with what is done.
    """
    model = AtDraws.of(target, drawn.resample(FIRST_ROUND))
    particles = PARTICLES if model.is_at_once else PARTICLES_ONE_BY_ONE
    elbo = Trace_ELBO(particles, model.target.nesting, vectorize_particles=model.is_at_once)
    args, kwargs = target.program.args, target.program.kwargs
    # whose own parameters stay as they are
    held = poutine.block(model.target.program.model, hide_types=["param"])

    @torch.no_grad()
    def loss() -> float:
        mean = fmean(elbo.loss(held, guide, *args, **kwargs) for _ in range(LOSSES))
        return math.inf if math.isnan(mean) else mean

    begun, a_round = time.process_time(), 0.0
    best, weights = loss(), copy.deepcopy(guide.state_dict())
    for i in range(MOST_ROUNDS):
        if time.process_time() - begun + 2 * a_round > seconds:
            break
        steps, before = FIRST_ROUND * 2**i, time.process_time()
        rate = {"lr": RATE / 2**i, "lrd": DECAY ** (1 / steps)}
        svi = SVI(held, guide, ClippedAdam(rate), elbo)
        for step in range(steps):
            svi.step(*args, **kwargs)
            if step % SHOWN == 0:
                tick(f"learning, {step + steps - FIRST_ROUND:,} steps")
            if time.process_time() - begun > seconds:
                break
        a_round = time.process_time() - before
        if (now := loss()) <= best:
            best, weights = now, copy.deepcopy(guide.state_dict())
        before = time.process_time()
        found = weigh()
        a_draw = (time.process_time() - before) / found.num_samples
        share = float(found.effective_sample_size) / found.num_samples
        wasted = num / share * a_draw
        if found.pareto_k <= K_MAX and wasted < 2 * a_round:
            break
    guide.load_state_dict(weights)
