"""What is read as a loop, by the names of sites and by what they read."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_nami import nami
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


def loops_of(model, *args):
    found = extract(model, args, lifted=True)
    return found, {held.name: held for held in found.loops.parts}


def test_names_sizes_and_edges():
    found, loops = loops_of(loop(), Y)
    assert list(loops) == ["z[time]", "y[time]"]
    states, data = loops.values()
    assert states.sites == tuple(f"z_{t}" for t in range(10))
    assert (states.width, states.back, states.span, states.values) == (1, 1, 1, 0)
    assert data.is_observed
    assert data.reads == tuple(range(10))
    assert list(found.bayesnet.edges) == [("z[time]", "y[time]")]


@pytest.mark.parametrize("name", ["z{}", "a.z_{}", "z_{}_loc", "z1_{}"])
def test_other_names(name):
    _, loops = loops_of(loop(name=name), Y)
    assert len(loops) == 2


def test_lags():
    _, loops = loops_of(loop(lag=3), Y)
    assert loops["z[time]"].back == 3
    assert loops["z[time]"].width == 3


def test_long_seasons():
    _, loops = loops_of(loop(count=120, lag=52), torch.randn(120))
    assert loops["z[time]"].width == 52


def second_order(y):
    states = [torch.zeros(()), torch.zeros(())]
    for t in range(10):
        states.append(pyro.sample(f"z_{t}", dist.Normal(1.5 * states[-1] - states[-2], 1.0)))
        pyro.sample(f"y_{t}", dist.Normal(states[-1], 1.0), obs=y[t])


def ahead(y):
    """A step's datum is of the state before."""
    z = pyro.sample("z_0", dist.Normal(0.0, 1.0))
    for t in range(1, 11):
        pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[t - 1])
        z = pyro.sample(f"z_{t}", dist.Normal(z, 1.0))


@pytest.mark.parametrize(
    ("model", "text", "states", "data"),
    [
        (loop(), "z[time] | y[time:], z[time - 1]", [3], range(4, 10)),
        (second_order, "z[time] | y[time:], z[time - 2:time]", [2, 3], range(4, 10)),
        (ahead, "z[time] | y[time + 1:], z[time - 1]", [3], range(5, 11)),
    ],
)
def test_an_inverse_as_text_names_what_a_step_reads(model, text, states, data):
    inverse = nami(extract(model, (Y,), lifted=True).bayesnet)
    assert str(inverse).splitlines()[1].strip() == text
    net = extract_bayesnet(model, Y)
    steps = nami(net, blocks=[[name] for name in reversed(net.latent)])
    expected = {f"z_{t}" for t in states} | {f"y_{t}" for t in data}
    assert set(steps.parents["z_4"]) == expected


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
def test_no_loops(model, why):
    found, loops = loops_of(model, Y)
    assert not loops
    assert "z_0" in found.bayesnet.sites


def test_independent_states_are_no_loop():
    def model(y):
        for t in range(10):
            z = pyro.sample(f"z_{t}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[t])

    assert not loops_of(model, Y)[1]


def test_coefficients_are_no_states():
    rows = torch.randn(40, 9)

    def model(y):
        b = torch.stack([pyro.sample(f"b_{k}", dist.Normal(0.0, 1.0)) for k in range(9)])
        z = torch.zeros(())
        for t in range(40):
            z = pyro.sample(f"z_{t}", dist.Normal(0.5 * z, 1.0))
            pyro.sample(f"y_{t}", dist.Normal(z + rows[t] @ b, 1.0), obs=y[t])

    found, loops = loops_of(model, torch.randn(40))
    assert list(loops) == ["z[time]", "y[time]"]
    assert ("b_8", "y[time]") in found.bayesnet.edges


def test_own_effects_of_steps_are_states():
    def model(y):
        z = torch.zeros(())
        for t in range(10):
            z = pyro.sample(f"z_{t}", dist.Normal(0.5 * z, 1.0))
            own = pyro.sample(f"own_{t}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y_{t}", dist.Normal(z + own, 1.0), obs=y[t])

    assert list(loops_of(model, Y)[1]) == ["z,own[time]", "y[time]"]


def test_a_loop_that_reads_its_data_is_a_loop_given_these():
    def model(y):
        z = torch.zeros(())
        for t in range(10):
            z = pyro.sample(f"z_{t}", dist.Normal(0.5 * z, 1.0))
            z = z + 0.1 * pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[t])

    found, loops = loops_of(model, Y)
    assert loops
    assert list(found.bayesnet.edges) == [("z[time]", "y[time]")]


def test_a_loop_that_another_latent_reads_on_the_way_is_no_loop():
    def model(y):
        z = torch.zeros(())
        for t in range(10):
            z = pyro.sample(f"z_{t}", dist.Normal(0.5 * z, 1.0))
            if t == 4:
                z = z + pyro.sample("turn", dist.Gamma(z.exp(), 1.0))
            pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[t])

    assert not loops_of(model, Y)[1]


def test_networks_that_users_extract_have_every_site():
    assert len(extract_bayesnet(loop(), Y).sites) == 20
