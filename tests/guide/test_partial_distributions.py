"""Distributions of one's own that define little more than `log_prob`: a guide asks of them what Pyro's guides ask."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import steps
from pyro.distributions import TorchDistribution, constraints
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_nami import AutoNaMIGuide, amortize, importance_sample

Y = torch.tensor([1.2, 3.0, 2.1, 2.4, 0.7, 1.9, 2.8, 2.2])
# of short training; of what cannot expand
QUIET = "ignore:The importance weights", "ignore:The model .*cannot be"
LOG_TWO = 0.6931471805599453


class OwnLaplace(TorchDistribution):
    """A Laplace distribution that defines `log_prob` and `sample`."""

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale
        super().__init__(torch.broadcast_shapes(loc.shape, scale.shape), validate_args=False)

    def log_prob(self, value):
        return -((value - self.loc) / self.scale).abs() - self.scale.log() - LOG_TWO

    def sample(self, sample_shape=torch.Size()):
        return torch.distributions.Laplace(self.loc, self.scale).sample(sample_shape)


class OfTorch(torch.distributions.Distribution):
    """The same without anything of Pyro's."""

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale
        super().__init__(torch.broadcast_shapes(loc.shape, scale.shape), validate_args=False)

    log_prob, sample = OwnLaplace.log_prob, OwnLaplace.sample


class RaisingSupport(OwnLaplace):
    @property
    def support(self):
        raise RuntimeError("none")

    @property
    def mean(self):
        raise RuntimeError("none")


class NoSupport(OwnLaplace):
    support = None


class NoSample(OwnLaplace):
    def sample(self, sample_shape=torch.Size()):
        raise NotImplementedError


class RealSupport(OwnLaplace):
    support = constraints.real


class Reparametrized(OwnLaplace):
    has_rsample = True
    sample = TorchDistribution.sample

    def rsample(self, sample_shape=torch.Size()):
        return torch.distributions.Laplace(self.loc, self.scale).rsample(sample_shape)


class Series(TorchDistribution):
    """A whole series as one event, as a filter has it; it cannot be expanded."""

    def __init__(self, loc, scale, event_shape=(len(Y),)):
        self.loc, self.scale = loc, scale
        super().__init__(loc.shape, torch.Size(event_shape), validate_args=False)

    def log_prob(self, value):
        return OwnLaplace(self.loc.unsqueeze(-1), self.scale.unsqueeze(-1)).log_prob(value).sum(-1)

    def sample(self, sample_shape=torch.Size()):
        shape = (*self.loc.shape, len(Y))
        loc, scale = (each.unsqueeze(-1).expand(shape) for each in (self.loc, self.scale))
        return torch.distributions.Laplace(loc, scale).sample(sample_shape)

    def expand(self, batch_shape, _instance=None):
        raise NotImplementedError


def of_wrong_shape(loc, scale):
    """A series that is declared to be a number."""
    return Series(loc, scale, ())


def with_data(kind):
    """A model whose data have a distribution of this kind."""

    def model(y):
        m = pyro.sample("m", dist.Normal(torch.tensor(0.0), 3.0))
        s = pyro.sample("s", dist.LogNormal(torch.tensor(0.0), 0.5))
        if kind in (Series, of_wrong_shape):
            pyro.sample("y", kind(m, s), obs=y)
        else:
            with pyro.plate("data", len(y)):
                pyro.sample("y", kind(m + torch.zeros(len(y)), s + torch.zeros(len(y))), obs=y)

    return model


def with_latent(kind):
    """A model with a latent of this kind."""

    def model(y):
        m = pyro.sample("m", dist.Normal(torch.tensor(0.0), 3.0))
        z = pyro.sample("z", kind(m, torch.tensor(1.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    return model


def elbo(model, guide):
    with torch.no_grad():
        return -Trace_ELBO(1000).loss(model, guide, Y)


def log_evidence(model):
    """Returns the log density of the data, by draws of two latents about where the posterior is."""
    proposal = dist.Normal(torch.tensor([2.0, 0.0]), torch.tensor([1.5, 1.5]))
    m, second = proposal.sample((200_000,)).unbind(-1)
    log_q = proposal.log_prob(torch.stack((m, second), -1)).sum(-1)
    prior = dist.Normal(0.0, 3.0).log_prob(m)
    if model == "latent":
        z = second + 2.0
        joint = (
            prior
            + dist.Laplace(m, 1.0).log_prob(z)
            + dist.Normal(z.unsqueeze(-1), 1.0).log_prob(Y).sum(-1)
        )
    else:
        s = second.exp()  # of which the Jacobian is s
        data = dist.Laplace(m.unsqueeze(-1), s.unsqueeze(-1)).log_prob(Y).sum(-1)
        joint = prior + dist.Normal(0.0, 0.5).log_prob(second) + data
    return float((joint - log_q).logsumexp(0) - torch.tensor(200_000.0).log())


@pytest.fixture(scope="module")
def of_auto_normal():
    """The ELBO that Pyro's guide reaches; the density is the same of all kinds."""
    model = with_data(OwnLaplace)
    guide = AutoNormal(model)
    steps(model, guide, Y, count=150, lr=0.05)
    return elbo(model, guide)


@pytest.mark.filterwarnings("error", *QUIET)
@pytest.mark.parametrize(
    "kind",
    [
        OwnLaplace,
        OfTorch,
        RaisingSupport,
        NoSupport,
        NoSample,
        Reparametrized,
        Series,
        of_wrong_shape,
    ],
)
def test_data_train_as_with_the_guides_of_pyro(kind, of_auto_normal):
    model = with_data(kind)
    guide = AutoNaMIGuide(model)
    steps(model, guide, Y, count=150, lr=0.05)
    exact, found = log_evidence("data"), elbo(model, guide)
    assert exact - 0.5 < found < exact + 0.05
    assert found > of_auto_normal - 0.1
    draws = importance_sample(model, guide, Y, num_samples=500)
    assert draws.log_evidence.item() == pytest.approx(exact, abs=0.1)


@pytest.mark.parametrize("kind", [OwnLaplace, OfTorch, RaisingSupport, NoSupport])
def test_latents_are_drawn_by_predictive(kind):
    model = with_data(kind)
    guide = AutoNaMIGuide(model)
    steps(model, guide, Y)
    drawn = Predictive(model, guide=guide, num_samples=5, return_sites=["m", "s"])(Y)
    assert drawn["m"].isfinite().all() and (drawn["s"] > 0).all()


@pytest.mark.parametrize(
    "kind", [RealSupport, OwnLaplace, RaisingSupport, NoSupport, Reparametrized]
)
def test_a_latent_whose_support_is_unknown_is_real_and_named_in_a_warning(kind):
    model = with_latent(kind)
    guide = AutoNaMIGuide(model)
    if kind is RealSupport:
        steps(model, guide, Y, count=150, lr=0.05)
    else:
        with pytest.warns(UserWarning, match="support of 'z' is taken to be real"):
            guide(Y)
        steps(model, guide, Y, count=150, lr=0.05)
    exact = log_evidence("latent")
    assert exact - 0.3 < elbo(model, guide) < exact + 0.05
    draws = importance_sample(model, guide, Y, num_samples=500)
    assert draws.log_evidence.item() == pytest.approx(exact, abs=0.1)


def test_a_latent_keeps_the_support_that_it_declares():
    class OwnExponential(TorchDistribution):
        support = constraints.positive

        def log_prob(self, value):
            return -value

        def sample(self, sample_shape=torch.Size()):
            return torch.empty(sample_shape).exponential_()

    def model(y):
        z = pyro.sample("z", OwnExponential(validate_args=False))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Exponential(z), obs=y)

    guide = AutoNaMIGuide(model)
    steps(model, guide, Y, count=150, lr=0.05)
    # a Gamma's integral
    exact = torch.lgamma(torch.tensor(len(Y) + 1.0)) - (len(Y) + 1) * (Y.sum() + 1).log()
    assert elbo(model, guide) == pytest.approx(float(exact), abs=0.05)


@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize("kind", [OwnLaplace, OfTorch, Series])
def test_posteriors_are_compiled(kind):
    posterior = amortize(with_data(kind), Y, simulations=64, steps=4, progress=False)
    assert posterior({"y": Y}, num_samples=20).mean("m").isfinite()
