"""What networks read of a call's data: standardized features of every observed site.

Data that a call lacks, or that are missing, are replaced here.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from pyro.poutine.util import is_validation_enabled
from torch import Tensor

from pyro_nami.guide.arguments import Cache
from pyro_nami.guide.call import Call
from pyro_nami.guide.plan import Plan
from pyro_nami.guide.series import series_inputs
from pyro_nami.networks.running import tempered
from pyro_nami.parameters.conditioning import covariates_of, site_of
from pyro_nami.parameters.inverse_network import InverseNetwork
from pyro_nami.parameters.network_state import NetworkState
from pyro_nami.program.first_run import with_nan

__all__ = ["standardized", "tell_observed"]


def tell_observed(
    state: NetworkState, plan: Plan, call: Call, cache: Cache, changing: Collection[str]
) -> None:
    """Gives the networks' state the features of all observed values and covariates of a call.

    Features are made anew where a value changed, or where they depend on weights: those of ``changing`` sites.
    """
    network = state.network

    def features(node: Any, value: Tensor) -> Tensor:
        make = partial(standardized, node, value, plan, network)
        if node in changing or torch.jit.is_tracing():
            return make()
        return cache.get(("features", node), [value], make)

    of_series = () if plan.series is None else plan.series.data
    read = [name for name in plan.read if name not in of_series]
    unseen = [name for name in read if name not in call.values]
    lacking = call.lacking.intersection(plan.columns).difference(call.covariates)
    for node in (*call.lacking.intersection(plan.order), *unseen, *map(covariates_of, lacking)):
        state.put(node, _blank(node, plan, call, network))
    for name in read:
        if name in unseen:
            continue
        found = features(name, call.values[name])
        column = plan.covariates.mask_column(name)
        if column is not None:
            mask = call.covariates[name][..., column : column + 1] != 0
            found = torch.where(mask.to(found.device), found, torch.zeros_like(found))
        state.put(name, found)
    for name, values in call.covariates.items():
        state.put(covariates_of(name), features(covariates_of(name), values))
    if plan.series is not None:
        for name in plan.series.data:
            _check(name, call.values[name], plan)
        inputs = series_inputs(plan.series, call.program.loops, call.values, call.counted)
        state.read_series(inputs, plan.series.data[0])


def standardized(node: Any, value: Tensor, plan: Plan, network: InverseNetwork) -> Tensor:
    """Returns the standardized features of an observed node, ``(*left, *plates, features)``."""
    features = value
    if node in plan.sites:
        _check(node, value, plan)
        features = plan.features(node, value)
    if features.shape[-1] != len(network.standard(node)[0]):
        raise ValueError(
            f"Expected site '{node}' with the event shape that it had at the guide's first call; got a value of shape "
            f"{tuple(value.shape)}. A guide's networks are fixed at its first call: make a new guide."
        )
    return tempered(network.standardize(node, features))


def _blank(node: Any, plan: Plan, call: Call, network: InverseNetwork) -> Tensor:
    """Returns features of a node whose site a call lacks: average ones, and none in plates that the call lacks."""
    plates, shape = plan.plates, [1] * plan.plates.nesting
    frames = {
        frame.name
        for site in call.sites.values()
        for frame in site["cond_indep_stack"]
        if frame.vectorized
    }
    for plate in plan.sites[site_of(node)].plates:
        if plate in plan.blocks:
            shape[plates.dims[plate]] = plates.sizes[plate]
        elif plate not in frames:
            shape[plates.dims[plate]] = 0
    return torch.zeros(*shape, len(network.standard(node)[0]), **plan.factory)


def _check(name: str, value: Tensor, plan: Plan) -> None:
    """Raises for NaN in the data of a site whose distribution and mask do not allow for it."""
    if plan.sites[name].allows_nan or not is_validation_enabled() or not value.is_floating_point():
        return
    missing = int(value.isnan().sum())
    if missing:
        raise with_nan(name, missing, value.numel())
