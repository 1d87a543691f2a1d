"""Numbers that are large, small, constant, missing, or of another type: a guide trains, or says why not."""

from __future__ import annotations

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import local_normals, pooled, varying_intercept
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 3, generator=GENERATOR), torch.randn(20, generator=GENERATOR)
COLUMNS = torch.stack([X[:, 0], torch.ones(20), torch.zeros(20)], -1)
INTEGERS = torch.tensor([1, 2, 3])


def hierarchy(y):
    """With constants of the dtype of the data, where these are real numbers."""
    like = y if y.is_floating_point() else torch.zeros(())
    m = pyro.sample("m", dist.Normal(like.new_zeros(()), 1.0))
    t = pyro.sample("t", dist.HalfCauchy(like.new_ones(())))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(m, t))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def regression(x, y, subsample_size=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y), subsample_size=subsample_size) as rows:
        pyro.sample("y", dist.Normal((x[rows] * w).sum(-1), s), obs=y[rows])


def with_covariate(x, y):
    """m, then z_n | m + x_n with heavy tails, then y_n | z_n."""
    local_normals(y, prior=lambda m: dist.Cauchy(m + x, 1.0))


def student(loc):
    return dist.StudentT(3.0, loc, 1.0)


counts = pooled(dist.Gamma(2.0, 1.0), dist.Poisson)
heavy_tails = functools.partial(local_normals, likelihood=student)
groups = functools.partial(varying_intercept, likelihood=student)
TRAINS = {
    "data of 1e6": (heavy_tails, (1e6 * Y,)),
    "data of 1e-6": (hierarchy, (1e-6 * Y,)),
    "covariates of 1e6": (regression, (1e6 * X, Y)),
    "covariates of 1e-6": (regression, (1e-6 * X, Y)),
    "constant columns": (regression, (COLUMNS, Y)),
    "constant data": (hierarchy, (torch.ones(8),)),
    "zeros": (hierarchy, (torch.zeros(8),)),
    "data of a Cauchy distribution": (heavy_tails, (100 * torch.linspace(-1.5, 1.5, 50).tan(),)),
    "a plate of one": (hierarchy, (Y[:1],)),
    "a regression on one row": (regression, (X[:1], Y[:1])),
    "minibatches of one": (regression, (X, Y, 1)),
    "float16": (hierarchy, (Y.half(),)),
    "bfloat16": (hierarchy, (Y.bfloat16(),)),
    "float64 data in a float32 model": (heavy_tails, (Y.double(),)),
    "float64 covariates in a float32 model": (with_covariate, (Y.double(), Y)),
    "float16 data in a float32 model": (heavy_tails, (Y.half(),)),
    "integers for real data": (hierarchy, (INTEGERS,)),
    "an integer covariate": (with_covariate, (INTEGERS, Y[:3])),
    "a boolean covariate": (with_covariate, (INTEGERS > 1, Y[:3])),
    "integer counts": (counts, (INTEGERS,)),
    "counts of 1e6": (counts, (torch.tensor([1e6, 2e6, 1.0]),)),
    "groups of one": (groups, (torch.arange(5), 5, Y[:5])),
    "a group without rows": (groups, (torch.tensor([0, 0, 2, 2]), 4, Y[:4])),
    "one group": (groups, (torch.zeros(4, dtype=torch.long), 1, Y[:4])),
}


@pytest.mark.parametrize("name", TRAINS)
def test_trains(name):
    model, args = TRAINS[name]
    guide = AutoNaMIGuide(model)
    losses = []
    for vectorized in (False, True):
        elbo = Trace_ELBO(num_particles=2, vectorize_particles=vectorized, max_plate_nesting=1)
        svi = SVI(model, guide, Adam({"lr": 0.01}), elbo)
        losses += [svi.step(*args) for _ in range(8)]
    assert torch.tensor(losses).isfinite().all()
    assert sum(losses[-5:]) < 5 * abs(losses[0]) * (1 + 1e-5) + 5  # to the rounding of float32
    draws = Predictive(model, guide=guide, num_samples=3)(*args)
    assert all(draws[name].float().isfinite().all() for name in guide(*args))


def test_nan_in_the_data_names_the_site():
    with pytest.raises(ValueError, match="data of site 'y' without NaN; got 1 of 2.*obs_mask"):
        AutoNaMIGuide(hierarchy)(torch.tensor([0.0, math.nan]))


@pytest.mark.parametrize("args", [(X[:0], Y[:0]), (X, Y, 0)], ids=["an empty plate", "an empty minibatch"])
def test_pyro_refuses_what_is_empty(args):
    with pytest.raises(ZeroDivisionError):
        AutoNaMIGuide(regression)(*args)
