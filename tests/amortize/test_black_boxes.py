"""`amortize` for a prior, a simulator and simulations: a linear Gaussian one, whose posterior is known."""

import io
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pyro_nami import AutoNaMIGuide, Interrupted, amortize, from_simulator
from pyro_nami.amortize import amortizing
from pyro_nami.amortize.encoding import embeddings_for
from pyro_nami.amortize.request import source_of

PRIOR = dist.Normal(torch.zeros(2), 1.0).to_event(1)
NOISE = 0.5
# given x: both numbers are read from one sum, so that they depend on each other
COVARIANCE = torch.linalg.inv(torch.eye(2) + torch.ones(2, 2) / NOISE**2)
QUICK = {"steps": 2, "progress": False}


def simulations(num):
    theta = PRIOR.sample((num,))
    return {"theta": theta, "x": theta.sum(-1, keepdim=True) + NOISE * torch.randn(num, 1)}


def never(theta):
    """A simulator that is run for nothing but the shape of its data."""
    if len(theta) != 3 or never.runs:
        raise AssertionError("The simulator is run, though all simulations are given.")
    never.runs += 1
    return theta.sum(-1, keepdim=True)


@pytest.fixture(scope="module")
def posterior():
    pyro.set_rng_seed(0)
    never.runs = 0
    model = from_simulator(PRIOR, never)
    return amortize(model, simulations=simulations(2000), steps=200, progress=False)


@pytest.fixture(scope="module")
def found(posterior):
    pyro.set_rng_seed(0)
    return posterior({"x": torch.tensor([1.5])}, num_samples=2000)


def exact(x):
    return dist.MultivariateNormal(
        COVARIANCE @ (torch.ones(2) * x / NOISE**2), covariance_matrix=COVARIANCE
    )


def test_draws_mode_and_density_are_those_of_the_posterior_without_a_run(found):
    """Tolerances: 0.1 of the standard deviations, and what 200 steps leave of the density."""
    known = exact(1.5)
    drawn = found["theta"]
    torch.testing.assert_close(drawn.mean(0), known.mean, atol=0.1, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), COVARIANCE, atol=0.12, rtol=0)
    theta = known.sample((500,))
    gap = (known.log_prob(theta) - found.log_prob({"theta": theta})).mean()
    assert -0.05 < gap < 0.2, gap
    best = found.log_prob({"theta": found.map["theta"]})
    assert best >= found.log_prob({"theta": drawn}).max() - 1e-4
    assert (found.map["theta"] - known.mean).norm() < 0.5
    assert set(found.sample(7)) == {"theta"}
    assert found.marginal("theta").num_samples == 2000


def test_given_one_number_the_other_is_drawn_from_its_conditional(found):
    pyro.set_rng_seed(0)
    drawn = found.conditional({"theta": torch.tensor([torch.nan, 1.0])}, num=4000)
    assert drawn.verdict.is_trusted and (drawn["theta"][:, 1] == 1.0).all()
    grid = torch.linspace(-3.0, 4.0, 701)
    log_density = found.log_prob({"theta": torch.stack([grid, torch.ones(701)], -1)})
    weights = log_density.softmax(0)
    mean = (weights * grid).sum()
    sd = (weights * (grid - mean).square()).sum().sqrt()
    own = drawn["theta"][:, 0]
    assert abs(own.mean() - mean) < 0.1 * sd and abs(own.std() / sd - 1) < 0.1
    with pytest.raises(ValueError, match="all are given"):
        found.conditional({"theta": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"of 'theta' of shape \(2,\), with NaN"):
        found.conditional({"theta": 1.0})


def test_what_cannot_be_pickled_of_a_simulator_is_left_out():
    model = from_simulator(PRIOR, lambda theta: theta)
    own = amortize(model, simulations=40, **QUICK)
    with pytest.warns(UserWarning, match="The simulator is not saved"):
        saved = pickle.dumps(own)
    loaded = pickle.loads(saved)
    assert loaded({"x": torch.zeros(2)}, 5)["theta"].shape == (5, 2)

    def local():
        pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0))

    with pytest.raises(pickle.PicklingError, match="Define the model, or the classes of its prior"):
        torch.save(amortize(local, observed=["x"], simulations=40, **QUICK), io.BytesIO())


@pytest.mark.parametrize("form", ["mapping", "two mappings", "pair", "data set"])
def test_a_prior_and_simulations_need_no_simulator(form):
    both = simulations(40)
    given = {
        "mapping": both,
        "two mappings": ({"theta": both["theta"]}, {"x": both["x"]}),
        "pair": (both["theta"].numpy(), both["x"].numpy()),
        "data set": TensorDataset(both["theta"], both["x"]),
    }[form]
    own = amortize({"theta": PRIOR} if form == "mapping" else PRIOR, simulations=given, **QUICK)
    drawn = own({"x": torch.zeros(3, 1)}, 5)
    assert drawn["theta"].shape == (5, 3, 2)
    if form == "pair":
        one = own({"x": torch.zeros(1)}, 5)
        with pytest.raises(ValueError, match="a prior and simulations only"):
            one.predict()
        with pytest.raises(TypeError, match="got a prior without them"):
            amortize(PRIOR)
        with pytest.raises(
            TypeError, match="a mapping from observed sites to values; got a Tensor"
        ):
            own(torch.zeros(1))
        assert "'x' have no density" in str(own.guide.rules)


class Triangle:
    """A prior of one's own, of no support: pairs of numbers in [0, 1] of which the second is the larger."""

    def sample(self, shape=torch.Size()):
        return torch.rand(*shape, 2).sort(-1).values

    def log_prob(self, value):
        ordered = (value[..., 0] < value[..., 1]) & (value[..., 0] > 0) & (value[..., 1] < 1)
        return torch.where(ordered, math.log(2.0), -math.inf)


def test_draws_and_density_end_where_a_prior_of_ones_own_does():
    model = from_simulator(Triangle(), lambda theta: theta + 0.2 * torch.randn_like(theta))
    own = amortize(model, simulations=200, steps=20, progress=False)
    drawn = own({"x": torch.tensor([[0.5, 0.5], [0.1, 0.9]])}, 300)["theta"]
    assert drawn.shape == (300, 2, 2) and Triangle().log_prob(drawn).isfinite().all()
    one = own({"x": torch.tensor([0.5, 0.5])}, 300)
    axis = (torch.arange(200) + 0.5) / 200
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    total = one.log_prob({"theta": grid}).exp().sum() / 200**2
    assert abs(total - 1) < 0.15  # the share within the prior is that of 1,000 draws
    assert one.log_prob({"theta": torch.tensor([0.6, 0.5])}) == -math.inf


def test_integers_are_numbers():
    def counts():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        pyro.deterministic("n", torch.poisson(rate).long())

    own = amortize(counts, observed=["n"], simulations=100, **QUICK)
    for value in (torch.tensor(3), torch.tensor([3, 0])):
        assert own({"n": value}, 10).mean("rate").isfinite().all()
    given = {"theta": torch.rand(40, 1), "n": torch.arange(40)}
    own = amortize(dist.Uniform(torch.zeros(1), 1.0).to_event(1), simulations=given, **QUICK)
    assert own({"n": 3}, 10)["theta"].shape == (10, 1)


def test_more_simulations_are_trained_on_beside_the_first():
    model = from_simulator(PRIOR, lambda theta: theta)
    own = amortize(model, simulations=40, **QUICK)
    both = own.append(30).append({"theta": torch.randn(20, 2), "x": torch.randn(20, 2)})
    given = both.more.args[2]
    assert given.num == 90 and not given.own and own.more.args[2].num == 40
    (all_of_it,), (first,) = given.groups, own.more.args[2].groups
    torch.testing.assert_close(all_of_it.draws.latents["theta"][:40], first.draws.latents["theta"])
    assert both({"x": torch.zeros(2)}, 5)["theta"].shape == (5, 2)
    with pytest.raises(ValueError, match="got one at other arguments"):
        own.at().append(30)


def test_errors_in_training_keep_the_simulations(monkeypatch):
    model = from_simulator(PRIOR, lambda theta: theta)
    for error, kind in ((KeyboardInterrupt(), Interrupted), (ValueError("no"), ValueError)):

        def failing(*_, error=error):
            raise error

        monkeypatch.setattr(amortizing._Training, "posterior", failing)
        with pytest.raises(kind) as caught:
            amortize(model, simulations=40, **QUICK)
        assert caught.value.simulations.num == 40
        monkeypatch.undo()
        own = amortize(model, simulations=caught.value.simulations, **QUICK)
        assert own({"x": torch.zeros(2)}, 5)["theta"].shape == (5, 2)


def test_workers_draw_the_simulations():
    own = amortize(
        from_simulator(PRIOR, lambda theta: theta), simulations=40, num_workers=2, **QUICK
    )
    assert own.more.args[2].num == 40
    for given in ("fresh", simulations(40)):
        with pytest.raises(ValueError, match="num_workers with a number of simulations"):
            amortize(from_simulator(PRIOR, lambda theta: theta), simulations=given, num_workers=2)


def test_options_are_the_guides():
    model = from_simulator(PRIOR, lambda theta: theta)
    own = amortize(
        model,
        simulations=40,
        embeddings={"x": nn.Linear(2, 3)},
        options={"hidden_features": (7,), "families": "normal"},
        **QUICK,
    )
    assert own.guide.embeddings["x"].weight.shape == (3, 2)
    assert type(own.guide._made().learned["theta"].family).__name__ == "NormalFamily"
    assert own.guide._options.hidden_features == (7,)
    with pytest.raises(TypeError, match="got `pooling`, an option of the guide. Use options="):
        amortize(model, pooling="mean")
    with pytest.raises(ValueError, match="other than embeddings, mode, observed; got 'mode'"):
        amortize(model, options={"mode": "fixed"})
    with pytest.raises(ValueError, match="got some beside guide="):
        amortize(model, guide=AutoNaMIGuide(model), options={"skip": False})
    with pytest.raises(ValueError, match="observed sites, 'x'; got 'y'"):
        amortize(model, simulations=40, embeddings={"y": "set"}, **QUICK)


def test_encoders_are_chosen_by_shape_unless_said_otherwise():
    data = {"image": torch.randn(30, 16, 16), "short": torch.randn(30, 5)}
    both = source_of(
        from_simulator(PRIOR, lambda theta: {name: x[: len(theta)] for name, x in data.items()}),
        (),
        {},
        (),
        marked=False,
    )

    def kinds(given, by_shape=True):
        found = embeddings_for(both, data, given, by_shape=by_shape)
        return {name: type(module).__name__ for name, module in found.items()}

    assert kinds(None) == {"image": "ImageEncoder"}
    assert kinds({"image": None, "short": "series"}) == {"short": "SeriesEncoder"}
    assert kinds({"image": "series"}, by_shape=False) == {"image": "SeriesEncoder"}
    with pytest.raises(ValueError, match="for 'image'.*that of site 'short'"):
        kinds({"short": "image"})
    with pytest.raises(TypeError, match="a kind, a module or None; got int"):
        kinds({"short": 3})


def test_images_and_long_series_are_read_by_their_encoders():
    given = {
        "theta": torch.randn(40, 2),
        "image": torch.randn(40, 16, 16),
        "series": torch.randn(40, 120),
    }
    own = amortize(PRIOR, simulations=given, **QUICK)
    kinds = {name: type(module).__name__ for name, module in own.guide.embeddings.items()}
    assert kinds == {"image": "PyroImageEncoder", "series": "PyroSeriesEncoder"}
    loaded = pickle.loads(pickle.dumps(own))
    data = {"image": torch.randn(3, 16, 16), "series": torch.randn(3, 120)}
    theta = own.guide.log_prob({"theta": torch.zeros(3, 2)}, observations=data)
    again = loaded.guide.log_prob({"theta": torch.zeros(3, 2)}, observations=data)
    torch.testing.assert_close(theta, again)
    assert loaded(data, 4)["theta"].shape == (4, 3, 2)
