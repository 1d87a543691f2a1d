"""Splines in sequence: against Jacobians by automatic differentiation, and as factors of guides by quadrature."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide, InferenceCompilation
from pyro_nami.factors.unconstrained import flow
from pyro_nami.parameters.spline_stack import SplineStack


@pytest.fixture
def stack():
    made = SplineStack(3, 2, transforms=3, bins=4, hidden_features=(16, 16), dtype=torch.double)
    for layer in made.layers:
        torch.nn.init.normal_(layer.output)
    return made


def test_log_slopes_add_up_to_the_determinant_of_the_jacobian(stack):
    context, noise = torch.randn(2, dtype=torch.double), torch.randn(3, dtype=torch.double)
    given = stack.start()(context)
    vector, slopes = given.bend(noise)
    jacobian = torch.autograd.functional.jacobian(lambda e: given.bend(e)[0], noise)
    assert (jacobian != 0).all()  # two layers and more leave no triangle
    torch.testing.assert_close(slopes.sum(), torch.linalg.slogdet(jacobian).logabsdet)
    back, again = given.straighten(vector)
    torch.testing.assert_close(back, noise)
    torch.testing.assert_close(again.sum(), slopes.sum())


def test_contexts_and_vectors_broadcast(stack):
    context, noise = (
        torch.randn(1, 4, 1, 2, dtype=torch.double),
        torch.randn(4, 5, 3, dtype=torch.double),
    )
    vector, _ = stack.start()(context).bend(noise)
    one, _ = stack.start()(context[0, 2, 0]).bend(noise[2, 3])
    torch.testing.assert_close(vector[2, 3], one)


def test_it_is_the_identity_at_first():
    # an even number turns vectors round
    stack = SplineStack(3, 0, transforms=3, bins=8, hidden_features=())
    noise = torch.randn(7, 3)
    torch.testing.assert_close(
        stack.start()(torch.zeros(0)).straighten(noise)[0], noise, atol=1e-5, rtol=0
    )


def ring():
    """The latent lies near one of two circles, which its length says nothing of."""
    z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("x", dist.Normal(z.norm(dim=-1), 0.1))


def compiled(transforms: int) -> AutoNaMIGuide:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(
        ring, observed=["x"], hidden_features=(32,), families={"z": flow(8, transforms)}
    )
    compilation = InferenceCompilation(
        ring, guide, lambda p: torch.optim.Adam(p, 1e-2), batch_size=200, clip_norm=5.0
    )
    compilation.fit(250, progress=False)
    return guide


@pytest.fixture(scope="module")
def guide():
    return compiled(2)


def test_densities_are_normalized_and_those_of_draws(guide):
    at = {"x": torch.tensor(1.3)}
    line = torch.linspace(-4, 4, 401)
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    with torch.no_grad():
        density = guide.log_prob({"z": grid}, observations=at).exp()
        assert abs(density.sum() * 0.02**2 - 1) < 0.01
        right = density[(grid[:, 0] > 0.5) & (grid[:, 1] > 0)].sum() * 0.02**2
        draws = Predictive(
            lambda observations: guide(observations=observations), num_samples=4000, parallel=True
        )
        z = draws(at)["z"].reshape(-1, 2)
    share = ((z[:, 0] > 0.5) & (z[:, 1] > 0)).float().mean()
    assert abs(share - right) < 4 * (right * (1 - right) / 4000).sqrt() + 0.01


def test_a_ring_needs_a_stack(guide):
    """The exact density is that of z given x: N(z) N(x; |z|) / p(x), with p(x) by quadrature."""
    z = torch.randn(2000, 2)
    x = z.norm(dim=-1) + 0.1 * torch.randn(2000)
    radius = torch.linspace(1e-3, 8, 4001)
    ray = radius.log() - radius.square() / 2  # the density of a length
    evidence = (ray + dist.Normal(radius, 0.1).log_prob(x[:, None])).logsumexp(-1) + radius[
        0
    ].new_tensor(0.002).log()
    exact = (
        dist.Normal(0, 1).log_prob(z).sum(-1)
        + dist.Normal(z.norm(dim=-1), 0.1).log_prob(x)
        - evidence
    )

    def gap(guide):
        with torch.no_grad():
            return (exact - guide.log_prob({"z": z}, observations={"x": x})).mean()

    assert gap(guide) < 0.7 * gap(compiled(0))


def test_weights_are_saved_and_copied(guide):
    z, at = torch.randn(5, 2), {"x": torch.tensor(1.0)}
    new = AutoNaMIGuide(ring, observed=["x"], hidden_features=(32,), families={"z": flow(8, 2)})
    new.load_state_dict(guide.state_dict())
    for other in (new, copy.deepcopy(guide)):
        torch.testing.assert_close(
            other.log_prob({"z": z}, observations=at), guide.log_prob({"z": z}, observations=at)
        )
    assert any(name.startswith("network.stacks") for name, _ in guide.named_parameters())


@pytest.mark.slow
def test_svi_trains_it_and_blocks_of_plates_are_coupled():
    """The mean of the three correlations is -0.463, by weights of two million draws from the prior."""
    x = torch.tensor([0.5, -1.0, 2.0])

    def model():
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("total", dist.Normal(z.sum(), 0.3), obs=torch.tensor(1.5))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.StudentT(3.0, z, 1.0), obs=x)

    guide = AutoNaMIGuide(model, families={"z": flow(4, 2)}, init_scale=0.5)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, Adam({"lr": 0.03}), elbo)
    losses = [svi.step() for _ in range(300)]
    assert sum(losses[-50:]) < sum(losses[:50]) - 5
    z = Predictive(model, guide=guide, num_samples=2000, parallel=True)()["z"].reshape(-1, 3)
    # training noise over seeds is below 0.02
    assert abs((torch.corrcoef(z.T).sum() - 3) / 6 + 0.463) < 0.15


def test_fewer_than_no_transforms():
    with pytest.raises(ValueError, match="no or more transforms; got -1"):
        flow(8, transforms=-1)
