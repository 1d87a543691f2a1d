"""Pyro's own algorithms compile and use the same guide, and agree with `InferenceCompilation`."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CHAIN,
    conjugate_normal,
    conjugate_normal_evidence,
    conjugate_normal_posterior,
    learned,
    scatter,
    told,
)
from pyro import poutine
from pyro.infer import (
    CSIS,
    SVI,
    EmpiricalMarginal,
    Importance,
    ReweightedWakeSleep,
    SMCFilter,
    Trace_ELBO,
)
from pyro.infer.importance import vectorized_importance_weights
from pyro.infer.reparam import NeuTraReparam

from pyro_nami import AutoNaMIGuide
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.losses import CompilationLoss
from pyro_nami.inference.simulate import Batch, Simulator

pytestmark = pytest.mark.filterwarnings("error")
Adam = functools.partial(torch.optim.Adam, lr=0.02)
ZERO = (torch.zeros(()),)


wake_sleep = functools.partial(
    ReweightedWakeSleep, num_particles=2, vectorize_particles=True, model_has_params=False
)


def weights(guide):
    return torch.cat([value.detach().flatten() for value in guide.parameters()])


@pytest.mark.usefixtures("double")
def test_the_loss_is_the_same_in_three_ways():
    """At equal parameters, each within five standard errors of the mean over 20,000 simulations."""
    guide = learned(CHAIN)
    compilation = InferenceCompilation(CHAIN, guide, Adam, batch_size=5000)
    compilation.evaluate_loss(*ZERO, num=1)
    scatter(guide, 0.1)
    draws = Simulator(CHAIN, ZERO).draw(20_000)
    with torch.no_grad():
        losses = CompilationLoss(guide)(Batch(ZERO, {}, draws))
    loss, sd = losses.mean().item(), losses.std().item()

    def within(value, count):
        return abs(value - loss) < 5 * sd * (1 / count + 1 / 20_000) ** 0.5

    assert within(compilation.evaluate_loss(*ZERO, num=20_000), 20_000)
    csis = CSIS(CHAIN, guide, pyro.optim.Adam({"lr": 0.01}), validation_batch_size=300)
    assert within(csis.validation_loss(*ZERO), 300)
    sleep = wake_sleep(insomnia=0.0, num_sleep_particles=20_000, max_plate_nesting=0)
    assert within(sleep.loss(CHAIN, guide, *ZERO)[1].item(), 20_000)


@pytest.mark.usefixtures("double")
def test_the_gradient_of_csis_is_that_of_compilation():
    """On the very same simulations."""
    guide, draws = learned(CHAIN), Simulator(CHAIN, ZERO).draw(6)
    CompilationLoss(guide)(Batch(ZERO, {}, draws))
    scatter(guide, 0.1)
    CompilationLoss(guide)(Batch(ZERO, {}, draws)).mean().backward()
    ours = {name: value.grad.clone() for name, value in guide.named_parameters()}
    guide.zero_grad()
    csis, traces = CSIS(CHAIN, guide, pyro.optim.Adam({"lr": 0.01})), []
    for i in range(6):
        values = {name: value[i] for name, value in {**draws.latents, **draws.observed}.items()}
        replay = poutine.Trace()
        for name, value in values.items():
            seen = {"was_observed": True} if name == "y" else {}
            replay.add_node(
                name, name=name, type="sample", is_observed=False, value=value, infer=seen
            )
        model = poutine.replay(poutine.uncondition(CHAIN), trace=replay)
        traces.append(poutine.trace(model).get_trace(*ZERO))
    csis.loss_and_grads(True, traces, *ZERO)
    for name, value in guide.named_parameters():
        assert torch.allclose(value.grad, ours[name], rtol=1e-8, atol=1e-10), name


def free(y=None):
    """`conjugate_normal` for six data, which may be left out: CSIS and others pass them as ``observations=``."""
    conjugate_normal(torch.zeros(6) if y is None else y)


def test_csis_trains_and_samples():
    model = told(free)
    guide = learned(model, observed=["y"])
    csis = CSIS(
        model, guide, pyro.optim.Adam({"lr": 0.05}), num_inference_samples=40, training_batch_size=5
    )
    compilation = InferenceCompilation(model, guide, Adam, batch_size=100)

    def loss():
        pyro.set_rng_seed(0)  # the same simulations, as tails of their losses are heavy
        return compilation.evaluate_loss(num=2000)

    before = loss()
    losses = [csis.step() for _ in range(20)]
    assert torch.tensor(losses).isfinite().all() and loss() < before - 0.1
    compilation.fit(150, progress=False)
    y = torch.linspace(0.0, 2.0, 6)
    posterior = csis.run(observations={"y": y})
    mean, sd = conjugate_normal_posterior(y)
    assert abs(EmpiricalMarginal(posterior, "mu").mean - mean) < 5 * sd / 40**0.5


@pytest.mark.parametrize("insomnia", [0.0, 0.5, 1.0])
def test_wake_sleep_trains(insomnia):
    y = torch.linspace(0.0, 2.0, 6)
    guide = learned(free)
    objective = wake_sleep(insomnia=insomnia, num_sleep_particles=50, max_plate_nesting=1)
    svi = SVI(free, guide, pyro.optim.Adam({"lr": 0.02}), objective)
    svi.step(y)
    before = weights(guide)
    losses = [svi.step(y)[1] for _ in range(40)]
    assert torch.tensor(losses).isfinite().all() and not torch.equal(weights(guide), before)
    if insomnia == 0.0:
        assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.usefixtures("double")
def test_importance_sampling_with_a_compiled_guide():
    guide, y = learned(free, observed=["y"], hidden_features=()), torch.linspace(0.0, 2.0, 6)
    compilation = InferenceCompilation(free, guide, Adam, batch_size=100)
    compilation.fit(150, (torch.zeros(6),), progress=False)
    exact = conjugate_normal_evidence(y)
    importance = Importance(free, guide, num_samples=50)
    importance.run(y)
    assert abs(importance.get_log_normalizer() - exact) < 0.1  # sds of log weights are about 0.1
    with torch.no_grad():
        log_weights, *_ = vectorized_importance_weights(
            free, guide, y, num_samples=1000, max_plate_nesting=1
        )
    assert abs(log_weights.logsumexp(0) - math.log(1000) - exact) < 0.05
    assert (2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp() > 900


class Step:
    """A random walk seen in noise, for `SMCFilter`; the guide's proposal reads the datum too."""

    transition_sd, noise_sd = 1.0, 0.5

    def transition(self):
        z_before = pyro.sample("z_before", dist.Normal(0.0, 2.0))
        z = pyro.sample("z", dist.Normal(z_before, self.transition_sd))
        pyro.sample("y", dist.Normal(z, self.noise_sd))

    def init(self, state):
        state["z"] = torch.zeros(state._num_particles)

    def step(self, state, y):
        state["z"] = pyro.sample("z", dist.Normal(state["z"], self.transition_sd))
        pyro.sample("y", dist.Normal(state["z"], self.noise_sd), obs=y)


class Proposal:
    def __init__(self, guide):
        self.guide = guide

    def init(self, state):
        pass

    def step(self, state, y):
        self.guide(observations={"z_before": state["z"], "y": y.expand(state["z"].shape)})


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("exact", [True, False])
def test_a_particle_filter_takes_a_compiled_proposal(exact):
    """The particles' mean against the Kalman filter's, within five standard errors at the ESS that resampling keeps."""
    model = Step()
    guide = AutoNaMIGuide(
        model.transition, observed=["z_before", "y"], hidden_features=(), exact=exact
    )
    compilation = InferenceCompilation(
        model.transition, guide, Adam, batch_size=100, observed=guide.observed
    )
    compilation.fit(5 if exact else 200, progress=False)
    smc = SMCFilter(model, Proposal(guide), num_particles=2000, max_plate_nesting=0)
    smc.init()
    mean, variance = 0.0, 0.0
    with torch.no_grad():
        for y in (0.7, -0.4, 1.5):
            smc.step(torch.tensor(y))
            variance += model.transition_sd**2
            gain = variance / (variance + model.noise_sd**2)
            mean, variance = mean + gain * (y - mean), (1 - gain) * variance
    filtered = smc.get_empirical()["z"]
    assert abs(filtered.mean - mean) < 5 * (variance / 1000) ** 0.5
    assert abs(filtered.variance - variance) < 5 * variance * (2 / 1000) ** 0.5


def test_neutra_takes_continuous_autoguides_only():
    """It needs all latents as one vector of a closed form, which a product of conditionals is not."""
    guide = AutoNaMIGuide(CHAIN)
    guide(*ZERO)
    with pytest.raises(TypeError, match="AutoContinuous"):
        NeuTraReparam(guide)


def _regression(x, y, mean):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.StudentT(4.0, mean(weights, x), 1.0), obs=y)


@pytest.mark.parametrize(
    ("mean", "is_told"), [(lambda w, x: w @ x.T, True), (lambda w, x: (w * x).sum(-1), False)]
)
def test_models_of_one_draw_are_told_where_pyro_runs_them_for_many(mean, is_told, recwarn):
    """``(particles, 1, 2) @ (2, rows)`` has a dim too many, by which data count once for each particle."""
    x, y = torch.randn(9, 2), torch.randn(9)
    guide = AutoNaMIGuide(_regression)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    for _ in range(2):
        elbo.loss(_regression, guide, x, y, mean)
    found = [each for each in recwarn if "written for one draw" in str(each.message)]
    assert len(found) == is_told
