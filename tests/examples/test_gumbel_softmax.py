"""Relaxed draws: what they are, how they are scored, and what flows through them."""

import math
import sys
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from scripts import ROOT
from torch.distributions import Independent

from pyro_nami.factors.distribution import Relocated, Relocation
from pyro_nami.factors.family import SequentialElements
from pyro_nami.factors.own_type import OwnTypeFamily

sys.path.append(str(ROOT / "examples" / "noisy_or"))

from gumbel_softmax import gumbel_softmax  # noqa: E402


@pytest.mark.parametrize("temperature", [0.05, 0.2, 0.5, 2.0])
def test_the_larger_side_of_a_draw_is_distributed_as_the_discrete_value(temperature):
    count = 100_000
    probs = torch.tensor([0.03, 0.5, 0.9])
    z = gumbel_softmax(dist.Bernoulli(probs), temperature).rsample((count,))
    assert ((z > 0) & (z < 1)).all()
    error = 5 * (probs * (1 - probs) / count).sqrt()  # five standard errors
    assert (((z > 0.5).float().mean(0) - probs).abs() < error).all()
    classes = torch.tensor([0.1, 0.6, 0.3])
    z = gumbel_softmax(dist.OneHotCategorical(classes), temperature).rsample((count,))
    assert ((z > 0) & (z < 1)).all()
    torch.testing.assert_close(z.sum(-1), torch.ones(count))
    shares = torch.nn.functional.one_hot(z.argmax(-1), 3).float().mean(0)
    assert ((shares - classes).abs() < 5 * (classes * (1 - classes) / count).sqrt()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_densities_are_linear_in_the_draw_and_those_of_the_discrete_type_at_its_values(dtype):
    probs = torch.tensor([[0.2, 0.7], [0.5, 0.1]], dtype=dtype)
    mask = torch.tensor([True, False])
    for_each = gumbel_softmax(dist.Bernoulli(probs).to_event(1).mask(mask).expand([3, 2]), 0.5)
    z = for_each.rsample()
    assert z.dtype == dtype
    assert (for_each.batch_shape, for_each.event_shape, z.shape) == ((3, 2), (2,), (3, 2, 2))
    linear = (z * probs.log() + (1 - z) * (1 - probs).log()).sum(-1) * mask
    torch.testing.assert_close(for_each.log_prob(z), linear)

    classes = torch.tensor([0.2, 0.5, 0.3], dtype=dtype)
    one_hot = gumbel_softmax(dist.OneHotCategorical(classes), 0.5)
    z = one_hot.expand([4]).rsample()
    assert z.dtype == dtype
    torch.testing.assert_close(one_hot.log_prob(z), z @ classes.log())
    torch.testing.assert_close(one_hot.log_prob(torch.eye(3, dtype=dtype)), classes.log())


def test_an_impossible_class_is_never_drawn_and_leaves_density_and_gradient_finite():
    logits = torch.tensor([0.0, -math.inf, 0.0], requires_grad=True)
    fn = gumbel_softmax(dist.OneHotCategorical(logits=logits), 0.2)
    z = fn.rsample((100,))
    assert (z[:, 1] < 1e-30).all()
    torch.testing.assert_close(fn.log_prob(z).detach(), torch.full((100,), -math.log(2)))
    fn.log_prob(z).sum().backward()
    assert logits.grad[[0, 2]].isfinite().all()


def test_validation_takes_draws_and_nothing_outside_of_the_unit_interval():
    fn = gumbel_softmax(dist.Bernoulli(torch.tensor(0.5)), 0.5)
    fn.log_prob(torch.tensor(0.3))
    for value in (1.1, math.nan):
        with pytest.raises(ValueError, match="support"):
            fn.log_prob(torch.tensor(value))


def family(prior):
    return OwnTypeFamily("z", prior, prior.sample())


@pytest.mark.parametrize("relocated", [False, True])
def test_a_guides_own_distribution_is_relaxed_likewise(relocated):
    prior = dist.Bernoulli(torch.full((3,), 0.5)).to_event(1)
    params = torch.randn(5, 1, 2, 3, 1, requires_grad=True)
    fn = plain = family(prior).distribution(params)
    if relocated:
        fn = Relocated(fn, Relocation(kept=1, gap=1))
    plain.fixed = object()  # of the score along the path, which no relaxed draw may use
    relaxed = gumbel_softmax(fn, 0.5)
    z = relaxed()
    assert relaxed.has_rsample and not fn.has_rsample
    assert z.shape == ((5, 2, 3) if relocated else (5, 1, 2, 3))
    probs = params.squeeze(-1).sigmoid().reshape(z.shape)
    linear = (z * probs.log() + (1 - z) * (1 - probs).log()).sum(-1)
    torch.testing.assert_close(relaxed.log_prob(z), linear)
    torch.testing.assert_close(relaxed.log_prob(z.clone()), linear)
    torch.testing.assert_close(relaxed.score_parts(z).entropy_term, linear)
    assert set(plain.sample().unique().tolist()) == {0.0, 1.0}
    with pytest.raises(ValueError, match="support"):
        relaxed.log_prob(z + 1)


def walk(start):
    """Conditionals of two elements: logit ``start`` for the first, three times the first for the second."""
    first = torch.stack([start])
    return SimpleNamespace(
        first=lambda: (first, lambda z: (3 * z, None)),
        all=lambda z: torch.stack([first, 3 * z[..., 0, :]], -2),
    )


def test_elements_in_sequence_are_reparametrized_through_those_before_them():
    torch.set_default_dtype(torch.float64)
    prior = dist.Bernoulli(torch.full((2,), 0.5)).to_event(1)

    def draw(start):
        pyro.set_rng_seed(3)
        discrete = SequentialElements(family(prior), walk(start), None, torch.Size(), (), ())
        fn = gumbel_softmax(discrete, 0.5)
        z = fn.rsample()
        return z, fn.log_prob(z), fn.log_prob(z.clone())

    start, step = torch.tensor(0.2, requires_grad=True), 1e-6
    z, by_draw, in_one_pass = draw(start)
    first, second = start.sigmoid(), (3 * z[0]).sigmoid()
    by_hand = torch.stack(
        [
            z[0] * first.log() + (1 - z[0]) * (1 - first).log(),
            z[1] * second.log() + (1 - z[1]) * (1 - second).log(),
        ]
    )
    torch.testing.assert_close(by_draw, by_hand)
    torch.testing.assert_close(in_one_pass, by_hand)
    # the second element, and the density
    for take in (lambda out: out[0][1], lambda out: out[1].sum()):
        (slope,) = torch.autograd.grad(take(draw(start)), start)
        ahead, behind = take(draw(start.detach() + step)), take(draw(start.detach() - step))
        assert float(slope) == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-5)
        assert abs(float(slope)) > 1e-3


def test_plain_torch_wrappers_are_relaxed_too():
    fn = gumbel_softmax(Independent(torch.distributions.Bernoulli(torch.full((2,), 0.5)), 1), 0.5)
    assert fn.event_shape == (2,) and fn.has_rsample
