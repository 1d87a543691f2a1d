"""Checks of the data that a guide's first call brings, so that an error names the site and the way out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from numbers import Number
from typing import Any

import numpy as np
import torch
from pyro import poutine
from pyro.poutine.util import is_validation_enabled, site_is_factor
from torch import Tensor
from torch.distributions.constraints import Constraint

from pyro_nami.factors.bijections import has_tensor_bounds, support_of
from pyro_nami.factors.wrappers import innermost
from pyro_nami.messages import quoted
from pyro_nami.program.first_run import MAY_BE_NAN, is_node, with_nan
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.masks import element_mask
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Message, Runner

__all__ = ["checked_run"]


def checked_run(program: Program, run: Callable[[], poutine.Trace]) -> poutine.Trace:
    """Returns the trace of a model's first run, after a check of its data.

    Raises:
        ValueError: data that are NaN where nothing masks them, or outside of their support; a model that fails on
            arguments with NaN.
        TypeError: data that are no tensors.
    """
    try:
        trace = run()
    except ValueError as error:
        holding = _arguments_with_nan(program)
        if not holding:
            raise
        raise ValueError(
            f"Expected arguments without NaN, or a model that masks them; got some in {quoted(holding)}, and the "
            "model fails. Leave out these rows, or give missing covariates a prior and observe the others with "
            "obs_mask=."
        ) from error
    _check_data(program, trace)
    return trace


def _check_data(program: Program, trace: poutine.Trace) -> None:
    """Raises for observed values that are no tensors, that are NaN, or that no latents bring into the support."""
    if not is_validation_enabled():
        return
    for name, site in trace.nodes.items():
        if not (is_node(site) and site["is_observed"]) or site_is_factor(site):
            continue
        value: Any = site["value"]
        whole: Any = site["fn"]
        fn = innermost(whole)
        if isinstance(value, (np.ndarray, Number)):
            raise TypeError(
                f"Expected data of site '{name}' as a tensor; got a {type(value).__name__}. Pass torch.as_tensor(...)."
            )
        missing = _missing(site)
        if missing:
            raise with_nan(name, missing, value.numel())
        outside = _outside(site)
        if outside.any() and _is_fixed(program, name, support_of(fn)):
            example = value.expand(whole.shape())[outside].flatten()[0].item()
            raise ValueError(
                f"Expected data of site '{name}' in the support of its {type(fn).__name__}, {support_of(fn)}; got "
                f"{int(outside.sum())} of {outside.numel()} outside, such as {example}. Correct them, take another "
                "likelihood, or leave them out with obs_mask=."
            )


def _missing(site: Message) -> int:
    """Returns how many values of an observed site are NaN where neither its mask nor its distribution allows for it."""
    value = torch.as_tensor(site["value"])
    if not value.is_floating_point() or isinstance(innermost(site["fn"]), MAY_BE_NAN):
        return 0
    missing, mask = value.isnan(), element_mask(site)
    return int((missing if mask is None else missing & mask).sum())


def _outside(site: Message) -> Tensor:
    """Returns which values of a site are outside of its support, ``(*batch)``; False where that is not known."""
    fn: Any = innermost(site["fn"])
    value, shape = site["value"], site["fn"].shape()
    is_of_shape = value.dim() <= len(shape)  # own types may declare another
    if is_of_shape and fn._validate_args and not isinstance(fn, MAY_BE_NAN):
        with suppress(NotImplementedError):
            outside = ~support_of(fn).check(value.expand(shape))
            mask = element_mask(site)
            if mask is None:
                return outside
            own = tuple(range(-len(fn.event_shape), 0))
            return outside & (mask.expand(shape).amax(own) if own else mask)
    return torch.zeros((), dtype=torch.bool)


def _is_fixed(program: Program, name: str, support: Constraint, *, runs: int = 8) -> bool:
    """Whether a support is the same in runs at other latents; that of a Uniform up to an unknown bound is not.

    In fewer ``runs`` a discrete latent may have the same value in all.
    """
    if not has_tensor_bounds(support):
        return True
    bounds = _bounds(support)
    with torch.no_grad(), forked_rng():
        for _ in range(runs):
            site = program.run(Runner({})).get(name)
            others = [] if site is None else _bounds(support_of(innermost(site["fn"])))
            if not (len(others) == len(bounds) and all(map(torch.equal, bounds, others))):
                return False
    return True


def _bounds(support: Constraint) -> list[Tensor]:
    return [bound for bound in vars(support).values() if isinstance(bound, Tensor)]


def _arguments_with_nan(program: Program) -> list[str]:
    """Returns the places and names of the arguments that hold NaN."""
    places = {f"argument {i}": value for i, value in enumerate(program.args)}
    return [
        place
        for place, value in {**places, **program.kwargs}.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any()
    ]
