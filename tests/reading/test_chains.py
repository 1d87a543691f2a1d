"""What is read as a loop, by the names of sites and by what they read."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_nami.reading.extraction import extract, extract_bayesnet

Y = torch.randn(10)


def loop(count=10, name="z_{}", lag=1, other=None):
    def model(y):
        states = [torch.zeros(())] * lag
        for t in range(count):
            states.append(pyro.sample(name.format(t), dist.Normal(0.5 * states[-lag], 1.0)))
            if other is not None:
                other(t, states[-1])
            pyro.sample(f"y_{t}", dist.Normal(states[-1], 1.0), obs=y[t])

    return model


def chains_of(model, *args):
    found = extract(model, args, lifted=True)
    return found, {chain.name: chain for chain in found.chains.chains}


def test_names_sizes_and_edges():
    found, chains = chains_of(loop(), Y)
    assert list(chains) == ["z[time]", "y[time]"]
    states, data = chains.values()
    assert states.sites == tuple(f"z_{t}" for t in range(10))
    assert (states.width, states.back, states.span, states.values) == (1, 1, 1, 0)
    assert data.is_observed
    assert data.reads == tuple(range(10))
    assert list(found.bayesnet.edges) == [("z[time]", "y[time]")]


@pytest.mark.parametrize("name", ["z{}", "a.z_{}", "z_{}_loc", "z1_{}"])
def test_other_names(name):
    _, chains = chains_of(loop(name=name), Y)
    assert len(chains) == 2


def test_lags():
    _, chains = chains_of(loop(lag=3), Y)
    assert chains["z[time]"].back == 3
    assert chains["z[time]"].width == 3


def sampled(make):
    return lambda t, z: pyro.sample(f"w_{t}", make(z))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (loop(count=5), "too short"),
        (loop(other=sampled(lambda z: dist.Gamma(z.exp(), 1.0))), "states of another kind"),
        (loop(other=sampled(lambda z: dist.Bernoulli(logits=z))), "states of two kinds"),
        (loop(other=lambda t, z: float(z)), "values leave torch"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_no_chains(model, why):
    found, chains = chains_of(model, Y)
    assert not chains
    assert "z_0" in found.bayesnet.sites


def test_independent_states_are_no_chain():
    def model(y):
        for t in range(10):
            z = pyro.sample(f"z_{t}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[t])

    assert not chains_of(model, Y)[1]


def test_coefficients_are_no_states():
    rows = torch.randn(40, 9)

    def model(y):
        b = torch.stack([pyro.sample(f"b_{k}", dist.Normal(0.0, 1.0)) for k in range(9)])
        z = torch.zeros(())
        for t in range(40):
            z = pyro.sample(f"z_{t}", dist.Normal(0.5 * z, 1.0))
            pyro.sample(f"y_{t}", dist.Normal(z + rows[t] @ b, 1.0), obs=y[t])

    found, chains = chains_of(model, torch.randn(40))
    assert list(chains) == ["z[time]", "y[time]"]
    assert ("b_8", "y[time]") in found.bayesnet.edges


def test_own_effects_of_steps_are_states():
    def model(y):
        z = torch.zeros(())
        for t in range(10):
            z = pyro.sample(f"z_{t}", dist.Normal(0.5 * z, 1.0))
            own = pyro.sample(f"own_{t}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y_{t}", dist.Normal(z + own, 1.0), obs=y[t])

    assert list(chains_of(model, Y)[1]) == ["z,own[time]", "y[time]"]


def test_a_loop_that_reads_its_data_is_a_chain_given_these():
    def model(y):
        z = torch.zeros(())
        for t in range(10):
            z = pyro.sample(f"z_{t}", dist.Normal(0.5 * z, 1.0))
            z = z + 0.1 * pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[t])

    found, chains = chains_of(model, Y)
    assert chains
    assert list(found.bayesnet.edges) == [("z[time]", "y[time]")]


def test_a_loop_that_another_latent_reads_on_the_way_is_no_chain():
    def model(y):
        z = torch.zeros(())
        for t in range(10):
            z = pyro.sample(f"z_{t}", dist.Normal(0.5 * z, 1.0))
            if t == 4:
                z = z + pyro.sample("turn", dist.Gamma(z.exp(), 1.0))
            pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[t])

    assert not chains_of(model, Y)[1]


def test_networks_that_users_extract_have_every_site():
    assert len(extract_bayesnet(loop(), Y).sites) == 20
