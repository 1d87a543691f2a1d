"""Numbers that are large, small, constant, missing, or of another type: a guide trains, or says why not."""

from __future__ import annotations

import functools
import math
import statistics
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import local_normals, pooled, varying_intercept
from pyro import poutine
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
    first, last = (statistics.median(each) for each in (losses[:5], losses[-5:]))
    noise = 1.0 if name == "minibatches of one" else 1e-5  # of rows, and of rounding
    assert last < abs(first) * (1 + noise) + 1
    draws = Predictive(model, guide=guide, num_samples=3)(*args)
    assert all(draws[name].float().isfinite().all() for name in guide(*args))


def test_nan_in_the_data_names_the_site():
    with pytest.raises(ValueError, match="data of site 'y' without NaN; got 1 of 2.*obs_mask"):
        AutoNaMIGuide(hierarchy)(torch.tensor([0.0, math.nan]))


@pytest.mark.parametrize(
    "args", [(X[:0], Y[:0]), (X, Y, 0)], ids=["an empty plate", "an empty minibatch"]
)
def test_pyro_refuses_what_is_empty(args):
    with pytest.raises(ZeroDivisionError):
        AutoNaMIGuide(regression)(*args)


# ---- exact conditionals that are not finite at some instances


def slopes(x, y, s=None):
    m = pyro.sample("m", dist.Normal(0.0, 2.0))
    s = pyro.sample("s", dist.HalfNormal(1.0)) if s is None else s
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(m, 1.0))
        mean = torch.where(x > 0, z * x.log(), 0.0)  # at 0, a number whose gradient is none
        pyro.sample("y", dist.Normal(mean, s), obs=y)


def exposures(x, y):
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Gamma(2.0, 1.0))
        pyro.sample("y", dist.Poisson(z * x), obs=y)


def switches(x, y):
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.3))
        pyro.sample("y", dist.Normal(z, x), obs=y)


def replayed(guide, *args, **values):
    """The distributions of a guide's sites in a run with some of its latents at values, one for each particle."""
    with pyro.plate("particles", 3, dim=-2):
        trace = poutine.trace(guide).get_trace(*args)
        for name, value in values.items():
            trace.nodes[name]["value"] = value
        return {
            name: site["fn"]
            for name, site in poutine.trace(poutine.replay(guide, trace))
            .get_trace(*args)
            .nodes.items()
            if site["type"] == "sample"
        }


SPREAD, M = torch.tensor([[0.5], [1.0], [2.0]]), torch.full((3, 1), 0.7)
BAD = {  # of row 1, after a first call at numbers that are fine
    "an infinite observation": (
        slopes,
        Y[:4],
        1,
        math.inf,
        {"s": SPREAD, "m": M},
        dist.Normal(0.7, 1.0),
    ),
    "a gradient that is NaN": (
        functools.partial(slopes, s=0.5),
        Y[:4],
        0,
        0.0,
        {"m": M},
        dist.Normal(0.7, 1.0),
    ),
    "an infinite exposure": (
        exposures,
        torch.tensor([3.0, 0, 1, 5]),
        0,
        math.inf,
        {},
        dist.Gamma(2.0, 1.0),
    ),
    "an impossible value": (switches, Y[:4], 1, math.inf, {}, dist.Bernoulli(0.3)),
}


@pytest.mark.parametrize("model, y, which, number, values, prior", BAD.values(), ids=list(BAD))
def test_a_row_whose_conditional_is_not_finite_has_its_prior(
    model, y, which, number, values, prior
):
    """The other rows, and what they share, are what they are without it."""
    good = (1 + X[:4, 0].abs(), y)
    bad = [each.clone() for each in good]
    bad[which][1] = number
    guide, other = AutoNaMIGuide(model), AutoNaMIGuide(model)
    guide(*good)
    with pytest.warns(
        UserWarning, match="conditional of 'z' is not finite at [13] of its (4|12) instances.*mask"
    ):
        found = replayed(guide, *bad, **values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        replayed(guide, *bad, **values)
    left = torch.tensor([0, 2, 3])
    fine = replayed(other, *(each[left] for each in good), **values)
    at = torch.tensor(1.0)
    assert torch.allclose(
        found["z"].log_prob(at)[..., 1], prior.log_prob(at).expand(found["z"].batch_shape[:-1])
    )
    assert torch.allclose(found["z"].log_prob(at)[..., left], fine["z"].log_prob(at))
    if "m" in found:
        assert torch.allclose(found["m"].log_prob(at), fine["m"].log_prob(at))


def test_a_particle_whose_conditional_is_not_finite_has_its_prior():
    """Precision overflows in one of three; the others are what they are without it."""
    guide = AutoNaMIGuide(slopes)
    x, y = 1 + X[:4, 0].abs(), Y[:4]
    fine = replayed(guide, x, y, s=SPREAD, m=torch.zeros(3, 1))
    with pytest.warns(UserWarning, match="'z' is not finite at 4 of its 12 instances"):
        found = replayed(guide, x, y, s=torch.tensor([[0.5], [1e-30], [2.0]]), m=torch.zeros(3, 1))
    kept, at = torch.tensor([0, 2]), torch.ones(4)
    for name, prior in {"m": dist.Normal(0.0, 2.0), "z": dist.Normal(0.0, 1.0)}.items():
        log_prob = found[name].log_prob(at[:1] if name == "m" else at)
        assert torch.allclose(
            log_prob[kept], fine[name].log_prob(at[:1] if name == "m" else at)[kept]
        )
        assert torch.allclose(log_prob[1], prior.log_prob(at[:1]))


def test_effects_that_share_a_bad_row_have_their_priors_and_the_rest_stays_proper():
    """A row of group 0 is infinite: nothing is known of that group's effect, nor of the slope that all rows share."""

    def groups(group, x, y):
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        with pyro.plate("groups", 3):
            a = pyro.sample("a", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(a[..., group] + b * x, 0.5), obs=y)

    guide, group, y = AutoNaMIGuide(groups), torch.tensor([0, 1, 2, 0, 1]), Y[:5].clone()
    guide(group, X[:5, 0], y)
    y[3] = math.inf
    with pytest.warns(UserWarning, match="'[ab]' is not finite"):
        trace = poutine.trace(guide).get_trace(group, X[:5, 0], y)
    b, a = (trace.nodes[name]["fn"] for name in "ba")
    assert torch.allclose(b.log_prob(Y[0]), dist.Normal(0.0, 2.0).log_prob(Y[0]))
    assert torch.allclose(a.log_prob(Y[0])[0], dist.Normal(0.0, 3.0).log_prob(Y[0]))
    # The other groups have a row or two each, as if the slope were at its mean: their evidence is in their rows alone.
    counts = torch.tensor([2.0, 1.0])
    assert torch.allclose(a.stddev[1:], (1 / 9 + counts / 0.25).rsqrt())
