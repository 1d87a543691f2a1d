"""The run of a model that a guide is made from, and what is read off its sites one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pyro import poutine
from pyro.distributions import Delta, NanMaskedMultivariateNormal, NanMaskedNormal
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample

from pyro_nami.factors.wrappers import layers
from pyro_nami.reading.runner import widen

__all__ = ["allows_nan", "first_run", "is_latent", "is_passing", "is_transparent", "subsamples"]


class _InitContinuous(InitMessenger):
    """Pyro's initialization for the sites that it covers; the others, discrete ones for instance, are sampled."""

    def _pyro_sample(self, msg: Any) -> None:
        widen(msg)
        if not _is_discrete(msg["fn"]):
            with suppress(NotImplementedError):
                super()._pyro_sample(msg)


def _is_discrete(fn: Any) -> bool:
    try:
        return bool(fn.support.is_discrete)
    except (AttributeError, NotImplementedError):
        return False


def first_run(model: Callable, args: tuple, kwargs: Mapping[str, Any], init_loc_fn: Callable) -> poutine.Trace:
    """Returns the trace of a run with every continuous latent at its initial value."""
    with _InitContinuous(init_loc_fn):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return trace


def subsamples(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the instances that a run, of which a trace has these nodes, saw of each plate that it saw a part of."""
    plates = ((name, site) for name, site in nodes.items() if site_is_subsample(site))
    return {name: site["value"] for name, site in plates if len(site["value"]) < site["fn"].size}


def is_latent(site: Any) -> bool:
    """Whether a site is drawn, and not summed out by enumeration."""
    return not (site["is_observed"] or site_is_subsample(site) or site["infer"].get("enumerate") == "parallel")


def is_passing(site: Any) -> bool:
    """Whether a site is one of a sequential plate that the model subsamples: other calls have others."""
    return any(not frame.vectorized and frame.size < frame.full_size for frame in site["cond_indep_stack"])


def is_transparent(site: Any) -> bool:
    """Whether a trace's site is a latent that the model itself determines."""
    if site["type"] != "sample" or site["is_observed"] or site_is_subsample(site):
        return False
    *_, fn = layers(site["fn"])
    return isinstance(fn, Delta)


def allows_nan(site: Mapping[str, Any]) -> bool:
    *_, fn = layers(site["fn"])
    return site["mask"] is not None or isinstance(fn, (NanMaskedNormal, NanMaskedMultivariateNormal))
