"""Trains the learned factors of a guide on one data set, until more steps cost more than the draws they would save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

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
PARTICLES = 16
PARTICLES_ONE_BY_ONE = 2


def train(
    target: Target,
    guide: Any,
    drawn: WeightedSamples,
    weigh: Callable[[], WeightedSamples],
    seconds: float,
    tick: Callable[[str], None],
) -> WeightedSamples:
    """Trains a guide in rounds; returns its weighted draws after the last one, or those before if no round is better.

    A round is made while it costs less time than the draws that the weights waste: with an effective share s of the
    draws, n effective ones cost n / s of them.

    Args:
        target: the model and its data.
        guide: its guide.
        drawn: weighted draws of the guide as it is.
        weigh: makes such draws anew.
        seconds: of processor time, beyond which no round begins.
        tick: called with what is done.
    """
    model = AtDraws.of(target, drawn.resample(FIRST_ROUND))
    particles = PARTICLES if model.is_at_once else PARTICLES_ONE_BY_ONE
    elbo = Trace_ELBO(
        particles,
        max_plate_nesting=model.target.nesting,
        vectorize_particles=model.is_at_once,
    )
    best, begun, a_step = drawn, time.process_time(), 0.0
    for i in range(MOST_ROUNDS):
        steps = FIRST_ROUND * 2**i
        spent = time.process_time() - begun
        if i and spent + steps * a_step > seconds:
            break
        rate = {"lr": RATE / 2**i, "lrd": DECAY ** (1 / steps)}
        svi = SVI(model.target.program.model, guide, ClippedAdam(rate), elbo)
        before = time.process_time()
        for step in range(steps):
            svi.step(*target.program.args, **target.program.kwargs)
            if step % 10 == 0:
                tick(f"learning, {step + FIRST_ROUND * (2**i - 1):,} steps")
        a_step = (time.process_time() - before) / steps
        before = time.process_time()
        found = weigh()
        a_draw = (time.process_time() - before) / found.num_samples
        if _waste(found) <= _waste(best):
            best = found
        wasted = found.num_samples / _share(found) * a_draw
        if found.pareto_k <= K_MAX and wasted < 2 * steps * a_step:
            break
    return best


def _share(drawn: WeightedSamples) -> float:
    return float(drawn.effective_sample_size) / drawn.num_samples


def _waste(drawn: WeightedSamples) -> tuple[bool, float]:
    """Returns whether weights have a heavy tail, and the log of how many draws make an effective one."""
    return not bool(drawn.pareto_k <= K_MAX), -math.log(max(_share(drawn), 1e-12))
