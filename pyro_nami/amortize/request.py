"""What a call of `amortize` asks for: its checks, the simulator of its model, and the simulations to learn from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pyro_nami.amortize.sizes import arguments_of
from pyro_nami.fit.fitting import Interrupted
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.batches import as_draws
from pyro_nami.inference.history import History
from pyro_nami.inference.simulate import Batch, Simulator
from pyro_nami.inference.simulator_model import SimulatorModel, with_drawn_data
from pyro_nami.inference.site_messages import with_idle_dims
from pyro_nami.inference.workers import PartOfDraws, drawn
from pyro_nami.messages import warn
from pyro_nami.program.first_run import unmarked
from pyro_nami.program.runner import signature_of

__all__ = [
    "DEFAULT_SIMULATIONS",
    "Chosen",
    "GroupedSimulations",
    "as_given",
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
    sizes: Mapping[str, tuple[int, int]] | None
    arguments: Callable[[], tuple] | None


class GroupedSimulations(NamedTuple):
    """Simulations to learn from."""

    groups: list[Batch]  # by the arguments that they were made at
    seen: History  # counts those that are not finite
    own: bool  # whether the simulator made the draws, with the model's prior

    @property
    def num(self) -> int:
        """The number of simulations."""
        return sum(group.draws.num for group in self.groups)

    def joined(self, more: GroupedSimulations) -> GroupedSimulations:
        """Returns these simulations, and others behind them."""
        seen = replace(
            self.seen,
            simulations=self.seen.simulations + more.seen.simulations,
            skipped=self.seen.skipped + more.seen.skipped,
            non_finite=self.seen.non_finite + more.seen.non_finite,
        )
        groups = [*self.groups]
        for group in more.groups:
            place = next((i for i, each in enumerate(groups) if _are_alike(each, group)), None)
            if place is None:
                groups.append(group)
            else:
                draws = groups[place].draws.joined([group.draws])
                groups[place] = groups[place]._replace(draws=draws)
        return GroupedSimulations(groups, seen, self.own and more.own)


def _are_alike(one: Batch, other: Batch) -> bool:
    """Whether simulations were made at the same arguments: the same objects, or equal sizes."""
    pairs = [*zip(one.args, other.args)]
    pairs += [(value, other.kwargs.get(name)) for name, value in one.kwargs.items()]
    return all(a is b or isinstance(a, int) and isinstance(b, int) and a == b for a, b in pairs)


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
        simulator = Simulator(unmarked(model), args, kwargs, observed)
    return simulator


def undrawn(model: Callable) -> Callable:
    """Returns a model for runs that show its sites and shapes alone."""
    return model.undrawn() if isinstance(model, SimulatorModel) else model


def simulated(
    source: Simulator, simulations: Any, chosen: Chosen, *, least: int = FEWEST_SIMULATIONS
) -> GroupedSimulations:
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
        groups = _drawn(source, simulations, chosen)
    elif chosen.sizes or chosen.arguments:
        raise ValueError("Expected a number of simulations with sizes or arguments; got values.")
    else:
        groups = _given(source, simulations)
    seen = History()
    # Real data are finite, and no simulation with finite data is left out, so that their posterior stays what it is.
    groups = [group._replace(draws=seen.finite(group.draws, most=1.0)) for group in groups]
    found = GroupedSimulations(
        [group for group in groups if group.draws.num >= min(least, 2)], seen, own
    )
    if found.num < least:
        why = f", as {seen.shortfall()}" if seen.skipped else ""
        raise ValueError(
            f"Expected at least {least} simulations to learn from; got {found.num}{why}."
        )
    if seen.skipped:
        warn(f"{seen.shortfall()}; they were left out.")
    return found


def _drawn(source: Simulator, num: int, chosen: Chosen) -> list[Batch]:
    """Returns simulations at each of several arguments, as many at each."""
    places = arguments_of(source, num, chosen.sizes, chosen.arguments)
    groups: list[Batch] = []
    for i, (args, kwargs) in enumerate(places):
        count = num // len(places) + (i < num % len(places))
        here = source.at(*args, **kwargs)
        try:
            groups.append(here.batch(drawn(here, count, chosen.num_workers, chosen.progress)))
        except PartOfDraws as error:
            part = [] if error.draws is None else [here.batch(error.draws)]
            raise interrupted([*groups, *part]) from error
    return groups


def _given(source: Simulator, simulations: Any) -> list[Batch]:
    """Returns simulations that a user has given, after a check."""
    if isinstance(simulations, list) and all(isinstance(each, Batch) for each in simulations):
        return simulations
    given = as_draws(simulations, source)
    for name, value in {**given.latents, **given.observed}.items():
        # raises for a value of a wrong shape
        with_idle_dims(value, source.single[name], source.nesting, 1)
    return [source.batch(given)]


def as_given(groups: Sequence[Batch]) -> Any:
    """Returns simulations in the form that `amortize` takes again; None if there are none."""
    if len(groups) > 1:
        return [*groups]
    return groups[0].draws if groups else None


def interrupted(groups: Sequence[Batch]) -> Interrupted:
    """Returns the error of Ctrl-C, with the simulations that were drawn by then."""
    error = Interrupted("amortize was interrupted; see `simulations` for those that it had.")
    error.simulations = as_given(groups)
    return error
