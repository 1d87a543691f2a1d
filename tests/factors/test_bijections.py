"""`bijection_to`: Pyro's own where there is one, and true bijections with true Jacobians for the rest."""

import copy
import pickle

import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from torch.autograd.functional import jacobian
from torch.distributions import biject_to

from pyro_nami.factors.bijections import bijection_to, detached_support, interior, support_on
from pyro_nami.factors.layout import UnconstrainedLayout

# support -> (length of the unconstrained vector, the free coordinates of the value)
LOWER = torch.tril_indices(3, 3)
BELOW = torch.tril_indices(3, 3, -1)
SUPPORTS = {
    "real": (constraints.real, 2, lambda y: y),
    "real_vector": (constraints.real_vector, 2, lambda y: y),
    "positive": (constraints.positive, 2, lambda y: y),
    "nonnegative": (constraints.nonnegative, 2, lambda y: y),
    "greater_than": (constraints.greater_than(2.0), 2, lambda y: y),
    "greater_than_eq": (constraints.greater_than_eq(torch.tensor(2.0)), 2, lambda y: y),
    "less_than": (constraints.less_than(-1.0), 2, lambda y: y),
    "interval": (constraints.interval(-1.0, 3.0), 2, lambda y: y),
    "half_open_interval": (constraints.half_open_interval(-1.0, 3.0), 2, lambda y: y),
    "unit_interval": (constraints.unit_interval, 2, lambda y: y),
    "wide_interval": (constraints.interval(-3.0, torch.tensor(2.0)), 2, lambda y: y),
    "softplus_positive": (constraints.softplus_positive, 2, lambda y: y),
    "simplex": (constraints.simplex, 2, lambda y: y[..., :-1]),
    "ordered": (constraints.ordered_vector, 3, lambda y: y),
    "positive_ordered": (constraints.positive_ordered_vector, 3, lambda y: y),
    "wrapped_positive_ordered": (
        constraints.independent(constraints.positive_ordered_vector, 1),
        3,
        lambda y: y,
    ),
    "corr_cholesky": (constraints.corr_cholesky, 3, lambda y: y[..., BELOW[0], BELOW[1]]),
    "corr_matrix": (constraints.corr_matrix, 3, lambda y: y[..., BELOW[0], BELOW[1]]),
    "lower_cholesky": (constraints.lower_cholesky, 6, lambda y: y[..., LOWER[0], LOWER[1]]),
    "softplus_lower_cholesky": (
        constraints.softplus_lower_cholesky,
        6,
        lambda y: y[..., LOWER[0], LOWER[1]],
    ),
    "positive_definite": (constraints.positive_definite, 6, lambda y: y[..., LOWER[0], LOWER[1]]),
    "cat": (
        constraints.cat([constraints.positive, constraints.unit_interval], -1, [1, 2]),
        3,
        lambda y: y,
    ),
    "stack": (constraints.stack([constraints.positive, constraints.real], -1), 2, lambda y: y),
}


@pytest.mark.parametrize("name", SUPPORTS)
def test_values_lie_in_the_support_and_the_jacobian_is_autograds(name):
    support, length, free = SUPPORTS[name]
    x = torch.randn(length, dtype=torch.float64)
    bijection = bijection_to(support)
    y = bijection(x)
    assert support_on(support, y.dim()).check(y).all()
    torch.testing.assert_close(bijection.inv(y), x)
    matrix = jacobian(lambda x: free(bijection(x)), x)
    oracle = torch.linalg.slogdet(matrix).logabsdet
    torch.testing.assert_close(bijection.log_abs_det_jacobian(x, y).sum(), oracle)
    # The layout sums to one number a value, whatever event dim the transform declares.
    layout = UnconstrainedLayout(support, y.shape)
    batch = torch.randn(4, 2, length, dtype=torch.float64)
    values = layout.value(batch)
    assert values.shape == (4, 2) + y.shape and layout.log_abs_det is not None
    torch.testing.assert_close(layout.elements(values), batch)
    log_abs_det = layout.log_abs_det(layout.elements(y), y)
    torch.testing.assert_close(
        torch.zeros_like(oracle) if log_abs_det is None else log_abs_det, oracle
    )
    if log_abs_det is not None:
        assert layout.log_abs_det(batch, values).shape == (4, 2)


@pytest.mark.parametrize("name", SUPPORTS)
def test_where_pyro_has_a_bijection_it_is_used(name):
    support, length, _ = SUPPORTS[name]
    try:
        oracle = biject_to(support)
    except NotImplementedError:
        pytest.skip("torch has none")
    if name == "wide_interval":
        pytest.skip("it is stretched by a quarter of its width there")
    if "wrapped" in name:
        pytest.skip("Pyro counts the wrapper's dim besides the transform's own")
    x = torch.randn(length, dtype=torch.float64)
    torch.testing.assert_close(bijection_to(support)(x), oracle(x))


@pytest.mark.parametrize("name", SUPPORTS)
def test_layouts_can_be_copied_and_pickled(name):
    support, length, _ = SUPPORTS[name]
    x = torch.randn(length, dtype=torch.float64)
    y = bijection_to(support)(x)
    layout = UnconstrainedLayout(support, y.shape)
    for other in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        torch.testing.assert_close(other.elements(y), x)


def test_an_improper_prior_on_ordered_vectors_is_covered():
    """Its support declares event dim 0, where Pyro's own guides fail."""
    prior = dist.ImproperUniform(constraints.positive_ordered_vector, (), (3,))
    value = torch.tensor([1.0, 2.0, 4.0])
    layout = UnconstrainedLayout(prior.support, prior.event_shape)
    assert layout.num_elements == 3
    assert layout.log_abs_det(layout.elements(value), value).shape == ()
    two = prior.expand((2,)).to_event(1)
    layout = UnconstrainedLayout(two.support, two.event_shape)
    assert layout.num_elements == 6 and layout.support.check(value.expand(5, 2, 3)).all()


def test_supports_without_a_bijection_are_refused():
    for support in (
        constraints.sphere,
        constraints.boolean,
        constraints.independent(constraints.boolean, 1),
    ):
        with pytest.raises(NotImplementedError):
            bijection_to(support)


def test_a_detached_support_has_no_graph_and_the_same_bounds():
    high = torch.tensor(2.0, requires_grad=True)
    support = constraints.independent(constraints.interval(0.0, 3 * high), 1)
    detached = detached_support(support)
    assert (
        not detached.base_constraint.upper_bound.requires_grad
        and detached.base_constraint.upper_bound == 6.0
    )
    assert support.base_constraint.upper_bound.requires_grad
    assert detached_support(constraints.positive) is constraints.positive


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_interior_moves_the_boundary_only(dtype):
    for support, outside, inside in [
        (constraints.positive, 0.0, 1e-30),
        (constraints.greater_than(5.0), 5.0, 5.5),
        (constraints.less_than(-5.0), -5.0, -5.5),
        (constraints.interval(-5.0, -4.0), -4.0, -4.5),
    ]:
        moved = interior(support, torch.tensor([outside, inside], dtype=dtype))
        assert moved[1] == torch.tensor(inside, dtype=dtype)
        assert bijection_to(support).inv(moved).isfinite().all()


@pytest.mark.parametrize(
    "support", [constraints.positive, constraints.less_than(-5.0), constraints.unit_interval]
)
def test_what_interior_has_moved_it_takes_for_inside(support):
    moved = interior(support, torch.tensor([-9.0, 9.0])).unique().requires_grad_()
    again = interior(support, moved)
    assert torch.equal(again, moved)
    assert (torch.autograd.grad(again.sum(), moved)[0] == 1).all()
