"""`amortize`: train one guide on a model's simulations, for the posteriors of all its data sets.

Latents whose conditionals simulations do not refute are drawn from these, also those that the model marks for
enumeration. The other latents are learned: their factors are splines, several in sequence where the elements of a
vector depend on each other, by networks of two layers. The latents of simulations move between epochs, if the model has
a density, so that the guide does not overfit them (`latent_moves`). The rate rises, and falls linearly to zero.

A tenth of the simulations is held out. The guide ends with the latest weights that are as good on these as any
(`InferenceCompilation.fit`). Training ends when half of the steps brought no gain. If the best weights are of the
first half of the steps, or the guide's intervals hold too few of the held-out latents, the guide overfit: up to two
more are trained with weight decay, and the best one is kept. Where it is too narrow, it is widened in the end.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch.optim.lr_scheduler import OneCycleLR

from pyro_nami.amortize.coverage import Coverage, measured, widen
from pyro_nami.amortize.data_distance import SimulatedData
from pyro_nami.amortize.first_guide import first_guide, named
from pyro_nami.amortize.posterior import AmortizedPosterior
from pyro_nami.amortize.sizes import Arguments, arguments_of, sizes_of
from pyro_nami.amortize.soap import SOAP
from pyro_nami.factors.unconstrained import flow
from pyro_nami.fit.posterior import learned
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.batches import as_draws
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.history import History
from pyro_nami.inference.scaled_coordinates import site_forms
from pyro_nami.inference.simulate import Batch, JointDraws, Simulator
from pyro_nami.inference.simulator_model import SimulatorModel, with_drawn_data
from pyro_nami.inference.site_messages import with_idle_dims
from pyro_nami.messages import quoted, warn
from pyro_nami.program.isolation import forked_rng

__all__ = ["amortize"]

# Simulations by default. The number of training steps goes with their square root, so that with ten times more training
# takes three times as long.
DEFAULT_SIMULATIONS = 10_000
# Learning rate of SOAP, of splines; at 0.05 or 0.07 losses are about the same. A recurrent network takes a tenth of it:
# at the whole rate it is lost.
RATE = 0.06
# Draws of the guide that the latents of a simulation may move to after an epoch; with one, fewer of them move.
REFRESHED = 4
# Below so many simulations a guide has fewer splines and steps, which takes half the time and loses up to 0.2 nats.
FEW_SIMULATIONS = 2_000


def amortize(
    model: Callable,
    *args: Any,
    observed: Sequence[str] = (),
    simulations: Any = DEFAULT_SIMULATIONS,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    arguments: Callable[[], tuple] | None = None,
    steps: int | None = None,
    progress: bool = True,
    guide: AutoNaMIGuide | None = None,
    **kwargs: Any,
) -> AmortizedPosterior:
    """Returns the posterior of a model as a function of data, by a guide that is compiled on the model's simulations.

    Args:
        model: a Pyro model.
        *args, **kwargs: of the model; data among them are resampled, so only their shapes count.
        observed: sites to condition on, beside those that the model observes itself.
        simulations: how many to draw; those drawn before, as ``data`` of `InferenceCompilation.fit` all at once; or
            ``"fresh"``, to draw others in each step, if the model is fast.
        sizes: plate, or loop -> its smallest and largest size in the simulations, where an integer argument of the
            model gives it; the guide then answers for all sizes between, see `AmortizedPosterior.at`. By default from a
            quarter to four times of the size at the arguments given; ``{}`` for this size alone.
        arguments: a function that draws the model's arguments (a tuple, of those without a name), in place of sizes:
            ``lambda: (covariates(int(torch.randint(10, 100, ()))),)``. It is called up to 11 times.
        steps: of a training; by default 20 times the square root of the number of simulations, and 450 below 2,000
            simulations. A batch is 3.5 times this square root, and twice that for the last two fifths of the steps.
        progress: whether to show a progress bar.
        guide: one to train in place of the guide that is made for the model.

    Raises:
        ValueError: fewer than 20 simulations; sizes that no argument gives, or sizes with simulations that are given;
            and as `InferenceCompilation` does.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 0.5))
        >>> posterior = amortize(model, observed=["x"], simulations=100, progress=False)
        >>> posterior({"x": torch.tensor(1.0)}, num_samples=50).mean("z").shape  # exact: nothing had to be learned
        torch.Size([])
    """
    simulator = _simulator(model, args, kwargs, observed, marked=guide is not None)
    return _training(simulator, simulations, sizes, arguments, steps, progress).posterior(guide)


def _simulator(
    model: Callable, args: tuple, kwargs: Mapping[str, Any], observed: Sequence[str], marked: bool
) -> Simulator:
    """Returns the simulator of a model; unless ``marked``, of one without marks for enumeration."""
    model = with_drawn_data(model, args, kwargs, observed)
    simulator = Simulator(model, args, kwargs, observed)
    if simulator.enumerates and not marked:
        model = poutine.infer_config(model, lambda site: {"enumerate": None})  # type: ignore[typeddict-item]
        simulator = Simulator(model, args, kwargs, observed)
    return simulator


def _training(
    simulator: Simulator,
    simulations: Any,
    sizes: Mapping[str, tuple[int, int]] | None,
    arguments: Callable[[], tuple] | None,
    steps: int | None,
    progress: bool,
) -> _Training:
    """Returns what trains guides on simulations that are drawn, or given; checks them."""
    fresh = isinstance(simulations, str)
    if fresh and simulations != "fresh":
        raise ValueError(
            f"Expected simulations to be a number, 'fresh', or values; got {simulations!r}."
        )
    own = fresh or isinstance(simulations, int)
    if own:
        num = DEFAULT_SIMULATIONS if fresh else simulations
        groups = _drawn(simulator, num, arguments_of(simulator, num, sizes, arguments))
    elif sizes or arguments:
        raise ValueError("Expected a number of simulations with sizes or arguments; got values.")
    else:
        groups = [simulator.batch(_given(simulator, simulations))]
    groups, seen = _finite(groups)
    num = sum(group.draws.num for group in groups)
    steps = steps or (450 if num < FEW_SIMULATIONS else round(20 * num**0.5))
    return _Training(simulator, groups, seen, own, fresh, steps, progress)


def _drawn(simulator: Simulator, num: int, places: Sequence[Arguments]) -> list[Batch]:
    """Returns simulations at each of several arguments, as many at each."""
    counts = [num // len(places) + (i < num % len(places)) for i in range(len(places))]
    here = [simulator.at(*args, **kwargs) for args, kwargs in places]
    return [each.batch(each.draw(count)) for each, count in zip(here, counts) if count]


def _given(simulator: Simulator, simulations: Any) -> JointDraws:
    """Returns simulations that a user has given, after a check."""
    given = as_draws(simulations, simulator)
    for name, value in {**given.latents, **given.observed}.items():
        # raises for a value of a wrong shape
        with_idle_dims(value, simulator.single[name], simulator.nesting, 1)
    return given


def _finite(groups: Sequence[Batch]) -> tuple[list[Batch], History]:
    """Returns the simulations that are finite, and a history that counts the others."""
    seen = History()
    # Real data are finite, and no simulation with finite data is left out, so that their posterior stays what it is.
    kept = [group._replace(draws=seen.finite(group.draws, most=1.0)) for group in groups]
    num = sum(group.draws.num for group in kept)
    if num < 20:
        why = f", as {seen.shortfall()}" if seen.skipped else ""
        raise ValueError(f"Expected at least 20 simulations to learn from; got {num}{why}.")
    if seen.skipped:
        warn(f"{seen.shortfall()}; they were left out.")
    return [group for group in kept if group.draws.num > 1], seen


class _Trained(NamedTuple):
    """A trained guide."""

    loss: float  # on held-out simulations, in nats
    guide: AutoNaMIGuide
    history: History
    coverage: Coverage | None = None


class _Training(NamedTuple):
    """The simulations and settings of one call of `amortize`, by which up to three guides are trained."""

    simulator: Simulator
    groups: list[
        Batch
    ]  # the simulations, by the arguments that they were made at; first those of the simulator
    seen: History  # of a posterior without training; counts the simulations that are not finite
    own: bool  # whether the simulator made the draws, with the model's prior
    fresh: bool  # whether each step draws simulations of its own
    steps: int
    progress: bool

    @property
    def num(self) -> int:
        """The number of simulations."""
        return sum(group.draws.num for group in self.groups)

    def posterior(self, guide: AutoNaMIGuide | None) -> AmortizedPosterior:
        """Returns the posterior by this guide, or by one that is made for the model."""
        simulator = self.simulator
        best = self._best() if guide is None else self._of_user(guide)
        simulated = None
        if best.history.losses:
            with forked_rng():
                draws = self.groups[0].draws
                simulated = SimulatedData(draws.observed, site_forms(simulator))
            best = self._checked(best)
        return AmortizedPosterior(
            *simulator.program[:3],
            best.guide,
            best.history,
            simulated,
            coverage=best.coverage,
            sizes=self._sizes(),
        )

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Returns plate, or loop -> its smallest and largest size in the simulations."""
        found: dict[str, list[int]] = {}
        with forked_rng():
            for group in self.groups:
                sites = self.simulator.at(*group.args, **group.kwargs).sites()
                for name, size in sizes_of(sites, self.simulator.loops).items():
                    found.setdefault(name, []).append(size)
        return {name: (min(each), max(each)) for name, each in found.items()}

    def _best(self) -> _Trained:
        """Returns the best guide that is made for the model; without training if all its latents are exact."""
        guide, options = first_guide(self.simulator, self.groups[0].draws, self.own)
        if not guide.num_parameters:
            return _Trained(0.0, guide, self.seen)
        families = {name: rule.family for name, rule in guide._made().learned.items()}
        names = learned(guide)
        plain = [name for name in names if name in families and families[name].locations]
        if plain:
            return self._restrained(self._flows(plain, options), RATE)
        make = functools.partial(
            AutoNaMIGuide, self.simulator.model, observed=self.simulator.observed, **options
        )
        if len(names) > len(families):  # states of a loop, by a recurrent network
            return self._restrained(make, rate=RATE / 10, first=guide)
        # modes are derived: there is little to learn, and a step takes long
        return self.run(guide, rate=RATE / 20, share=1 / 6)

    def _of_user(self, guide: AutoNaMIGuide) -> _Trained:
        """Returns a user's guide after training; where another one of its kind is best, with the weights of that."""
        untrained = copy.deepcopy(guide)
        best = self._restrained(lambda: copy.deepcopy(untrained), RATE, first=guide)
        if best.guide is not guide:
            guide.load_state_dict(best.guide.state_dict())
        return best._replace(guide=guide)

    def _flows(
        self, names: Sequence[str], options: Mapping[str, Any]
    ) -> Callable[[], AutoNaMIGuide]:
        """Returns a function that makes guides with splines for these latents."""
        # without a density the latents of simulations do not move, and four splines do best for few of them as well
        few = self.num < FEW_SIMULATIONS
        moves = not isinstance(self.simulator.model, SimulatorModel)
        return functools.partial(
            AutoNaMIGuide,
            self.simulator.model,
            families=dict.fromkeys(names, flow(8, 2 if few and moves else 4)),
            observed=self.simulator.observed,
            hidden_features=(64, 64),
            **options,
        )

    def _restrained(
        self,
        make: Callable[[], AutoNaMIGuide],
        rate: float,
        first: AutoNaMIGuide | None = None,
    ) -> _Trained:
        """Returns the best of up to three guides; after one that overfits comes one with more restraint.

        Args:
            make: makes a guide that has not been trained.
            rate: of the first two guides; a third one has a third of it.
            first: a guide to begin with, which has not been trained either.
        """
        trained = [self.run(first or named(make()), rate)]
        for slower in () if self.fresh else (rate, rate / 3):
            if not self._overfits(trained[-1]):
                break
            # at a rate that stays the same, this decay would shrink weights by a factor of exp(-7)
            decay = 7 / (slower * self.steps)
            trained.append(self.run(named(make()), slower, decay=decay))
        return min(trained, key=lambda trained: trained.loss)

    def _overfits(self, trained: _Trained) -> bool:
        """Whether a guide was best in the first half of its steps, or is overconfident at held-out simulations."""
        if (trained.history.best_step or 0) <= self.steps / 2:
            return True
        coverage = measured(self.simulator, trained.guide, self.held_out)
        return coverage is not None and bool(coverage.overconfident)

    def _checked(self, best: _Trained) -> _Trained:
        """Returns a trained guide, widened where it is too narrow, with its coverage of held-out simulations."""
        widened = widen(best.guide, self.held_out)
        coverage = measured(self.simulator, best.guide, self.held_out)
        if coverage is not None:
            coverage = coverage._replace(widened=widened)
            if coverage.overconfident:
                warn(
                    f"The guide is overconfident at {quoted(coverage.overconfident)}: {coverage}. Amortize with more "
                    "simulations."
                )
        return best._replace(coverage=coverage)

    @property
    def held_out(self) -> list[Batch]:
        """The simulations that are held out, by their arguments."""
        return [_split(group)[0] for group in self.groups]

    def _arguments_at(self, step: int) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments of a step whose simulations are fresh."""
        group = self.groups[step % len(self.groups)]
        return group.args, dict(group.kwargs)

    def run(
        self, guide: AutoNaMIGuide, rate: float, share: float = 1.0, decay: float = 0.0
    ) -> _Trained:
        """Returns a guide after training, for a share of the steps."""
        simulator = self.simulator
        steps = max(1, round(share * self.steps))
        train = [_split(group)[1] for group in self.groups]
        num = sum(group.draws.num for group in train)
        compilation = InferenceCompilation(
            simulator.model,
            guide,
            functools.partial(SOAP, lr=rate, weight_decay=decay),
            batch_size=functools.partial(_batch_size, num=num, steps=steps),
            observed=simulator.observed,
            clip_norm=1.0,
            scheduler=functools.partial(
                OneCycleLR,
                max_lr=rate,
                total_steps=steps + 1,
                pct_start=0.03,
                anneal_strategy="linear",
                cycle_momentum=False,
            ),
        )
        history = compilation.fit(
            steps,
            self._arguments_at if self.fresh else self.groups[0].args,
            self.groups[0].kwargs,
            data=None if self.fresh else train,
            refresh=0 if self.fresh else REFRESHED,
            validation=self.held_out,
            validate_every=max(1, steps // 50),
            patience=25,
            progress=self.progress,
        )
        loss = dict(history.validation).get(history.best_step or 0, math.inf)
        return _Trained(loss, guide, history)


def _split(group: Batch) -> tuple[Batch, Batch]:
    """Returns the tenth of the simulations that is held out, and the others."""
    num = group.draws.num
    held_out, train = torch.arange(num).tensor_split([max(1, num // 10)])
    held_out_draws, train_draws = group.draws.select(held_out), group.draws.select(train)
    return group._replace(draws=held_out_draws), group._replace(draws=train_draws)


def _batch_size(step: int, num: int, steps: int) -> int:
    """Returns the number of simulations in a step; larger batches at the end make gradients less noisy."""
    size = min(max(round(3.5 * num**0.5), 50), 500)
    return min(2 * size if step >= 0.6 * steps else size, num)
