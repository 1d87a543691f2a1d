"""`Vectorized`: models that are written for one draw are run for many, and say what single runs say."""

import contextlib
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import transforms as T
from pyro.infer import SVI, JitTrace_ELBO, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_nami import (
    AutoNaMIGuide,
    InferenceCompilation,
    amortize,
    annealed_importance_sampling,
    importance_sample,
)
from pyro_nami.checking import calibrate
from pyro_nami.inference.simulate import Simulator
from pyro_nami.inference.target import Target, log_densities
from pyro_nami.messages import OneByOne
from pyro_nami.program.many_draws import difference_at
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner
from pyro_nami.program.vectorized import Vectorized


def written(z, make):
    """The running sums of a vector, written into what has been made for them."""
    x = make(z)
    for i in range(1, len(z)):
        x[i] = x[i - 1] + z[i]
    x += z[0]
    return x


# Of a vector z and positive numbers a, both of size 3, as a model for one draw writes them.
ONE = {
    "normal": lambda z, a: dist.Normal(torch.eye(3) @ z, a.sum()).to_event(1),
    "student": lambda z, a: dist.StudentT(a[0], z[0], a[1]),
    "log normal": lambda z, a: dist.LogNormal(z[0], a[1]),
    "by tril": lambda z, a: dist.MultivariateNormal(z, scale_tril=torch.diag(a)),
    "by covariance": lambda z, a: dist.MultivariateNormal(z, torch.outer(z, z) + torch.diag(a)),
    "low rank": lambda z, a: dist.LowRankMultivariateNormal(z, z[:, None], a),
    "probabilities": lambda z, a: dist.Bernoulli(z[0].sigmoid()),
    "logits": lambda z, a: dist.Categorical(logits=z),
    "counts": lambda z, a: dist.Multinomial(10, logits=z),
    "binomial": lambda z, a: dist.Binomial(10, logits=z[0]),
    "beta binomial": lambda z, a: dist.BetaBinomial(a[0], a[1], 7),
    "dirichlet": lambda z, a: dist.Dirichlet(a),
    "inverse gamma": lambda z, a: dist.InverseGamma(a[0], a[1]),
    "uniform": lambda z, a: dist.Uniform(z[0], z[0] + a[0]),
    "circular": lambda z, a: dist.VonMises(z[0], a[0]),
    "zero inflated": lambda z, a: dist.ZeroInflatedPoisson(a[0], gate=z[0].sigmoid()),
    "mixture": lambda z, a: dist.MixtureSameFamily(dist.Categorical(logits=z), dist.Normal(z, a)),
    "of vectors": lambda z, a: dist.MixtureSameFamily(
        dist.Categorical(logits=z[:2]), dist.Normal(torch.stack([z, a]), 1.0).to_event(1)
    ),
    "transformed": lambda z, a: dist.TransformedDistribution(
        dist.Normal(0.0, 1.0),
        [T.AffineTransform(z[0], a[0]), T.ExpTransform(), T.AffineTransform(z[1], a[1]).inv],
    ),
    "matrix": lambda z, a: dist.LKJCholesky(3, a[0]),
    "masked": lambda z, a: dist.Normal(z[0], a[0]).mask(z[0] > 0),
    "delta": lambda z, a: dist.Delta(z * 2, event_dim=1),
    "expanded": lambda z, a: dist.Poisson(a[0]).expand([2, 3]).to_event(2),
    "ordered": lambda z, a: dist.OrderedLogistic(z[0], a.cumsum(0)),
    "written": lambda z, a: dist.Normal(written(z, lambda z: torch.zeros(3)), 1.0).to_event(1),
    "written like": lambda z, a: dist.Normal(written(z, torch.zeros_like), 1.0).to_event(1),
    "written on data": lambda z, a: dist.Normal(
        written(z, lambda z: DESIGN[0].new_ones(3).clone()), 1.0
    ).to_event(1),
}
# The same in a plate of 5, of a vector z and positive a of shape (5, 3).
PLATED = {
    "normal": lambda z, a: dist.Normal(a @ z, z[0].exp()),
    "vectors": lambda z, a: dist.Normal(a * z, 1.0).to_event(1),
    "covariance of all": lambda z, a: dist.MultivariateNormal(a, torch.outer(z, z) + torch.eye(3)),
    "cutpoints of all": lambda z, a: dist.MixtureSameFamily(
        dist.Categorical(logits=z), dist.Normal(a, 1.0)
    ),
    "transformed": lambda z, a: dist.TransformedDistribution(
        dist.Normal(0.0, 1.0).expand([5]), [T.AffineTransform(z[0], a[:, 0])]
    ),
    "masked": lambda z, a: dist.Normal(z[0], a[:, 0]).mask(a[:, 0] > 1),
    "deterministic": lambda z, a: dist.Normal(
        (pyro.deterministic("mean", a @ z)[:, None] * torch.eye(5)).sum(1), 1.0
    ),
}


def model_of(fn, plated):
    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("groups", 4):
            a = pyro.sample("a", dist.Gamma(2.0, torch.ones(3)).to_event(1))
        with pyro.plate("rows", 5) if plated else contextlib.nullcontext():
            pyro.sample("x", fn(z, a[torch.arange(5) % 4] if plated else a[0]))

    return model


CASES = [(fn, False) for fn in ONE.values()] + [(fn, True) for fn in PLATED.values()]
IDS = [*ONE, *(f"plated {name}" for name in PLATED)]


@pytest.mark.parametrize(("fn", "plated"), CASES, ids=IDS)
def test_sites_are_those_of_single_runs(fn, plated):
    model = model_of(fn, plated)
    target = Target(Program(Vectorized(model, 1), (), {}), None, nesting=1)
    with pyro.validation_enabled(False):
        sites = target.run_model(target.extent(7), Runner({}))
        together = log_densities(sites)
        for draw in range(7):
            single = {name: site["value"][draw] for name, site in sites.items()}
            single["z"] = single["z"][0]
            single["x"] = single["x"] if plated else single["x"][0]
            alone = Runner(single).run(model, (), {})
            assert type(sites["x"]["fn"]) is type(alone["x"]["fn"])
            for name, log_prob in log_densities({name: alone[name] for name in sites}).items():
                torch.testing.assert_close(together[name][draw].reshape(log_prob.shape), log_prob)


def regression(y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("groups", 3):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 6):
        pyro.sample("y", dist.Normal(DESIGN.to(w) @ w + b[GROUP], 0.5), obs=y)


DESIGN = torch.linspace(-1, 2, 12).sin().reshape(6, 2)
GROUP = torch.tensor([0, 1, 2, 0, 1, 2])
DATA = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4, 1.9])


def exact(y):
    """The log evidence of `regression`, by linear-Gaussian algebra."""
    design = torch.cat([DESIGN, torch.eye(3)[GROUP]], -1)
    covariance = design @ design.mT + 0.25 * torch.eye(6)
    return float(dist.MultivariateNormal(torch.zeros(6), covariance).log_prob(y))


def test_gradients_are_those_of_single_runs(double):  # single precision rounds by the order of sums
    data = DATA.double()
    values = {"w": torch.randn(4, 1, 2).requires_grad_(), "b": torch.randn(4, 3).requires_grad_()}
    sites = Runner(values).run(Vectorized(regression, 1), (data,), {})
    slopes = torch.autograd.grad(
        log_densities({"y": sites["y"]})["y"].sum(), list(values.values()), create_graph=True
    )
    curvature = torch.autograd.grad(slopes[0].square().sum(), values["b"])[0]
    for draw in range(4):
        w, b = (
            values["w"][draw, 0].detach().requires_grad_(),
            values["b"][draw].detach().requires_grad_(),
        )
        alone = log_densities({"y": Runner({"w": w, "b": b}).run(regression, (data,), {})["y"]})[
            "y"
        ].sum()
        expected = torch.autograd.grad(alone, (w, b), create_graph=True)
        torch.testing.assert_close(slopes[0][draw, 0], expected[0])
        torch.testing.assert_close(slopes[1][draw], expected[1])
        torch.testing.assert_close(
            curvature[draw], torch.autograd.grad(expected[0].square().sum(), b)[0]
        )


def test_single_runs_are_the_model_s_own():
    trace = poutine.trace(Vectorized(regression, 1)).get_trace(DATA)
    assert trace.nodes["y"]["fn"].batch_shape == (6,) and trace.nodes["w"]["value"].shape == (2,)


def test_masks_scales_parameters_and_shared_data():
    def model(y):
        shift = pyro.param("shift", torch.tensor(1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with poutine.scale(scale=z[0].exp()), poutine.mask(mask=z[1] > 0), pyro.plate("rows", 2):
            pyro.sample("y", dist.Normal(torch.eye(2) @ z + shift, 1.0), obs=y)
        pyro.factor("f", z.sum())

    z = torch.randn(3, 1, 2)
    found = log_densities(Runner({"z": z}).run(Vectorized(model, 1), (DATA[:2],), {}))["y"]
    plain = dist.Normal(z[:, 0] + 1, 1.0).log_prob(DATA[:2])
    torch.testing.assert_close(found, plain * z[:, 0, :1].exp() * (z[:, 0, 1:] > 0))


@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoNaMIGuide])
def test_weights_give_the_exact_evidence_without_a_loop(guide):
    guide = guide(regression)
    svi = SVI(regression, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(400):
        svi.step(DATA)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OneByOne)
        found = importance_sample(regression, guide, DATA, num_samples=5000)
        several = importance_sample(
            regression, guide, DATA, num_samples=5000, observations={"y": torch.stack([DATA, DATA])}
        )
    for log_evidence in (found.log_evidence, *several.log_evidence):
        assert float(log_evidence) == pytest.approx(exact(DATA), abs=0.05)


def test_annealing_reaches_the_exact_evidence():
    found = annealed_importance_sampling(
        regression, None, DATA, num_chains=200, num_temperatures=100
    )
    assert float(found.log_evidence) == pytest.approx(
        exact(DATA), abs=4 * float(found.log_evidence_error)
    )
    assert float(found.log_evidence_error) < 0.15


def test_compilation_derives_what_it_derives_of_a_model_for_many():
    posterior = amortize(regression, observed=["y"], simulations=200, progress=False)
    assert {note.rule for note in posterior.guide.rules.values()} == {"exact"}
    for sign in (1, -1):
        assert posterior({"y": sign * DATA}, 50).log_evidence.item() == pytest.approx(
            exact(sign * DATA), abs=1e-3
        )
    again = pickle.loads(pickle.dumps(posterior))
    assert float(again({"y": DATA}, 50).log_evidence) == pytest.approx(exact(DATA), abs=1e-3)


def test_a_guide_of_the_user_s_is_compiled_and_judged():
    guide = AutoNaMIGuide(regression, observed=["y"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InferenceCompilation(
            regression, guide, pyro.optim.Adam({"lr": 0.01}), batch_size=20, observed=["y"]
        ).fit(2)
        assert calibrate(regression, guide, num_datasets=50).passed


@pytest.mark.parametrize("latent", ["if", "float", "hidden"])
def test_what_vmap_cannot_run_is_run_one_by_one(latent):
    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        at = torch.zeros(2)
        if latent == "if":
            at = z if z[0] > 0 else -z
        elif latent == "float":
            at = at + float(z[0])
        else:
            at = z + torch.randn(2)
        pyro.sample("x", dist.Normal(at, 1.0).to_event(1))

    with pytest.warns(UserWarning, match="one vectorized run"):
        simulator = Simulator(model, observed=["x"])
    assert simulator.model is model and simulator.draw(3).observed["x"].shape == (3, 2)


@pytest.mark.filterwarnings("ignore:The importance weights")
def test_what_mixes_up_draws_is_found_by_a_few():
    sizes = []

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", 6):
            mean = w @ DESIGN.mT  # of draws (n, 1), as they lie left of the plate: (n, 1, 6)
            sizes.append(mean.shape.numel())
            pyro.sample("y", dist.Normal(mean, 0.5), obs=DATA)

    found = importance_sample(model, AutoMultivariateNormal(model), num_samples=1000)
    assert found.num_samples == 1000 and max(sizes) < 1000


def unknown_scale(many):
    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("groups", 3):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        mean = b[..., GROUP] + (DESIGN * w).sum(-1) if many else b[GROUP] + DESIGN @ w
        with pyro.plate("rows", 6):
            pyro.sample("y", dist.Normal(mean, scale), obs=y)

    return model


@pytest.mark.parametrize("wrapped", [True, False])
def test_derived_conditionals_are_those_of_a_model_for_many(wrapped):
    """In training as well, where they are derived in the run that draws what comes before them."""
    model = Vectorized(unknown_scale(False), 1) if wrapped else unknown_scale(False)
    guides = [AutoNaMIGuide(unknown_scale(True)), AutoNaMIGuide(model)]
    for guide in guides:
        guide(DATA)
    assert {name: note.rule for name, note in guides[0].rules.items()} == {
        name: note.rule for name, note in guides[1].rules.items()
    }
    values = {
        name: site["value"].detach()
        for name, site in Runner({}).run(guides[0], (DATA,), {}).items()
    }
    values = {name: value for name, value in values.items() if name in ("scale", "w", "b")}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            ours, theirs = (
                log_densities(Runner(values).run(guide, (DATA,), {})) for guide in guides
            )
        for name in values:
            torch.testing.assert_close(theirs[name], ours[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("loss", [Trace_ELBO, JitTrace_ELBO])
def test_guides_take_models_for_one_draw_as_they_are(loss):
    """A loss that Pyro compiles cannot be, with `torch.vmap`: there more is learned."""
    found = []
    for many in (True, False):
        pyro.clear_param_store()
        guide = AutoNaMIGuide(unknown_scale(many))
        svi = SVI(unknown_scale(many), guide, pyro.optim.Adam({"lr": 0.01}), loss())
        pyro.set_rng_seed(0)
        found.append(sum(svi.step(DATA) for _ in range(40)) / 40)
        assert guide.rules["w"].rule == "exact" and not isinstance(guide.model, Vectorized)
        assert (guide.rules["scale"].rule == "quadrature") == (many or loss is Trace_ELBO)
    assert found[1] == pytest.approx(found[0], abs=1e-3 if loss is Trace_ELBO else 2.0)


def test_predictions_of_a_model_for_one_draw_have_the_exact_conditional():
    """From 16 draws on one of them shows the derivation what all share; it has the shapes that the model knows."""
    x = torch.tensor([[1.0, -0.5, 0.2], [0.3, 1.0, -1.0], [-0.7, 0.4, 0.9], [0.1, -1.2, 0.6]])
    y = torch.tensor([0.8, 0.3, -0.9, 0.2])

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(b * torch.tanh(x @ w), 0.5), obs=y)

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    for _ in range(3):
        svi.step(x, y)
    drawn = Predictive(model, guide=guide, num_samples=200)(x[:2])
    slope = torch.tanh(drawn["w"].reshape(200, 3) @ x.mT)
    precision = 1 + slope.square().sum(-1) / 0.25
    noise = (drawn["b"].flatten() - (slope * y).sum(-1) / 0.25 / precision) * precision.sqrt()
    assert guide.rules["b"].rule == "exact"
    assert abs(noise.mean()) < 0.3 and 0.7 < noise.std() < 1.3  # 4 standard errors of 200 draws


def test_models_that_need_no_mapping_are_run_as_they_are():
    # one takes many, of the other everything is found without
    for model in (unknown_scale(True), regression):
        guide = AutoNaMIGuide(model)
        guide(DATA)
        assert not guide._plan.program.vectorized


def test_a_guide_that_is_mapped_has_the_same_loss_when_it_is_compiled():
    model = unknown_scale(False)
    guide = AutoNaMIGuide(model)
    guide(DATA)
    assert guide._plan.program.vectorized

    def loss(elbo):
        pyro.set_rng_seed(0)
        return SVI(model, guide, pyro.optim.Adam({"lr": 1e-9}), elbo).step(DATA)

    plain, compiled = loss(Trace_ELBO()), loss(JitTrace_ELBO(ignore_jit_warnings=True))
    assert compiled == pytest.approx(plain, abs=1e-3)


def test_draws_as_many_as_a_plate_has_instances_tell_that_a_model_takes_many():
    def model():
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    program = Program(model, (), {})
    assert difference_at(program.prior_draws(3), 1, program) is None


def test_a_chain_that_indexes_by_its_states_is_given_up_early():
    """Of several draws each step would have all pairs of the one before."""
    seen = []

    def model():
        p = pyro.sample("p", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
        z = torch.tensor(0)
        for t in range(40):
            z = pyro.sample(f"z_{t}", dist.Categorical(p[z]))
            seen.append(z.numel())

    draws = Program(model, (), {}).prior_draws(3)
    seen.clear()
    assert difference_at(draws, 0, Program(model, (), {})) is not None
    assert max(seen) < 100
