"""One suite over every family: what each must do whatever its type, then what is particular to some."""

import copy
import math
import pickle

import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from torch.distributions import biject_to, kl_divergence

from pyro_nami.factors import Family, flow, mixture, register_family, registry, relaxed
from pyro_nami.factors.own_type import OwnTypeFamily
from pyro_nami.factors.registry import features_of, make_family
from pyro_nami.factors.unconstrained import CorrectionFamily, NormalFamily, SinhArcsinhFamily

DTYPE = torch.float64


def ones(*shape):
    return torch.ones(shape, dtype=DTYPE)


def zeros(size):
    return torch.zeros(size, dtype=DTYPE)


def t(*values):
    return torch.tensor(values if len(values) != 1 else values[0], dtype=DTYPE)


# name -> (spec, prior). Every built-in family, on scalars and on events; priors have no batch dims.
CASES = {
    "normal-real": (None, dist.Normal(t(0.5), t(2.0))),
    "normal-positive": (None, dist.LogNormal(t(0.5), t(0.7))),
    "normal-nonnegative": (None, dist.HalfNormal(t(2.0))),
    "normal-unit": (None, dist.Beta(t(2.0), t(3.0))),
    "normal-interval": (None, dist.Uniform(-1.0, t(3.0))),
    "normal-greater": (None, dist.Pareto(t(2.0), t(3.0))),
    "normal-vector": (None, dist.Normal(zeros(3), 1.0).to_event(1)),
    "normal-matrix": (None, dist.Gamma(torch.full((2, 2), 2.0, dtype=DTYPE), 1.0).to_event(2)),
    "normal-mvn": (None, dist.MultivariateNormal(zeros(3), torch.eye(3, dtype=DTYPE))),
    "normal-simplex": (None, dist.Dirichlet(t(1.0, 2.0, 3.0))),
    "normal-simplices": (None, dist.Dirichlet(ones(2, 3)).to_event(1)),
    "normal-circle": (None, dist.VonMises(t(0.5), t(2.0))),
    "normal-corr-cholesky": (None, dist.LKJCholesky(3, t(2.0))),
    "normal-positive-definite": (None, dist.Wishart(t(4.0), torch.eye(2, dtype=DTYPE))),
    "normal-size-one": (None, dist.Normal(zeros(1), 1.0).to_event(1)),
    "normal-masked": (None, dist.Normal(zeros(2), 1.0).mask(torch.tensor(True)).to_event(1)),
    "normal-mixture-prior": (
        None,
        dist.MixtureSameFamily(dist.Categorical(ones(2)), dist.Normal(t(-2.0, 2.0), t(1.0))),
    ),
    "mixture-real": (mixture(4), dist.Normal(t(0.0), t(1.0))),
    "mixture-positive": ("mixture", dist.Gamma(t(2.0), t(1.0))),
    "mixture-vector": ("mixture", dist.Normal(zeros(2), 1.0).to_event(1)),
    "sinh_arcsinh-real": ("sinh_arcsinh", dist.Normal(t(0.0), t(1.0))),
    "sinh_arcsinh-vector": (
        "sinh_arcsinh",
        dist.Gamma(torch.full((2,), 2.0, dtype=DTYPE), 1.0).to_event(1),
    ),
    "flow-real": ("flow", dist.Normal(t(0.0), t(1.0))),
    "flow-unit": (flow(4), dist.Beta(t(2.0), t(3.0))),
    "flow-vector": ("flow", dist.Normal(zeros(2), 1.0).to_event(1)),
    "bernoulli": (None, dist.Bernoulli(t(0.3))),
    "bernoulli-vector": (None, dist.Bernoulli(t(0.3, 0.6, 0.2)).to_event(1)),
    "categorical": (None, dist.Categorical(t(0.2, 0.3, 0.5))),
    "categorical-vector": (None, dist.Categorical(ones(4, 3)).to_event(1)),
    "one-hot": (None, dist.OneHotCategorical(t(0.2, 0.3, 0.5))),
    "one-hot-vector": (None, dist.OneHotCategorical(ones(2, 3)).to_event(1)),
    "one-hot-straight-through": (None, dist.OneHotCategoricalStraightThrough(t(0.2, 0.3, 0.5))),
    "binomial": (None, dist.Binomial(5, t(0.3))),
    "binomial-vector": (None, dist.Binomial(t(5.0, 7.0), t(0.3, 0.6)).to_event(1)),
    "beta-binomial": (None, dist.BetaBinomial(t(2.0), t(3.0), 6)),
    "poisson": (None, dist.Poisson(t(4.0))),
    "poisson-vector": (None, dist.Poisson(t(4.0, 2.0)).to_event(1)),
    "geometric": (None, dist.Geometric(t(0.4))),
    "negative-binomial": (None, dist.NegativeBinomial(t(3.0), t(0.4))),
    "gamma-poisson": (None, dist.GammaPoisson(t(3.0), t(0.8))),
    "tempered": (relaxed(0.6), dist.RelaxedBernoulli(t(0.5), t(0.3, 0.8)).to_event(1)),
    "tempered-logits": (relaxed(0.6), dist.Logistic(t(0.0), t(2.0))),
}
MATCHED = {
    "Gamma": (2.0, 1.0),
    "InverseGamma": (3.0, 1.0),
    "Chi2": (3.0,),
    "Beta": (2.0, 3.0),
    "Kumaraswamy": (2.0, 3.0),
    "LogNormal": (0.0, 1.0),
    "Exponential": (2.0,),
    "HalfNormal": (2.0,),
    "HalfCauchy": (2.0,),
    "Weibull": (2.0, 1.5),
    "StudentT": (5.0, 0.0, 1.0),
    "Laplace": (0.5, 2.0),
    "Cauchy": (0.5, 2.0),
    "Gumbel": (0.5, 2.0),
    "Logistic": (0.5, 2.0),
}
CASES |= {
    f"match-{name}": ("match", getattr(dist, name)(*map(t, args))) for name, args in MATCHED.items()
}
CASES |= {
    "match-discrete": ("match", dist.Bernoulli(t(0.3))),
    "match-gamma-vector": ("match", dist.Gamma(t(2.0, 3.0), t(1.0)).to_event(1)),
    "match-dirichlet": ("match", dist.Dirichlet(t(2.0, 3.0))),
    "match-dirichlet-vector": ("match", dist.Dirichlet(ones(2, 3)).to_event(1)),
}
ids = list(CASES)


def build(case, *, anchored=False, batch=(), jitter=0.3, dtype=DTYPE):
    """Returns the family of a case, its prior, its anchor, and parameters near its start ``(*batch, E, k)``."""
    spec, prior = CASES[case]
    torch.manual_seed(0)
    value = prior.sample()
    family = make_family(spec, "z", prior, value)
    anchor = family.anchor(prior) if anchored else None
    start = family.initial(value, 0.5, anchor)
    params = start + jitter * torch.randn(tuple(batch) + tuple(start.shape), dtype=start.dtype)
    return family, prior, anchor, params.to(dtype).requires_grad_()


class Linear:
    """Conditionals whose parameters are a bias plus a linear map of the features before; counts its dense passes."""

    def __init__(self, bias, family, seen=()):
        num_elements, num_params, width = (
            family.num_elements,
            family.num_params,
            family.num_features,
        )
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(
            (num_elements, num_params, num_elements, width), generator=generator, dtype=bias.dtype
        )
        order = torch.arange(num_elements)
        self.weight = 0.1 * weight * (order[:, None, None, None] > order[None, None, :, None])
        self.bias, self.passes = bias, 0

    def first(self):
        return self._row((), 0)

    def all(self, features):
        self.passes += 1
        return self.bias + torch.einsum("ekgf,...gf->...ek", self.weight, features)

    def _row(self, seen, index):
        params = self.bias[..., index, :]
        for position, features in enumerate(seen):
            params = params + torch.einsum(
                "kf,...f->...k", self.weight[index, :, position], features
            )
        return params, lambda features: self._row(seen + (features,), index + 1)


def draw(distribution, sample_shape=()):
    return distribution(torch.Size(sample_shape))


def score(q, value, params):
    """The density of a value, and its gradient with respect to parameters."""
    log_prob = q.log_prob(value)
    return log_prob, torch.autograd.grad(log_prob.sum(), params, retain_graph=True)[0]


def assert_scored_alike(q, value, params, tolerance=1e-6):
    """A draw, whose density the factor may remember, is scored as an equal value is; returns the gradient."""
    (kept, gradient), (computed, other) = score(q, value, params), score(q, value.clone(), params)
    torch.testing.assert_close(kept, computed, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, other, rtol=tolerance, atol=tolerance)
    return gradient


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("case", ids)
def test_draws_have_the_right_shape_lie_in_the_support_and_have_finite_density(case, anchored):
    family, prior, anchor, params = build(case, anchored=anchored, batch=(4,))
    q = family.distribution(params, anchor)
    assert q.batch_shape == (4,) and q.event_shape == prior.event_shape
    for sample_shape in [(), (3,)]:
        value = draw(q, sample_shape)
        assert value.shape == sample_shape + (4,) + prior.event_shape
        assert q.support.check(value).all()
        log_prob = q.log_prob(value)
        assert log_prob.shape == sample_shape + (4,) and log_prob.isfinite().all()
    # The prior's own density must accept it too: Pyro scores it there.
    assert prior.expand((4,)).log_prob(draw(q)).shape == (4,)


@pytest.mark.parametrize("case", ids)
def test_shapes_and_counts_are_declared_truly(case):
    family, prior, _, params = build(case)
    assert params.shape == (family.num_elements, family.num_params)
    features = family.features(prior.sample((5,)))
    assert features.shape == (5, family.num_elements, family.num_features)
    assert features.isfinite().all() and features.dtype == DTYPE
    assert family.distribution(params).has_rsample == family.has_rsample


@pytest.mark.parametrize("case", ids)
def test_density_of_own_draw_equals_that_of_an_equal_value_with_equal_gradients(case):
    family, _, anchor, params = build(case, anchored=True, batch=(2,))
    q = family.distribution(params, anchor)
    assert_scored_alike(q, draw(q), params, 1e-5)
    value = q.sample()
    assert not value.requires_grad
    assert assert_scored_alike(q, value, params).abs().max() > 0


@pytest.mark.parametrize("case", ids)
def test_gradient_reaches_every_raw_parameter(case):
    family, _, _, params = build(case)
    q = family.distribution(params)
    values = draw(q, (20_000,))
    if q.has_rsample:
        loss = q.log_prob(values).sum() + values.sin().sum()
    else:
        loss = (q.log_prob(values) * torch.linspace(0, 1, 20_000, dtype=DTYPE)).sum()
    (gradient,) = torch.autograd.grad(loss, params)
    assert gradient.isfinite().all() and (gradient != 0).all()


@pytest.mark.parametrize("case", ids)
def test_expand_draws_independently_and_scores_alike(case):
    family, prior, _, params = build(case, batch=(2,))
    q = family.distribution(params)
    wide = q.expand((3, 2))
    value = draw(wide)
    assert wide.batch_shape == (3, 2) and value.shape == (3, 2) + prior.event_shape
    assert wide.log_prob(value).shape == (3, 2)
    torch.testing.assert_close(wide.log_prob(value), q.log_prob(value.clone()))
    assert wide.log_prob(value[0]).shape == (3, 2)
    many = draw(q.expand((40, 2)))
    assert (many[0] != many).any()


@pytest.mark.parametrize("case", ids)
def test_copies_and_pickles_make_the_same_distribution_and_no_divergence_from_the_prior_is_registered(
    case,
):
    family, prior, _, params = build(case)
    value = draw(family.distribution(params)).detach()
    expected = family.distribution(params).log_prob(value)
    for other in (copy.deepcopy(family), pickle.loads(pickle.dumps(family))):
        torch.testing.assert_close(other.distribution(params).log_prob(value), expected)
    with pytest.raises(NotImplementedError):
        kl_divergence(family.distribution(params), prior)


# Bounds that are tensors have the model's own dtype, which is float64 here.
@pytest.mark.parametrize(
    "case", [name for name in ids if name not in ("normal-interval", "normal-greater")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_dtype_follows_the_parameters(case, dtype):
    family, _, _, params = build(case, dtype=dtype)
    q = family.distribution(params)
    value = draw(q)
    assert q.log_prob(value).dtype == dtype
    if value.is_floating_point():
        assert value.dtype == dtype


@pytest.mark.parametrize("case", ids)
def test_parameters_far_out_give_finite_densities_and_gradients(case):
    family, prior, _, _ = build(case)
    value = prior.sample()
    for size in (1e3, -1e3):
        shape = (family.num_elements, family.num_params)
        params = torch.full(shape, size, dtype=DTYPE).requires_grad_()
        log_prob = family.distribution(params).log_prob(value)
        assert not log_prob.isnan().any()
        if "match" not in case and "normal-circle" not in case:
            (gradient,) = torch.autograd.grad(log_prob, params)
            assert log_prob.isfinite() and gradient.isfinite().all()


# Elements in sequence -------------------------------------------------------------------------------------------------

sequences = [name for name in ids if build(name)[0].num_elements > 1]


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("case", sequences)
def test_sequential_draws_agree_with_the_dense_pass(case, anchored):
    family, prior, anchor, params = build(case, anchored=anchored, batch=(2,))
    conditionals = Linear(params, family)
    q = family.autoregressive_distribution(conditionals, anchor, torch.Size((2,)))
    assert (
        q.batch_shape == (2,) and q.event_shape == prior.event_shape and not q.has_enumerate_support
    )
    for sample_shape in [(), (3,)]:
        value = draw(q, sample_shape)
        assert value.shape == sample_shape + (2,) + prior.event_shape
        before = conditionals.passes
        q.log_prob(value)
        assert conditionals.passes == before, "own draws cost no pass"
        q.log_prob(value.clone())
        assert conditionals.passes == before + 1
        assert (assert_scored_alike(q, value, params, 1e-5)[..., 0, :] != 0).any()


@pytest.mark.parametrize("case", sequences)
def test_sequential_density_is_the_product_of_conditionals(case):
    """With the elements' parameters worked out beforehand, the independent factor must give the same density."""
    family, prior, _, params = build(case)
    conditionals = Linear(params, family)
    value = prior.sample((3,))
    q = family.autoregressive_distribution(conditionals, None, torch.Size())
    oracle = family.distribution(conditionals.all(family.features(value)))
    torch.testing.assert_close(q.log_prob(value), oracle.log_prob(value))
    assert q.expand((3,)).log_prob(value).shape == (3,)
    assert draw(q.expand((5, 3))).shape == (5, 3) + prior.event_shape


def test_sequential_draw_without_gradients_is_scored_with_them():
    for case in ("normal-vector", "bernoulli-vector"):
        family, _, _, params = build(case)
        q = family.autoregressive_distribution(Linear(params, family))
        with torch.no_grad():
            value = q.sample()
        assert (assert_scored_alike(q, value, params) != 0).any()


# Densities ------------------------------------------------------------------------------------------------------------

# Grids (value, width): uniform on a line that the test itself maps onto the support.
LINE = torch.linspace(-60, 60, 200_001, dtype=DTYPE)


def grid_of(prior):
    step = LINE[1] - LINE[0]
    support = prior.support
    if isinstance(prior, dist.VonMises):
        return LINE * (math.pi / 60), torch.full_like(LINE, step * math.pi / 60), LINE / 20
    if support is constraints.real or "Mixture" in type(support).__name__:
        # sinh spreads the line to where even a Cauchy has no mass left.
        return (LINE / 2).sinh() / 10, (LINE / 2).cosh() / 20 * step, LINE / 2
    if isinstance(support, (constraints.greater_than, constraints.greater_than_eq)):
        return LINE.exp() + support.lower_bound, LINE.exp() * step, LINE
    low, high = (
        getattr(support, name, bound)
        for name, bound in (("lower_bound", 0.0), ("upper_bound", 1.0))
    )
    unit = LINE.sigmoid()
    return low + (high - low) * unit, (high - low) * unit * (-LINE).sigmoid() * step, LINE


def scalar_continuous(case):
    prior = CASES[case][1]
    return (
        not prior.support.is_discrete
        and prior.event_shape in [(), (2,)]
        and build(case)[0].num_elements == 1
    )


@pytest.mark.parametrize("case", [name for name in ids if scalar_continuous(name)])
def test_density_integrates_to_one_and_draws_follow_it(case):
    family, prior, _, params = build(case)
    q, pairs, circle = (
        family.distribution(params.detach()),
        prior.event_shape == (2,),
        case == "normal-circle",
    )
    value, width, line = grid_of(prior)
    if not circle:
        inside = (value > value[0]) & (value < value[-1]) & (width > 0)
        value, width, line = value[inside], width[inside], line[inside]
    mass = q.log_prob(torch.stack([value, 1 - value], -1) if pairs else value).exp() * width
    # Trapezoid ends carry no mass; the circle's two ends are one point.
    total = mass.sum() - (mass[0] if circle else 0.0)
    torch.testing.assert_close(total.item(), 1.0, rtol=0, atol=2e-4)
    statistic = line.sigmoid()
    mean, square = (mass * statistic).sum(), (mass * statistic.square()).sum()
    draws = draw(q, (4000,))
    places = torch.searchsorted(value, (draws[..., 0] if pairs else draws).contiguous())
    seen = line[places.clamp(max=len(line) - 1)].sigmoid()
    error = ((square - mean**2).clamp(min=0) / 4000).sqrt()
    assert (seen.mean() - mean).abs() < 5 * error + 1e-4


@pytest.mark.parametrize(
    "case", [name for name in ids if CASES[name][1].support.is_discrete and "vector" not in name]
)
def test_probabilities_sum_to_one_and_draws_follow_them(case):
    family, prior, _, params = build(case)
    q = family.distribution(params.detach())
    if q.has_enumerate_support:
        values = q.enumerate_support()
        assert (
            q.enumerate_support(expand=False).shape
            == values.shape
            == values.shape[:1] + prior.event_shape
        )
    else:
        values = torch.arange(3000, dtype=DTYPE)
    probability = q.log_prob(values).exp()
    torch.testing.assert_close(probability.sum().item(), 1.0, rtol=0, atol=1e-6)
    flat = values.reshape(len(values), -1).to(DTYPE)
    mean = (probability[:, None] * flat).sum(0)
    spread = ((probability[:, None] * flat.square()).sum(0) - mean.square()).clamp(min=0).sqrt()
    draws = draw(q, (4000,)).reshape(4000, -1).to(DTYPE)
    assert ((draws.mean(0) - mean).abs() < 5 * spread / math.sqrt(4000) + 1e-9).all()


@pytest.mark.parametrize(
    "case", ["bernoulli", "categorical", "one-hot", "binomial", "beta-binomial"]
)
def test_finite_supports_are_enumerated_over_a_batch(case):
    family, prior, _, params = build(case, batch=(4,))
    q = family.distribution(params)
    values = q.enumerate_support()
    assert values.shape[1:] == (4,) + prior.event_shape
    assert q.enumerate_support(expand=False).shape[1:] == (1,) + prior.event_shape
    torch.testing.assert_close(
        q.log_prob(values).logsumexp(0), torch.zeros(4, dtype=DTYPE), rtol=0, atol=1e-9
    )


def test_vectors_are_not_enumerated():
    family, _, _, params = build("bernoulli-vector")
    assert not family.distribution(params).has_enumerate_support


# Step 0 ---------------------------------------------------------------------------------------------------------------

unconstrained = [
    name for name in ids if name.split("-")[0] in ("normal", "sinh_arcsinh", "mixture", "flow")
]


def test_a_flow_with_transforms_starts_from_uniform_variables_up_to_their_edges():
    low = t(-1.0, 0.0, 2.0)
    prior = dist.Uniform(low, 3.0).to_event(1)
    family = flow(4, transforms=2)("z", prior, prior.sample())
    standard = t(0.0, math.log(math.e - 1.0), *[0.0] * 11)  # softplus of the second is 1
    q = family.distribution(standard.expand(3, -1))
    value = torch.cat(
        (prior.sample((5,)), (low + 1e-9).expand(1, 3), (3.0 - 1e-9 * ones(3)).expand(1, 3))
    )
    torch.testing.assert_close(q.log_prob(value), prior.log_prob(value))
    draw = q.sample((4000,))
    torch.testing.assert_close(((draw - low) / (3 - low)).mean(0), 0.5 * ones(3), atol=0.03, rtol=0)


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("case", [name for name in unconstrained if "mixture-" not in name])
def test_at_step_0_the_factor_is_autonormals(case, anchored):
    """AutoNormal: a Normal at the unconstrained init value with the init scale, pushed through ``biject_to``."""
    family, prior, anchor, _ = build(case, anchored=anchored)
    value, other = prior.sample((2,))
    q = family.distribution(family.initial(value, 0.1, anchor), anchor)
    try:
        bijection = biject_to(prior.support)
    except NotImplementedError:
        pytest.skip("torch has no bijection here, so AutoNormal has no answer")
    loc = bijection.inv(value)
    base = dist.Normal(loc, torch.full_like(loc, 0.1)).to_event(loc.dim())
    oracle = (
        base.log_prob(bijection.inv(other))
        - bijection.log_abs_det_jacobian(bijection.inv(other), other).sum()
    )
    torch.testing.assert_close(q.log_prob(other), oracle, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("components", [1, 2, 5])
def test_a_mixture_starts_with_the_given_mean_and_scale_and_distinct_components(
    components, anchored
):
    prior = dist.Normal(t(3.0), t(2.0))
    family = make_family(mixture(components), "z", prior, t(1.0))
    anchor = family.anchor(prior) if anchored else None
    q = family.distribution(family.initial(t(1.0), 0.25, anchor), anchor)
    line = torch.linspace(-1, 3, 20_001, dtype=DTYPE)
    mass = q.log_prob(line).exp() * (line[1] - line[0])
    mean = (mass * line).sum()
    torch.testing.assert_close(mean, t(1.0), rtol=0, atol=1e-8)
    torch.testing.assert_close(
        (mass * (line - mean).square()).sum().sqrt(), t(0.25), rtol=1e-6, atol=0
    )
    locations = q._elements.loc.flatten()
    assert len(set(locations.tolist())) == components


@pytest.mark.parametrize(
    "case", [name for name in ids if isinstance(build(name)[0], OwnTypeFamily)]
)
def test_families_of_the_own_type_are_the_prior_where_the_network_says_nothing(case):
    family, prior, anchor, _ = build(case, anchored=True)
    values = prior.sample((6,))
    assert (family.initial(values[0], 0.1, anchor) == 0).all()
    for given in (anchor, None):
        start = family.distribution(family.initial(values[0], 0.1, given), given)
        torch.testing.assert_close(start.log_prob(values), prior.log_prob(values))


def test_initial_takes_values_with_batch_dims():
    for case in ("normal-vector", "sinh_arcsinh-vector", "mixture-positive"):
        family, prior, _, _ = build(case)
        values = prior.sample((4,))
        together = family.initial(values, 0.1)
        assert together.shape == (4, family.num_elements, family.num_params)
        torch.testing.assert_close(together[2], family.initial(values[2], 0.1))


@pytest.mark.parametrize("case", ["normal-real", "normal-positive", "normal-simplex"])
def test_a_correction_changes_nothing_at_first_whatever_the_support(case):
    prior = CASES[case][1]
    value = prior.sample((2,))
    family = CorrectionFamily("z", prior, value[0])
    elements = family.elements(family.initial(value, 0.1))
    noise = torch.randn(elements.batch_shape, dtype=DTYPE)
    torch.testing.assert_close(
        elements.log_prob(noise), dist.Normal(t(0.0), t(1.0)).log_prob(noise)
    )
    assert elements.batch_shape == (2, family.num_elements) and family.anchor(prior) is None


# Anchors --------------------------------------------------------------------------------------------------------------


def test_an_anchored_normal_with_standard_parameters_is_the_prior():
    prior = dist.LogNormal(t(1.0, 2.0), t(0.5, 3.0))
    family = make_family(None, "z", prior, prior.sample())
    anchor = family.anchor(prior)
    # location 0, scale 1
    params = torch.tensor([0.0, math.log(math.e - 1)], dtype=DTYPE).expand(2, 1, 2)
    q = family.distribution(params, anchor)
    values = prior.sample((5,))
    torch.testing.assert_close(q.log_prob(values), prior.log_prob(values))


def test_gradient_flows_through_the_anchor_and_stays_finite_at_a_vanishing_scale():
    for scale in (1.0, 1e-30, 0.0):
        tau = torch.tensor(scale, requires_grad=True)
        mu = torch.tensor(0.0, requires_grad=True)
        prior = dist.Normal(mu, tau, validate_args=False)
        family = make_family(None, "z", dist.Normal(0.0, 1.0), torch.tensor(0.0))
        q = family.distribution(torch.zeros(1, 2), family.anchor(prior))
        value = q.rsample()
        gradients = torch.autograd.grad(value + q.log_prob(value), [mu, tau])
        assert all(gradient.isfinite() for gradient in gradients)
        assert gradients[0] == 1.0
        if scale >= 1e-15:
            assert gradients[1] != 0.0


def test_anchor_and_parameters_of_different_batch_shapes_broadcast():
    prior = dist.Normal(torch.zeros(5, 1, 3), 1.0).to_event(1)
    family = make_family(None, "z", dist.Normal(torch.zeros(3), 1.0).to_event(1), torch.zeros(3))
    anchor = family.anchor(prior)
    assert anchor.shape == (5, 1, 3, 2)
    q = family.distribution(torch.zeros(4, 3, 2), anchor)
    assert q.batch_shape == (5, 4) and q.rsample().shape == (5, 4, 3)
    sequential = family.autoregressive_distribution(
        Linear(torch.zeros(4, 3, 2), family), anchor, torch.Size((4,))
    )
    assert sequential.batch_shape == (5, 4) and sequential.rsample((2,)).shape == (2, 5, 4, 3)


def test_types_without_known_moments_have_no_anchor():
    prior = CASES["normal-positive-definite"][1]
    assert make_family(None, "z", prior, prior.sample()).anchor(prior) is None


# Supports and counts that depend on the call --------------------------------------------------------------------------


def test_a_moving_support_is_that_of_the_current_prior():
    prototype = dist.Uniform(0.0, torch.tensor(2.0, requires_grad=True) * 1.0)
    family = make_family("normal", "z", prototype, torch.tensor(1.0))
    copy.deepcopy(family)
    pickle.loads(pickle.dumps(family))
    high = torch.tensor([[3.0], [50.0]], requires_grad=True)
    now = family.at(dist.Uniform(0.0, high))
    q = now.distribution(torch.zeros(4, 1, 2))
    value = q.rsample()
    assert q.batch_shape == (2, 4) and (value[1] > 3.0).any() and (value[0] < 3.0).all()
    (gradient,) = torch.autograd.grad(value.sum(), high)
    assert (gradient > 0).all()
    assert q.support.check(value).all()
    torch.testing.assert_close(now.features(torch.tensor([[1.5], [25.0]])), torch.zeros(2, 1, 1, 1))
    assert q.log_prob(value.detach().clone()).shape == (2, 4)
    fixed = make_family(None, "z", dist.Normal(0.0, 1.0), torch.tensor(0.0))
    assert fixed.at(dist.Normal(1.0, 1.0)) is fixed


@pytest.mark.parametrize("anchored", [True, False], ids=["anchored", "plain"])
def test_a_total_count_is_that_of_the_current_prior(anchored):
    prototype, now = build("binomial")[0], dist.Binomial(t(9.0, 20.0), t(0.5, 0.1))
    family, params = prototype.at(now), torch.zeros(2, 1, 1, dtype=DTYPE)
    q = family.distribution(params, family.anchor(now) if anchored else None)
    oracle = now if anchored else dist.Binomial(now.total_count, t(0.5, 0.5))
    values = torch.arange(10, dtype=DTYPE)[:, None]
    assert (
        not prototype.distribution(params[0]).support.check(t(9.0))
        and q.support.check(t(9.0)).all()
    )
    torch.testing.assert_close(q.log_prob(values), oracle.log_prob(values))


def test_a_relaxed_family_has_the_density_of_torchs_at_its_own_temperature():
    logits, values = t(0.4, -1.0), t(0.3, 0.9)
    torchs = dist.RelaxedBernoulli(t(0.6), logits=logits).to_event(1)
    family, _, _, _ = build("tempered")
    found = family.distribution(logits.unsqueeze(-1))
    torch.testing.assert_close(found.log_prob(values), torchs.log_prob(values))


def test_a_relaxed_draw_close_to_the_boundary_keeps_a_finite_density_and_gradient():
    prior = dist.RelaxedBernoulli(torch.tensor(0.05), logits=torch.tensor(8.0))
    family = make_family(relaxed(0.05), "z", prior, torch.tensor(0.5))
    params = torch.tensor([[9.0]], requires_grad=True)
    q = family.distribution(params)
    values = q.rsample((100,))
    log_prob = q.log_prob(values)
    (gradient,) = torch.autograd.grad(log_prob.sum(), params)
    assert log_prob.isfinite().all() and gradient.isfinite().all()


# Observed sites -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prior, value, expected",
    [
        (dist.Normal(0.0, 1.0), torch.tensor([1.0, math.nan]), [[[1.0]], [[0.0]]]),
        (dist.LogNormal(0.0, 1.0), torch.tensor(math.e), [[1.0]]),
        (dist.Bernoulli(0.5), torch.tensor(True), [[1.0]]),
        (
            dist.Categorical(torch.ones(3)),
            torch.tensor([2, 0]),
            [[[0.0, 0.0, 1.0]], [[1.0, 0.0, 0.0]]],
        ),
        (
            dist.OneHotCategorical(torch.ones(3)),
            torch.tensor([0.0, 1.0, 0.0]),
            [[0.0], [1.0], [0.0]],
        ),
        (dist.Poisson(3.0), torch.tensor(math.e - 1), [[1.0]]),
        (dist.Binomial(10, 0.5), torch.tensor(3.0), [[math.log(4.0)]]),
        (dist.Uniform(0.0, torch.tensor(9.0)), torch.tensor(5.0), [[5.0]]),
        (dist.ProjectedNormal(torch.zeros(2)), torch.tensor([0.6, 0.8]), [[0.6], [0.8]]),
    ],
    ids=[
        "real-nan",
        "positive",
        "bool",
        "class",
        "one-hot",
        "count",
        "binomial",
        "moving-bounds",
        "sphere",
    ],
)
def test_observed_features(prior, value, expected):
    read = features_of("x", prior, value)
    torch.testing.assert_close(read.features(value), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert read.features(value).shape[-2:] == (read.num_elements, read.num_features)


@pytest.mark.parametrize(
    "prior, value",
    [
        (dist.LogNormal(0.0, 1.0), [-1.0, 0.0, math.inf, math.nan]),
        (dist.Beta(1.0, 1.0), [-1.0, 0.0, 1.0, 2.0]),
        (dist.Dirichlet(torch.ones(3)), [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]),
        (dist.Normal(0.0, 1.0), [math.inf, -math.inf]),
    ],
    ids=["positive", "unit", "simplex", "real"],
)
def test_features_on_and_beyond_the_boundary_are_finite(prior, value):
    value = torch.tensor(value, requires_grad=True)
    assert features_of("x", prior, value.detach()).features(value.detach()).isfinite().all()
    family = make_family(None, "z", prior, prior.sample())
    features = family.features(value)
    assert features.isfinite().all()
    if not value.isnan().any():
        (gradient,) = torch.autograd.grad(features.sum(), value)
        assert gradient.isfinite().all()


# Choosing a family ----------------------------------------------------------------------------------------------------


GAUSS = dist.Normal(0.0, 1.0)
STRAIGHT_THROUGH = dist.RelaxedBernoulliStraightThrough(torch.tensor(0.5), torch.tensor(0.5))
ALL_FAMILIES = r"'flow', 'match', 'mixture', 'normal', 'sinh_arcsinh'.*\"z\".*'gauss'"


@pytest.mark.parametrize(
    ("spec", "prior", "kind", "error"),
    [
        (None, dist.ProjectedNormal(torch.zeros(3)), ValueError, '"z".*register_family'),
        (None, dist.Multinomial(3, torch.ones(2)), NotImplementedError, '"z".*register_family'),
        (None, STRAIGHT_THROUGH, NotImplementedError, "register_family"),
        ("gauss", GAUSS, ValueError, ALL_FAMILIES),
        (3, GAUSS, TypeError, 'site "z"; got int'),
        (lambda name, prior, value: 3, GAUSS, TypeError, '"z" to be a Family; got int'),
    ],
)
def test_a_family_that_does_not_fit_names_the_site_and_the_way_out(spec, prior, kind, error):
    with pytest.raises(kind, match=error):
        make_family(spec, "z", prior, prior.sample())


LOGIT_NORMAL = dist.TransformedDistribution(GAUSS, [dist.transforms.SigmoidTransform()])
TAIL = dist.HalfCauchy(t(1.0))


@pytest.mark.parametrize(
    ("spec", "prior", "kind"),
    [
        ("normal", STRAIGHT_THROUGH, NormalFamily),
        *(
            ("match", prior, NormalFamily)
            for prior in (GAUSS, dist.LogNormal(0.0, 1.0), LOGIT_NORMAL, dist.VonMises(0.0, 1.0))
        ),
        # a lone bounded number has two tails
        (None, TAIL, SinhArcsinhFamily),
        *(
            (None, prior, NormalFamily)
            for prior in (GAUSS, TAIL.expand([3]), TAIL.expand([3]).to_event(1))
        ),
    ],
)
def test_families_that_are_chosen(spec, prior, kind):
    assert type(make_family(spec, "z", prior, torch.tensor(0.5).expand(prior.shape()))) is kind
    assert (
        type(make_family("match", "z", dist.HalfNormal(1.0), torch.tensor(1.0))) is not NormalFamily
    )


@pytest.mark.parametrize(
    "spec", ["normal", "sinh_arcsinh", "mixture", "flow", mixture(2), NormalFamily]
)
def test_a_continuous_family_on_a_discrete_site_is_refused(spec):
    with pytest.raises(ValueError, match='discrete values at site "k" .Categorical.'):
        make_family(spec, "k", dist.Categorical(torch.ones(3)), torch.tensor(0))


class Own(Family):
    """A Normal with the mistakes that `broken` makes."""

    num_params = 2

    def elements(self, params, anchor=None):
        return dist.Normal(params[..., 0], params[..., 1].exp())

    def initial(self, value, scale, anchor=None):
        location = self.layout.elements(value)
        return torch.stack((location, torch.as_tensor(scale).log().expand(location.shape)), -1)


@pytest.mark.parametrize(
    ("mistake", "match"),
    [
        ({"num_params": 3}, r"`Own.initial`.*\(2, 3\); got \(2, 2\)"),
        ({"initial": lambda *_: torch.zeros(2)}, r"`Own.initial`.*\(2, 2\); got \(2,\)"),
        (
            {"elements": lambda self, p, a: dist.Normal(p[..., 2], 1.0)},
            "`Own.elements`.*IndexError",
        ),
        (
            {"elements": lambda self, p, a: dist.Normal(p.sum(), 1.0)},
            r"number of elements; got \(\)",
        ),
    ],
)
def test_what_a_family_of_ones_own_gets_wrong_is_told(mistake, match):
    prior, value = dist.Normal(torch.zeros(2), 1.0).to_event(1), torch.zeros(2)
    assert isinstance(make_family(Own, "z", prior, value), Own)
    with pytest.raises(ValueError, match=match):
        make_family(type("Own", (Own,), mistake), "z", prior, value)


def test_families_can_be_registered_by_name_or_given_directly(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})

    class Half(NormalFamily):
        pass

    prior = dist.Normal(0.0, 1.0)
    register_family("half", Half)
    assert type(make_family("half", "z", prior, torch.tensor(0.0))) is Half
    assert type(make_family(Half, "z", prior, torch.tensor(0.0))) is Half
    assert isinstance(make_family(lambda *site: Half(*site), "z", prior, torch.tensor(0.0)), Family)
    with pytest.raises(ValueError, match="built-in"):
        register_family("normal", Half)
    with pytest.raises(TypeError, match="callable"):
        register_family("none", None)
    for make, size, error in (
        (mixture, 0, "at least 1 component"),
        (flow, 1, "at least 2 bins"),
        (relaxed, 0.0, "positive temperature"),
    ):
        with pytest.raises(ValueError, match=error):
            make(size)
