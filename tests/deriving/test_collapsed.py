"""Latents that come first, about the mode of their marginal posterior."""

from __future__ import annotations

import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import ClippedAdam
from torch.distributions import constraints

from pyro_nami import AutoNaMIGuide
from pyro_nami.deriving import collapsed
from pyro_nami.deriving.collapsed import Collapsed
from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.latent_vector import LatentVector
from pyro_nami.factors.layout import UnconstrainedLayout
from pyro_nami.guide import first_latents

pytestmark = pytest.mark.usefixtures("double")
X = torch.linspace(-1, 1, 40)
COUNTS = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0])


def found(log_prob, supports, shapes=None, plates=None, starts=None):
    """Returns the conditionals of latents ``a``, ``b``, ... from their log density."""
    names = "abcdef"[: len(supports)]
    shapes = shapes or [torch.Size()] * len(supports)
    layouts = dict(zip(names, map(UnconstrainedLayout, supports, shapes)))
    plates = plates or [torch.Size()] * len(supports)
    coordinates = LatentVector(layouts, dict(zip(names, plates)), torch.zeros(()))
    numbers = sum(coordinates.sizes)
    group = ConjugateGroup(tuple(names), ("y",), form="collapsed")
    starts = torch.randn(4, numbers) if starts is None else starts
    return Collapsed(group, coordinates, starts, torch.ones(numbers), lambda at: log_prob(**at))


def moments(conditionals, count=40_000):
    values, _ = conditionals.draw(count, torch.Size())
    numbers = torch.stack(list(values.values()), -1)
    return numbers.mean(0), numbers.T.cov()


def test_a_normal_is_found_exactly():
    mean, root = (
        torch.tensor([1.0, -2.0, 300.0]),
        torch.tensor([[1.0, 0, 0], [5, 0.1, 0], [0, 9, 70]]),
    )
    normal = dist.MultivariateNormal(mean, scale_tril=root)
    conditionals = found(
        lambda a, b, c: normal.log_prob(torch.stack([a, b, c], -1)), [constraints.real] * 3
    )
    values, log_q = conditionals.draw(100, torch.Size())
    log_p = normal.log_prob(torch.stack(list(values.values()), -1))
    assert not conditionals.flaw and (log_q - log_p).abs().max() < 0.02


def test_bent_densities_have_the_moments_of_a_grid():
    """A Gamma variable, and a Normal one whose scale is that."""

    def log_prob(a, b):
        return dist.Gamma(3.0, 1.0).log_prob(a) + dist.Normal(2.0, a.sqrt()).log_prob(b)

    conditionals = found(log_prob, [constraints.positive, constraints.real])
    mean, covariance = moments(conditionals)
    a, b = torch.meshgrid(
        torch.linspace(1e-3, 25, 800), torch.linspace(-25, 29, 800), indexing="ij"
    )
    weights = log_prob(a, b).exp()
    weights = weights / weights.sum()
    for i, value in enumerate((a, b)):
        center = (weights * value).sum()
        sd = (weights * (value - center).square()).sum().sqrt()
        assert abs(mean[i] - center) < 0.05 * sd and 0.93 < covariance[i, i].sqrt() / sd < 1.07
    assert conditionals.effective > 0.8


def test_conditionals_in_turn_have_the_density_of_their_draws():
    def log_prob(a, b, c):
        total = dist.Beta(2.0, 3.0).log_prob(a) + dist.Normal(3 * a, 1.0).log_prob(b)
        return total + dist.LogNormal(b, 0.5).log_prob(c)

    supports = [constraints.unit_interval, constraints.real, constraints.positive]
    conditionals = found(log_prob, supports)
    values, log_q = conditionals.draw(50, torch.Size())
    total, before = 0.0, {}
    for name, value in values.items():
        normal = conditionals.conditional(name, before)
        layout = conditionals._density.coordinates.layouts[name]
        elements = layout.elements(value)
        own = normal.log_prob(elements).sum(-1)
        log_abs_det = layout.log_abs_det(elements, value)
        total = total + own - (0.0 if log_abs_det is None else log_abs_det)
        before[name] = value
    torch.testing.assert_close(total, log_q, rtol=1e-6, atol=1e-6)


def test_latents_of_plates_and_vectors_are_one_vector():
    """A vector of two in a plate of three, after a simplex."""
    means = torch.arange(6.0).reshape(3, 2)

    def log_prob(a, b):
        counts = (torch.tensor([4.0, 2.0, 9.0]) * a.log()).sum(-1)
        normal = dist.Normal(means + a[..., :2], 0.5).log_prob(b).sum((-1, -2))
        return counts.flatten(1).sum(-1) + normal

    conditionals = found(
        log_prob,
        [constraints.simplex, constraints.real_vector],
        [torch.Size([3]), torch.Size([2])],
        [torch.Size([1]), torch.Size([3])],
    )
    values, _ = conditionals.draw(4000, torch.Size())
    assert values["a"].shape == (4000, 1, 3) and values["b"].shape == (4000, 3, 2)
    first = conditionals.conditional("a", {})
    second = conditionals.conditional("b", {"a": values["a"]})
    assert first.batch_shape == (1, 2) and second.batch_shape == (4000, 3, 2)
    assert (values["b"].mean(0) - means - values["a"].mean(0)[:, :2]).abs().max() < 0.05


def test_where_a_model_fails_its_density_is_zero():
    def log_prob(a, b):
        if (a.abs() > 3).any():
            raise ValueError("out of reach")
        return -(a.square() + b.square()) / 2

    starts = torch.tensor([[0.5, 1.0], [50.0, 1.0], [0.0, -1.0], [1.0, 2.0]])
    mean, covariance = moments(found(log_prob, [constraints.real] * 2, starts=starts))
    assert mean.abs().max() < 0.1 and (covariance - torch.eye(2)).abs().max() < 0.15


@pytest.mark.parametrize(
    "log_prob, reason",
    [
        (lambda a, b: -a.square() + 0 * b, "does not fall .* along 'b'"),
        (lambda a, b: (a + b) * torch.nan, "not finite at any of 4 starts"),
        (lambda a, b: -a.square() - b.square() - a.abs(), "'a', 'b' are effective"),
    ],
    ids=["improper", "nowhere finite", "others"],
)
def test_what_is_no_picture_of_the_density_is_told(log_prob, reason, monkeypatch):
    monkeypatch.setattr(collapsed, "LEAST", 1.0)
    monkeypatch.setattr(collapsed, "MUCH", 1.0)
    monkeypatch.setattr(collapsed, "nearest_normal", lambda *_: (None, None, False))

    def flaw():
        try:
            return found(log_prob, [constraints.real] * 2).flaw
        except ValueError as error:
            return str(error)

    assert re.search(reason, flaw())


# ---- in a guide


def robust(y):
    """A line with noise of heavy tails."""
    a, b = pyro.sample("a", dist.Normal(0.0, 10.0)), pyro.sample("b", dist.Normal(0.0, 10.0))
    s = pyro.sample("s", dist.HalfCauchy(1.0))
    with pyro.plate("rows", 40):
        pyro.sample("y", dist.StudentT(4.0, a + b * X, s), obs=y)


def line():
    return 1 + 2 * X + 0.3 * dist.StudentT(4.0).sample((40,))


def test_a_model_of_scales_and_effects_begins_at_the_nearest_normal():
    """Whose density has no highest point: it grows as the scale and all effects beside it fall."""
    design = dist.Normal(0.0, 1.0).sample((12, 6))

    def model(y):
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        with pyro.plate("items", 12):
            effect = pyro.sample("effect", dist.StudentT(4.0, 0.0, scale))
            pyro.sample("y", dist.Bernoulli(logits=effect[..., None] + design).to_event(1), obs=y)

    y = (design + 1.0 > 0).double()
    guide = AutoNaMIGuide(model)
    guide(y)
    assert {note.rule for note in guide.rules.values()} == {"collapsed"}
    elbo = Trace_ELBO(200, vectorize_particles=True, max_plate_nesting=1)
    with torch.no_grad():
        first = -elbo.loss(model, guide, y)
    svi = SVI(
        model,
        guide,
        ClippedAdam({"lr": 0.02, "lrd": 0.99}),
        Trace_ELBO(8, vectorize_particles=True, max_plate_nesting=1),
    )
    for _ in range(300):
        svi.step(y)
    with torch.no_grad():
        last = -elbo.loss(model, guide, y)
    assert first > last - 2.0


def test_priors_that_are_wide_are_no_matter_where_there_is_no_mode():
    """Counts of eight shops, written for one draw: the rate is the exponential of a Cauchy intercept and effects."""
    torch.set_default_dtype(torch.float32)
    pyro.set_rng_seed(1)
    x = torch.stack([torch.rand(80), torch.arange(80) % 8.0], -1)
    effects = 0.5 * torch.randn(8)
    y = dist.Poisson((0.5 + 0.6 * x[:, 0] + effects[x[:, 1].long()]).exp()).sample()

    def model(x, y):
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        intercept = pyro.sample("intercept", dist.Cauchy(0.0, 2.0))
        slope = pyro.sample("slope", dist.Laplace(0.0, 1.0))
        with pyro.plate("shops", 8):
            effect = pyro.sample("effect", dist.StudentT(4.0, 0.0, scale))
        with pyro.plate("rows", len(x)):
            log_rate = intercept + slope * x[:, 0] + effect[x[:, 1].long()]
            pyro.sample("y", dist.Poisson(log_rate.clamp(max=12).exp()), obs=y)

    guide = AutoNaMIGuide(model)
    guide(x, y)
    assert {note.rule for note in guide.rules.values()} == {"collapsed"}
    with torch.no_grad():
        draws = [guide(x, y) for _ in range(400)]
    rate = torch.stack([draw["intercept"] + draw["slope"] * x[:, 0].mean() for draw in draws])
    assert abs(float(rate.mean() - y.mean().log())) < 0.4 and float(rate.std()) < 0.5


def test_evidence_that_is_hidden_is_not_taken_for_none():
    def model(y):
        weights = pyro.sample("weights", dist.StudentT(3.0, torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("rows", 40):
            logits = (
                weights[..., 0, None] + weights[..., 1, None] * X + weights[..., 2, None] * X**2
            )
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    y = (X > 0.2).double()
    guide = AutoNaMIGuide(model)
    guide(y)
    assert guide.rules["weights"].rule == "collapsed"
    pyro.clear_param_store()
    guide = AutoNaMIGuide(poutine.block(model, hide=["y"]))
    guide(y)
    assert guide.rules["weights"].rule == "learned"


def test_a_guide_begins_near_the_posterior():
    y = line()
    guide = AutoNaMIGuide(robust)
    guide(y)
    assert {note.rule for note in guide.rules.values()} == {"collapsed"}
    with torch.no_grad(), pyro.plate("draws", 2000, dim=-2):
        trace = poutine.trace(guide).get_trace(y)
        model = poutine.trace(poutine.replay(robust, trace)).get_trace(y)
        model.compute_log_prob(), trace.compute_log_prob()
        log_w = sum(
            site["log_prob"].flatten(1).sum(-1) if site["log_prob"].dim() > 1 else site["log_prob"]
            for site in model.nodes.values()
            if site["type"] == "sample" and "log_prob" in site and site["name"] != "draws"
        ) - sum(trace.nodes[name]["log_prob"].flatten() for name in "abs")
    weights = log_w.softmax(0)
    assert 1 / weights.square().sum() > 0.8 * 2000


def test_the_search_is_made_once_for_a_data_set(monkeypatch):
    made = []
    search = collapsed.ascend

    def counted(*args):
        made.append(1)
        return search(*args)

    monkeypatch.setattr(collapsed, "ascend", counted)
    y, guide = line(), AutoNaMIGuide(robust)
    for _ in range(4):
        Trace_ELBO(2, vectorize_particles=True, max_plate_nesting=1).differentiable_loss(
            robust, guide, y
        ).backward()
    Predictive(robust, guide=guide, num_samples=5)(None)
    assert len(made) == 1
    with torch.no_grad():
        guide(y + 5)  # no training step
    assert len(made) == 1


def test_steps_bend_what_was_found():
    y, guide = line(), AutoNaMIGuide(robust)
    guide(y)
    optimizer = torch.optim.Adam(guide.parameters(), 0.01)
    elbo = Trace_ELBO(16, vectorize_particles=True, max_plate_nesting=1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = elbo.differentiable_loss(robust, guide, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert sum(losses[-20:]) / 20 < sum(losses[:20]) / 20 + 0.05


def test_parameters_of_the_models_own_leave_nothing_to_search_for():
    def model(y):
        scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
        a, b = pyro.sample("a", dist.Normal(0.0, 10.0)), pyro.sample("b", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", 40):
            pyro.sample("y", dist.StudentT(4.0, a + b * X, scale), obs=y)

    guide = AutoNaMIGuide(model)
    guide(line())
    assert {note.rule for note in guide.rules.values()} == {"learned"}
    assert "parameters" in guide.rules["a"].reason


@pytest.mark.parametrize("mode", ["amortized", "minibatches"])
def test_guides_of_many_data_sets_learn(mode):
    guide = AutoNaMIGuide(robust, mode=mode)
    guide(line())
    assert {note.rule for note in guide.rules.values()} == {"learned"}


def test_other_modes_are_counted():
    def log_prob(a, b):
        return torch.logaddexp(-(a - 5).square(), 1 - (a + 5).square()) - b.square()

    starts = torch.tensor([[4.0, 0.0], [-4.0, 1.0], [-7.0, 1.0], [5.0, 2.0]])
    conditionals = found(log_prob, [constraints.real] * 2, starts=starts)
    assert conditionals.others == pytest.approx([1.0], abs=0.1)
    assert moments(conditionals)[0][0] == pytest.approx(-5, abs=0.05)


def test_a_mixture_has_all_modes_and_their_mass():
    """Draws of both members, and their density, integrate to those of the mixture by a grid."""

    def log_prob(a, b):
        return torch.logaddexp(-(a - 5).square(), 1 - (a + 5).square()) - (b - a).square()

    starts = torch.tensor([[4.0, 0.0], [-4.0, 1.0], [-7.0, 1.0], [5.0, 2.0]])
    conditionals = found(log_prob, [constraints.real] * 2, starts=starts)
    assert conditionals.mix() is not None
    first = conditionals.conditional("a", {})
    values = {"a": first.expand((20_000, 1)).sample()[:, 0]}
    second = conditionals.conditional("b", values)
    b = second.sample()[:, 0]
    assert float((values["a"] > 0).double().mean()) == pytest.approx(1 / (1 + math.e), abs=0.02)
    # a tenth of the draws are of wider parts, which guard the tails
    assert float((b - values["a"]).var()) == pytest.approx(0.5, rel=0.25)
    log_q = first.log_prob(values["a"][:, None])[:, 0] + second.log_prob(b[:, None])[:, 0]
    weights = (log_prob(values["a"], b) - log_q).exp()
    evidence = math.pi * (1 + math.e)
    error = float(weights.std()) / 20_000**0.5
    assert float(weights.mean()) == pytest.approx(evidence, abs=5 * error) and error < 0.1


def test_latents_by_quadrature_are_integrated_out(monkeypatch):
    """The scale of Poisson counts' effects; beside their sum over a fine grid of both."""

    def model():
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        shape = pyro.sample("shape", dist.Gamma(4.0, 2.0))
        with pyro.plate("rows", 10):
            effect = pyro.sample("effect", dist.Normal(0.0, scale))
            pyro.sample("y", dist.GammaPoisson(shape, shape / (1.3 + effect).exp()), obs=COUNTS)

    monkeypatch.setattr(first_latents, "MOST_ON_GRID", 0)
    guide = AutoNaMIGuide(model)
    guide()
    assert guide.rules["scale"].rule == "collapsed" and guide.rules["shape"].rule == "collapsed"
    with torch.no_grad(), pyro.plate("draws", 4000, dim=-2):
        drawn = guide()
    scale, shape = torch.meshgrid(
        torch.linspace(-6, 3, 120).exp(), torch.linspace(-2, 3, 100).exp(), indexing="ij"
    )
    deviations = torch.linspace(-8, 8, 401)
    effect = scale[..., None] * deviations
    own = dist.Normal(0.0, 1.0).log_prob(deviations)
    log_p = dist.HalfCauchy(1.0).log_prob(scale) + dist.Gamma(4.0, 2.0).log_prob(shape)
    for count in COUNTS:
        rate = shape[..., None] / (1.3 + effect).exp()
        likelihood = dist.GammaPoisson(shape[..., None], rate).log_prob(count)
        log_p = log_p + (own + likelihood).logsumexp(-1)
    weights = (log_p + scale.log() + shape.log()).flatten().softmax(0)
    for name, value in (("scale", scale), ("shape", shape)):
        logs = value.log().flatten()
        mean = (weights * logs).sum()
        sd = (weights * (logs - mean).square()).sum().sqrt()
        assert abs(drawn[name].log().mean() - mean) < 0.1 * sd
        assert 0.9 < drawn[name].log().std() / sd < 1.1


def test_more_rows_of_data_take_no_more_runs_of_the_model():
    """Two latents are on grids given the scale, one after the other: runs for many draws hold one grid at a time."""

    def runs(rows):
        x, group, calls = torch.linspace(-1, 1, rows), torch.arange(rows) % 4, []

        def model(y):
            calls.append(None)
            scale = pyro.sample("scale", dist.HalfNormal(1.0))
            mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
            with pyro.plate("groups", 4):
                u = pyro.sample("u", dist.Normal(0.0, scale))
            with pyro.plate("rows", rows):
                pyro.sample("y", dist.Poisson((mean + u[..., group] + x).exp()), obs=y)

        pyro.clear_param_store()
        guide = AutoNaMIGuide(model)
        guide(torch.poisson((1 + 0.5 * x).exp()))
        assert [note.rule for note in guide.rules.values()][1:] == ["quadrature"] * 2
        return len(calls)

    assert runs(100) < 1.5 * runs(20)  # 2.2 if a run held the grids' product


def test_compiled_and_single_precision():
    torch.set_default_dtype(torch.float32)
    x, y = X.float(), line().float()

    def model():
        a, b = pyro.sample("a", dist.Normal(0.0, 10.0)), pyro.sample("b", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", 40):
            pyro.sample("y", dist.StudentT(4.0, a + b * x, 0.3), obs=y)

    guide = AutoNaMIGuide(model)
    draws = [guide() for _ in range(3)]
    assert draws[0]["a"].dtype == torch.float32 and guide.rules["a"].rule == "collapsed"
    assert abs(float(draws[0]["a"]) - 1) < 0.5 and math.isfinite(float(draws[0]["b"]))


def test_points_without_a_density_have_no_weight():
    """Nine of ten points about the mode, in a narrow wedge."""

    def log_prob(a, b):
        inside = (a > 0) & (b > 0) & (b < 0.05 * a)
        return torch.where(inside, -a + 0 * b, -torch.inf)

    starts = torch.tensor([[1.0, 0.02], [2.0, 0.05]])
    assert found(log_prob, [constraints.real] * 2, starts=starts).flaw


def test_several_modes_are_logged(caplog):
    def model():
        with pyro.plate("rows", 2):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x.square(), 0.1), obs=torch.tensor([4.0, 1.0]))

    guide = AutoNaMIGuide(model)
    guide()
    assert guide.rules["x"].rule == "collapsed"
    assert any("several modes" in record.getMessage() for record in caplog.records)


def test_what_a_blocked_model_draws_takes_no_random_numbers_of_the_guides():
    """A guide that kept its result, and one that finds it anew, draw the same by the same seed."""

    def model():
        x = pyro.sample("x", dist.Gamma(2.0, 1.0))
        pyro.sample("hidden", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.StudentT(4.0, x, 0.5), obs=torch.tensor(1.0))

    blocked = poutine.block(model, hide=["hidden"])
    kept = AutoNaMIGuide(blocked)
    kept()
    assert kept.rules["x"].rule == "collapsed"
    found = []
    for forget in (False, True):
        if forget:
            kept._reader.memory.derived.tables.clear()
        pyro.set_rng_seed(3)
        found.append(kept()["x"])
    assert torch.equal(*found)
