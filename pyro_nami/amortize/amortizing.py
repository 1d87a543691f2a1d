"""`amortize`: train one guide on a model's simulations, for the posteriors of all its data sets."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch.optim.lr_scheduler import LambdaLR

from pyro_nami.amortize.data_distance import SimulatedData
from pyro_nami.amortize.posterior import AmortizedPosterior
from pyro_nami.amortize.soap import SOAP
from pyro_nami.amortize.truncated_rounds import next_round
from pyro_nami.factors.unconstrained import flow
from pyro_nami.guide.misfits import RANKED
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.batches import as_draws
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.history import History
from pyro_nami.inference.scaled_coordinates import site_forms
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.simulator_model import SimulatorModel, with_drawn_data
from pyro_nami.inference.site_messages import with_idle_dims
from pyro_nami.messages import warn
from pyro_nami.program.isolation import forked_rng

__all__ = ["amortize"]

# share of the steps in which the rate is reached; norm of gradients, low as few are typical
_WARM, _CLIP = 0.03, 1.0
_SIMULATIONS = 10_000
# share of the simulations, and how often the loss on these is looked at
_HELD_OUT, _VALIDATIONS = 0.1, 50
# sizes: a multiple of the root of the number of simulations, and their bounds
_BATCH = 3.5, 50, 500
# share of the steps after which they are larger, as gradients are to be less noisy, by what
_LARGE, _LARGER = 0.6, 2
_MOVES = 4  # draws of the guide for each simulation between epochs
# multiples of the root of the number of simulations and of that, and their bounds
_STEPS = 20, 0.45, 450, 10_000
# of splines; bounds of those in sequence between elements of a vector
_BINS, _TRANSFORMS = 8, (2, 4)

_number = itertools.count()


class _Setting(NamedTuple):
    """Widths of hidden layers, SOAP's rate, a share of the steps, decay over all of them."""

    hidden: tuple[int, ...]
    rate: float
    steps: float
    decay: float


_SHARP = _Setting((64, 64), 6e-2, 1.0, 0.0)
# Where that one is best early, the guide overfits, by weights that are too large; or, within a quarter of
# the steps, by a rate that is too high for what is smooth.
_HELD, _SMOOTH = _SHARP._replace(decay=7.0), _SHARP._replace(rate=3e-3, steps=1 / 4)
# where modes are derived there is little to learn, and a step takes long
_NEAR = _Setting((64,), 3e-3, 1 / 6, 0.0)
_EARLY, _LATE = 1 / 4, 3 / 5
# simulations, and their latents' elements, by which what was derived is checked
_CHECKED, _ELEMENTS = 1000, 2**16
# of guides that are not trained, and of those that make grids for each
_CHECKED_ONLY, _CHECKED_TABLES = 200, 20
# shares of them at which these may be others, and Normals about the mode
_TOLERATED, _NEWTON = 0.02, 0.2


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

    Latents with exact conditionals are drawn from these, if simulations do not speak against them, also those that the
    model marks for enumeration. Factors that have to be learned are splines of 8 bins, those of vectors whose elements
    depend on each other two to four more in sequence (two for 1,000 simulations, four for 10,000, and without a
    density), by networks of two layers of 64 units, at a rate of 0.06 of `SOAP`.
    Rates rise, and fall linearly to zero; gradients are clipped; batches grow twofold for the last two fifths of the
    steps. If the model has a density, the latents of simulations move between epochs, so that the guide does not
    overfit them (`latent_moves`).

    A tenth of the simulations is held out, and the latest weights that are as good on these as any are kept
    (`InferenceCompilation.fit`). If the held-out loss was lowest within the first three fifths of the steps, the guide
    overfit. A second guide is then trained with weight decay; if it was lowest within the first quarter, a third one
    at a rate of 0.003 for a quarter of the steps. The best of them is kept. Training ends when half of the steps
    brought no gain. Where modes are derived, one guide is trained at that rate, for a sixth of the steps.

    Args:
        model: a Pyro model.
        *args, **kwargs: of the model; data among them are resampled, so only their shapes count.
        observed: sites to condition on, beside those that the model observes itself.
        simulations: how many to draw; those drawn before, as ``data`` of `InferenceCompilation.fit` all at once; or
            ``"fresh"``, to draw others in each step, if the model is fast.
        steps: of the first training; by default 20 times the square root of the number of simulations, or 0.45 times
            the number if that is less, within 450 and 10,000.
        progress: whether to show a progress bar.
        guide: one to train in place of what is described.
        at: data that the posterior is wanted for, and no others, where the model's data have no density: simulations
            then come in ``rounds``, each with a guide of its own, and after the first from where the guide before has
            its mass given these data; see `truncated_rounds`.
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
    if simulator.enumerates and guide is None:
        model = poutine.infer_config(model, lambda site: {"enumerate": None})  # type: ignore[typeddict-item]
        simulator = Simulator(model, args, kwargs, observed)
    model = simulator.model
    if at is not None:
        if (
            not isinstance(model, SimulatorModel)
            or not isinstance(simulations, int)
            or guide is not None
        ):
            raise ValueError(
                "Expected at= for data without a density, and simulations to be a number, without guide=. Where data "
                "have a density, leave at= out: draws are weighted, and carried to the posterior of any data."
            )
        again = functools.partial(
            amortize, model, *args, observed=observed, steps=steps, progress=progress, **kwargs
        )
        return _in_rounds(again, simulator, at, simulations, rounds)
    fresh = isinstance(simulations, str)
    if fresh and simulations != "fresh":
        raise ValueError(
            f"Expected simulations to be a number, 'fresh', or values; got {simulations!r}."
        )
    given = _SIMULATIONS if fresh else simulations
    draws, seen = _simulated(simulator, given)
    learned: list[str] = []
    given_up: dict[str, Any] = {}
    plain = guide
    if plain is None:
        plain, learned, given_up = _plain(simulator, draws, own=isinstance(given, int))
        if not plain.num_parameters:
            return AmortizedPosterior(model, args, kwargs, plain, seen)
    # Without a density latents do not move, and the most do best for few simulations as well.
    transforms = _TRANSFORMS[1] if isinstance(model, SimulatorModel) else _transforms(draws.num)
    training = _Training(
        simulator,
        observed,
        draws,
        steps or _steps(draws.num),
        plain,
        dict.fromkeys(learned, flow(_BINS, transforms)),
        given_up,
        fresh,
        progress,
    )
    found = [training.run(_NEAR if guide is None and not learned else _SHARP)]
    first = found[0].history
    if learned and not fresh and first.best_step not in (None, len(first.losses)):
        lowest, _ = min(first.validation, key=lambda pair: pair[1])
        for setting, share in ((_HELD, _LATE), (_SMOOTH, _EARLY)):
            if lowest < share * training.steps:
                found.append(training.run(setting))
    best = min(found, key=lambda each: each.loss)
    with forked_rng():
        simulated = SimulatedData(draws.observed, site_forms(simulator))
    return AmortizedPosterior(model, args, kwargs, best.guide, best.history, simulated)


def _in_rounds(
    again: Callable[..., AmortizedPosterior],
    simulator: Simulator,
    at: Mapping[str, Any],
    simulations: int,
    rounds: int,
) -> AmortizedPosterior:
    """Returns the posterior of one data set, by rounds of simulations, with ``again`` for each round."""
    if rounds < 1:
        raise ValueError(f"Expected at least one round; got {rounds}.")
    num = simulations // rounds
    draws = simulator.draw(simulations - (rounds - 1) * num)
    posterior = again(simulations=draws)
    for _ in range(rounds - 1):
        draws = next_round(simulator, posterior.guide, at, draws, num)
        posterior = again(simulations=draws)
    return posterior


def _simulated(simulator: Simulator, simulations: Any) -> tuple[JointDraws, History]:
    """Returns the simulations that are finite, drawn or given, and a history that counts the others."""
    if isinstance(simulations, int):
        given = simulator.draw(simulations)
    else:
        given = as_draws(simulations, simulator)
        with forked_rng():
            sites = simulator.sites()
        for name, value in {**given.latents, **given.observed}.items():
            # raises where shapes are others
            with_idle_dims(value, sites[name], simulator.nesting, 1)
    draws, non_finite = given.finite()
    seen = History()
    # Real data are finite, and of all simulations with such data none is left out: their posterior stays what it is.
    seen.count(given.num, given.num - draws.num, non_finite, most=1.0)
    if draws.num < 20:
        why = f", as {seen.shortfall()}" if seen.skipped else ""
        raise ValueError(f"Expected at least 20 simulations to learn from; got {draws.num}{why}.")
    if seen.skipped:
        warn(f"{seen.shortfall()}; they were left out.")
    return draws, seen


class _Trained(NamedTuple):
    """A trained guide."""

    loss: float  # on held-out simulations, in nats
    guide: AutoNaMIGuide
    history: History


class _Training(NamedTuple):
    """What the trainings of one call of `amortize` have in common."""

    simulator: Simulator
    observed: Sequence[str]  # sites to condition on, beside those that the model observes
    draws: JointDraws
    steps: int  # of a training with a share of 1
    plain: AutoNaMIGuide  # to train where no family is chosen
    families: Mapping[str, Any]  # of latents that are to be learned
    options: Mapping[str, Any]  # of guides with these families
    fresh: bool  # whether each step draws simulations of its own
    progress: bool

    def run(self, setting: _Setting) -> _Trained:
        """Returns a guide trained by a setting."""
        simulator = self.simulator
        guide = self.plain
        if self.families:
            guide = _named(
                AutoNaMIGuide(
                    simulator.model,
                    families=self.families,
                    observed=simulator.observed,
                    hidden_features=setting.hidden,
                    **self.options,
                )
            )
        num_held_out = max(1, round(_HELD_OUT * self.draws.num))
        rows = torch.arange(self.draws.num)
        train = self.draws.select(rows[num_held_out:])
        held_out = self.draws.select(rows[:num_held_out])
        count = max(1, round(setting.steps * self.steps))
        decay = setting.decay / setting.rate / count
        compilation = InferenceCompilation(
            simulator.model,
            guide,
            functools.partial(SOAP, lr=setting.rate, weight_decay=decay),
            batch_size=functools.partial(_batch_size, num=train.num, steps=count),
            observed=self.observed,
            scheduler=functools.partial(LambdaLR, lr_lambda=functools.partial(_share, steps=count)),
            clip_norm=_CLIP,
        )
        history = compilation.fit(
            count,
            simulator.args,
            simulator.kwargs,
            data=None if self.fresh else train,
            refresh=0 if self.fresh else _MOVES,
            validation=held_out,
            validate_every=max(1, count // _VALIDATIONS),
            patience=_VALIDATIONS // 2,
            progress=self.progress,
        )
        kept = [loss for step, loss in history.validation if step == history.best_step]
        return _Trained(min(kept, default=-math.inf), guide, history)


def _plain(
    simulator: Simulator, draws: JointDraws, own: bool
) -> tuple[AutoNaMIGuide, list[str], dict[str, Any]]:
    """Returns a guide that was called once, the latents that it has to learn by families that may be too plain, and
    options by which conditionals are learned that cannot be derived for all simulations.

    ``own`` says that the draws are the simulator's, and not of another prior, for which weights will correct.
    """
    options: dict[str, Any] = {}
    given_up: dict[str, Any] | None = options
    while given_up is not None:
        options = given_up
        guide = _named(AutoNaMIGuide(simulator.model, observed=simulator.observed, **options))
        few = draws.select(torch.arange(2) if simulator.vectorized else torch.tensor(0))
        with torch.no_grad():
            guide.log_prob(
                few.latents, *simulator.args, **{**simulator.kwargs, "observations": few.observed}
            )
        given_up = None
        if simulator.vectorized and (bad := _misfits(guide, simulator, draws if own else None)):
            given_up = {"rules": {**options.get("rules", {}), **dict.fromkeys(bad, "learned")}}
        elif not simulator.vectorized and not options and guide.num_parameters:
            # as the model cannot be run for many simulations at once
            given_up = {"exact": False, "anchor": False}
    families = {name: rule.family for name, rule in guide._made().learned.items()}
    learned = [name for name, note in guide.rules.items() if note.rule == "learned"]
    return (
        guide,
        [name for name in learned if families[name].locations],
        options,
    )


def _misfits(guide: AutoNaMIGuide, simulator: Simulator, draws: JointDraws | None) -> list[str]:
    """Returns the latents whose derived conditionals are not finite, or not those that simulations come from."""
    found: dict[str, Any] = {}
    if all(rule.group is None for rule in guide._made().rules.values()):
        return []
    draws = simulator.draw(_CHECKED).finite()[0] if draws is None else draws
    if not guide.num_parameters:  # and none of these will be learned from
        tables = any(
            rule.group and rule.group.form == "marginal" for rule in guide._made().rules.values()
        )
        draws = draws.select(
            torch.arange(min(draws.num, _CHECKED_TABLES if tables else _CHECKED_ONLY))
        )
    one = sum(value[0].numel() for value in draws.latents.values())
    for part in map(
        draws.select, torch.arange(draws.num).split(min(_CHECKED, max(1, _ELEMENTS // one)))
    ):
        seen = guide.misfits(
            part.latents, *simulator.args, **{**simulator.kwargs, "observations": part.observed}
        )
        found = {name: found.get(name, 0) + flags.sum(1) for name, flags in seen.items()}
    chance = draws.num / (RANKED + 1)
    none_at = 0 if guide.num_parameters else _TOLERATED * draws.num
    most = chance + 6 * chance**0.5
    shares = {
        name: _NEWTON if note.rule == "newton" else _TOLERATED for name, note in guide.rules.items()
    }
    return [
        name
        for name, (none, low) in found.items()
        if none > none_at or low > most + shares[name] * draws.num
    ]


def _named(guide: AutoNaMIGuide) -> AutoNaMIGuide:
    """Gives a new guide a name of its own in the parameter store."""
    guide._pyro_set_supermodule(f"amortized_{next(_number)}", guide._pyro_context)
    return guide


def _share(step: int, steps: int) -> float:
    """Returns the share of the rate at a step."""
    done = step / steps
    return min(1.0, (done + 1e-3) / _WARM) * (1 - min(done, 1.0))


def _steps(num: int) -> int:
    """Returns how long the first training is, for so many simulations."""
    by_root, by_number, least, most = _STEPS
    return int(min(max(min(by_root * num**0.5, by_number * num), least), most))


def _transforms(num: int) -> int:
    """Returns the number of splines in sequence that so many simulations are worth the time of."""
    least, most = _TRANSFORMS
    return min(max(round(2 * math.log10(num)) - 4, least), most)


def _batch_size(step: int, num: int, steps: int) -> int:
    """Returns the number of simulations in a step."""
    multiple, least, most = _BATCH
    size = min(max(round(multiple * num**0.5), least), most)
    return min(size * (_LARGER if step >= _LARGE * steps else 1), num)
