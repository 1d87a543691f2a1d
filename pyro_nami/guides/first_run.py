"""The run of a model that a guide is made from, and what is read off its sites one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pyro import poutine
from pyro.distributions import Delta, NanMaskedMultivariateNormal, NanMaskedNormal
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample

__all__ = ["allows_nan", "first_run", "is_transparent"]


class _InitContinuous(InitMessenger):
    """Pyro's initialization for the sites that it covers; the others, discrete ones for instance, are sampled."""

    def _pyro_sample(self, msg: Any) -> None:
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


def is_transparent(site: Any) -> bool:
    """Whether a trace's site is a latent that the model itself determines."""
    if site["type"] != "sample" or site["is_observed"] or site_is_subsample(site):
        return False
    fn = site["fn"]
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, Delta)


def allows_nan(site: Mapping[str, Any]) -> bool:
    fn = site["fn"]
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return site["mask"] is not None or isinstance(fn, (NanMaskedNormal, NanMaskedMultivariateNormal))
