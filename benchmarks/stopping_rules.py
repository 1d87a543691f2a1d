"""Rules of `stopping.py` by which a guide is trained, and when that ends.

- `rounds`, the rule of `pyro_nami.fit.training`: rounds of twice as many steps and half the rate, while one costs less
  time than the draws that the weights waste.
- `rabvi`, after Welandawe et al. 2022, "Robust, automated, and accurate black-box variational inference": steps of a
  fixed rate until split R-hat is below 1.1 over a window; then weights are averaged over the window, once the Monte
  Carlo error is small; then half the rate, while the predicted gain of that is above 0.1 nats and worth its steps.
  Departures: Adam, from the rate of `rounds`. R-hat and error are those of the losses, as weights of networks drift
  along directions in which the guide is the same (the median of their R-hats stays at 1.2 to 2.2 on `effects`). Gains
  are differences of ELBOs, as the guides' divergences have no closed form. A rate is predicted to take as many steps as
  the one before.
- `dadvi`, after Giordano, Ingram and Broderick 2023, "Black box variational inference with a deterministic objective":
  L-BFGS on 30 draws by the same random numbers at each evaluation, until its tolerance. The paper warns that a family
  richer than a mean field takes more draws. Departure: no trust region, no second derivatives.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from pyro_nami import AutoNaMIGuide, WeightedSamples, importance_sample
from pyro_nami.fit.at_draws import AtDraws
from pyro_nami.fit.fitting import DEFENSIVE, FEWEST
from pyro_nami.fit.training import train
from pyro_nami.inference.target import Target
from pyro_nami.program.program import Program

__all__ = ["DRAWS", "RULES", "Training", "weighed"]

DRAWS, ELBO_DRAWS = 4000, 1000
PARTICLES, RATE = 16, 0.02  # of a step, and of Adam, as `fit` begins
SAME = 5000  # added to a seed, for the random numbers of ELBOs that are compared
# RABVI
STATIONARY = 1.1  # split R-hat
WINDOW = 100  # steps, the shortest window; 200 in the paper, which has cheaper steps
WINDOWS = 5  # compared, up to 95% of the steps
ERROR = 0.1  # nats, standard error of the mean loss over a window
LEAST_GAIN = 0.1  # nats that half the rate is to gain
# DADVI
FIXED = 30  # draws
WALL = 1e4  # nats, by which an objective that is not finite counts as worse than the first
TOLERANCE = 1e-3  # nats, and weights, by which an iteration changes at least


@dataclass
class Training:
    """A guide on one data set, as `fit` has it before it trains it.

    Attributes:
        drawn: weighted draws of the guide at its first weights.
        seconds: of processor time, that a rule has at most.
    """

    target: Target
    guide: Any
    drawn: WeightedSamples
    seconds: float

    @classmethod
    def of(cls, model: Callable, args: tuple, seconds: float) -> Training:
        """Returns the training of a guide, whose structure is found here."""
        guide = AutoNaMIGuide(model).for_weights()
        with torch.no_grad():
            guide(*args)
        assert any(note.rule == "learned" for note in guide.rules.values())
        guide.answer_for(*args)
        guide.mix()
        target = Target(Program(model, args, {}), guide, prior_share=DEFENSIVE)
        return cls(target, guide, weighed(target, DRAWS), seconds)

    def __post_init__(self) -> None:
        self._model = AtDraws.of(self.target, self.drawn.resample(100)).target
        self._begun = time.process_time()
        self.parameters = [each for each in self.guide.parameters() if each.requires_grad]

    def begin(self) -> None:
        """Starts the clock."""
        self._begun = time.process_time()

    @property
    def spent(self) -> float:
        """Seconds since the clock was started."""
        return time.process_time() - self._begun

    @property
    def is_over(self) -> bool:
        """Whether all seconds are spent."""
        return self.spent > self.seconds

    def loss(self, draws: int) -> Tensor:
        """Returns the negative ELBO in nats by some draws at once, with its gradient."""
        elbo = Trace_ELBO(draws, max_plate_nesting=self._model.nesting, vectorize_particles=True)
        return elbo.differentiable_loss(
            self._model.program.model, self.guide, *self.target.program.args
        )

    def exact_loss(self, draws: int) -> Tensor:
        """Returns the negative ELBO in nats with the gradient of this very number.

        The gradient of `loss` leaves out that of the guide's log density at given values, whose mean is zero.
        """
        args, dim = self.target.program.args, -1 - self._model.nesting
        with pyro.plate("fixed", draws, dim=dim):
            drawn = poutine.trace(self.guide).get_trace(*args)
            values = {name: drawn.nodes[name]["value"] for name in self.guide.rules}
            sites = poutine.trace(poutine.condition(self._model.program.model, values))
            log_p = sites.get_trace(*args).log_prob_sum() / draws
        return self.guide.log_prob(values, *args).mean() - log_p

    @torch.no_grad()
    def set(self, weights: Tensor) -> None:
        """Sets all weights, ``(number,)``, in place, so that the guide can tell that no step has changed them."""
        sizes = [each.numel() for each in self.parameters]
        for parameter, value in zip(self.parameters, weights.split(sizes)):
            parameter.copy_(value.view_as(parameter))

    def elbo(self) -> float:
        """Returns the ELBO in nats by `ELBO_DRAWS` draws."""
        return float(weighed(self.target, ELBO_DRAWS, 0.0).log_weights.mean())


def rounds(training: Training, seed: int) -> dict[str, float]:
    """Trains by the rule of `fit`; returns the steps."""
    steps = itertools.count()
    train(
        training.target,
        training.drawn,
        training.drawn.num_samples,
        lambda: weighed(training.target, FEWEST),
        training.seconds,
        lambda: next(steps),
    )
    return {"steps": next(steps)}


def rabvi(training: Training, seed: int) -> dict[str, float]:
    """Trains by RABVI's rule; returns the steps, and how many rates they had."""
    rate, total = RATE, 0
    elbos: list[float] = []
    while True:
        steps = _at_rate(training, rate)
        total += steps
        pyro.set_rng_seed(seed + SAME)  # the same draws at all rates
        elbos.append(training.elbo())
        gains = [after - before for before, after in zip(elbos, elbos[1:])]
        if training.is_over or (gains and not _is_worth(gains, steps / total)):
            return {"steps": total, "rates": len(elbos)}
        rate /= 2


def _at_rate(training: Training, rate: float) -> int:
    """Takes steps of one rate until losses are stationary, and leaves mean weights of the window; returns how many."""
    optimizer = torch.optim.Adam(training.parameters, lr=rate)
    losses: list[float] = []
    weights: list[Tensor] = []
    window = WINDOW
    while not training.is_over:
        optimizer.zero_grad()
        loss = training.loss(PARTICLES)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        weights.append(parameters_to_vector(training.parameters).detach())
        longest = int(0.95 * len(losses))
        if len(losses) % (WINDOW // 2) == 0 and longest > WINDOW:
            found = torch.tensor(losses)
            sizes = torch.linspace(WINDOW, longest, WINDOWS).int().tolist()
            r_hats = [float(split_gelman_rubin(found[None, -size:], 0, 1)) for size in sizes]
            window = sizes[r_hats.index(min(r_hats))]
            effective = effective_sample_size(found[None, -window:], 0, 1)
            error = found[-window:].std() / effective.sqrt()
            if min(r_hats) < STATIONARY and error < ERROR:
                break
    if weights:
        training.set(torch.stack(weights[-window:]).mean(0))
    return len(losses)


def _is_worth(gains: list[float], last_steps: float) -> bool:
    """Returns whether half the rate is predicted to gain enough.

    Gains are geometric in the paper's model. The index of inefficiency is the relative root of the divergence that is
    left, a tolerance added, times the relative steps.

    Args:
        gains: nats, of each halving of the rate.
        last_steps: those of the last rate, as a share of all.
    """
    shrinks = 0.5 if len(gains) == 1 or gains[-2] <= 0 else min(gains[-1] / gains[-2], 0.9)
    predicted = gains[-1] * shrinks
    if predicted < LEAST_GAIN:
        return False
    left = predicted / (1 - shrinks)
    inefficiency = (shrinks**0.5 + (LEAST_GAIN / left) ** 0.5) * last_steps
    return inefficiency < 1


class _OutOfTime(Exception):
    """The seconds are spent within a search."""


def dadvi(training: Training, seed: int) -> dict[str, float]:
    """Trains by DADVI's rule; returns the evaluations, and by how many nats the objective is overfit."""
    training.loss(FIXED).backward()  # which centers what networks read
    training.guide.eval()  # in which nothing but weights changes between evaluations
    found: list[tuple[float, Tensor]] = []
    search = torch.optim.LBFGS(
        training.parameters,
        max_iter=100_000,
        max_eval=100_000,
        tolerance_grad=TOLERANCE,
        tolerance_change=TOLERANCE,
        line_search_fn="strong_wolfe",
    )

    def evaluate() -> Tensor:
        if training.is_over:
            raise _OutOfTime
        search.zero_grad()
        pyro.set_rng_seed(seed)
        loss = torch.tensor(torch.nan)
        with contextlib.suppress(ValueError):  # of NaN, where a step was too long
            loss = training.exact_loss(FIXED)
            loss.backward()
        slopes = [each.grad for each in training.parameters if each.grad is not None]
        if not all(each.isfinite().all() for each in (loss, *slopes)):
            search.zero_grad(set_to_none=False)
            return torch.tensor(found[0][0] + WALL)
        found.append((float(loss), parameters_to_vector(training.parameters).detach().clone()))
        return loss

    with contextlib.suppress(_OutOfTime):
        search.step(evaluate)
    objective, best = min(found, key=lambda each: each[0])
    training.set(best)
    training.guide.train()
    pyro.set_rng_seed(seed + SAME)
    return {"steps": len(found), "overfit": -objective - training.elbo()}


RULES: dict[str, Callable[[Training, int], dict[str, float]]] = {
    "none": lambda training, seed: {"steps": 0},
    "rounds": rounds,
    "rabvi": rabvi,
    "dadvi": dadvi,
}


def weighed(target: Target, num: int, share: float = DEFENSIVE) -> WeightedSamples:
    """Returns weighted draws of a guide, some share of them the prior's."""
    model, args = target.program.model, target.program.args
    return importance_sample(model, target.guide, *args, num_samples=num, defensive=share)
