"""Loops that networks learn, for series of any length: Kalman's and the forward algorithm are the oracles.

Gaps are E_q[log p(states, data | ..) - log q] below the log evidence, in nats a step, over some hundred simulated
series; their standard errors are a tenth of the tolerances.
"""

import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam

from pyro_nami import AutoNaMIGuide, InferenceCompilation
from pyro_nami.guide import build

STEP, NOISE = 0.5, 0.7  # scales of a local level
STAY = torch.tensor([[0.9, 0.1], [0.2, 0.8]])  # transitions of a hidden Markov model
MEANS = torch.tensor([-1.0, 1.0])
TOLERANCE = 0.02  # nats a step, as issue 67 asks
SERIES = 200


@pytest.fixture(autouse=True)
def learned_from_the_first_steps(request, monkeypatch):
    """Lets short loops, which take little time, be learned as long ones are."""
    if "short" not in request.node.name:
        monkeypatch.setattr(build, "SHORTEST_LEARNED", 1)


def level(steps):
    """A local level of a number of steps, its data to be simulated."""
    z = torch.zeros(())
    for t in range(steps):
        z = pyro.sample(f"z_{t}", dist.Normal(z, STEP))
        pyro.sample(f"y_{t}", dist.Normal(z, NOISE), obs=torch.zeros(()))


def hidden_markov(steps):
    z = torch.zeros((), dtype=torch.long)
    for t in range(steps):
        z = pyro.sample(f"z_{t}", dist.Categorical(STAY[z]))
        pyro.sample(f"y_{t}", dist.Normal(MEANS[z], 1.0), obs=torch.zeros(()))


def scaled(steps):
    """A local level with an unknown scale."""
    s = pyro.sample("s", dist.LogNormal(-0.7, 0.5))
    z = torch.zeros(())
    for t in range(steps):
        z = pyro.sample(f"z_{t}", dist.Normal(z, s))
        pyro.sample(f"y_{t}", dist.Normal(z, NOISE), obs=torch.zeros(()))


def of_data(y):
    """A local level of given data ``(steps,)``."""
    z = torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(z, STEP))
        pyro.sample(f"y_{t}", dist.Normal(z, NOISE), obs=y[t])


def ragged(y, lengths):
    """Local levels ``(series, steps)`` in a plate, of which the steps beyond their lengths are masked."""
    with pyro.plate("series", len(y)):
        z = torch.zeros(len(y))
        for t in range(y.shape[1]):
            with poutine.mask(mask=t < lengths):
                z = pyro.sample(f"z_{t}", dist.Normal(z, STEP))
                pyro.sample(f"y_{t}", dist.Normal(z, NOISE), obs=y[:, t])


def subsampled(y):
    with pyro.plate("series", len(y), subsample_size=4) as rows:
        z = torch.zeros(4)
        for t in range(y.shape[1]):
            z = pyro.sample(f"z_{t}", dist.Normal(z, STEP))
            pyro.sample(f"y_{t}", dist.Normal(z, NOISE), obs=y[rows, t])


def trend(y):
    """Two chains beside each other, and gaps in the data."""
    z, slope = torch.zeros(()), torch.zeros(())
    for t in range(len(y)):
        slope = pyro.sample(f"slope_{t}", dist.Normal(slope, 0.1))
        z = pyro.sample(f"z_{t}", dist.Normal(z + slope, STEP))
        if t % 3:
            pyro.sample(f"y_{t}", dist.Normal(z, NOISE), obs=y[t])


def vectors(y):
    """States of 40 elements, of which data show the sum."""
    z = torch.zeros(40)
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, 0.3).to_event(1))
        pyro.sample(f"y_{t}", dist.Normal(z.sum(-1), NOISE), obs=y[t])


def walks(series, steps):
    """Simulated data of local levels ``(series, steps)``."""
    return (STEP * torch.randn(series, steps)).cumsum(1) + NOISE * torch.randn(series, steps)


def kalman(y, step=STEP):
    """Log evidence ``(series,)`` of data ``(series, steps)``, and means and variances of filtered states."""
    mean, variance, evidence = torch.zeros(len(y)), torch.zeros(()), torch.zeros(len(y))
    means, variances = [], []
    for datum in y.unbind(1):
        variance = variance + step**2
        total = variance + NOISE**2
        evidence = evidence + dist.Normal(mean, total.sqrt()).log_prob(datum)
        mean = mean + variance / total * (datum - mean)
        variance = variance - variance**2 / total
        means.append(mean)
        variances.append(variance)
    return evidence, means, variances


def smoothed(y):
    """Means ``(series, steps)`` of states given all data (Rauch, Tung and Striebel)."""
    _, means, variances = kalman(y)
    found = [means[-1]]
    for mean, variance in zip(means[-2::-1], variances[-2::-1]):
        gain = variance / (variance + STEP**2)
        found.append(mean + gain * (found[-1] - mean))
    return torch.stack(found[::-1], 1)


def forward(y):
    """Log evidence ``(series,)`` of data of `hidden_markov`."""
    density = dist.Normal(MEANS, 1.0).log_prob(y.unsqueeze(-1))
    alpha = STAY[0].log() + density[:, 0]
    for t in range(1, y.shape[1]):
        alpha = torch.logsumexp(alpha.unsqueeze(-1) + STAY.log(), 1) + density[:, t]
    return alpha.logsumexp(-1)


def drawn(guide, y):
    """One draw of all latents for each of several data sets, and its log density under the guide."""
    data = {f"y_{t}": y[:, t] for t in range(y.shape[1])}
    with torch.no_grad():
        trace = poutine.trace(guide).get_trace(y.shape[1], observations=data)
    sites = {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
    total = sum(site["fn"].log_prob(site["value"]).reshape(-1) for site in sites.values())
    return {name: site["value"] for name, site in sites.items()}, total


def states_of(values, steps):
    return torch.stack([values[f"z_{t}"] for t in range(steps)], -1)


def compiled(model, steps, rate=0.01):
    """A guide compiled on series of 20 to 60 steps."""
    generator = torch.Generator().manual_seed(1)

    def arguments(step):
        return (int(torch.randint(20, 61, (), generator=generator)),), {}

    guide = AutoNaMIGuide(model)
    compilation = InferenceCompilation(
        model,
        guide,
        lambda parameters: torch.optim.Adam(parameters, lr=rate),
        batch_size=64,
        scheduler=lambda optim: torch.optim.lr_scheduler.CosineAnnealingLR(optim, steps),
    )
    compilation.fit(steps, arguments, progress=False)
    return guide


@pytest.fixture(scope="module")
def level_guide():
    pyro.set_rng_seed(0)
    return compiled(level, 120)


def level_gap(guide, y):
    values, log_q = drawn(guide, y)
    z = states_of(values, y.shape[1])
    before = torch.cat([torch.zeros(len(y), 1), z[:, :-1]], 1)
    joint = dist.Normal(before, STEP).log_prob(z) + dist.Normal(z, NOISE).log_prob(y)
    return float((kalman(y)[0] - joint.sum(1) + log_q).mean()) / y.shape[1]


@pytest.mark.parametrize("steps", [20, 60, 120, 300])
def test_level_against_the_kalman_filter_at_any_length(level_guide, steps):
    pyro.set_rng_seed(steps)
    assert abs(level_gap(level_guide, walks(SERIES, steps))) < TOLERANCE


def test_level_means_against_the_smoother(level_guide):
    pyro.set_rng_seed(0)
    y = walks(4, 100)
    draws = [states_of(drawn(level_guide, y)[0], 100) for _ in range(50)]
    # posterior deviations are 0.4, so means of 50 draws have errors of 0.06
    assert (torch.stack(draws).mean(0) - smoothed(y)).square().mean().sqrt() < 0.1


def test_hidden_markov_model_against_the_forward_algorithm():
    pyro.set_rng_seed(0)
    guide = compiled(hidden_markov, 100)
    for steps in (40, 150):
        z = torch.zeros(SERIES, dtype=torch.long)
        y = torch.zeros(SERIES, steps)
        for t in range(steps):
            z = dist.Categorical(STAY[z]).sample()
            y[:, t] = MEANS[z] + torch.randn(SERIES)
        values, log_q = drawn(guide, y)
        z = states_of(values, steps)
        before = torch.cat([torch.zeros(SERIES, 1, dtype=torch.long), z[:, :-1]], 1)
        joint = STAY.log()[before, z] + dist.Normal(MEANS[z], 1.0).log_prob(y)
        gap = float((forward(y) - joint.sum(1) + log_q).mean()) / steps
        assert abs(gap) < TOLERANCE


def test_unknown_scale_is_learned_from_a_summary():
    pyro.set_rng_seed(0)
    guide = compiled(scaled, 200)
    assert guide.rules["s"].reads == ("y[time]",)
    grid = torch.linspace(0.02, 4.0, 400)
    s = dist.LogNormal(-0.7, 0.5).sample((SERIES, 1))
    y = (s * torch.randn(SERIES, 50)).cumsum(1) + NOISE * torch.randn(SERIES, 50)
    prior = dist.LogNormal(-0.7, 0.5).log_prob(grid)
    height = torch.stack([kalman(y, step)[0] for step in grid], 1) + prior
    mean = (height.softmax(1) * grid).sum(1)
    draws = torch.stack([drawn(guide, y)[0]["s"].reshape(-1).log() for _ in range(10)])
    known = torch.corrcoef(torch.stack([draws.mean(0), mean.log()]))[0, 1]
    assert (
        known > 0.75
    )  # of a guide that reads nothing 0; of one that is trained sixteen times as long 0.99


@pytest.mark.parametrize("model", [level, scaled], ids=["known scale", "unknown scale"])
def test_number_of_weights_does_not_depend_on_the_length(model):
    counts = set()
    for steps in (10, 50):
        guide = AutoNaMIGuide(model, mode="amortized")
        guide(steps)
        counts.add(guide.num_parameters)
    assert len(counts) == 1


@pytest.mark.parametrize("model", [of_data, trend, vectors], ids=["level", "trend", "vectors"])
def test_scoring_equals_drawing_at_any_length(model):
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(model, mode="amortized")
    svi = SVI(model, guide, ClippedAdam({"lr": 0.01}), Trace_ELBO())
    for steps in (12, 20, 9, 12):
        svi.step(torch.randn(steps))
    assert list(guide.inverse.order) == [name for name in guide.rules if "[time]" in name]
    for steps in (12, 30, 7):
        y = torch.randn(steps)
        trace = poutine.trace(guide).get_trace(y)
        values = {n: s["value"] for n, s in trace.nodes.items() if s["type"] == "sample"}
        assert len(values) == steps * (2 if model is trend else 1)
        total = guide.log_prob(values, y)
        assert torch.isclose(total, torch.as_tensor(trace.log_prob_sum()), rtol=1e-4, atol=1e-3)


def test_several_particles_at_once():
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(of_data, mode="amortized")
    y = walks(1, 15)[0]
    guide(y)
    elbo = Trace_ELBO(num_particles=200, vectorize_particles=True, max_plate_nesting=0)
    single = Trace_ELBO(num_particles=200)
    losses = [each.loss(of_data, guide, y) for each in (elbo, single)]
    assert abs(losses[0] - losses[1]) < 2.0  # standard errors of 0.3
    assert guide.median(y)["z_14"].shape == ()
    assert guide.median(walks(1, 18)[0])["z_17"].shape == ()


@pytest.mark.parametrize("nesting", [0, 1])
def test_several_particles_of_a_latent_that_the_states_depend_on(nesting):
    def model(y):
        s = pyro.sample("s", dist.LogNormal(-0.7, 0.5))
        z = torch.zeros(())
        for t in range(len(y)):
            z = pyro.sample(f"z_{t}", dist.Normal(z, s))
            pyro.sample(f"y_{t}", dist.Normal(z, NOISE), obs=y[t])

    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(model, mode="amortized", exact=False)
    y = walks(1, 8)[0]
    guide(y)
    options = {"vectorize_particles": True, "max_plate_nesting": nesting}
    elbos = [Trace_ELBO(1000, **options), Trace_ELBO(200)]
    losses = [elbo.loss(model, guide, y) for elbo in elbos]
    assert losses[0] == pytest.approx(losses[1], abs=0.5)  # five standard errors


@pytest.mark.parametrize("mode", ["amortized", "minibatches"])
def test_masked_steps_of_ragged_minibatches_contribute_nothing(mode):
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(ragged, mode=mode)
    svi = SVI(ragged, guide, ClippedAdam({"lr": 0.01}), Trace_ELBO())
    for series in (3, 5, 4):
        svi.step(walks(series, 10 + series), torch.arange(series) + 6)
    y, lengths = walks(3, 12), torch.tensor([12, 5, 8])
    trace = poutine.trace(guide).get_trace(y, lengths)
    longer = torch.cat([y, torch.full((3, 6), 50.0)], 1)
    values = {n: s["value"] for n, s in trace.nodes.items() if s["type"] == "sample"}
    other = poutine.trace(poutine.condition(guide, values)).get_trace(longer, lengths)
    assert torch.isclose(trace.log_prob_sum(), other.log_prob_sum(), rtol=1e-5)
    # alone, each series has the states that it has among others
    for i, length in enumerate(lengths.tolist()):
        alone = poutine.trace(guide).get_trace(y[i : i + 1, :length], lengths[i : i + 1])
        assert torch.allclose(
            alone.nodes["z_0"]["fn"].loc[0], trace.nodes["z_0"]["fn"].loc[i], atol=1e-5
        )


@pytest.mark.parametrize("mode", ["amortized", "minibatches"])
def test_series_in_a_subsampled_plate(mode):
    pyro.set_rng_seed(0)
    y = walks(20, 10)
    guide = AutoNaMIGuide(subsampled, mode=mode)
    svi = SVI(subsampled, guide, ClippedAdam({"lr": 0.02}), Trace_ELBO())
    losses = [svi.step(y) for _ in range(60)]
    assert guide.rules["z[time]"].rule == "learned"
    evidence = float(kalman(y)[0].sum())
    assert sum(losses[-20:]) / 20 + evidence < 0.1 * y.numel()


def test_model_with_parameters_of_its_own_stays_finite():
    """A transition that stretches what it is given."""

    def model(y):
        pull = pyro.param("pull", torch.tensor(1.5))
        z = torch.zeros(())
        for t in range(len(y)):
            z = pyro.sample(f"z_{t}", dist.Normal(pull * z, STEP))
            pyro.sample(f"y_{t}", dist.Normal(z, NOISE), obs=y[t])

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(model, mode="amortized")
    svi = SVI(model, guide, ClippedAdam({"lr": 0.05}), Trace_ELBO())
    for _ in range(60):
        assert math.isfinite(svi.step(walks(1, 60)[0]))
    assert pyro.param("pull").item() < 1.2


def test_copies_and_pickles_answer_alike():
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(of_data, mode="amortized")
    y = walks(1, 12)[0]
    guide(y)
    expected = guide.median(y)
    for other in (copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
        assert other.median(y).keys() == expected.keys()
        assert all(torch.equal(value, expected[n]) for n, value in other.median(y).items())


def test_state_is_loaded_by_a_guide_whose_first_call_has_another_length():
    pyro.set_rng_seed(0)
    first, other = (AutoNaMIGuide(of_data, mode="amortized") for _ in range(2))
    y = walks(1, 12)[0]
    first(y)
    other(walks(1, 20)[0])
    other.load_state_dict(first.state_dict())
    pyro.set_rng_seed(1)
    expected = first(y)
    pyro.set_rng_seed(1)
    assert all(torch.allclose(value, expected[n]) for n, value in other(y).items())


def test_series_without_steps_is_told():
    guide = AutoNaMIGuide(of_data, mode="amortized")
    guide(walks(1, 12)[0])
    with pytest.raises(ValueError, match="this call has no site 'z_0'"):
        guide(torch.zeros(0))


def test_data_for_fewer_steps_than_the_loop_has_are_told():
    guide = AutoNaMIGuide(level, mode="amortized")
    guide(12, observations={f"y_{t}": torch.zeros(()) for t in range(12)})
    with pytest.raises(ValueError, match="'y_7'; got 7"):
        guide(12, observations={f"y_{t}": torch.zeros(()) for t in range(7)})


def test_explicit_options_read_the_loop_site_by_site():
    guide = AutoNaMIGuide(of_data, mode="amortized", inverse="reverse")
    guide(walks(1, 9)[0])
    assert "z_0" in guide.rules and "z[time]" not in guide.rules


def test_a_datum_that_no_step_has_reads_the_loop_site_by_site():
    def model(y):
        z = torch.zeros(())
        for t in range(len(y)):
            z = pyro.sample(f"z_{t}", dist.Normal(z, STEP))
            pyro.sample(f"y_{t}", dist.Normal(z, NOISE), obs=y[t])
        pyro.sample("last", dist.Normal(z, NOISE), obs=y[-1])

    guide = AutoNaMIGuide(model, mode="amortized")
    guide(walks(1, 9)[0])
    assert "z_0" in guide.rules


def with_inputs(y, x):
    z = torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(z, 0.5))
        pyro.sample(f"y_{t}", dist.Normal(z + x[t], 0.5), obs=y[t])


def by_step(y, _):
    z = torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(z + 0.3 * (t % 4), 0.5))
        pyro.sample(f"y_{t}", dist.Normal(z, 0.5), obs=y[t])


def fed_back(y, _):
    z, before = torch.zeros(()), torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(z, 0.5))
        before = pyro.sample(f"y_{t}", dist.Normal(z + 0.9 * before, 0.5), obs=y[t])


def with_noise(y, noise):
    z = torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(z, 0.5))
        pyro.sample(f"y_{t}", dist.Normal(z, noise), obs=y[t])


@pytest.mark.parametrize(
    ("model", "argument"),
    [
        (with_inputs, torch.linspace(-1.0, 1.0, 9)),
        (with_inputs, torch.zeros(9)),
        (by_step, None),
        (fed_back, None),
        (with_noise, 1.0),
        (with_noise, torch.tensor(0.4)),
    ],
)
def test_what_messages_do_not_read_is_read_site_by_site(model, argument):
    guide = AutoNaMIGuide(model, mode="amortized")
    guide(torch.randn(9), argument)
    assert not guide._plan.loops.parts
    assert {note.rule for note in guide.rules.values()} == {"exact"}


@pytest.mark.parametrize(("steps", "rules"), [(12, {"exact"}), (40, {"learned"})])
def test_short_loops_stay_derived(steps, rules):
    guide = AutoNaMIGuide(level, mode="amortized", observed=[f"y_{t}" for t in range(steps)])
    guide(steps, observations={f"y_{t}": torch.zeros(()) for t in range(steps)})
    assert {note.rule for note in guide.rules.values()} == rules


def test_short_loops_of_any_length_are_learned_where_asked():
    guide = AutoNaMIGuide(of_data, mode="amortized", exact=False)
    for steps in (10, 7, 15):
        assert guide(walks(1, steps)[0])[f"z_{steps - 1}"].isfinite()
    assert guide.rules["z[time]"].rule == "learned"


def test_short_loops_of_another_length_are_told_the_way_out():
    guide = AutoNaMIGuide(of_data, mode="amortized")
    guide(walks(1, 10)[0])
    with pytest.warns(UserWarning, match="exact=False"):
        guide(walks(1, 12)[0])
