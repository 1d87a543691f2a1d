"""The first run of a model, from which a guide is made, and predicates on the messages of sites."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pyro import poutine
from pyro.distributions import Delta, NanMaskedMultivariateNormal, NanMaskedNormal
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.util import site_is_subsample

from pyro_nami.factors.wrappers import layers
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Message, Sites, make_whole

__all__ = [
    "MAY_BE_NAN",
    "allows_nan",
    "first_run",
    "is_delta",
    "is_enumerated",
    "is_latent",
    "is_node",
    "is_partial",
    "is_passing",
    "is_transparent",
    "subsamples",
    "unmarked",
    "with_nan",
]

MAY_BE_NAN = (NanMaskedNormal, NanMaskedMultivariateNormal)  # whose data may hold NaN


class _InitContinuous(InitMessenger):
    """Pyro's initialization for the sites that it covers; the others, discrete ones for instance, are sampled."""

    def _pyro_sample(self, msg: Any) -> None:
        make_whole(msg)
        if site_is_subsample(msg) or msg["fn"].support.is_discrete:
            return
        with suppress(NotImplementedError):
            super()._pyro_sample(msg)


def first_run(program: Program, init_loc_fn: Callable) -> poutine.Trace:
    """Returns the trace of a run with every continuous latent at its initial value."""
    with _InitContinuous(init_loc_fn):
        return poutine.trace(program.model).get_trace(*program.args, **program.kwargs)


def is_node(msg: Any) -> bool:
    """Whether a message is a node of the network: not a subsample, deterministic, Delta or masked out."""
    if msg["type"] != "sample" or site_is_subsample(msg):
        return False
    observed, fn = msg["is_observed"], msg["fn"]
    if observed and (msg["mask"] is False or msg["infer"].get("_deterministic", False)):
        return False
    return not is_delta(fn) or (
        observed and all(getattr(layer, "_mask", None) is not False for layer in layers(fn))
    )


def is_latent(site: Any) -> bool:
    """Whether a site is drawn, and not summed out by enumeration."""
    return not (site["is_observed"] or site_is_subsample(site) or is_enumerated(site))


def is_enumerated(site: Any) -> bool:
    """Whether the model sums a site out, by parallel enumeration."""
    return site["infer"].get("enumerate") == "parallel"


def unmarked(model: Callable) -> Callable:
    """Returns a model that marks no latent for enumeration, so that all are drawn."""
    return poutine.infer_config(model, lambda site: {"enumerate": None})  # type: ignore[typeddict-item]


def is_passing(site: Any) -> bool:
    """Whether a site is one of a sequential plate that the model subsamples: other calls have others."""
    return any(
        not frame.vectorized and frame.size < frame.full_size for frame in site["cond_indep_stack"]
    )


def is_transparent(site: Any) -> bool:
    """Whether a trace's site is a latent that the model itself determines."""
    return site["type"] == "sample" and is_latent(site) and is_delta(site["fn"])


def is_partial(msg: Any) -> bool:
    """Whether a message is a plate that is about to draw a part of its instances."""
    if not site_is_subsample(msg) or msg["value"] is not None:
        return False
    return msg["fn"].subsample_size is not None and msg["fn"].subsample_size < msg["fn"].size


def subsamples(nodes: Sites) -> dict[str, Any]:
    """Returns plate name -> indices, for every plate that the traced run subsampled."""
    return {
        name: site["value"]
        for name, site in nodes.items()
        if site_is_subsample(site) and len(site["value"]) < site["fn"].size
    }


def allows_nan(site: Message) -> bool:
    """Whether a site's value may be missing in part."""
    *_, fn = layers(site["fn"])
    return site["mask"] is not None or isinstance(fn, MAY_BE_NAN)


def with_nan(name: str, missing: int, count: int) -> ValueError:
    """Returns the error for data of a site with ``missing`` of ``count`` numbers that are NaN."""
    return ValueError(
        f"Expected data of site '{name}' without NaN; got {missing} of {count}. Mark missing values with obs_mask=, or "
        "observe them by NanMaskedNormal."
    )


def is_delta(fn: Any) -> bool:
    """Whether a distribution is a Delta, below its event dims and masks."""
    *_, last = layers(fn)
    return isinstance(last, Delta)
