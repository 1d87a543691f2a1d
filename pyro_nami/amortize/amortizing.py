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
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import OneCycleLR

from pyro_nami.amortize.coverage import Coverage, measured, widen
from pyro_nami.amortize.data_distance import SimulatedData
from pyro_nami.amortize.encoding import embeddings_for
from pyro_nami.amortize.first_guide import first_guide, named
from pyro_nami.amortize.posterior import AmortizedPosterior
from pyro_nami.amortize.request import (
    DEFAULT_SIMULATIONS,
    Chosen,
    GroupedSimulations,
    as_given,
    check_given,
    check_options,
    interrupted,
    simulated,
    source_of,
    undrawn,
)
from pyro_nami.amortize.sizes import sizes_of
from pyro_nami.amortize.soap import SOAP
from pyro_nami.factors.unconstrained import flow
from pyro_nami.fit.posterior import learned
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.black_box import from_simulations
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.history import History
from pyro_nami.inference.priors import is_prior
from pyro_nami.inference.scaled_coordinates import site_forms
from pyro_nami.inference.simulate import Batch, Simulator
from pyro_nami.inference.simulator_model import SimulatorModel
from pyro_nami.messages import quoted, warn
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.program import Program

__all__ = ["amortize"]

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
    embeddings: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    num_workers: int = 0,
    **kwargs: Any,
) -> AmortizedPosterior:
    """Returns the posterior of a model as a function of data, by a guide that is compiled on the model's simulations.

    Simulations that fail are left out, and a warning says why; so are those with values that are not finite.

    Args:
        model: a Pyro model; or a prior, as `from_simulator` takes it, if simulations are given.
        *args, **kwargs: of the model; data among them are resampled, so only their shapes count.
        observed: sites to condition on, beside those that the model observes itself; by default all data of
            `from_simulator`.
        simulations: how many to draw; those drawn before, as ``data`` of `InferenceCompilation.fit` all at once, for
            which no simulator is run; or ``"fresh"``, to draw others in each step, if the model is fast.
        sizes: plate, or loop -> its smallest and largest size in the simulations, where an integer argument gives it;
            by default a quarter and four times of the size here; ``{}``: this one alone. See `AmortizedPosterior.at`.
        arguments: a function that draws the model's arguments (a tuple, of those without a name), in place of sizes:
            ``lambda: (covariates(int(torch.randint(10, 100, ()))),)``. It is called up to 11 times.
        steps: of a training; by default 20 times the square root of the number of simulations; 450 below 2,000.
        progress: whether to show a progress bar.
        guide: one to train in place of the guide that is made for the model.
        embeddings: observed site -> ``"image"``, ``"series"``, ``"set"``, a module ``(batch, *event)`` to ``(batch,
            features)``, or None for the values themselves; by default as `pyro_nami.amortize.encoding` says.
        options: other options of `AutoNaMIGuide` for the guide that is made.
        num_workers: processes that simulations are drawn in; 0: this one. The random numbers are others than without.

    Raises:
        ValueError: fewer than 20 simulations; sizes that no argument gives; and as `InferenceCompilation` does.
        Interrupted: at Ctrl-C. Its attribute ``simulations``, as of any error in training, holds those drawn by then.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 0.5))
        >>> posterior = amortize(model, observed=["x"], simulations=100, progress=False)
        >>> posterior({"x": torch.tensor(1.0)}, num_samples=50).mean("z").shape  # exact: nothing had to be learned
        torch.Size([])
    """
    if is_prior(model):
        check_given(simulations, args)
        model, simulations = from_simulations(model, simulations)
    check_options(model, kwargs, guide, embeddings, options)
    source = source_of(model, args, kwargs, observed, marked=guide is not None)
    how = steps, progress, embeddings, dict(options or {}), num_workers, sizes, arguments
    chosen = Chosen(isinstance(simulations, str), *how)
    return _trained(source, simulated(source, simulations, chosen), chosen, guide)


def _trained(
    source: Simulator, given: GroupedSimulations, chosen: Chosen, guide: AutoNaMIGuide | None
) -> AmortizedPosterior:
    """Returns the posterior of a simulator's model; errors in training have the simulations with them."""
    num = given.num
    steps = chosen.steps or (450 if num < FEW_SIMULATIONS else round(20 * num**0.5))
    structure = source if chosen.fresh else source.of(undrawn(source.model))
    training = _Training(structure, given, chosen, steps)
    try:
        posterior = training.posterior(guide)
    except KeyboardInterrupt as error:
        raise interrupted(given.groups) from error
    except Exception as error:
        error.simulations = as_given(given.groups)  # type: ignore[attr-defined]
        raise
    more = functools.partial(_appended, source.program, source.observed, given, chosen, guide)
    return replace(posterior, model=source.model, more=more)


def _appended(
    program: Program,
    observed: Sequence[str],
    given: GroupedSimulations,
    chosen: Chosen,
    guide: AutoNaMIGuide | None,
    simulations: Any,
) -> AmortizedPosterior:
    """Returns the posterior by more simulations than it was trained on, drawn or given; see `amortize`."""
    source = source_of(*program[:3], observed, marked=True)
    further = simulated(source, simulations, chosen, least=1)
    guide = copy.deepcopy(guide)
    return _trained(source, given.joined(further), chosen, guide)


class _Trained(NamedTuple):
    """A trained guide."""

    loss: float  # on held-out simulations, in nats
    guide: AutoNaMIGuide
    history: History
    coverage: Coverage | None = None


class _Training(NamedTuple):
    """The simulations and settings of one call of `amortize`, by which up to three guides are trained."""

    simulator: Simulator
    given: GroupedSimulations
    chosen: Chosen
    steps: int

    @property
    def groups(self) -> list[Batch]:
        """The simulations, by the arguments that they were made at."""
        return self.given.groups

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
            progress=self.chosen.progress,
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
        asked = {**self.chosen.options, **self._embeddings(by_shape=False)}
        draws, own = self.groups[0].draws, self.given.own
        guide, options = first_guide(self.simulator, draws, own, asked)
        if not guide.num_parameters:
            return _Trained(0.0, guide, self.given.seen)
        families = {name: rule.family for name, rule in guide._made().learned.items()}
        names = learned(guide)
        plain = [name for name in names if name in families and families[name].locations]
        if plain:
            return self._restrained(self._flows(plain, options), RATE)
        make = functools.partial(
            AutoNaMIGuide, self.simulator.model, **{**options, "observed": self.simulator.observed}
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
        few = self.given.num < FEW_SIMULATIONS
        moves = not isinstance(self.simulator.model, SimulatorModel)
        families: Any = dict.fromkeys(names, flow(8, 2 if few and moves else 4))
        given = options.get("families")
        if given is not None:
            families = {**families, **given} if isinstance(given, Mapping) else given
        defaults = {"hidden_features": (64, 64), **options, **self._embeddings(by_shape=True)}
        return functools.partial(
            AutoNaMIGuide,
            self.simulator.model,
            **{**defaults, "families": families, "observed": self.simulator.observed},
        )

    def _embeddings(self, by_shape: bool) -> dict[str, Any]:
        """Returns the guide's option of how networks read observed values, if there is one."""
        observed = self.groups[0].draws.observed
        found = embeddings_for(self.simulator, observed, self.chosen.embeddings, by_shape=by_shape)
        return {"embeddings": found} if found else {}

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
        for slower in () if self.chosen.fresh else (rate, rate / 3):
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
        simulator, fresh = self.simulator, self.chosen.fresh
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
            self._arguments_at if fresh else self.groups[0].args,
            self.groups[0].kwargs,
            data=None if fresh else train,
            refresh=0 if fresh else REFRESHED,
            validation=self.held_out,
            validate_every=max(1, steps // 50),
            patience=25,
            progress=self.chosen.progress,
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
