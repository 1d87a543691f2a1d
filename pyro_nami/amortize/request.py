"""What a call of `amortize` asks for: its checks, the simulator of its model, and the simulations to learn from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pyro import poutine

from pyro_nami.fit.fitting import Interrupted
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.batches import as_draws
from pyro_nami.inference.history import History
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.simulator_model import SimulatorModel, with_drawn_data
from pyro_nami.inference.site_messages import with_idle_dims
from pyro_nami.inference.workers import PartOfDraws, drawn
from pyro_nami.messages import warn
from pyro_nami.program.runner import signature_of

__all__ = [
    "DEFAULT_SIMULATIONS",
    "Chosen",
    "Simulations",
    "check_given",
    "check_options",
    "interrupted",
    "simulated",
    "source_of",
    "undrawn",
]

# Simulations by default. The number of training steps goes with their square root, so that with ten times more training
# takes three times as long.
DEFAULT_SIMULATIONS = 10_000
FRESH = "fresh"  # the word for simulations that are others in each step
# Simulations of which a tenth, held out, is at least two.
FEWEST_SIMULATIONS = 20
# Options of a guide that `amortize` sets itself.
ITS_OWN = {"observed", "embeddings", "mode"}


class Chosen(NamedTuple):
    """What a call of `amortize` was told."""

    fresh: bool  # whether each step draws simulations of its own
    steps: int | None
    progress: bool
    embeddings: Mapping[str, Any] | None
    options: Mapping[str, Any]
    num_workers: int


class Simulations(NamedTuple):
    """Simulations to learn from."""

    draws: JointDraws
    seen: History  # counts those that are not finite
    own: bool  # whether the simulator made the draws, with the model's prior

    def joined(self, more: Simulations) -> Simulations:
        """Returns these simulations, and others behind them."""
        seen = replace(
            self.seen,
            simulations=self.seen.simulations + more.seen.simulations,
            skipped=self.seen.skipped + more.seen.skipped,
            non_finite=self.seen.non_finite + more.seen.non_finite,
        )
        return Simulations(self.draws.joined([more.draws]), seen, self.own and more.own)


def check_given(simulations: Any, args: tuple) -> None:
    """Raises where a prior is given in place of a model, without simulations."""
    if args or isinstance(simulations, (int, str)):
        raise TypeError(
            "Expected a model, or a prior with simulations={'theta': ..., 'x': ...}; got a prior without them. Give "
            "its simulator by from_simulator(prior, simulator)."
        )


def check_options(
    model: Callable,
    kwargs: Mapping[str, Any],
    guide: AutoNaMIGuide | None,
    embeddings: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
) -> None:
    """Raises where options of a guide are given to the model, or beside a guide, and for unknown ones."""
    of_guide = inspect.signature(AutoNaMIGuide.__init__).parameters.keys() - {"self", "model"}
    for name in sorted(of_guide.intersection(kwargs)):
        if not _takes(model, name):
            raise TypeError(
                f"Expected keywords of the model; got `{name}`, an option of the guide. Use options={{'{name}': ...}}."
            )
    for name in sorted((options or {}).keys() - (of_guide - ITS_OWN)):
        raise ValueError(
            f"Expected options of AutoNaMIGuide other than {', '.join(sorted(ITS_OWN))}; got '{name}'."
        )
    if guide is not None and (embeddings or options):
        raise ValueError(
            "Expected embeddings and options of a guide that is made here; got some beside guide=. Give them to that "
            "guide."
        )


def _takes(model: Callable, name: str) -> bool:
    """Whether a model takes a keyword, by its signature."""
    model = model.model if isinstance(model, SimulatorModel) else model
    try:
        parameters = signature_of(model).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def source_of(
    model: Callable, args: tuple, kwargs: Mapping[str, Any], observed: Sequence[str], marked: bool
) -> Simulator:
    """Returns the simulator of a model; unless ``marked``, of one without marks for enumeration."""
    model = with_drawn_data(model, args, kwargs, observed)
    if isinstance(model, SimulatorModel):
        # sites and shapes take no run of a simulator
        structure = Simulator(undrawn(model), args, kwargs, observed or tuple(model.data))
        return structure.of(model)
    simulator = Simulator(model, args, kwargs, observed)
    if simulator.enumerates and not marked:
        model = poutine.infer_config(model, lambda site: {"enumerate": None})  # type: ignore[typeddict-item]
        simulator = Simulator(model, args, kwargs, observed)
    return simulator


def undrawn(model: Callable) -> Callable:
    """Returns a model for runs that show its sites and shapes alone."""
    return model.undrawn() if isinstance(model, SimulatorModel) else model


def simulated(
    source: Simulator, simulations: Any, chosen: Chosen, *, least: int = FEWEST_SIMULATIONS
) -> Simulations:
    """Returns the simulations that are finite, drawn or given.

    Raises:
        ValueError: there are fewer than ``least``; simulations of another form.
        Interrupted: at Ctrl-C.
    """
    if isinstance(simulations, str):
        if simulations != FRESH:
            raise ValueError(
                f"Expected simulations to be a number, 'fresh', or values; got {simulations!r}."
            )
        simulations = DEFAULT_SIMULATIONS
    own = isinstance(simulations, int)
    if chosen.num_workers and (chosen.fresh or not own):
        kind = "fresh in each step" if chosen.fresh else "given"
        raise ValueError(
            f"Expected num_workers with a number of simulations, for workers to draw; got simulations that are {kind}."
        )
    if own:
        try:
            given = drawn(source, simulations, chosen.num_workers, chosen.progress)
        except PartOfDraws as error:
            raise interrupted(error.draws) from error
    else:
        given = as_draws(simulations, source)
        for name, value in {**given.latents, **given.observed}.items():
            # raises for a value of a wrong shape
            with_idle_dims(value, source.single[name], source.nesting, 1)
    seen = History()
    # Real data are finite, and no simulation with finite data is left out, so that their posterior stays what it is.
    draws = seen.finite(given, most=1.0)
    if draws.num < least:
        why = f", as {seen.shortfall()}" if seen.skipped else ""
        raise ValueError(
            f"Expected at least {least} simulations to learn from; got {draws.num}{why}."
        )
    if seen.skipped:
        warn(f"{seen.shortfall()}; they were left out.")
    return Simulations(draws, seen, own)


def interrupted(draws: JointDraws | None) -> Interrupted:
    """Returns the error of Ctrl-C, with the simulations that were drawn by then."""
    error = Interrupted("amortize was interrupted; see `simulations` for those that it had.")
    error.simulations = draws
    return error
