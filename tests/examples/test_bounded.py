"""Conditionals by bounds: eta through the model's weights, by formulas, enumeration and dense algebra."""

import itertools
import math
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import called, conditional
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from scripts import ROOT
from torch.nn.functional import softplus

from pyro_nami import AutoNaMIGuide, InferenceCompilation, verify_inverse
from pyro_nami.guide import build

sys.path.append(str(ROOT / "examples" / "noisy_or"))

from noisy_or_distribution import NoisyOr  # noqa: E402

K, D, N = 4, 9, 40
PRIOR = torch.tensor([0.2, 0.3, 0.1, 0.4])


def weights(dtype=torch.float64):
    pyro.set_rng_seed(3)
    found = (2 * torch.rand(D, K) * (torch.rand(D, K) < 0.6)).to(dtype)
    found[:, 2] = 0.0  # connected to nothing
    return found


W, LEAK = weights(), torch.full((D,), 0.05, dtype=torch.float64)
X = NoisyOr(W, LEAK, torch.bernoulli(PRIOR.double().expand(N, K))).sample()
STATES = torch.tensor(list(itertools.product([0.0, 1.0], repeat=K)), dtype=torch.float64)


def model(x, w=W, leak=LEAK):
    with pyro.plate("n", len(x)):
        z = pyro.sample("z", dist.Bernoulli(PRIOR.to(w.dtype)).to_event(1))
        pyro.sample("x", NoisyOr(w, leak, z), obs=x)


def evidence(x):
    """Log evidence of each row in nats, by enumeration."""
    joint = dist.Bernoulli(PRIOR.double()).to_event(1).log_prob(STATES)
    return (joint + NoisyOr(W, LEAK, STATES).log_prob(x.unsqueeze(1))).logsumexp(1)


def psi_of(guide, name="x"):
    """A bound's parameters at a guide's start, where they are the same for all rows: those of biases."""
    place = guide.network.places["bound", name]
    return softplus(place.rows(place.group.mlp.output_bias())[:, 0]).detach()


def logits_by(psi, x, w=W):
    """Equation 13 of Yan et al. 2019."""
    return (x * psi) @ w - (1 - x) @ w + PRIOR.to(w).logit()


def test_a_guide_starts_at_the_bounds_conditional():
    guide = called(model, X, inverse="mean_field")
    assert guide.rules["z"].rule == "bounded" and guide.rules["z"].reads == ("x",)
    expected = dist.Bernoulli(logits=logits_by(psi_of(guide), X)).to_event(1)
    for state in STATES:
        found = conditional(guide, "z", X).log_prob(state.expand(N, K))
        torch.testing.assert_close(found, expected.log_prob(state), rtol=1e-6, atol=1e-6)


def log_odds_in_turn(psi, z, x, w=W, places=range(K)):
    """Each latent's by the model, given those before it as drawn and those after it at the bound's probabilities."""
    q, found = torch.sigmoid(logits_by(psi, x, w)), []
    for i, k in enumerate(places):
        mixed = q.clone()
        mixed[..., places[:i]] = z[..., places[:i]].expand(len(q), i)
        one, zero = mixed.clone(), mixed.clone()
        one[..., k], zero[..., k] = 1.0, 0.0
        found.append(
            NoisyOr(w, LEAK, one).log_prob(x)
            - NoisyOr(w, LEAK, zero).log_prob(x)
            + PRIOR[k].logit()
        )
    return torch.stack(found, -1)


@pytest.mark.parametrize("inverse", ["mean_field", "auto"])
def test_of_several_starts_that_of_the_largest_elbo_is_taken(monkeypatch, inverse):
    def started(*starts):
        monkeypatch.setattr(
            build, "initial_bounds", lambda *_: tuple(each.expand(D, 1) for each in starts)
        )
        pyro.clear_param_store()
        return called(model, X, inverse=inverse)

    raw, elbos = torch.linspace(-4.0, 6.0, 5).double(), []
    for each in raw:
        guide = started(each)
        assert torch.allclose(psi_of(guide), softplus(each).expand(D))
        elbos.append(
            -Trace_ELBO(300, vectorize_particles=True, max_plate_nesting=1).loss(model, guide, X)
        )
    best = int(torch.tensor(elbos).argmax())
    assert 0 < best < 4
    torch.testing.assert_close(psi_of(started(*raw)), softplus(raw[best]).expand(D))


def test_weights_that_are_in_the_store_are_not_started_again():
    with pyro.settings.context(module_local_params=False):
        first = called(model, X)
        with torch.no_grad():
            for value in first.parameters():
                value.add_(0.1)
        kept = [value.clone() for value in first.parameters()]
        second = called(model, X)
        assert all(map(torch.equal, second.parameters(), kept))


def test_a_faithful_guide_starts_at_the_models_conditionals_in_turn():
    guide = called(model, X)
    assert guide.rules["z"].rule == "bounded"
    psi = psi_of(guide)
    by_state = []
    for state in STATES:
        by_state.append(
            dist.Bernoulli(logits=log_odds_in_turn(psi, state, X)).to_event(1).log_prob(state)
        )
        found = conditional(guide, "z", X).log_prob(state.expand(N, K))
        torch.testing.assert_close(found, by_state[-1], rtol=1e-6, atol=1e-6)
    # with a batch dim of its own
    found = conditional(guide, "z", X).log_prob(STATES[:, None].expand(-1, N, K))
    torch.testing.assert_close(found, torch.stack(by_state), rtol=1e-6, atol=1e-6)


def test_draws_under_few_weights_have_the_density_of_all():
    """Where a latent adds to few data its turn looks at these alone; densities of given values look at all."""
    few = W * (torch.arange(D)[:, None] % K == torch.arange(K))
    guide = called(model, X, few)
    trace = poutine.trace(guide).get_trace(X, few)
    z = trace.nodes["z"]["value"]
    expected = guide.log_prob({"z": z.clone()}, X, few)
    torch.testing.assert_close(trace.log_prob_sum(), expected, rtol=1e-6, atol=1e-6)
    psi = psi_of(guide)
    odds = dist.Bernoulli(logits=log_odds_in_turn(psi, z, X, few)).to_event(1)
    torch.testing.assert_close(expected, odds.log_prob(z).sum(), rtol=1e-6, atol=1e-6)


def test_the_last_latent_has_its_exact_conditional_at_first():
    q = conditional(called(model, X), "z", X)
    pairs = [
        torch.cat([STATES[::2, :-1], torch.full((8, 1), value, dtype=torch.float64)], -1)
        for value in (1.0, 0.0)
    ]
    for one, zero in zip(*pairs):
        joint = [
            NoisyOr(W, LEAK, z).log_prob(X) + dist.Bernoulli(PRIOR.double()).to_event(1).log_prob(z)
            for z in (one, zero)
        ]
        found = q.log_prob(one.expand(N, K)) - q.log_prob(zero.expand(N, K))
        torch.testing.assert_close(found, joint[0] - joint[1], rtol=1e-6, atol=1e-6)


def test_rows_that_are_masked_or_scaled_count_so_in_turn():
    mask, scale = torch.arange(N) % 3 != 0, 2.5

    def partly(x):
        with pyro.plate("n", len(x)):
            z = pyro.sample("z", dist.Bernoulli(PRIOR.double()).to_event(1))
            with poutine.mask(mask=mask), poutine.scale(scale=scale):
                pyro.sample("x", NoisyOr(W, LEAK, z), obs=x)

    q = conditional(called(partly, X), "z", X)
    one, zero = torch.ones(K).double(), torch.tensor([1.0, 1.0, 1.0, 0.0]).double()
    found = q.log_prob(one.expand(N, K)) - q.log_prob(zero.expand(N, K))
    gain = NoisyOr(W, LEAK, one).log_prob(X) - NoisyOr(W, LEAK, zero).log_prob(X)
    torch.testing.assert_close(
        found, PRIOR[-1].double().logit() + scale * gain * mask, rtol=1e-6, atol=1e-6
    )


def test_a_model_that_runs_at_one_point_only_is_corrected_by_networks_alone():
    def narrow(x):
        with pyro.plate("n", len(x)):
            z = pyro.sample("z", dist.Bernoulli(PRIOR.double()).to_event(1))
            pyro.sample("x", NoisyOr(W, LEAK, z.reshape(-1, K)[-N:]), obs=x)

    guide = called(narrow, X)
    expected = dist.Bernoulli(logits=logits_by(psi_of(guide), X)).to_event(1)
    found = conditional(guide, "z", X).log_prob(STATES[5].expand(N, K))
    torch.testing.assert_close(found, expected.log_prob(STATES[5]), rtol=1e-6, atol=1e-6)


def test_elements_that_nothing_brings_about_but_a_small_leak_start_finite():
    w, leak = W.float().clone(), torch.full((D,), 1e-3)
    w[0] = 0.0
    guide = called(model, X.float(), w, leak, inverse="mean_field")
    psi = psi_of(guide)
    torch.testing.assert_close(psi[0], 1 / torch.expm1(leak[0]), rtol=1e-3, atol=0)
    expected = torch.sigmoid(logits_by(psi, X.float(), w))
    torch.testing.assert_close(conditional(guide, "z", X.float(), w, leak).mean, expected)


def test_mean_field_has_no_weights_but_those_of_the_bound_and_faithful_ones_correct_it():
    mean_field = called(model, X, inverse="mean_field")
    pyro.clear_param_store()
    faithful = called(model, X)
    assert set(mean_field.network.places) == {("bound", "x")}
    assert set(faithful.network.places) == {("bound", "x"), "z"}
    assert verify_inverse(faithful.bayesnet, faithful.inverse)


def test_a_latent_that_nothing_depends_on_keeps_its_prior():
    q = conditional(called(model, X, inverse="mean_field"), "z", X)
    torch.testing.assert_close(q.mean[:, 2], PRIOR[2].double().expand(N))


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_gradients_flow_into_the_models_weights(layout):
    values = W.clone().requires_grad_()

    def with_parameter(x):
        w = pyro.param("w", lambda: W.clone())
        model(x, w if layout == torch.strided else w.to_sparse(layout=layout))

    guide = called(with_parameter, X, inverse="mean_field")
    pyro.get_param_store()["w"].grad = None
    q = conditional(guide, "z", X)
    own = poutine.trace(with_parameter).get_trace(X).nodes["w"]["value"]
    direction = torch.rand(N, K, dtype=torch.float64)
    (found,) = torch.autograd.grad(
        (q.base_dist.logits * direction).sum(), pyro.get_param_store()._params["w"]
    )
    (expected,) = torch.autograd.grad(
        (logits_by(psi_of(guide), X, values) * direction).sum(), values
    )
    kept = W != 0 if layout != torch.strided else torch.ones_like(W, dtype=torch.bool)
    assert own.shape == W.shape
    torch.testing.assert_close(found[kept], expected[kept])


def test_the_tightest_bound_is_a_fixed_point():
    guide = called(model, X, inverse="mean_field", rules={"z": "bound"})
    assert guide.num_parameters == 0 and guide.rules["z"].rule == "bound"
    mean = conditional(guide, "z", X).mean
    psi = 1 / torch.expm1(LEAK + mean @ W.T)
    torch.testing.assert_close(mean, torch.sigmoid(logits_by(psi, X)), atol=1e-3, rtol=0)


def test_the_tightest_bound_is_below_all_others():
    """The upper bound on the evidence, by enumeration: at no other psi is it lower."""
    guide = called(model, X, inverse="mean_field", rules={"z": "bound"})
    best = 1 / torch.expm1(LEAK + conditional(guide, "z", X).mean @ W.T)

    def bound(psi):
        dual = (psi + 1) * (psi + 1).log() - psi * psi.log()
        s = LEAK + STATES @ W.T
        terms = torch.where(X.bool()[:, None], psi[:, None] * s - dual[:, None], -s).sum(-1)
        return (terms + dist.Bernoulli(PRIOR.double()).to_event(1).log_prob(STATES)).logsumexp(1)

    assert (bound(best) >= evidence(X)).all()
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert (bound(best * factor) >= bound(best) - 1e-5).all()


@pytest.mark.parametrize("options", [{}, {"inverse": "mean_field"}, {"rules": {"z": "bound"}}])
def test_densities_are_normalized_and_those_of_draws(options):
    guide = called(model, X, **options)
    trace = poutine.trace(guide).get_trace(X)
    torch.testing.assert_close(
        guide.log_prob({"z": trace.nodes["z"]["value"]}, X),
        trace.log_prob_sum(),
        rtol=1e-5,
        atol=1e-5,
    )
    one = X[:1]
    pyro.clear_param_store()
    guide = called(model, one, **options)
    total = torch.stack([guide.log_prob({"z": state[None]}, one) for state in STATES]).logsumexp(0)
    assert abs(float(total)) < 1e-5


def test_the_correction_closes_the_gap_that_independence_leaves():
    """Gaps to the exact evidence after 400 steps at 0.02 on the rows themselves; of mean field by its best q."""
    gaps = {}
    for inverse in ("mean_field", "auto"):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = called(model, X, inverse=inverse, mode="amortized")
        svi = SVI(
            model,
            guide,
            pyro.optim.Adam({"lr": 0.02}),
            Trace_ELBO(num_particles=10, vectorize_particles=True),
        )
        for _ in range(400):
            svi.step(X)
        with torch.no_grad():
            log_q = torch.stack(
                [conditional(guide, "z", X).log_prob(state.expand(N, K)) for state in STATES], 1
            )
        joint = dist.Bernoulli(PRIOR.double()).to_event(1).log_prob(STATES) + NoisyOr(
            W, LEAK, STATES
        ).log_prob(X.unsqueeze(1))
        gaps[inverse] = float((evidence(X) - (log_q.exp() * (joint - log_q)).sum(1)).mean())
    assert -1e-6 < gaps["auto"] < 0.02 < 0.08 < gaps["mean_field"] < 0.15, gaps


def test_two_sites_are_one_block():
    def two(x):
        with pyro.plate("n", len(x)):
            a = pyro.sample("a", dist.Bernoulli(PRIOR[:2].double()).to_event(1))
            b = pyro.sample("b", dist.Bernoulli(PRIOR[2:].double()).to_event(1))
            pyro.sample("x", NoisyOr(W, LEAK, torch.cat([a, b], -1)), obs=x)

    guide = called(two, X, inverse="mean_field")
    found = torch.cat([conditional(guide, name, X).mean for name in "ab"], -1)
    torch.testing.assert_close(found, torch.sigmoid(logits_by(psi_of(guide), X)))
    pyro.clear_param_store()
    guide = called(two, X)
    psi, first = psi_of(guide), guide.inverse.order[-1]
    places = [0, 1, 2, 3] if first == "a" else [2, 3, 0, 1]
    for state in STATES:
        expected = dist.Bernoulli(logits=log_odds_in_turn(psi, state, X, places=places)).to_event(1)
        values = {"a": state[:2].expand(N, 2), "b": state[2:].expand(N, 2)}
        found = guide.log_prob(values, X)
        torch.testing.assert_close(
            found, expected.log_prob(state[places]).sum(), rtol=1e-6, atol=1e-6
        )


def test_a_site_that_a_call_observes_is_known_to_the_others():
    def two(x, b=None):
        with pyro.plate("n", len(x)):
            a = pyro.sample("a", dist.Bernoulli(PRIOR[:2].double()).to_event(1))
            b = pyro.sample("b", dist.Bernoulli(PRIOR[2:].double()).to_event(1), obs=b)
            pyro.sample("x", NoisyOr(W, LEAK, torch.cat([a, b], -1)), obs=x)

    guide = called(two, X)
    b = torch.tensor([1.0, 0.0]).double().expand(N, 2)
    assert set(guide(X, b)) == {"a"}
    q = conditional(guide, "a", X, b)
    one, zero = (torch.tensor([1.0, last]).double() for last in (1.0, 0.0))
    found = q.log_prob(one.expand(N, 2)) - q.log_prob(zero.expand(N, 2))
    gain = [NoisyOr(W, LEAK, torch.cat([a.expand(N, 2), b], -1)).log_prob(X) for a in (one, zero)]
    torch.testing.assert_close(
        found, gain[0] - gain[1] + PRIOR[1].double().logit(), rtol=1e-6, atol=1e-6
    )


def test_latents_in_a_plate_are_as_a_vector():
    def flat(x):
        with pyro.plate("k", K):
            z = pyro.sample("z", dist.Bernoulli(PRIOR.double()))
        pyro.sample("x", NoisyOr(W, LEAK, z), obs=x)

    guide = called(flat, X[0], inverse="mean_field")
    assert guide.rules["z"].rule == "bounded"
    torch.testing.assert_close(
        conditional(guide, "z", X[0]).mean, torch.sigmoid(logits_by(psi_of(guide), X[0]))
    )


def test_latents_in_a_plate_are_drawn_in_turn():
    def flat(x):
        with pyro.plate("k", K):
            z = pyro.sample("z", dist.Bernoulli(PRIOR.double()))
        pyro.sample("x", NoisyOr(W, LEAK, z.unsqueeze(-2)), obs=x)

    guide = called(flat, X[:1])
    psi = psi_of(guide)
    for state in STATES:
        expected = (
            dist.Bernoulli(logits=log_odds_in_turn(psi, state, X[:1])).to_event(1).log_prob(state)
        )
        torch.testing.assert_close(
            guide.log_prob({"z": state}, X[:1]), expected[0], rtol=1e-6, atol=1e-6
        )


def test_a_single_binary_latent_is_enumerated_unless_bounds_are_asked_for():
    def single(x):
        with pyro.plate("n", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("x", NoisyOr(W[:, :1], LEAK, z.unsqueeze(-1).double()), obs=x)

    assert called(single, X).rules["z"].rule == "exact"
    pyro.clear_param_store()
    assert called(single, X, rules={"z": "bounded"}).rules["z"].rule == "bounded"


def test_compilation_and_other_numbers_of_rows():
    def simulator(n=20, x=None):
        with pyro.plate("n", n):
            z = pyro.sample("z", dist.Bernoulli(PRIOR.double()).to_event(1))
            pyro.sample("x", NoisyOr(W, LEAK, z), obs=x)

    guide = AutoNaMIGuide(simulator, observed=["x"])
    InferenceCompilation(simulator, guide, pyro.optim.Adam({"lr": 1e-3}), batch_size=16).fit(
        30, progress=False
    )
    assert guide.rules["z"].rule == "bounded"
    q = conditional(guide, "z", N, X)
    assert q.batch_shape == (N,) and q.log_prob(STATES[0].expand(N, K)).isfinite().all()


# ---- Normal latents under Bernoulli data


def logistic(design, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 2.0).to_event(1))
    with pyro.plate("n", len(design)):
        pyro.sample("y", dist.Bernoulli(logits=(w * design).sum(-1)), obs=y)


def test_a_logistic_regression_has_jaakkola_and_jordans_gaussian():
    design = torch.randn(30, 3, dtype=torch.float64)
    y = torch.bernoulli(torch.sigmoid(design.sum(-1)))
    assert called(logistic, design, y).rules["w"].rule == "newton"  # which needs no bound
    pyro.clear_param_store()
    guide = called(logistic, design, y, rules={"w": "bounded"}, inverse="mean_field")
    assert guide.rules["w"].rule == "bounded"
    xi = psi_of(guide, "y")
    precision = (
        torch.eye(3, dtype=torch.float64) / 4
        + 2 * torch.tanh(xi / 2) / (4 * xi) * design.T @ design
    )
    covariance = precision.inverse()
    expected = dist.MultivariateNormal(covariance @ design.T @ (y - 0.5), covariance)
    q = conditional(guide, "w", design, y)
    points = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(points), expected.log_prob(points), rtol=1e-5, atol=1e-5)


# ---- what is refused


def test_a_child_without_a_bound_is_named():
    def normal(x):
        z = pyro.sample("z", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
        pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)

    with pytest.raises(
        ValueError, match=r"'z': 'x' has no bound; pyro_nami.register_bound gives Normal one"
    ):
        called(normal, torch.tensor(1.0), rules={"z": "bounded"})
    assert called(normal, torch.tensor(1.0)).rules["z"].rule == "learned"


def test_a_predictor_that_is_not_linear_is_refused():
    def squared(x):
        with pyro.plate("n", len(x)):
            z = pyro.sample("z", dist.Bernoulli(PRIOR.double()).to_event(1))
            pyro.sample("x", NoisyOr(W, LEAK, z.square()), obs=x)

    note = called(squared, X).rules["z"]
    assert note.rule == "learned"
    assert "a bound on the log density of 'x' does not add to a Bernoulli prior" in note.reason


def test_a_fixed_point_is_of_binary_latents_only():
    with pytest.raises(
        ValueError, match="'w': a fixed point is found of bounds on binary latents only"
    ):
        called(logistic, torch.ones(4, 3).double(), torch.ones(4).double(), rules={"w": "bound"})


def test_impossible_data_are_told_with_their_site():
    x = X.clone()
    x[0] = 1.0
    none = W.clone()
    none[0] = 0.0
    with pytest.warns(UserWarning, match="site 'x' are impossible .* small leak"):
        called(model, x, none, torch.zeros(D, dtype=torch.float64))


def test_numbers_are_those_of_the_model():
    guide = called(model, X.float(), W.float(), LEAK.float())
    assert (
        poutine.trace(guide).get_trace(X.float(), W.float(), LEAK.float()).nodes["z"]["value"].dtype
        == torch.float32
    )
    assert math.isfinite(
        float(guide.log_prob({"z": torch.zeros(N, K)}, X.float(), W.float(), LEAK.float()))
    )
