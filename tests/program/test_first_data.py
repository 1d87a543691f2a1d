"""Data that no posterior has: the error of a first call names the site and the way out."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_nami import AutoNaMIGuide, fit

NAN = torch.tensor([0.5, math.nan, 1.0])


def normal(y, x=1.0, seen=True):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 3), poutine.mask(mask=torch.as_tensor(seen)):
        pyro.sample("y", dist.Normal(mean * x, 1.0), obs=y)


def of(likelihood):
    """Three data under a positive number."""

    def model(y):
        number = pyro.sample("number", dist.Gamma(2.0, 1.0))
        pyro.sample("y", likelihood(number).expand([3]).to_event(1), obs=y)

    return model


counts = of(dist.Poisson)
REFUSED = {
    "NaN": (normal, (NAN,), "site 'y' without NaN; got 1 of 3.*obs_mask"),
    "NaN where a mask counts": (
        normal,
        (NAN, 1.0, torch.tensor([True, True, False])),
        "site 'y' without NaN; got 1 of 3",
    ),
    "NaN in a covariate": (normal, (torch.ones(3), NAN), "without NaN.*'argument 1'.*obs_mask"),
    "a negative count": (
        counts,
        (torch.tensor([1.0, -2.0, 3.0]),),
        r"'y' in the support of its Poisson.*got 1 of 3 outside, such as -2\.0",
    ),
    "a share of a count": (counts, (torch.tensor([1.0, 2.5, 3.5]),), "got 2 of 3 outside"),
    "more than all": (
        of(lambda p: dist.Binomial(torch.tensor(4), p / (1 + p))),
        (torch.tensor([1.0, 5.0, 4.0]),),
        "its Binomial.*got 1 of 3 outside",
    ),
    "an infinite number": (
        normal,
        (torch.tensor([0.0, math.inf, 1.0]),),
        "all weights are zero, as the model's density is at 'y'.*infinite",
    ),
}


@pytest.mark.parametrize("model, args, message", REFUSED.values(), ids=list(REFUSED))
def test_data_that_no_latents_explain_are_refused(model, args, message):
    with pytest.raises(ValueError, match=message):
        fit(model, *args, seed=0, progress=False)


@pytest.mark.parametrize("data", [torch.ones(3).numpy(), 1.5], ids=["numpy", "a number"])
def test_data_that_are_no_tensors_are_refused(data):
    with pytest.raises(TypeError, match="data of site 'y' as a tensor.*torch.as_tensor"):
        AutoNaMIGuide(normal)(data)


ALLOWED = {
    "NaN behind a mask": (normal, (NAN, 1.0, ~NAN.isnan())),
    "NaN that the distribution takes": (of(lambda z: dist.NanMaskedNormal(z, 1.0)), (NAN,)),
    "a support that latents move": (of(lambda z: dist.Uniform(0.0, z)), (torch.full((3,), 9.0),)),
    "bounds that are not checked": (
        of(lambda z: dist.Poisson(z, validate_args=False)),
        (torch.tensor([0.5, 1.0, 1.5]),),
    ),
}


@pytest.mark.parametrize("model, args", ALLOWED.values(), ids=list(ALLOWED))
def test_data_that_some_latents_explain_are_taken(model, args):
    latents = AutoNaMIGuide(model)(*args)
    assert all(value.isfinite().all() for value in latents.values())


def test_a_bound_by_the_data_is_where_it_was():
    """Uniform data under a Pareto prior: the posterior is Pareto with a share of 1 + 3, above the largest."""

    def model(y):
        bound = pyro.sample("bound", dist.Pareto(1.0, 1.0))
        pyro.sample("y", dist.Uniform(0.0, bound).expand([3]).to_event(1), obs=y)

    posterior = fit(model, torch.tensor([1.0, 5.0, 2.5]), seed=0, progress=False)
    exact = dist.Pareto(torch.tensor(5.0), 4.0)
    assert posterior.verdict.is_trusted
    assert float(posterior.mean("bound")) == pytest.approx(float(exact.mean), rel=0.03)
