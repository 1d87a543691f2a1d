"""One run of a guide and of a model for many draws and data sets, and the log densities of both.

A `Pair` runs the guide in outer plates, draws in one and data sets in another, left of the model's plates, and the
model at what the guide drew. It checks, once, that guide and model have the same latents and that the observed values
fit. Change this module when a guide and a model are to be run together in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.infer.inspect import is_sample_site
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor
from torch.distributions import transform_to

from pyro_nami.inference.observations import Observations
from pyro_nami.inference.sites import (
    check_full_plate,
    is_delta,
    plate_names,
    plate_nesting,
    unconstrained_zeros,
)
from pyro_nami.reading.runner import takes_observations

__all__ = ["BadDensity", "Pair", "Traces", "sample_sites"]

_PLATES = ("_draws", "_data_sets")


class BadDensity(ValueError):
    """A log density that no weight can be made of; the message names the site."""


class Traces(NamedTuple):
    """A run of the guide, and one of the model at its values, with log densities."""

    guide: poutine.Trace
    model: poutine.Trace


class Pair:
    """A model and a guide on one call's arguments and data.

    Args:
        model, guide, args, kwargs: as Pyro takes them.
        observations: observed site -> value; see `importance_sample`.

    Attributes:
        sets: ``(data sets,)``, or ``()`` where there is one without a dim.
        nesting: plate dims of the model.
        single: the traces of one draw for the first data set; they give every site's own shape.
        latents: names of the latents, in model order, and ``plates`` the names of their batch dims' plates.
        elements: of the values of all sites, for one draw and all data sets.

    Raises:
        ValueError: observations of an unknown site or a wrong shape, a latent that only one of the two has, or a guide
            that is a point.
        NotImplementedError: plates with random subsampling.
    """

    def __init__(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict, observations: Mapping[str, Any]
    ) -> None:
        self.model, self.guide, self.args, self.kwargs = model, guide, args, kwargs
        self._told = {"model": takes_observations(model), "guide": takes_observations(guide, is_guide=True)}
        self.nesting = 0
        self._data = self._read(observations)
        self.sets: tuple[int, ...] = () if self._data.num is None else (self._data.num,)
        self.single = self.run(())
        self.nesting = max(plate_nesting(sample_sites(trace).values()) for trace in self.single)
        for trace in self.single:
            site: Any
            for name, site in trace.nodes.items():
                if site["type"] == "sample" and site_is_subsample(site):
                    check_full_plate(name, site["fn"])
        sites = sample_sites(self.single.model)
        self.latents = self._matched(sites)
        self.plates = {name: plate_names(sites[name]) for name in self.latents}
        numbers = [
            site["fn"].shape().numel() for trace in self.single for site in sample_sites(trace).values()
        ]
        self.elements = max(1, sum(numbers)) * (self.sets[0] if self.sets else 1)

    def run(self, batch: tuple[int, ...], which: int = 0, held: Mapping[str, Tensor] | None = None) -> Traces:
        """Runs guide and model once, and computes log densities.

        Args:
            batch: ``(draws, *data sets)``, or ``()`` for one draw on one data set.
            which: the data set, where ``batch`` is empty.
            held: values of the guide's sites; by default they are drawn.

        Raises:
            BadDensity: a distribution refuses NaN.
        """
        try:
            return self._run(batch, which, held)
        except ValueError as error:
            # Without validation the run goes on to a log density, which has a site to name.
            with pyro.validation_enabled(False):
                try:
                    self.check_densities(self._run(batch, which, held), batch)
                except BadDensity as bad:
                    raise bad from error
                except Exception:  # the same error, or what follows from it
                    pass
            raise

    def _run(self, batch: tuple[int, ...], which: int, held: Mapping[str, Tensor] | None) -> Traces:
        data = self._data.batch() if batch else self._data.one(which)
        guide, model = self._in_plates("guide", batch, data), self._in_plates("model", batch, data)
        with torch.no_grad(), poutine.block():
            with _Held(held or {}):
                guide_trace = poutine.trace(guide).get_trace()
            # What the guide observes is no part of its density, but what it weights by a factor is.
            for name, site in sample_sites(guide_trace).items():
                if site["is_observed"] and not site_is_factor(site):
                    guide_trace.remove_node(name)
            model = poutine.replay(poutine.condition(model, data=data), trace=guide_trace)
            model_trace = poutine.trace(model).get_trace()
            for trace in (guide_trace, model_trace):
                trace.compute_log_prob()
        return Traces(guide_trace, model_trace)

    def _in_plates(self, role: str, batch: tuple[int, ...], data: Mapping[str, Tensor]) -> Callable:
        """Returns a function that runs the guide or the model in plates for the draws and the data sets."""
        fn, kwargs, first = getattr(self, role), self._kwargs(role, data), -self.nesting - len(batch)

        def run() -> None:
            with ExitStack() as stack:
                for index, size in enumerate(batch):
                    stack.enter_context(pyro.plate(_PLATES[index], size, dim=first + index))
                fn(*self.args, **kwargs)

        return run

    def _kwargs(self, role: str, data: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.kwargs, "observations": data} if data and self._told[role] else self.kwargs

    # ---- what traces hold

    def values(self, traces: Traces, batch: tuple[int, ...]) -> dict[str, Tensor]:
        """Returns every latent's value, ``(*batch, *site shape)``."""
        sites = sample_sites(traces.model)
        return {
            name: sites[name]["value"]
            .expand(sites[name]["fn"].shape())
            .reshape(batch + self._own_shape(self.single.model, name))
            for name in self.latents
        }

    def log_probs(self, trace: poutine.Trace, batch: tuple[int, ...]) -> dict[str, Tensor]:
        """Returns each site's log density, summed over its plates: ``(draws, *data sets)``."""
        result = {}
        for name, site in sample_sites(trace).items():
            log_prob = site["log_prob"]
            if batch:
                log_prob = log_prob[(None,) * max(0, self.nesting + len(batch) - log_prob.dim())]
                log_prob = log_prob.sum(tuple(range(-self.nesting, 0))) if self.nesting else log_prob
                result[name] = log_prob.expand(batch)
            else:
                result[name] = log_prob.sum()
        return result

    def check_densities(self, traces: Traces, batch: tuple[int, ...]) -> None:
        """Raises BadDensity for a site whose log density is no number, or +inf, or -inf in the guide, which drew it."""
        log_probs = [(role, self.log_probs(trace, batch)) for role, trace in zip(("guide", "model"), traces)]
        for bad in (torch.isnan, torch.isposinf, torch.isneginf):
            for role, parts in log_probs:
                for name, log_prob in parts.items():
                    found = int(bad(log_prob).sum())
                    if found and not (bad is torch.isneginf and role == "model"):
                        kind = {torch.isnan: "NaN", torch.isposinf: "inf", torch.isneginf: "-inf"}[bad]
                        raise BadDensity(_DENSITY.format(name, role, kind, found, log_prob.numel()))

    def one_draw(self, trace: poutine.Trace, index: tuple[int, ...]) -> dict[str, Tensor]:
        """Returns the values of the guide's sites in one of its draws."""
        held: dict[str, Tensor] = {}
        site: Any
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and not site["is_observed"]:
                held[name] = site["value"]
                if not site_is_subsample(site):
                    value = site["value"].expand(site["fn"].shape())[index]
                    held[name] = value.reshape(self._own_shape(self.single.guide, name))
        return held

    def _own_shape(self, trace: poutine.Trace, name: str) -> torch.Size:
        site: Any = trace.nodes[name]
        return site["fn"].shape()

    # ---- checks of what is given

    def _read(self, observations: Mapping[str, Any]) -> Observations:
        """Returns the observed values, checked against a run of the model."""
        if not observations:
            return Observations({}, {}, 0)
        with torch.no_grad(), poutine.block(), InitMessenger(self._any_value):
            trace = poutine.trace(self.model).get_trace(*self.args, **self._kwargs("model", observations))
        sites = sample_sites(trace)
        return Observations(observations, sites, plate_nesting(sites.values()))

    def _matched(self, sites: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the latents, and raises where the guide's and the model's differ."""
        latents = tuple(name for name, site in sites.items() if not site["is_observed"])
        drawn = {
            name: site
            for name, site in sample_sites(self.single.guide).items()
            if not site["is_observed"] and not site["infer"].get("is_auxiliary")
        }
        for name in latents:
            if name not in drawn and is_sample_site(sites[name]):
                raise ValueError(
                    f"Expected a guide that samples every latent of the model; it does not sample '{name}'. If "
                    f"'{name}' is data, pass it as an argument or by observations=."
                )
        # A Delta of the guide has a density only if it is a function of an auxiliary site, or says so.
        made = any(
            site_is_factor(site) or (site["infer"].get("is_auxiliary") and not is_delta(site["fn"]))
            for site in sample_sites(self.single.guide).values()
        )
        for name, site in drawn.items():
            if name not in latents:
                what = "observed" if name in sites else "none of its sites"
                raise ValueError(
                    f"Expected a guide that samples latents of the model; it samples '{name}', which is {what} there."
                )
            if site["fn"].shape() != sites[name]["fn"].shape():
                raise ValueError(
                    f"Expected the guide to sample '{name}' of the model's shape, "
                    f"{tuple(sites[name]['fn'].shape())}; got {tuple(site['fn'].shape())}."
                )
            if (
                not made
                and is_delta(site["fn"])
                and not (is_delta(sites[name]["fn"]) or site["log_prob"].any())
            ):
                raise ValueError(
                    f"Expected a guide with a density at every latent; it is a point at '{name}'. Use AutoNaMIGuide, "
                    "or another guide that draws."
                )
        return tuple(name for name in latents if name in drawn)

    def _any_value(self, site: Any) -> Tensor:
        """Returns a value for a site, in a run that only shows shapes; an improper prior has no draw."""
        try:
            return site["fn"].sample()
        except NotImplementedError:
            transform = transform_to(site["fn"].support)
            shape = transform.inverse_shape(site["fn"].shape())
            return transform(unconstrained_zeros(shape, self.args, self.kwargs))


class _Held(Messenger):
    """Gives sites their values. Unlike `poutine.replay` it leaves all else of them alone."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"], msg["done"] = self.values[msg["name"]], True


def sample_sites(trace: poutine.Trace) -> dict[str, Any]:
    """Returns the sites of a trace that have densities: no parameters and no plates."""
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site_is_subsample(site)
    }


_DENSITY = (
    "Expected a finite log density at site '{}' of the {}; got {} for {} of {} draws. Check the site's parameters and "
    "the data that it sees."
)
