"""`amortize`: posteriors of all data sets by one call, against exact ones."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import config_enumerate
from torch.utils.data import TensorDataset

from pyro_nami import AutoNaMIGuide, amortize, from_simulator
from pyro_nami.amortize import SOAP, AmortizedPosterior, amortizing, improvement
from pyro_nami.inference import History, Simulator
from pyro_nami.messages import OneByOne


def folded():
    """Two modes: x says how large z is, not which sign it has."""
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(z.abs(), 0.2))


def exact(z, x):
    """log p(z given x) in nats, on a fine grid."""
    grid = torch.linspace(-6.0, 6.0, 4001)

    def joint(z):
        return dist.Normal(0.0, 1.0).log_prob(z) + dist.Normal(z.abs(), 0.2).log_prob(x)

    return joint(z) - (joint(grid[:, None]).logsumexp(0) + math.log(12.0 / 4000))


@pytest.mark.slow
def test_a_posterior_of_two_modes_is_learned_and_weighted():
    simulator = Simulator(folded, observed=["x"])
    draws, test = simulator.draw(2000), simulator.draw(2000)
    posterior = amortize(folded, observed=["x"], simulations=draws, steps=900, progress=False)
    z, x = test.latents["z"], test.observed["x"]
    with torch.no_grad():
        gap = (exact(z, x) - posterior.guide.log_prob({"z": z}, observations={"x": x})).mean()
    assert -0.02 < gap < 0.1, gap
    found = posterior({"x": torch.tensor(1.0)}, num_samples=2000)
    assert found.effective_sample_size > 1000
    negative = found.resample(2000)["z"].lt(0).float().mean()
    assert abs(negative - 0.5) < 0.1


def test_simulations_may_be_fresh_in_each_step():
    posterior = amortize(folded, observed=["x"], simulations="fresh", steps=60, progress=False)
    assert posterior.history.simulations == 36 * 332 + 24 * 664
    z, x = (
        part["z"] if "z" in part else part["x"]
        for part in Simulator(folded, observed=["x"]).draw(2000)[:2]
    )
    with torch.no_grad():
        gap = (exact(z, x) - posterior.guide.log_prob({"z": z}, observations={"x": x})).mean()
    assert -0.05 < gap < 0.4, gap
    with pytest.raises(ValueError, match="'fresh', or values; got 'new'"):
        amortize(folded, observed=["x"], simulations="new")


def test_where_weights_are_bad_draws_are_carried_to_the_posterior():
    def sharp():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.abs(), 0.02))

    posterior = amortize(sharp, observed=["x"], simulations=200, steps=2, progress=False)
    data = {"x": torch.tensor([1.5, 0.6])}
    assert (posterior(data, num_temperatures=2).effective_sample_size < 200).any()
    drawn = posterior(data)
    assert (drawn.effective_sample_size > 400).all()
    z = drawn.resample(1000)["z"]
    assert torch.allclose(z.abs().mean(0), data["x"] / (1 + 0.02**2), atol=0.005)
    assert torch.allclose(z.abs().std(0), torch.tensor(0.02), rtol=0.15)
    # the modes' shares are those of a resampling
    assert (z > 0).float().mean(0).sub(0.5).abs().max() < 0.2
    evidence = dist.Normal(0.0, 1.0).log_prob(data["x"]) + math.log(2)
    assert torch.allclose(drawn.log_evidence, evidence, atol=0.3)

    def discrete():
        z = pyro.sample("z", dist.Poisson(3.0))
        pyro.sample("x", dist.Normal(z, 0.1))

    drawn = amortize(discrete, observed=["x"], simulations=50, steps=2, progress=False)(
        {"x": torch.tensor(9.0)}
    )
    assert drawn.samples["z"].eq(9).all()


def test_two_numbers_behind_many_data_are_on_a_grid():
    """A decay, measured at many times: against its evidence by a fine grid."""
    times, num = torch.linspace(0.0, 5.0, 120), 301

    def model():
        size = pyro.sample("size", dist.LogNormal(0.0, 0.5))
        rate = pyro.sample("rate", dist.LogNormal(-0.5, 0.5))
        with pyro.plate("times", 120):
            pyro.sample("y", dist.Normal(size * torch.exp(-rate * times), 0.1))

    posterior = amortize(model, observed=["y"], simulations=20, progress=False)
    assert {rule.rule for rule in posterior.guide.rules.values()} == {"quadrature"}
    y = 1.2 * torch.exp(-0.5 * times) + 0.1 * torch.randn(120)
    found = posterior({"y": y}, 500)
    grid = torch.linspace(-2.0, 1.5, num, dtype=torch.float64)
    size, rate = grid[:, None, None], grid[None, :, None]
    joint = dist.Normal(size.exp() * torch.exp(-rate.exp() * times), 0.1).log_prob(y).sum(-1)
    joint = joint + dist.Normal(0.0, 0.5).log_prob(size[..., 0])
    joint = joint + dist.Normal(-0.5, 0.5).log_prob(rate[..., 0])
    evidence = joint.flatten().logsumexp(0) + 2 * math.log(3.5 / (num - 1))
    assert found.effective_sample_size > 480
    assert abs(found.log_evidence - evidence) < 0.05


def test_draws_stop_where_their_seconds_end():
    """A guide that is off: without seconds its draws are returned as they are, with a warning and their verdict."""

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.1))

    class Wide:
        rules: dict = {}

        def __call__(self, observations):
            pyro.sample("z", dist.Normal(observations["x"], 5.0))

    posterior = AmortizedPosterior(model, (), {}, Wide(), History())
    x = torch.tensor(0.5)
    with pytest.warns(UserWarning, match="not improved further than seconds=0 for a data set"):
        stopped = posterior({"x": x}, seconds=0)
    pyro.set_rng_seed(0)
    assert stopped.effective_sample_size < 200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert posterior({"x": x}).effective_sample_size > 500


def test_data_sets_with_good_weights_are_left_alone():
    def model():
        with pyro.plate("rows", 2):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0))

    class Guide:
        """Exact, but off by two standard deviations where the data are above one."""

        rules: dict = {}

        def __call__(self, observations):
            x = observations["x"]
            off = 2**0.5 * (x > 1).any(-1, keepdim=True)
            with pyro.plate("rows", 2):
                pyro.sample("z", dist.Normal(x / 2 + off, 0.5**0.5))

    x = torch.tensor([[0.0, -1.0], [2.0, 1.0], [0.5, 0.0], [-1.0, 3.0]])
    drawn = AmortizedPosterior(model, (), {}, Guide(), History())({"x": x}, 1000)
    evidence = dist.Normal(0.0, 2**0.5).log_prob(x).sum(-1)
    assert torch.allclose(drawn.log_weights[:, [0, 2]], evidence[[0, 2]].expand(1000, 2), atol=1e-4)
    assert (
        torch.allclose(drawn.log_evidence, evidence, atol=0.3)
        and (drawn.effective_sample_size > 500).all()
    )
    z = drawn.resample(1000)["z"]
    assert torch.allclose(z.mean(0), x / 2, atol=0.15) and torch.allclose(
        z.std(0), torch.tensor(0.5**0.5), rtol=0.15
    )


def test_where_few_draws_are_effective_there_are_more(monkeypatch):
    """By guides that are too wide: of Normal latents, for two of four data sets, and of a count that is known."""

    def refused(*_, **__):
        raise AssertionError("Annealed, where more draws would do.")

    monkeypatch.setattr(improvement, "annealed_importance_sampling", refused)

    def model():
        with pyro.plate("rows", 6):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0))

    class Wide:
        rules: dict = {}

        def __call__(self, observations):
            x = observations["x"]
            scale = 0.5**0.5 * (1 + (x > 1).any(-1, keepdim=True))
            with pyro.plate("rows", 6):
                pyro.sample("z", dist.Normal(x / 2, scale))

    x = torch.tensor([[0.0], [2.0], [-1.0], [1.5]]).expand(4, 6)
    posterior = AmortizedPosterior(model, (), {}, Wide(), History())
    drawn, left = posterior({"x": x}), posterior({"x": x}, num_temperatures=2)
    assert (
        left.effective_sample_size[[1, 3]].max() < 150 and (drawn.effective_sample_size > 500).all()
    )
    evidence = dist.Normal(0.0, 2**0.5).log_prob(x).sum(-1)
    assert (drawn.effective_sample_size[[0, 2]] > 999).all() and (
        drawn.effective_sample_size[[1, 3]] < 900
    ).all()
    off = torch.stack([posterior({"x": x[1:2]}).log_evidence[0] - evidence[1] for _ in range(30)])
    assert off.square().mean().sqrt() == pytest.approx(drawn.log_evidence_error[1].item(), rel=0.4)
    assert (drawn.log_evidence - evidence).abs().max() < 0.08
    z = drawn.samples["z"]
    assert torch.allclose(z.mean(0), x / 2, atol=0.12) and torch.allclose(
        z.std(0), torch.tensor(0.5**0.5), rtol=0.1
    )

    def count():
        pyro.sample("x", dist.Normal(pyro.sample("n", dist.Poisson(3.0)), 0.1))

    class Guess(Wide):
        def __call__(self, observations):
            pyro.sample("n", dist.Poisson(observations["x"]))

    drawn = AmortizedPosterior(count, (), {}, Guess(), History())({"x": torch.tensor(9.0)})
    assert drawn.samples["n"].eq(9).all() and drawn.samples["n"].shape == (1000,)
    exact = dist.Poisson(3.0).log_prob(torch.tensor(9.0)) + dist.Normal(0.0, 0.1).log_prob(
        torch.tensor(0.0)
    )
    assert abs(drawn.log_evidence - exact) < 0.15


@pytest.mark.parametrize("affordable", [5_000, 2**40])
def test_where_draws_take_long_there_are_fewer_to_resample_from(affordable, monkeypatch):
    asked, sample = [], improvement.weighted_draws
    monkeypatch.setattr(
        improvement, "elements_of_a_draw", lambda proposal: improvement.MAX_WORK / affordable
    )
    monkeypatch.setattr(
        improvement,
        "weighted_draws",
        lambda target, data, num: asked.append(num) or sample(target, data, num),
    )

    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z, 1.0).to_event(1))

    class Wide:
        rules: dict = {}

        def __call__(self, observations):
            pyro.sample("z", dist.Normal(observations["x"] / 2, 3.0).to_event(1))

    x = torch.zeros(8)
    drawn = AmortizedPosterior(model, (), {}, Wide(), History())({"x": x}, 500)
    most = max(asked)
    assert most > 2_000 if affordable > 5_000 else most == 2_000
    assert drawn.effective_sample_size > 100
    assert abs(drawn.log_evidence - dist.Normal(0.0, 2**0.5).log_prob(x).sum()) < 0.5


def scaled(rows, y=None):
    s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", rows):
        pyro.sample("y", dist.Logistic(0.0, s), obs=y)


def test_data_outside_of_simulations_are_told_and_annealed_from_the_prior():
    """Scales six prior deviations out, where the guide was never trained: against a grid."""
    posterior = amortize(scaled, 15, observed=["y"], simulations=500, steps=100, progress=False)
    y = torch.randn(3, 15, dtype=torch.float64) * torch.tensor([[1.0], [300.0], [1e4]])
    grid = torch.linspace(-4.0, 14.0, 4001, dtype=torch.float64)
    joint = dist.Normal(0.0, 1.0).log_prob(grid) + dist.Logistic(0.0, grid.exp()).log_prob(
        y[:, :, None]
    ).sum(1)
    mean = (joint.softmax(-1) * grid).sum(-1)
    with pytest.warns(
        UserWarning, match="2 of 3 data sets lie outside. Of data set 1: .* sites first: 'y'"
    ):
        found = posterior({"y": y.float()})
    assert ((found.resample(4000)["s"].log().mean(0) - mean).abs() < 0.05).all()
    assert ((found.log_evidence - joint.logsumexp(-1) - math.log(18 / 4000)).abs() < 0.5).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior({"y": y[0].float()})
    with pytest.warns(UserWarning, match="The data lie far outside the model's simulations"):
        posterior({"y": y[2].float()}, num_temperatures=2)


def test_data_without_a_name_are_refused():
    posterior = amortize(folded, observed=["x"], simulations=200, steps=20, progress=False)
    with pytest.raises(TypeError, match="a mapping from observed sites to values; got a Tensor"):
        posterior(torch.tensor(1.0))


def test_posteriors_at_other_arguments_take_data_of_other_shapes():
    posterior = amortize(scaled, 15, observed=["y"], simulations=500, steps=100, progress=False)
    y = torch.randn(45)
    for rows in (44, 45):  # three times 15 are no three data sets
        with pytest.raises(ValueError, match="other arguments of the model, as in posterior.at()"):
            posterior({"y": torch.randn(rows)})
    grid = torch.linspace(-4.0, 4.0, 4001)
    joint = dist.Normal(0.0, 1.0).log_prob(grid) + dist.Logistic(0.0, grid.exp()).log_prob(
        y[:, None]
    ).sum(0)
    found = posterior.at(45)({"y": y})
    assert found.log_weights.shape == (1000,)
    assert abs(found.log_evidence - joint.logsumexp(-1) - math.log(8 / 4000)) < 0.2


def test_draws_in_double_precision_are_improved():
    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        pyro.sample("x", dist.Normal(z.abs(), 0.002))

    posterior = amortize(model, observed=["x"], simulations=100, steps=2, progress=False)
    found = posterior({"x": torch.tensor([0.5, 1.0], dtype=torch.float64)}, num_samples=500)
    expected = math.log(2) + dist.Normal(0.0, 1.0).log_prob(torch.tensor([0.5, 1.0]))
    assert found.log_evidence.dtype == torch.float64
    torch.testing.assert_close(found.log_evidence.float(), expected, atol=0.3, rtol=0)


def test_a_conditional_that_simulations_speak_against_is_learned(monkeypatch):
    """Draws of the model have the ranks of draws from a conditional that is exact; those of another model have not."""

    def model(spread=1.0):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), spread).to_event(1))
        pyro.sample("x", dist.Normal(z, 1.0).to_event(1))

    draws = {
        spread: Simulator(model, (spread,), observed=["x"]).draw(1000) for spread in (1.0, 3.0)
    }
    guide = AutoNaMIGuide(model, observed=["x"])
    low = {}
    for spread, found in draws.items():
        none, below = guide.misfits(found.latents, observations=found.observed)["z"]
        low[spread] = int(below.sum())
        assert below.shape == (1000,) and not none.any()
    assert low[1.0] < 1000 / 65 + 6 * (1000 / 65) ** 0.5 < 200 < low[3.0]

    def told(self, latents, *args, **kwargs):
        return (
            {"z": torch.ones(2, len(latents["z"]), dtype=torch.bool)}
            if self.rules["z"].rule == "exact"
            else {}
        )

    monkeypatch.setattr(AutoNaMIGuide, "misfits", told)
    posterior = amortize(model, observed=["x"], simulations=100, steps=2, progress=False)
    assert posterior.guide.rules["z"].rule == "learned"


@pytest.mark.parametrize("gaussian", [True, False])
def test_a_model_for_one_draw_is_derived_as_one_for_many(gaussian):
    design = torch.linspace(-1, 1, 10).unsqueeze(-1) ** torch.arange(3)

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        eta = design @ w
        with pyro.plate("rows", 10):
            pyro.sample("x", dist.Normal(eta, 0.5) if gaussian else dist.Bernoulli(logits=eta))

    posterior = amortize(model, observed=["x"], simulations=60, steps=3, progress=False)
    assert posterior.guide.rules["w"].rule == ("exact" if gaussian else "newton")
    with warnings.catch_warnings():
        warnings.simplefilter("error", OneByOne)
        found = posterior({"x": torch.ones(2, 10)}, 20, num_temperatures=2)
    assert found.samples["w"].shape == (20, 2, 3) and found.log_evidence.isfinite().all()


@pytest.mark.filterwarnings(
    "ignore:The model cannot be simulated", "ignore:The model and the guide cannot be run"
)
def test_a_model_with_a_branch_is_learned():
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0 if float(a) > 0 else 2.0))
        pyro.sample("x", dist.Normal(a + b, 1.0))

    posterior = amortize(model, observed=["x"], simulations=60, steps=3, progress=False)
    assert posterior({"x": torch.tensor(0.5)}, 20, num_temperatures=2).samples["b"].isfinite().all()


def test_normals_about_one_of_many_modes_are_not_kept():
    """Rotations of both factors leave their product as it is."""

    def model():
        rows = pyro.sample("rows", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
        columns = pyro.sample("columns", dist.Normal(torch.zeros(5, 2), 1.0).to_event(2))
        pyro.sample("x", dist.Normal(rows @ columns.mT, 0.3).to_event(2))

    posterior = amortize(model, observed=["x"], simulations=200, steps=3, progress=False)
    assert posterior.guide.rules["rows"].rule == "learned"


def test_a_model_that_is_exact_takes_no_training():
    def model():
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 0.5))

    posterior = amortize(model, observed=["x"], simulations=100, progress=False)
    assert not posterior.history.losses and posterior.guide.rules["z"].rule == "exact"
    x = torch.tensor([1.0, -1.0, 0.0])
    assert abs(posterior({"x": x}, num_samples=500).effective_sample_size - 500) < 1


def test_what_a_model_marks_for_enumeration_is_drawn_from_its_exact_conditional():
    """As all other latents are; a guide for `TraceEnum_ELBO` leaves it out, and weights would have no density of it."""

    @config_enumerate
    def model():
        with pyro.plate("rows", 3):
            k = pyro.sample("k", dist.Bernoulli(0.3))
            pyro.sample("x", dist.Normal(2 * k, 1.0))

    posterior = amortize(model, observed=["x"], simulations=50, progress=False)
    x = torch.tensor([-0.5, 1.0, 2.0])
    drawn = posterior({"x": x}, num_samples=20_000)
    joint = torch.stack(
        [
            0.7 * dist.Normal(0.0, 1.0).log_prob(x).exp(),
            0.3 * dist.Normal(2.0, 1.0).log_prob(x).exp(),
        ]
    )
    torch.testing.assert_close(drawn.mean("k"), joint[1] / joint.sum(0), rtol=0, atol=0.02)
    torch.testing.assert_close(drawn.log_evidence, joint.sum(0).log().sum(), rtol=0, atol=1e-4)


def test_simulations_are_given_in_any_form_and_too_few_are_refused():
    draws = Simulator(folded, observed=["x"]).draw(60)
    both = TensorDataset(draws.latents["z"], draws.observed["x"])
    values = {**draws.latents, **draws.observed}
    others = (
        {name: value.double() for name, value in values.items()},
        {n: value.numpy() for n, value in values.items()},
    )
    for given in (draws, values, both, *others):
        posterior = amortize(folded, observed=["x"], simulations=given, steps=6, progress=False)
        assert posterior.history.simulations <= 6 * 54
    with pytest.raises(
        ValueError, match=r"values of site 'z' of shape \(\) behind 1 batch dims; got \(60, 2\)"
    ):
        amortize(folded, observed=["x"], simulations={**values, "z": torch.zeros(60, 2)})
    own = AutoNaMIGuide(folded, observed=["x"])
    assert (
        amortize(
            folded, observed=["x"], simulations=draws, steps=3, guide=own, progress=False
        ).guide
        is own
    )
    with pytest.raises(ValueError, match="at least 20 simulations to learn from; got 5"):
        amortize(folded, observed=["x"], simulations=5)
    with pytest.raises(
        TypeError, match="Expected simulations as JointDraws, or as tensors of .*; got list"
    ):
        amortize(folded, observed=["x"], simulations=[draws])


def test_simulations_lack_dims_of_plates_that_their_sites_are_not_in():
    """As a user has them: one number a simulation for a latent outside of the plate; in one mapping or in two."""

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(mu, 1.0))

    draws = Simulator(model, observed=["y"]).draw(60)
    latents, observed = {"mu": draws.latents["mu"][:, 0]}, {"y": draws.observed["y"]}
    whole = amortize(model, observed=["y"], simulations=draws, progress=False)
    data = {"y": torch.ones(3)}
    for given in ((latents, observed), {**latents, **observed}, (latents["mu"], observed["y"])):
        posterior = amortize(model, observed=["y"], simulations=given, progress=False)
        pyro.set_rng_seed(0)
        drawn = posterior(data, num_samples=10)
        pyro.set_rng_seed(0)
        assert torch.equal(drawn.samples["mu"], whole(data, num_samples=10).samples["mu"])
    with pytest.raises(TypeError, match="a tensor as the value of site 'mu'; got dict"):
        amortize(model, observed=["y"], simulations={"mu": latents, "y": observed["y"]})


def test_a_prior_without_draws_is_named():
    def model():
        mu = pyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.sample("y", dist.Normal(mu, 1.0))

    with pytest.raises(
        NotImplementedError, match="can be sampled; got 'mu', whose ImproperUniform"
    ):
        amortize(model, observed=["y"])


def test_where_a_guide_overfits_the_next_one_has_more_restraint(monkeypatch):
    """Data that say nothing of two latents: the exact density is the prior's."""
    settings = []

    def recorded(parameters, lr, weight_decay):
        settings.append((lr, weight_decay))
        return SOAP(parameters, lr=lr, weight_decay=weight_decay)

    monkeypatch.setattr(amortizing, "SOAP", recorded)
    prior = dist.Normal(torch.zeros(2), 1.0).to_event(1)
    model = from_simulator(prior, lambda theta: torch.randn(len(theta), 10))
    posterior = amortize(model, observed=["x"], simulations=300, steps=120, progress=False)
    decays = [7 / (0.06 * 120), 7 / (0.02 * 120)]
    assert settings == [
        (0.06, 0.0),
        (0.06, pytest.approx(decays[0])),
        (0.02, pytest.approx(decays[1])),
    ]
    theta, x = prior.sample((2000,)), torch.randn(2000, 10)
    with torch.no_grad():
        gap = (
            prior.log_prob(theta)
            - posterior.guide.log_prob({"theta": theta}, observations={"x": x})
        ).mean()
    assert 0 < gap < 0.3, gap
