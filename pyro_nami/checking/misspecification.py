"""`misspecification`: how far real data lie from a model's simulations, where amortized inference was never trained.

Distances are those of `pyro_nami.amortize.data_distance`.
"""

from __future__ import annotations

__all__ = ["Misspecification", "compare", "misspecification"]

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyro_nami.amortize.data_distance import ADVICE, Misspecification, SimulatedData
from pyro_nami.checking.simulations import finite_draws, seeded
from pyro_nami.inference.observations import Observations, as_mapping, observed_names
from pyro_nami.inference.scaled_coordinates import site_forms
from pyro_nami.inference.simulate import Simulator
from pyro_nami.messages import warn


def misspecification(
    model: Callable,
    *args: Any,
    observations: Mapping[str, Any] | None = None,
    num_datasets: int = 1000,
    observed: Sequence[str] = (),
    level: float = 0.01,
    seed: int | None = None,
    **kwargs: Any,
) -> Misspecification:
    """Measures how unusual a data set is among a model's simulations, and warns where it is.

    On unusual data a compiled guide extrapolates, and the model itself may be wrong. A data set of the model gets a
    p-value below a level with at most that probability. What is unusual is judged by how the simulations vary: where
    these have heavy tails, a single outlier may pass.

    Args:
        model: a Pyro model.
        *args, **kwargs: its arguments.
        observations: observed site -> value, of the site's own shape; by default, what the model observes itself.
        num_datasets: simulations, one half to say what is usual, the other to compare with.
        observed: sites that the model samples when no data is given; those in ``observations`` need not be named.
        level: of the warning.
        seed: of all random numbers; None goes on from the current state. The state outside stays as it was.

    Raises:
        ValueError: a site without data, of another shape, or with values that are not finite.

    References:
        Schmitt et al. 2023, "Detecting Model Misspecification in Amortized Bayesian Inference with Neural Networks"
        (the aim; here the features are fixed, and the distance is Mahalanobis').
    """
    if num_datasets < 10:
        raise ValueError(f"Expected num_datasets of at least 10; got {num_datasets}.")
    given = as_mapping(observations)
    with seeded(seed):
        simulator = Simulator(model, args, kwargs, observed_names(observed, observations=given))
        result = compare(simulator, {**simulator.data, **given}, num_datasets, level)
    if not result.passed:
        warn(f"{result} {ADVICE}")
    return result


def compare(
    simulator: Simulator, data: Mapping[str, Any], num_datasets: int, level: float
) -> Misspecification:
    """Returns how far data, a value for every observed site, lie outside a model's simulations."""
    forms = site_forms(simulator)
    simulated = finite_draws(simulator, num_datasets)[0].observed
    own = {}
    for name, like in simulated.items():
        if data.get(name) is None:
            raise ValueError(
                f"Expected data of every observed site; got none for '{name}'. Pass it in observations=."
            )
        given = Observations({name: data[name]}, simulator.single, simulator.nesting)
        if given.num not in (None, 1):
            raise ValueError(f"Expected one data set; got {given.num} at site '{name}'.")
        value = given.one()[name]
        if not value.isfinite().all():
            raise ValueError(
                f"Expected data without NaN and infinite values; got some at site '{name}'."
            )
        own[name] = value.to(like.dtype).reshape(1, *like.shape[1:])
    return SimulatedData(simulated, forms).judged(own, level)
