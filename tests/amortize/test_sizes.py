"""`amortize` at several sizes of plates: which sizes are simulated, what is learned, and what is told of others."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_nami import amortize, calibrate
from pyro_nami.amortize import amortizing
from pyro_nami.amortize.sizes import arguments_of
from pyro_nami.inference import Simulator
from pyro_nami.inference.simulator_model import with_drawn_data

KNOWN_SD = 1.0


def rows(num, shift=0.0):
    """A mean of Normal rows, as a black box: the posterior is Normal(sum of y / (1 + num), 1 / (1 + num))."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", num):
        noise = torch.randn(torch.broadcast_shapes(mu.shape, (num,)))
        pyro.deterministic("y", mu + shift + KNOWN_SD * noise, event_dim=0)


def rows_of(x):
    """As above, with one row for each row of covariates."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        noise = torch.randn(torch.broadcast_shapes(mu.shape, x.shape))
        pyro.deterministic("y", mu + x + noise, event_dim=0)


def simulator_of(model, *args):
    return Simulator(with_drawn_data(model, args, {}, ["y"]), args, observed=["y"])


@pytest.fixture(scope="module")
def posterior():
    pyro.set_rng_seed(0)
    return amortize(rows, 16, observed=["y"], simulations=5000, steps=250, progress=False)


def nats_above_exact(posterior, num):
    """The mean KL divergence to the exact posterior at simulations of one size."""
    draws = simulator_of(rows, num).draw(1000)
    mu, y = draws.latents["mu"][:, 0], draws.observed["y"]
    exact = dist.Normal(y.sum(1) / (1 + num), (1 + num) ** -0.5).log_prob(mu)
    with torch.no_grad():
        found = posterior.guide.log_prob(draws.latents, num, observations=draws.observed)
    return float((exact - found).mean())


def test_a_black_box_is_learned_from_a_quarter_to_four_times_of_its_size(posterior):
    """Where it is trained at one size alone, the posterior's width is off by a factor of two at either end."""
    assert posterior.sizes == {"rows": (4, 64)}
    pyro.set_rng_seed(1)
    for num in (4, 16, 64):
        assert -0.02 < nats_above_exact(posterior, num) < 0.2
        ranks = calibrate(
            rows, posterior.guide, num, observed=["y"], num_datasets=300, progress=False
        )
        assert ranks.passed, str(ranks)


def test_sizes_that_were_not_trained_are_warned_of(posterior):
    with pytest.warns(
        UserWarning, match=r"'rows' is of size 200 here.*learned from 4 to 64 'rows'.*sizes="
    ):
        posterior.at(200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.at(50)({"y": torch.zeros(50)}, num_samples=10)

    def weighted(num):
        mu = pyro.sample("mu", dist.Cauchy(0.0, 1.0))
        with pyro.plate("rows", num):
            pyro.sample("y", dist.Normal(mu, 1.0))

    found = amortize(weighted, 4, observed=["y"], simulations=100, steps=2, progress=False)
    with warnings.catch_warnings():  # weights tell how good it is
        warnings.simplefilter("error")
        found.at(200)


def test_the_posterior_says_where_it_was_trained_and_what_it_covers(posterior):
    text = repr(posterior)
    assert "rows: learned 'mu'; simulated with 4 to 64 'rows'; 90% intervals hold" in text
    assert 0.85 < posterior.coverage.shares["mu"] < 0.95 and not posterior.coverage.overconfident
    assert len(posterior.coverage.by_size) == 3


def test_one_size_alone_is_trained_where_that_is_asked_for():
    found = amortize(rows, 6, observed=["y"], simulations=60, sizes={}, steps=2, progress=False)
    assert found.sizes == {"rows": (6, 6)}
    assert found.history.simulations == 2 * 50


def test_arguments_are_drawn_where_no_number_gives_the_size():
    def arguments():
        return (torch.zeros(int(torch.randint(3, 9, ()))),)

    found = amortize(
        rows_of,
        torch.zeros(5),
        observed=["y"],
        simulations=600,
        arguments=arguments,
        steps=3,
        progress=False,
    )
    least, most = found.sizes["rows"]
    assert 3 <= least < 5 < most <= 8
    with pytest.warns(UserWarning, match="arguments=, a function"):
        found.at(torch.zeros(20))


def test_which_arguments_are_sizes_is_found_by_runs():
    """A number that is no plate's size stays, and sizes at which the model fails are not asked for."""
    simulator = simulator_of(rows, 8, 3)
    found = arguments_of(simulator, 2000, None, None)
    assert {args[1] for args, _ in found} == {3}
    assert found[0].args == (8, 3) and {args[0] for args, _ in found} >= {2, 8, 32}
    assert arguments_of(simulator, 100, None, None) == found[:1]
    asked = arguments_of(simulator, 2000, {"rows": (8, 10)}, None)
    assert {args[0] for args, _ in asked} == {8, 9, 10}

    known = torch.zeros(8)

    def of_known(num):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", num):
            pyro.sample("y", dist.Normal(mu + known, 1.0))

    fixed = Simulator(of_known, (8,), observed=["y"])
    assert len(arguments_of(fixed, 2000, None, None)) == 1


def test_wrong_sizes_are_refused():
    simulator = simulator_of(rows, 8)
    with pytest.raises(
        ValueError, match="integer argument of the model gives; got 'trials', of the plates 'rows'"
    ):
        arguments_of(simulator, 1000, {"trials": (1, 2)}, None)
    with pytest.raises(ValueError, match="sizes of 'rows' as a smallest one, at least 1"):
        arguments_of(simulator, 1000, {"rows": (9, 2)}, None)
    with pytest.raises(TypeError, match="returns a tuple .* it returned int"):
        arguments_of(simulator, 1000, None, lambda: 3)
    with pytest.raises(ValueError, match="sizes or arguments; got both"):
        arguments_of(simulator, 1000, {"rows": (1, 2)}, lambda: (3,))
    values = simulator.draw(50)
    with pytest.raises(ValueError, match="Expected a number of simulations with sizes"):
        amortize(rows, 8, observed=["y"], simulations=values, sizes={"rows": (1, 2)})


def test_more_simulations_are_of_the_same_sizes_and_those_of_an_error_can_be_given(monkeypatch):
    quick = {"observed": ["y"], "steps": 5, "progress": False}
    own = amortize(rows, 8, simulations=300, **quick)
    more = own.append(300)
    assert more.sizes == own.sizes == {"rows": (2, 32)}
    assert more.more.args[2].num == 600
    assert len(more.more.args[2].groups) == len(own.more.args[2].groups) == 3

    def failing(*_):
        raise ValueError("no")

    monkeypatch.setattr(amortizing._Training, "posterior", failing)
    with pytest.raises(ValueError, match="no") as caught:
        amortize(rows, 8, simulations=300, **quick)
    monkeypatch.undo()
    assert amortize(rows, 8, simulations=caught.value.simulations, **quick).sizes == own.sizes
