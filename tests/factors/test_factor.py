"""What Pyro's algorithms ask of the emitted distributions: the right estimate and the right gradient."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import pair
from pyro.infer import (
    JitTrace_ELBO,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from torch.nn.functional import softplus

from pyro_nami.factors.registry import make_family

GAMMA = dist.Gamma(3.0, 2.0)


positive_model = pair(
    dist.LogNormal(0.3, 0.8), lambda z: dist.Normal(z.log(), 0.5), torch.tensor(1.2)
)


def positive_guide():
    """The exact posterior: that of log z has precision 1 / 0.8^2 + 1 / 0.5^2."""
    loc, scale = (0.3 / 0.64 + 1.2 / 0.25) / 5.5625, 5.5625**-0.5
    params = pyro.param("params", torch.tensor([[loc, math.log(math.expm1(scale))]]))
    family = make_family("normal", "z", dist.LogNormal(0.3, 0.8), torch.tensor(1.0))
    pyro.sample("z", family.distribution(params))


VECTORIZED = {"num_particles": 64, "vectorize_particles": True, "max_plate_nesting": 0}
# log z ~ N(0.3, 0.8^2) and x ~ N(log z, 0.5^2), so x ~ N(0.3, 0.8^2 + 0.5^2).
EVIDENCE = torch.distributions.Normal(0.3, math.sqrt(0.89)).log_prob(torch.tensor(1.2)).item()


@pytest.mark.parametrize(
    "elbo",
    [
        *(
            kind(**VECTORIZED)
            for kind in (Trace_ELBO, TraceMeanField_ELBO, TraceGraph_ELBO, TraceEnum_ELBO)
        ),
        RenyiELBO(alpha=0.5, **VECTORIZED),
        pytest.param(
            JitTrace_ELBO(**VECTORIZED, ignore_jit_warnings=True),
            marks=pytest.mark.filterwarnings("ignore"),
        ),
    ],
    ids=lambda elbo: type(elbo).__name__,
)
def test_every_elbo_of_an_exact_factor_is_the_evidence_with_no_variance(elbo):
    for _ in range(3):
        assert elbo.loss(positive_model, positive_guide) == pytest.approx(-EVIDENCE, abs=1e-5)


def test_a_discrete_factor_is_enumerated_in_the_guide():
    probs = torch.tensor([0.2, 0.5, 0.3])
    means = torch.tensor([-1.0, 0.0, 2.0])

    model = pair(dist.Categorical(probs), lambda k: dist.Normal(means[k], 1.0), torch.tensor(1.0))

    @pyro.infer.config_enumerate
    def guide():
        family = make_family(None, "z", dist.Categorical(probs), torch.tensor(0))
        pyro.sample("z", family.distribution(pyro.param("logits", torch.zeros(1, 3))))

    joint = probs.log() + dist.Normal(means, 1.0).log_prob(torch.tensor(1.0))
    logits = pyro.param("logits", torch.zeros(1, 3))
    elbo = TraceEnum_ELBO(max_plate_nesting=0)
    oracle = (torch.full((3,), 1 / 3) * (joint - math.log(1 / 3))).sum()
    assert elbo.loss(model, guide) == pytest.approx(-oracle.item(), abs=1e-5)
    with torch.no_grad():
        logits.copy_(joint)
    assert elbo.loss(model, guide) == pytest.approx(-joint.logsumexp(0).item(), abs=1e-5)


def test_a_guide_site_inside_plates_is_expanded_and_scored():
    family = make_family(None, "z", dist.Normal(0.0, 1.0), torch.tensor(0.0))

    def guide():
        with pyro.plate("n", 4):
            return pyro.sample("z", family.distribution(torch.zeros(1, 2)))

    trace = pyro.poutine.trace(guide).get_trace()
    trace.compute_log_prob()
    site = trace.nodes["z"]
    assert site["value"].shape == (4,) and site["log_prob"].shape == (4,)
    assert len(set(site["value"].tolist())) == 4
    oracle = torch.distributions.Normal(0.0, softplus(torch.tensor(0.0))).log_prob(site["value"])
    torch.testing.assert_close(site["log_prob"], oracle)


def test_a_value_made_to_require_gradients_gets_them():
    for prior in (dist.Normal(torch.zeros(2), 1.0).to_event(1), dist.LogNormal(0.0, 1.0)):
        family = make_family("normal", "z", prior, prior.sample())
        q = family.distribution(torch.zeros(family.num_elements, 2))
        value = q.sample()
        value.requires_grad_()
        (gradient,) = torch.autograd.grad(q.log_prob(value), value)
        (oracle,) = torch.autograd.grad(q.log_prob(value.clone()), value)
        torch.testing.assert_close(gradient, oracle)
        assert gradient.abs().sum() > 0


def test_values_outside_the_support_are_refused_under_validation():
    family = make_family("normal", "z", GAMMA, torch.tensor(1.0))
    q = family.distribution(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="within the support"):
        q.log_prob(torch.tensor(-1.0))


def test_types_without_a_reparameterization_say_so():
    q = make_family(None, "z", dist.Bernoulli(0.5), torch.tensor(1.0)).distribution(
        torch.zeros(1, 1)
    )
    with pytest.raises(NotImplementedError, match="no rsample"):
        q.rsample()
    with pytest.raises(NotImplementedError, match="enumerate"):
        make_family("normal", "z", GAMMA, torch.tensor(1.0)).distribution(
            torch.zeros(1, 2)
        ).enumerate_support()
