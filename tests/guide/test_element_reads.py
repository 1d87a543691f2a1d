"""Which elements of vectors factors read: against d-separation in a network whose nodes are the elements."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_nami import AutoNaMIGuide
from pyro_nami.factors.unconstrained import flow
from pyro_nami.graph import BayesNet, Inverse, verify_inverse


def reads(model, latents: dict, observed=("x",), **options) -> dict:
    """Returns latent -> node -> which elements each of its elements reads, of a guide that was called once."""
    pyro.clear_param_store()
    guide = AutoNaMIGuide(model, observed=observed, **options)
    with torch.no_grad():
        guide.log_prob(latents, observations={"x": torch.zeros(4)})
    return {name: rule.factor.parts for name, rule in guide._made().learned.items()}


def linear(weights: torch.Tensor):
    def model():
        z = pyro.sample("z", dist.Laplace(torch.zeros(weights.shape[1]), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z @ weights.T, 1.0).to_event(1))

    return model


@pytest.mark.parametrize("seed", range(8))
def test_elements_read_what_d_separation_asks_for(seed):
    torch.manual_seed(seed)
    weights = torch.randn(4, 5) * (torch.rand(4, 5) < 0.4)
    weights[torch.randint(4, (5,)), torch.arange(5)] = 1.0  # none without data
    found = reads(linear(weights), {"z": torch.zeros(5)})["z"]
    own = found.get("z", [[j < i for j in range(5)] for i in range(5)])
    data = found.get("x", [[True] * 4] * 5)
    z, x = [f"z{i}" for i in range(5)], [f"x{i}" for i in range(4)]
    edges = [(z[j], x[i]) for i, j in weights.nonzero().tolist()]
    net = BayesNet.from_edges(edges, observed=x, nodes=z + x)
    parents = {
        z[i]: {
            **{z[j]: frozenset() for j in range(i) if own[i][j]},
            **{x[j]: frozenset() for j in range(4) if data[i][j]},
        }
        for i in range(5)
    }
    verification = verify_inverse(net, Inverse(net, tuple(reversed(z)), parents))
    assert verification and verification.minimal, (verification.missing, verification.redundant)


def test_a_density_depends_on_nothing_else():
    guide = AutoNaMIGuide(
        linear(torch.eye(4)), observed=["x"], families={"z": flow(4, transforms=2)}
    )
    x = torch.randn(4, requires_grad=True)
    z = torch.randn(4)
    guide.log_prob({"z": z}, observations={"x": x})
    for mlp in guide.network.networks:
        torch.nn.init.normal_(mlp.output_unconstrained)
    moved = torch.autograd.functional.jacobian(
        lambda x: guide.log_prob({"z": z}, observations={"x": x}), x
    )
    assert (moved != 0).all()

    def at(i: int, j: int) -> float:
        """The mixed derivative by an element of z and one of x, which is zero where one does not read the other."""

        def density(z, x):
            return guide.log_prob({"z": z}, observations={"x": x})

        hessian = torch.autograd.functional.hessian(density, (z, x.detach()))
        return hessian[0][1][i, j].item()

    assert at(1, 1) != 0 and at(1, 2) == 0


def test_vectors_that_are_dense_or_hidden_are_read_whole():
    def correlated():
        z = pyro.sample("z", dist.MultivariateNormal(torch.zeros(4), torch.eye(4)))
        pyro.sample("x", dist.StudentT(5.0, z, 1.0).to_event(1))

    def largest():  # which element is read depends on all
        z = pyro.sample("z", dist.Laplace(torch.zeros(4), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z[..., z.argmax().item()], torch.ones(4)).to_event(1))

    assert reads(correlated, {"z": torch.zeros(4)})["z"] == {}
    assert reads(largest, {"z": torch.zeros(4)})["z"] == {}


def test_an_inverse_of_another_kind_is_left_alone():
    def two():
        a = pyro.sample("a", dist.Laplace(torch.zeros(4), 1.0).to_event(1))
        b = pyro.sample("b", dist.Laplace(torch.zeros(4), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(a + b, 1.0).to_event(1))

    latents = {"a": torch.zeros(4), "b": torch.zeros(4)}
    diagonal = tuple(tuple(i == j for j in range(4)) for i in range(4))
    first, second = sorted(reads(two, latents).items(), key=lambda each: len(each[1]))
    none = tuple((False,) * 4 for _ in range(4))
    assert first[1] == {"x": diagonal, first[0]: none}
    assert second[1] == {"x": diagonal, second[0]: none, first[0]: diagonal}
    assert not any(reads(two, latents, inverse="mean_field").values())


def test_arguments_that_may_change_keep_all():
    def model(weights):
        z = pyro.sample("z", dist.Laplace(torch.zeros(4), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z @ weights.T, 1.0).to_event(1))

    guide = AutoNaMIGuide(model, observed=["x"])
    x = torch.randn(4)
    guide.log_prob({"z": torch.zeros(4)}, torch.eye(4), observations={"x": x})
    assert guide._made().learned["z"].factor.parts == {}


def test_guides_trained_on_data_couple_all():
    def model():
        z = pyro.sample("z", dist.Laplace(torch.zeros(4), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=torch.zeros(4))

    guide = AutoNaMIGuide(model, rules={"z": "learned"})
    guide()
    assert (
        guide._made().learned["z"].factor.parts == {} and guide._made().learned["z"].factor.coupled
    )
