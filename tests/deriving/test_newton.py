"""Normals about the mode of a concave density: against the dense Hessian at a mode that plain Newton steps find."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import called, conditional
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.autograd.functional import hessian

from pyro_nami import AutoNaMIGuide, InferenceCompilation, importance_sample, verify_inverse
from pyro_nami.deriving import newton, refutation
from pyro_nami.inference import Simulator

pytestmark = pytest.mark.usefixtures("double", "own_parameters")

GENERATOR = torch.Generator().manual_seed(2)
X = torch.randn(24, 3, generator=GENERATOR, dtype=torch.float64)
GROUP, OTHER = torch.arange(24) % 5, (torch.arange(24) * 7) % 4
COUNTS = torch.poisson(
    (X @ torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64) + 1).exp(), GENERATOR
)
BITS = (X[:, 0] + 0.5 * torch.randn(24, generator=GENERATOR, dtype=torch.float64) > 0).double()


def spread(name="s"):
    return pyro.sample(name, dist.HalfNormal(torch.tensor(1.0)))


def normal(name, scale, **options):
    return pyro.sample(name, dist.Normal(torch.tensor(0.0), scale), **options)


def weights(name="w", size=3, scale=2.0):
    return pyro.sample(name, dist.Normal(torch.zeros(size), scale).to_event(1))


def flat(scale, size):
    return lambda v: dist.Normal(0.0, scale).log_prob(v).sum()


class Design(NamedTuple):
    """A model of y given s, and its joint log density as a function of one vector.

    Attributes:
        first: the first latent that is drawn, and its size: the vector's first elements.
        size: of the vector.
    """

    model: Callable
    y: Tensor
    first: tuple[str, int]
    size: int
    joint: Callable[[Tensor, Tensor], Tensor]  # vector, s


def regression(y):
    s, w, a = spread(), weights(), normal("a", 2.0)
    with pyro.plate("groups", 5):
        b = normal("b", s)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Poisson(((w * X).sum(-1) + a + b[..., GROUP]).exp()), obs=y)


def regression_joint(v, s):
    w, a, b = v.split([3, 1, 5])
    prior = dist.Normal(0.0, 2.0).log_prob(v[:4]).sum() + dist.Normal(0.0, s).log_prob(b).sum()
    return prior + dist.Poisson((X @ w + a + b[GROUP]).exp()).log_prob(COUNTS).sum()


def slopes(y):
    """Vectors of two effects for each group."""
    s, m = spread(), weights("m", 2, 1.0)
    with pyro.plate("groups", 5):
        b = pyro.sample(
            "b", dist.Normal(m.expand(m.shape[:-1] + (2,)), s.unsqueeze(-1)).to_event(1)
        )
    with pyro.plate("rows", len(y)):
        eta = b[..., GROUP, 0] + b[..., GROUP, 1] * X[:, 0]
        pyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def slopes_joint(v, s):
    m, b = v[:2], v[2:].reshape(5, 2)
    prior = dist.Normal(0.0, 1.0).log_prob(m).sum() + dist.Normal(m, s).log_prob(b).sum()
    return prior + dist.Bernoulli(logits=b[GROUP, 0] + b[GROUP, 1] * X[:, 0]).log_prob(BITS).sum()


def crossed(y):
    s, w = spread(), weights()
    with pyro.plate("groups", 5):
        b = normal("b", s)
    with pyro.plate("others", 4):
        c = normal("c", 1.0)
    with pyro.plate("rows", len(y)):
        pyro.sample(
            "y", dist.Bernoulli(logits=(w * X).sum(-1) + b[..., GROUP] + c[..., OTHER]), obs=y
        )


def crossed_joint(v, s):
    w, b, c = v.split([3, 5, 4])
    prior = dist.Normal(0.0, 2.0).log_prob(w).sum() + dist.Normal(0.0, s).log_prob(b).sum()
    prior = prior + dist.Normal(0.0, 1.0).log_prob(c).sum()
    return prior + dist.Bernoulli(logits=X @ w + b[GROUP] + c[OTHER]).log_prob(BITS).sum()


def walk(y):
    s, z = spread(), normal("z0", 1.0)
    for t in range(len(y)):
        z = pyro.sample(f"z{t}", dist.Normal(0.9 * z, s)) if t else z
        pyro.sample(f"y{t}", dist.Poisson(z.exp()), obs=y[t])


def walk_joint(v, s):
    prior = (
        dist.Normal(0.0, 1.0).log_prob(v[0]) + dist.Normal(0.9 * v[:-1], s).log_prob(v[1:]).sum()
    )
    return prior + dist.Poisson(v.exp()).log_prob(COUNTS[:6]).sum()


def ties(b):
    """Of neighbours in a field, as a log density; their sum is near zero."""
    return -2.0 * (b[..., 1:] - b[..., :-1]).square().sum(-1) - 50.0 * b.sum(-1).square()


def field(y):
    """Latents that a factor ties, as in conditional autoregressions."""
    s, a, b = spread(), normal("a", 2.0), weights("b", 5)
    pyro.factor("ties", ties(b))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Poisson((a + s * b[..., GROUP]).exp()), obs=y)


def field_joint(v, s):
    b, a = v.split([5, 1])
    prior = dist.Normal(0.0, 2.0).log_prob(v).sum() + ties(b)
    return prior + dist.Poisson((a + s * b[GROUP]).exp()).log_prob(COUNTS).sum()


DESIGNS = {
    "field": Design(field, COUNTS, ("b", 5), 6, field_joint),
    "regression": Design(regression, COUNTS, ("w", 3), 9, regression_joint),
    "vectors": Design(slopes, BITS, ("m", 2), 12, slopes_joint),
    "crossed": Design(crossed, BITS, ("w", 3), 12, crossed_joint),
    "autoregression": Design(walk, COUNTS[:6], ("z0", 1), 6, walk_joint),
}


def mode(design: Design, s: Tensor) -> tuple[Tensor, Tensor]:
    """The mode of the joint log density, and the covariance that its Hessian there says."""
    v = torch.zeros(design.size)

    def joint(v):
        return design.joint(v, s)

    for _ in range(60):
        v = v.requires_grad_()
        (slope,) = torch.autograd.grad(joint(v), v)
        step = torch.linalg.solve(hessian(joint, v), slope)
        while not joint(v - step) >= joint(v):
            if step.abs().max() < 1e-12:
                break
            step = step / 2
        v = (v - step).detach()
    return v, torch.linalg.inv(-hessian(joint, v))


def moments(fn) -> tuple[Tensor, Tensor]:
    return fn.loc, torch.linalg.inv(fn.lower.mT @ fn.lower)


@pytest.mark.parametrize("s", [0.4, 1.5])
@pytest.mark.parametrize("design", DESIGNS.values(), ids=list(DESIGNS))
def test_the_first_latent_is_normal_about_the_mode(design, s):
    guide, (name, size) = called(design.model, design.y), design.first
    assert guide.rules[name].rule == "newton"
    loc, covariance = moments(conditional(guide, name, design.y, s=torch.tensor(s)))
    center, whole = mode(design, torch.tensor(s))
    torch.testing.assert_close(loc.reshape(-1), center[:size], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        covariance.reshape(size, size), whole[:size, :size], rtol=1e-4, atol=1e-8
    )


@pytest.mark.parametrize("design", DESIGNS.values(), ids=list(DESIGNS))
def test_mode_and_curvature_follow_what_was_drawn(design):
    guide, (name, size) = called(design.model, design.y), design.first
    s, step = torch.tensor(0.7, requires_grad=True), 1e-4
    loc, covariance = moments(conditional(guide, name, design.y, s=s))
    above, below = (mode(design, torch.tensor(0.7 + sign * step)) for sign in (1, -1))
    for i in range(size):
        (slope,) = torch.autograd.grad(loc.reshape(-1)[i], s, retain_graph=True)
        torch.testing.assert_close(slope, (above[0] - below[0])[i] / 2 / step, rtol=1e-3, atol=1e-5)
        (slope,) = torch.autograd.grad(covariance.reshape(size, size)[i, i], s, retain_graph=True)
        torch.testing.assert_close(
            slope, (above[1] - below[1])[i, i] / 2 / step, rtol=1e-2, atol=1e-5
        )


@pytest.mark.parametrize("design", DESIGNS.values(), ids=list(DESIGNS))
def test_guides_are_faithful_and_their_density_is_that_of_their_draws(design):
    guide = called(design.model, design.y)
    verify_inverse(guide.bayesnet, guide.inverse)
    trace = poutine.trace(guide).get_trace(design.y)
    values = {name: site["value"] for name, site in trace.nodes.items() if name in guide.rules}
    torch.testing.assert_close(
        guide.log_prob(values, design.y).sum(), trace.log_prob_sum(), rtol=1e-4, atol=1e-3
    )


def test_particles_have_modes_of_their_own():
    design, scales = DESIGNS["regression"], torch.tensor([0.4, 1.5])
    guide = called(design.model, design.y)
    with pyro.plate("particles", 2, dim=-2):
        loc, _ = moments(conditional(guide, "w", design.y, s=scales.unsqueeze(-1)))
    expected = torch.stack([mode(design, s)[0][:3] for s in scales])
    torch.testing.assert_close(loc.reshape(2, 3), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [10.0, 100.0, 1000.0])
def test_large_counts_under_vague_priors(scale):
    y = torch.poisson((X @ torch.tensor([2.0, -1.0, 1.0]) + 5).exp())

    def model(y):
        w = weights("w", 4, scale)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson(((w[..., :3] * X).sum(-1) + w[..., 3]).exp()), obs=y)

    guide = called(model, y)
    assert guide.rules["w"].rule == "newton"
    loc = conditional(guide, "w", y).loc.reshape(-1).detach()
    slope = (
        torch.cat([X, torch.ones(24, 1)], -1).mT @ (y - (X @ loc[:3] + loc[3]).exp())
        - loc / scale**2
    )
    assert (slope.abs() < 1e-4 * y.sum()).all()


def test_what_data_cannot_tell_apart_is_as_wide_as_the_prior():
    def model(y):
        w = weights("w", 2, 3.0)
        with pyro.plate("rows", len(y)):
            pyro.sample(
                "y", dist.Bernoulli(logits=(w[..., 0] + w[..., 1]).unsqueeze(-1) * X[:, 0]), obs=y
            )

    _, covariance = moments(conditional(called(model, BITS), "w", BITS))
    apart = torch.tensor([1.0, -1.0]) / 2**0.5
    torch.testing.assert_close(
        apart @ covariance.reshape(2, 2) @ apart, torch.tensor(9.0), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("options", [{"exact": False}, {"rules": {"w": "learned"}}])
def test_options_turn_it_off(options):
    assert called(regression, COUNTS, **options).rules["w"].rule == "learned"


@pytest.mark.parametrize("width", [0.2, 0.02, 0.002])
@pytest.mark.parametrize("fold", [torch.abs, torch.square, torch.cos])
def test_a_density_with_modes_far_apart_is_not_taken_for_concave(fold, width):
    """However narrow they are, so that about each of them the density is concave; of vectors and in plates as well."""

    def model(x):
        z = normal("z", 1.0)
        pyro.sample("seen", dist.Normal(fold(z), width), obs=x.sum() / 2)
        with pyro.plate("rows", 2):
            effect = normal("effect", torch.ones(2))
            pyro.sample("x", dist.Normal(fold(effect), width), obs=x)

    guide = called(model, torch.tensor([0.7, 0.4]))
    assert {note.rule for note in guide.rules.values()} <= {"learned", "collapsed"}


def test_a_density_that_turns_is_not_taken_for_concave():
    """Factors of a matrix may turn together: at any mode one direction is flat, though most lines look concave."""

    def model(x):
        left = pyro.sample("u", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
        right = pyro.sample("v", dist.Normal(torch.zeros(5, 2), 1.0).to_event(2))
        pyro.sample("x", dist.Normal(left @ right.mT, 0.5).to_event(2), obs=x)

    pyro.set_rng_seed(1)
    x = poutine.trace(model).get_trace(None).nodes["x"]["value"]
    guide = called(model, x)
    assert sorted(note.rule for note in guide.rules.values()) == ["collapsed", "exact"]
    pyro.set_rng_seed(0)
    assert Trace_ELBO(100).loss(model, guide, x) < 60  # 18 to 20,000 by Normals at the mode


def student_errors():
    w, scale = weights(size=2, scale=1.0), pyro.sample("s", dist.HalfCauchy(0.5))
    fn = dist.StudentT(
        3.0, w[..., :1] + w[..., 1:] * torch.linspace(-2, 2, 15), scale.unsqueeze(-1)
    )
    pyro.sample("x", fn.to_event(1))


def cauchy_location():
    a = normal("a", 5.0)
    with pyro.plate("rows", 12):
        pyro.sample("x", dist.Cauchy(a, 1.0))


def square():
    a = normal("a", 1.0)
    with pyro.plate("rows", 3):
        pyro.sample("x", dist.Normal(a**2, 0.1))


def spread_along():
    a, b, c, d = (normal(name, 1.0) for name in "abcd")
    with pyro.plate("rows", 12):
        along = torch.linspace(-1, 1, 12)
        pyro.sample("x", dist.Normal(a + b * along, (c + d * along).exp()))


@pytest.mark.parametrize("model", [student_errors, cauchy_location, square, spread_along])
def test_densities_that_are_not_concave_leave_the_guide_finite(model):
    """Their curvature is the wrong one on the way to the mode, where data are many deviations from it, say."""

    draws = Simulator(model, observed=["x"]).draw(200)
    guide = AutoNaMIGuide(model, observed=["x"])
    with torch.no_grad():
        assert guide.log_prob(draws.latents, observations=draws.observed).isfinite().all()


def far_off():
    a, scale = normal("a", 1000.0), pyro.sample("s", dist.HalfCauchy(100.0))
    with pyro.plate("rows", 12):
        pyro.sample("x", dist.StudentT(8.0, a, scale))


def test_data_sets_do_not_wait_for_each_other(monkeypatch):
    """Far from heavy-tailed data the way is long, and each has its own."""
    steps, solve = [], newton.Newton.solve
    monkeypatch.setattr(
        newton.Newton, "solve", lambda self, sites: steps.append(self) or solve(self, sites)
    )
    draws = Simulator(far_off, observed=["x"]).draw(1000)
    guide = AutoNaMIGuide(far_off, observed=["x"])
    few, *each = map(draws.select, [torch.arange(2), *torch.arange(20).split(1)])
    guide.log_prob(few.latents, observations=few.observed)
    assert guide.rules["a"].rule == "quadrature"
    steps.clear()
    with torch.no_grad():
        found = guide.log_prob(draws.latents, observations=draws.observed)
        assert len(steps) < 40
        for one, together in zip(each, found):
            assert abs(guide.log_prob(one.latents, observations=one.observed) - together) < 0.02


def test_a_user_who_asks_for_exact_is_told_that_it_is_not():
    with pytest.raises(ValueError, match="'w'"):
        called(regression, COUNTS, rules={"w": "exact"})


def test_training_starts_far_ahead_and_stays_there(rate=0.1):
    """The evidence is importance sampling's; AutoNormal ends where it is after as many steps."""
    found, elbo = {}, Trace_ELBO(200, vectorize_particles=True, max_plate_nesting=1)
    for kind in (AutoNormal, AutoNaMIGuide):
        pyro.set_rng_seed(0)
        guide = kind(regression)
        svi = SVI(regression, guide, pyro.optim.Adam({"lr": rate}), Trace_ELBO())
        for _ in range(60):
            svi.step(COUNTS)
        with torch.no_grad():
            found[kind] = -elbo.loss(regression, guide, COUNTS)
    evidence = float(importance_sample(regression, guide, COUNTS, num_samples=500).log_evidence)
    assert found[AutoNaMIGuide] > evidence - 0.3
    assert found[AutoNaMIGuide] > found[AutoNormal] + 0.3


def test_compiled_guides_have_it_too():
    def model(size, y=None):
        w = weights("w", 2, 1.0)
        with pyro.plate("rows", size):
            pyro.sample("y", dist.Bernoulli(logits=(w.unsqueeze(-2) * X[:size, :2]).sum(-1)), obs=y)

    guide = AutoNaMIGuide(model, observed=["y"])
    compiled = InferenceCompilation(model, guide, pyro.optim.Adam({"lr": 1e-3}), batch_size=4)
    losses = [compiled.step(size) for size in (10, 20, 10)]
    assert guide.rules["w"].rule == "newton"
    assert all(map(torch.isfinite, map(torch.as_tensor, losses)))
    fn = poutine.trace(guide).get_trace(20, observations={"y": BITS[:20]}).nodes["w"]["fn"]

    def joint(w):
        return (
            dist.Normal(0.0, 1.0).log_prob(w).sum()
            + dist.Bernoulli(logits=X[:20, :2] @ w).log_prob(BITS[:20]).sum()
        )

    design = Design(model, BITS[:20], ("w", 2), 2, lambda w, s: joint(w))
    torch.testing.assert_close(
        fn.loc.reshape(-1), mode(design, torch.ones(()))[0], rtol=0, atol=1e-6
    )


@torch.no_grad()
def test_modes_are_found_at_counts_of_e30_among_others():
    """Which a random walk simulates: it was 1e26 nats off there. Such counts leave the prior no say."""

    def model():
        x = pyro.sample("x0", dist.Normal(0.0, 1.0))
        pyro.sample("y0", dist.Poisson(x.exp()))
        for t in range(1, 12):
            x = pyro.sample(f"x{t}", dist.Normal(x, 3.0))
            pyro.sample(f"y{t}", dist.Poisson(x.exp()))

    far = [1.266, 4.589, 8.985, 10.97, 13.99, 19.101, 16.144, 26.32, 30.103, 26.713, 25.713, 23.896]
    x = torch.stack(
        [torch.tensor(far), torch.linspace(0.0, 2.0, 12), torch.linspace(1.0, -1.0, 12)]
    )
    y = x.exp().round()
    latents, data = (
        {f"{name}{t}": value[:, t] for t in range(12)} for name, value in (("x", x), ("y", y))
    )
    guide = AutoNaMIGuide(model, observed=list(data))
    guide(observations={name: value[1] for name, value in data.items()})
    assert {note.rule for note in guide.rules.values()} <= {"newton", "quadrature"}
    log_prob = guide.log_prob(latents, observations=data)
    precise = dist.Normal(y[0].log(), y[0].rsqrt()).log_prob(x[0]).sum()
    torch.testing.assert_close(log_prob[0], precise, rtol=0, atol=0.3)
    few = {name: value[1:] for name, value in latents.items()}
    near = guide.log_prob(few, observations={name: value[1:] for name, value in data.items()})
    torch.testing.assert_close(log_prob[1:], near, rtol=0, atol=1e-2)


@torch.no_grad()
def test_counts_whose_log_density_is_rounded_by_many_nats_do_not_keep_it_from_ending():
    """Sums of terms of 1e6 are off by nats in single precision: whether a step gains cannot be seen from these."""
    torch.set_default_dtype(torch.float32)
    runs = []

    def model():
        runs.append(1)
        s = pyro.sample("s", dist.HalfNormal(1.0))
        x = pyro.sample("x0", dist.Normal(0.0, 1.0))
        pyro.sample("y0", dist.Poisson(x.exp()))
        for t in range(1, 12):
            x = pyro.sample(f"x{t}", dist.Normal(x, s))
            pyro.sample(f"y{t}", dist.Poisson(x.exp()))

    y = torch.tensor(
        [
            [2.0, 2, 53, 189, 10000, 2221, 28695, 64705, 149548, 5362, 278858, 55132],
            [0.0, 2, 1, 6, 127, 2097, 16829, 7847, 12888, 331927, 98402, 7600],
            [5.0, 113, 134, 187, 439, 505, 2797, 84124, 33707, 248692, 189414, 8395017],
        ]
    )
    x = (y + 1).log()
    data, latents = (
        {f"{name}{t}": value[:, t] for t in range(12)} for name, value in (("y", y), ("x", x))
    )
    guide = AutoNaMIGuide(model, observed=list(data))
    guide(observations={name: value[0] for name, value in data.items()})
    assert guide.rules["x3"].rule == "newton"
    found = []
    for s in (torch.rand(40, generator=torch.Generator().manual_seed(0)) * 1.5 + 0.3).tolist():
        runs.clear()
        guide.log_prob({**latents, "s": torch.full((3,), s)}, observations=data)
        found.append(len(runs))
    assert max(found) < 40, found


def test_conditionals_wait_for_latents_before_them_in_the_networks():
    """Which come later in the program, and which they do not read: of two regressions, ``m`` of the other one's."""
    design = X[:4, :2]

    def model():
        m = pyro.sample("m", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        p = pyro.sample("p", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        s = pyro.sample("s", dist.Gamma(5.0, 1.0))
        t = pyro.sample("t", dist.Gamma(5.0, 1.0))
        with pyro.plate("rows", 4):
            pyro.sample(
                "x", dist.Poisson((design @ m).exp()), obs=torch.tensor([1.0, 2.0, 0.0, 1.0])
            )
            pyro.sample(
                "y",
                dist.Gamma(t, t / (s * (design @ p).exp())),
                obs=torch.tensor([1.0, 2.0, 3.0, 1.0]),
            )

    guide = AutoNaMIGuide(model)
    with torch.no_grad():
        trace = poutine.trace(guide).get_trace()
    assert {name: note.rule for name, note in guide.rules.items()} == {
        "m": "newton",
        "p": "newton",
        "s": "collapsed",
        "t": "collapsed",
    }
    values = {name: trace.nodes[name]["value"] for name in "mpst"}
    assert trace.log_prob_sum() == pytest.approx(guide.log_prob(values).item())


@pytest.mark.parametrize("vague", [100.0, 1e4])
def test_logits_of_a_regressor_in_its_own_units(vague):
    """Years, say: logits saturate a hundredth of a prior deviation off. Against a grid over slope and middle logit."""
    torch.set_default_dtype(torch.float32)
    years = 1950.0 + 70.0 * torch.rand(80, generator=torch.Generator().manual_seed(0))
    late = (years + 10 * torch.randn(80, generator=torch.Generator().manual_seed(1)) > 1985).float()

    def model():
        a = pyro.sample("a", dist.Normal(0.0, vague))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 80):
            pyro.sample("late", dist.Bernoulli(logits=a + b * years), obs=late)

    guide = AutoNaMIGuide(model)
    elbo = -Trace_ELBO(200, vectorize_particles=True).loss(model, guide)
    assert {note.rule for note in guide.rules.values()} <= {"newton", "quadrature"}
    slope, middle = (
        torch.linspace(0.0, 0.6, 800).double(),
        torch.linspace(-6.0, 6.0, 800).double()[:, None],
    )
    logits = middle[..., None] + slope[:, None] * (years.double() - 1985)
    joint = dist.Bernoulli(logits=logits).log_prob(late.double()).sum(-1)
    joint = (
        joint
        + dist.Normal(0.0, vague).log_prob(middle - 1985 * slope)
        + dist.Normal(0.0, 1.0).log_prob(slope)
    )
    exact = joint.flatten().logsumexp(0) + math.log(0.6 * 12.0 / 799**2)
    assert exact - 0.3 < elbo < exact + 0.1


def test_a_mode_that_is_not_found_leaves_the_prior_in_its_place(monkeypatch):
    """Of latents outside of a plate that their child is in; here no step may be taken."""

    def model(y=BITS):
        a, b = (pyro.sample(name, dist.Normal(0.0, 100.0)) for name in "ab")
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=a + 1e3 * b * X[:, 0]), obs=y)

    guide = AutoNaMIGuide(model)
    guide()
    assert guide.rules["a"].rule == "newton"
    monkeypatch.setattr(newton, "MOST_RUNS", 1)
    with pytest.warns(UserWarning, match="prior"):
        guide(1 - BITS)


def test_what_takes_too_many_derivatives_is_not_located_by_newton(monkeypatch):
    """As each step would take as long as hundreds of steps of another guide."""

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("rows", 24):
            pyro.sample("y", dist.Bernoulli(logits=(X * w.unsqueeze(-2)).sum(-1)), obs=BITS)

    assert called(model).rules["w"].rule == "newton"
    # offsets of three elements, and none
    monkeypatch.setattr(refutation, "MOST_WORK", 4 * 24 - 1)
    note = called(model).rules["w"]
    assert note.rule == "collapsed"
    assert "4 derivatives for each of 24 rows of data, or 3 elements are too many" in str(note)


def test_a_long_chain_takes_no_more_runs_of_the_model_than_a_short_one():
    runs = [0]

    def model(length):
        runs[0] += 1
        scale, z = spread(), normal("z", 1.0)
        for t in range(length):
            z = pyro.sample(f"z_{t}", dist.Normal(z.sin(), scale))
            pyro.sample(f"y_{t}", dist.StudentT(4.0, z, 1.0), obs=X[t % 24, 0])

    counts = []
    for length in (15, 45):
        runs[0] = 0
        called(model, length)
        counts.append(runs[0])
    assert counts[1] < 1.5 * counts[0] + 50


@pytest.mark.parametrize("outputs, rule", [(3, "newton"), (20, "learned")])
def test_modes_that_move_with_many_weights_of_the_model_are_learned(outputs, rule):
    """As the search is made anew in each step, where networks take a step in less time; `rules` asks for it."""
    weights = torch.randn(2, outputs, requires_grad=True)

    def model():
        with pyro.plate("rows", 8):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            likelihood = dist.Bernoulli(logits=z @ weights).to_event(1)
            pyro.sample("x", likelihood, obs=torch.ones(8, outputs))

    assert called(model).rules["z"].rule == rule
    located = AutoNaMIGuide(model, rules={"z": "located"})
    located()
    assert located.rules["z"].rule == "newton"


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("far", [1e9, 1e19])
def test_a_draw_at_which_no_mode_is_found_leaves_other_draws_alone(grad, far):
    """Neither does its scale say where their search begins, nor its missing mode that they have no curvature."""
    deaths, operations = torch.tensor([0.0, 18.0, 8.0, 46.0]), torch.tensor([47.0, 148, 119, 810])

    def model():
        mu = normal("mu", 1000.0)
        scale = pyro.sample("scale", dist.LogNormal(torch.tensor(0.0), 5.0))
        with pyro.plate("hospitals", 4):
            effect = pyro.sample("effect", dist.Normal(mu, scale))
            pyro.sample("y", dist.Binomial(operations, logits=effect), obs=deaths)

    guide = called(model, rules={"scale": "learned"})
    alone = {
        "scale": torch.ones(1, 1),
        "mu": torch.full((1, 1), -2.6),
        "effect": torch.tensor([[-3.5, -2.0, -2.6, -2.8]]),
    }
    both = {name: torch.cat([value, value]) for name, value in alone.items()}
    both["scale"] = torch.tensor([[1.0], [far]])
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = guide.log_prob(alone), guide.log_prob(both)
    torch.testing.assert_close(found[:1], expected.reshape(1), rtol=0, atol=0.05)
