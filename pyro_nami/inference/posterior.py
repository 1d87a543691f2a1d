"""`amortize`: from a model to the posteriors of all its data sets, in one call.

Change this module when what a simulator is given by default is to be larger, or trained otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from pyro_nami.factors.unconstrained import NormalFamily, SinhArcsinhFamily, flow
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.annealing import annealed_importance_sampling
from pyro_nami.inference.batches import as_draws
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.history import History
from pyro_nami.inference.importance import importance_sample
from pyro_nami.inference.rounds import next_round
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.simulator_model import SimulatorModel, with_drawn_data
from pyro_nami.inference.soap import SOAP
from pyro_nami.inference.target import Target
from pyro_nami.inference.weights import K_MAX, WeightedSamples, warn_of_bad
from pyro_nami.messages import OneByOne, warn

__all__ = ["AmortizedPosterior", "amortize"]

_WARM, _CLIP = 0.03, 5.0  # share of the steps in which the rate is reached; norm of gradients
_SIMULATIONS = 10_000
_HELD_OUT, _VALIDATIONS = 0.1, 50  # share of the simulations, and how often the loss on these is looked at
_BINS, _TRANSFORMS = 8, 3  # of splines, and of those in sequence between elements of a vector
_DEFENSIVE = 0.05  # share of draws that are the prior's, where a guide had to learn
_FEW, _KEPT = 1 / 3, 0.95  # shares of effective draws: below which there are to be others, and what annealing leaves
_MORE, _POWERS = 4, 4  # by what others are resampled from more draws, and how often at most
_ROWS = 2**21  # draws to resample from at a time

_number = itertools.count()


class _Setting(NamedTuple):
    """Widths of hidden layers, SOAP's rate, a share of the steps, decay over all of them, draws to move to."""

    hidden: tuple[int, ...]
    rate: float
    steps: float
    decay: float
    refresh: int


_SHARP = _Setting((64, 64), 3e-2, 1.0, 0.0, 4)
# Where that one is best early, simulations are learned by heart, by weights that are too large; or, within a quarter of
# the steps, by a rate that is too high for what is smooth.
_HELD, _SMOOTH = _SHARP._replace(decay=7.0), _SHARP._replace(rate=3e-3, steps=1 / 4)
_NEAR = _Setting((64,), 3e-3, 1 / 6, 0.0, 0)  # where modes are derived there is little to learn, and a step takes long
_EARLY, _LATE = 1 / 4, 4 / 5


@dataclass(frozen=True)
class AmortizedPosterior:
    """A guide that was compiled for a model: weighted draws of the posterior given any data.

    Attributes:
        model, args, kwargs: as given.
        guide: the trained guide; history: what happened in training.
    """

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    guide: AutoNaMIGuide
    history: History

    def __call__(
        self,
        data: Mapping[str, Any],
        num_samples: int = 1000,
        *,
        num_temperatures: int | None = None,
        defensive: float | None = None,
    ) -> WeightedSamples:
        """Returns draws with importance weights, and a warning where these are bad.

        The guide's draws are weighted, or, with more than two temperatures, carried to the posterior on the way that
        `annealed_importance_sampling` describes, with ``resample=True``.

        Where a factor was learned, one in twenty is a draw of the prior, so that modes which the guide misses show in
        the weights.

        Where data have no known density all weights are one, and there is no evidence: in a model `from_simulator`, and
        in one that conditions on a `pyro.deterministic` site or a `Delta`.

        Args:
            data: observed site -> value, of one data set or of several; see `importance_sample`.
            num_samples: draws for each data set.
            num_temperatures: of annealing, for all data sets; 2 to leave draws where they are. By default data sets of
                which less than a third of the draws are effective, or k-hat is above 0.7, have theirs resampled from 4,
                16, 64 or 256 times as many, if as many are effective then as are asked for; or else annealed, if the
                model can be, by as many temperatures as they need. Resampled draws weigh the same, so that the error
                of the evidence is told as 0; ask for it by 2.
            defensive: another share of the prior's draws; 0 for the guide's alone.
        """
        if defensive is None:
            defensive = _DEFENSIVE * any(note.rule == "learned" for note in self.guide.rules.values())
        options: dict[str, Any] = {"observations": data, "defensive": defensive, **self.kwargs}
        if isinstance(self.model, SimulatorModel):
            drawn = _unwarned(self.model.without_data(), self.guide, num_samples=num_samples, observations=data)
            return WeightedSamples(drawn.samples, torch.zeros_like(drawn.log_weights), drawn.plates)
        if num_temperatures in (None, 2):
            drawn = _unwarned(self.model, self.guide, *self.args, num_samples=num_samples, **options)
            good = (drawn.pareto_k <= K_MAX) & (drawn.effective_sample_size >= _FEW * num_samples)
            if num_temperatures is None and not good.all():
                drawn = self._improved(~good, data, drawn, options)
        else:
            drawn = self._annealed(num_samples, options, num_temperatures=num_temperatures)
        warn_of_bad(drawn)
        return drawn

    def _annealed(self, num_chains: int, options: Mapping[str, Any], **path: Any) -> WeightedSamples:
        chains = {"num_chains": num_chains, "num_leapfrog_steps": 5, "resample": True, **path}
        return annealed_importance_sampling(self.model, self.guide, *self.args, **chains, **options).weighted()

    def _improved(
        self, bad: Tensor, data: Mapping[str, Any], drawn: WeightedSamples, options: Mapping[str, Any]
    ) -> WeightedSamples:
        """Returns draws of which those of bad data sets are resampled from more, or else annealed, if they can be."""
        if bad.dim() == 0:
            several = {name: torch.as_tensor(value)[None] for name, value in data.items()}
            alone = {name: value.unsqueeze(1) for name, value in drawn.samples.items()}
            drawn = WeightedSamples(alone, drawn.log_weights.unsqueeze(1), drawn.plates)
            found = self._improved(bad[None], several, drawn, options)
            alone = {name: value.squeeze(1) for name, value in found.samples.items()}
            return WeightedSamples(alone, found.log_weights.squeeze(1), found.plates)
        target, _ = Target(self.model, None, self.args, self.kwargs).observing(data)
        num, samples, log_weights = drawn.num_samples, dict(drawn.samples), drawn.log_weights.clone()
        factors = torch.where(bad, float(_MORE), 0.0)  # how many times as many draws there are to be; inf: annealed
        for factor in (*(float(_MORE**power) for power in range(1, _POWERS + 1)), math.inf):
            size = max(1, int(_ROWS / num / (1 if factor == math.inf else factor)))
            for rows in filter(len, (factors == factor).nonzero().squeeze(-1).split(size)):
                here = {**options, "observations": target.data.batch(rows)}
                # Draws one by one would take long, and neither they nor discrete latents can be annealed.
                with contextlib.suppress(OneByOne, NotImplementedError, ValueError), warnings.catch_warnings():
                    warnings.simplefilter("error", OneByOne)
                    if factor == math.inf:
                        found, again = self._annealed(num, here, conditional_ess=_KEPT), torch.zeros_like(rows)
                    else:
                        found, again = self._resampled(num, factor, here)
                    factors[rows], enough = again.to(factors), again == 0
                    log_weights[:, rows[enough]] = found.log_weights[:, enough]
                    for name, value in found.samples.items():
                        samples[name] = samples[name].index_copy(1, rows[enough], value[:, enough])
        return WeightedSamples(samples, log_weights, drawn.plates)

    def _resampled(self, num: int, factor: float, options: Mapping[str, Any]) -> tuple[WeightedSamples, Tensor]:
        """Returns draws of equal weight out of ``factor`` times as many, and the factor to go on with; 0: enough."""
        many = _unwarned(self.model, self.guide, *self.args, num_samples=int(factor) * num, **options)
        short = num / many.effective_sample_size
        wanted = factor * _MORE ** short.log().div(math.log(_MORE)).ceil().clamp(min=1)
        wanted = wanted.where(wanted <= _MORE**_POWERS, math.inf).where((many.pareto_k > K_MAX) | (short > 1), 0.0)
        return WeightedSamples(many.resample(num), many.log_evidence.expand(num, -1), many.plates), wanted


def amortize(
    model: Callable,
    *args: Any,
    observed: Sequence[str] = (),
    simulations: Any = _SIMULATIONS,
    steps: int | None = None,
    progress: bool = True,
    guide: AutoNaMIGuide | None = None,
    at: Mapping[str, Any] | None = None,
    rounds: int = 4,
    **kwargs: Any,
) -> AmortizedPosterior:
    """Compiles a guide on a model's simulations, with settings for all; returns the posterior as a function of data.

    Latents with exact conditionals are drawn from these. Factors that have to be learned are splines of 8 bins, those
    of vectors whose elements depend on each other three more in sequence, by networks of two layers of 64 units, at a
    rate of 0.03 of `SOAP`. Rates rise, and fall by a cosine; gradients are clipped. Between epochs latents of
    simulations move by the model's density, if it has one, see `moves`, so that they are not learned by heart. A tenth
    of the simulations is held out; the weights of the lowest loss on these are kept. If these came within the first
    four fifths of the steps, data were learned by heart; a second guide then has weights that decay, and a third, if
    they came in the first quarter, a tenth of the rate for a quarter of the steps, and the best is kept. Training ends
    when half of the steps brought nothing. Where modes are derived, one guide is trained, a sixth as long.

    Args:
        model: a Pyro model.
        *args, **kwargs: of the model; data among them are resampled, so only their shapes count.
        observed: sites to condition on, beside those that the model observes itself.
        simulations: how many to draw; those drawn before, as ``data`` of `InferenceCompilation.fit` all at once; or
            ``"fresh"``, to draw others in each step, if the model is fast.
        steps: of the first training; by default 20 times the square root of the number of simulations, within 500
            and 10,000.
        progress: whether to show a progress bar.
        guide: one to train in place of what is described.
        at: data that the posterior is wanted for, and no others, where the model's data have no density: simulations
            then come in ``rounds``, each with a guide of its own, and after the first from where the guide before has
            its mass given these data; see `rounds`.
        rounds: number of them, of equal numbers of simulations.

    Raises:
        ValueError: fewer than 20 simulations; ``at`` where draws have weights, or with simulations given; and as
            `InferenceCompilation` does.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 0.5))
        >>> posterior = amortize(model, observed=["x"], simulations=100, progress=False)
        >>> posterior({"x": torch.tensor(1.0)}, num_samples=50).mean("z").shape  # exact: nothing had to be learned
        torch.Size([])
    """
    model = with_drawn_data(model, args, kwargs, observed)
    simulator = Simulator(model, args, kwargs, observed)
    if at is not None:
        if not isinstance(model, SimulatorModel) or not isinstance(simulations, int) or guide is not None:
            raise ValueError(
                "Expected at= for data without a density, and simulations to be a number, without guide=. Where data "
                "have a density, leave at= out: draws are weighted, and carried to the posterior of any data."
            )
        if rounds < 1:
            raise ValueError(f"Expected at least one round; got {rounds}.")
        num = simulations // rounds
        again = functools.partial(amortize, model, *args, observed=observed, steps=steps, progress=progress, **kwargs)
        draws = simulator.draw(simulations - (rounds - 1) * num)
        posterior = again(simulations=draws)
        for _ in range(rounds - 1):
            draws = next_round(simulator, posterior.guide, at, draws, num)
            posterior = again(simulations=draws)
        return posterior
    fresh = isinstance(simulations, str)
    if fresh and simulations != "fresh":
        raise ValueError(f"Expected simulations to be a number, 'fresh', or values; got {simulations!r}.")
    simulations = _SIMULATIONS if fresh else simulations
    given = simulator.draw(simulations) if isinstance(simulations, int) else as_draws(simulations, simulator)
    draws, non_finite = given.finite()
    seen = History()
    seen.count(given.num, given.num - draws.num, non_finite)
    if draws.num < 20:
        why = f", as {seen.shortfall()}" if seen.skipped else ""
        raise ValueError(f"Expected at least 20 simulations to learn from; got {draws.num}{why}.")
    if seen.skipped:
        warn(f"{seen.shortfall()}; they were left out.")
    held_out = max(1, round(_HELD_OUT * draws.num))
    rows = torch.arange(draws.num)
    train, validation = draws.select(rows[held_out:]), draws.select(rows[:held_out])
    steps = steps or int(min(max(20 * draws.num**0.5, 500), 10_000))
    plain, learned = (guide, []) if guide is not None else _plain(simulator, draws)
    families = dict.fromkeys(learned, flow(_BINS, _TRANSFORMS))

    def trained(setting: _Setting) -> tuple[float, AutoNaMIGuide, History]:
        """Returns the lowest loss on held-out simulations, the guide that has it, and how it came to it."""
        made, count = plain, max(1, round(setting.steps * steps))
        if families:
            options: dict[str, Any] = {"observed": simulator.observed, "hidden_features": setting.hidden}
            made = _named(AutoNaMIGuide(model, families=families, **options))
        compilation = InferenceCompilation(
            model,
            made,
            functools.partial(SOAP, lr=setting.rate, weight_decay=setting.decay / setting.rate / count),
            batch_size=min(max(round(3.5 * train.num**0.5), 50), 500, train.num),
            observed=observed,
            scheduler=functools.partial(LambdaLR, lr_lambda=functools.partial(_share, steps=count)),
            clip_norm=_CLIP,
        )
        history = compilation.fit(
            count,
            args,
            kwargs,
            data=None if fresh else train,
            refresh=0 if fresh else setting.refresh,
            validation=validation,
            validate_every=max(1, count // _VALIDATIONS),
            patience=_VALIDATIONS // 2,
            progress=progress,
        )
        return min((loss for _, loss in history.validation), default=-math.inf), made, history

    found = [trained(_NEAR if guide is None and not learned else _SHARP)]
    best = found[0][-1].best_step
    if families and not fresh and best is not None:
        found += [trained(other) for other, share in ((_HELD, _LATE), (_SMOOTH, _EARLY)) if best < share * steps]
    _, made, history = min(found, key=lambda each: each[0])
    return AmortizedPosterior(model, args, kwargs, made, history)


def _plain(simulator: Simulator, draws: JointDraws) -> tuple[AutoNaMIGuide, list[str]]:
    """Returns a guide that was called once, and the latents that it has to learn by families that may be too plain."""
    guide = _named(AutoNaMIGuide(simulator.model, observed=simulator.observed))
    few = draws.select(torch.arange(2))
    with torch.no_grad():
        guide.log_prob(few.latents, *simulator.args, **{**simulator.kwargs, "observations": few.observed})
    families = {name: type(rule.family) for name, rule in guide._made().learned.items()}
    learned = [name for name, note in guide.rules.items() if note.rule == "learned"]
    return guide, [name for name in learned if families[name] in (NormalFamily, SinhArcsinhFamily)]


def _named(guide: AutoNaMIGuide) -> AutoNaMIGuide:
    """Gives a new guide a name of its own in the parameter store."""
    guide._pyro_set_supermodule(f"amortized_{next(_number)}", guide._pyro_context)
    return guide


def _unwarned(*args: Any, **kwargs: Any) -> WeightedSamples:
    """Returns what `importance_sample` does, without a warning of the weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The importance weights are")
        return importance_sample(*args, **kwargs)


def _share(step: int, steps: int) -> float:
    """Returns the share of the rate at a step."""
    done = step / steps
    return min(1.0, (done + 1e-3) / _WARM) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
