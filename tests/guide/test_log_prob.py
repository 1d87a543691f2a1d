"""`guide.log_prob`: one dense pass gives the density that the sites of a call add up to."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, CHAIN, beta_bernoulli, eight_schools, regression, scatter
from pyro import poutine
from pyro.infer import Predictive

from pyro_nami import AutoNaMIGuide
from pyro_nami.factors.normals import NormalElements
from pyro_nami.factors.unconstrained import NormalFamily

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore:The instances of"),  # what within="independent" gives up
    pytest.mark.usefixtures("double"),
]
INVERSES = ["auto", "forward", "reverse", "free", "stuhlmueller", "mean_field", "fully_connected"]
OPTIONS = {
    "default": {},
    "separate": {"shared": False},
    "independent": {"within": "independent"},
    "deep": {"hidden_features": (16, 8)},
    "linear": {"hidden_features": ()},
    "narrow": {"hidden_features": (1,)},
    "without anchors": {"anchor": False},
    "flow": {"families": "flow"},
    "mixture": {"families": "mixture"},
    "match": {"families": "match"},
}


def traced(guide, *args, **kwargs):
    trace = poutine.trace(guide).get_trace(*args, **kwargs)
    trace.compute_log_prob()
    return trace, trace.log_prob_sum()


def values_of(trace, case):
    return {name: trace.nodes[name]["value"].detach() for name in case.shapes}


def check(guide, case, args):
    """Latents have their order and shapes; a dense pass equals the traced density, for draws in a plate too."""
    drawn = {key: tuple(value.shape) for key, value in guide(*args).items()}
    assert list(drawn.items()) == list(case.shapes.items())
    scatter(guide, 0.2)
    trace, expected = traced(guide, *args)
    assert torch.allclose(
        guide.log_prob(values_of(trace, case), *args), expected, rtol=1e-8, atol=1e-8
    )
    with pyro.plate("outer", 5, dim=-1 - case.nesting):
        trace, _ = traced(guide, *args)
    batch = guide.log_prob(values_of(trace, case), *args)
    with pyro.plate("outer", 5, dim=-1 - case.nesting):
        run = poutine.trace(poutine.replay(case.model, trace)).get_trace(*args)
    values = {name: site["value"] for name, site in run.nodes.items() if name in case.shapes}
    learned, derived = (guide.log_prob_of(part, values, run.nodes, *args) for part in (True, False))
    assert torch.allclose(learned + derived, batch, rtol=1e-12, atol=1e-12)
    assert torch.allclose(
        guide.log_prob_of(True, values, None, *args), learned, rtol=1e-12, atol=1e-12
    )
    each = sum(
        site["log_prob"].reshape(5, -1).sum(-1)
        for name, site in trace.nodes.items()
        if name in case.shapes and not isinstance(site["log_prob"], int)
    )
    assert batch.shape == (5,)
    assert torch.allclose(batch, each, rtol=1e-8, atol=1e-8)


# Every case with three inverses, and every inverse with many cases; `test_random_programs.py` has all together. But for
# one pair: Stuhlmueller's order samples z before hi, on which its support depends.
PAIRS = [
    (name, inverse, ("default", "separate")[(i + j) % 2])
    for i, name in enumerate(CASES)
    for j, inverse in enumerate(INVERSES)
    if (i - j) % 7 < 3 and (name, inverse) != ("support_parents", "stuhlmueller")
]
NAMES = ["collider", "eight_schools", "vectors", "coupled_instances"]
PAIRS += [
    (name, ("forward", "reverse")[(i + j) % 2], option)
    for i, name in enumerate(NAMES)
    for j, option in enumerate(OPTIONS)
    if option not in ("default", "separate")
]


@pytest.mark.parametrize("name, inverse, option", PAIRS)
def test_the_dense_pass_equals_the_sum_over_sites(name, inverse, option):
    case = CASES[name]
    check(AutoNaMIGuide(case.model, inverse=inverse, **OPTIONS[option]), case, case.arguments())


@pytest.mark.parametrize("inverse", ["forward", "reverse", "mean_field"])
def test_the_density_integrates_to_one(inverse):
    """By the trapezoid rule over a two-dimensional posterior; its error is far below the tolerance."""

    def model(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(a, 0.5))
        pyro.sample("y", dist.Normal(a * b, 1.0), obs=y)

    guide, y = AutoNaMIGuide(model, inverse=inverse, init_scale=0.7), torch.tensor(1.0)
    guide(y)
    scatter(guide, 0.15)
    grid = torch.linspace(-14.0, 14.0, 601)
    a, b = torch.meshgrid(grid, grid, indexing="ij")
    density = guide.log_prob({"a": a.flatten(), "b": b.flatten()}, y).exp()
    total = density.sum() * (grid[1] - grid[0]) ** 2
    assert abs(total.item() - 1) < 1e-3


def test_density_on_a_constrained_support_integrates_to_one():
    guide, y = AutoNaMIGuide(beta_bernoulli, init_scale=1.0), torch.tensor([1.0, 0.0])
    guide(y)
    scatter(guide, 0.05)
    logits = torch.linspace(-12.0, 12.0, 2001)
    p = torch.sigmoid(logits)
    log_prob = guide.log_prob({"p": p.unsqueeze(-1)}, y)
    assert log_prob.shape == (2001,)
    assert abs((log_prob.exp() * p * (1 - p)).sum().item() * 0.012 - 1) < 1e-3


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 3, 4)], ids=str)
def test_result_has_the_batch_dims_left_of_the_plates(shape):
    case, guide = CASES["eight_schools"], AutoNaMIGuide(eight_schools)
    args = case.arguments()
    latents = {
        "mu": torch.randn(shape + (1,) * bool(shape)),
        "tau": torch.rand(shape + (1,) * bool(shape)) + 0.1,
        "theta": torch.randn(shape + (8,)),
    }
    log_prob = guide.log_prob(latents, *args)
    assert log_prob.shape == shape
    if shape:
        index = (0,) * len(shape)
        one = {name: value[index].reshape(case.shapes[name]) for name, value in latents.items()}
        assert torch.allclose(guide.log_prob(one, *args), log_prob[index])


def test_a_batch_of_data_sets_in_one_pass():
    """Observed values with the same batch dims as the latents: what compilation needs."""
    guide = AutoNaMIGuide(CHAIN)
    guide(torch.tensor(0.0))
    scatter(guide)
    latents, y = {name: torch.randn(6) for name in "abc"}, torch.randn(6)
    batch = guide.log_prob(latents, torch.tensor(0.0), observations={"y": y})
    each = [guide.log_prob({k: v[i] for k, v in latents.items()}, y[i]) for i in range(6)]
    assert torch.allclose(batch, torch.stack(each))


def test_a_batch_of_data_sets_with_plates_in_one_pass():
    case, guide = CASES["nested"], AutoNaMIGuide(CASES["nested"].model)
    guide(*case.arguments())
    scatter(guide)
    latents = {
        "top": torch.randn(6, 1, 1),
        "group": torch.randn(6, 3, 1),
        "member": torch.randn(6, 3, 4),
    }
    data = torch.randn(6, 3, 4)
    batch = guide.log_prob(latents, *case.arguments(), observations={"y": data})
    each = [
        guide.log_prob(
            {name: value[i].reshape(case.shapes[name]) for name, value in latents.items()}, y
        )
        for i, y in enumerate(data)
    ]
    assert batch.shape == (6,) and torch.allclose(batch, torch.stack(each))


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_accepts_what_predictive_returns(inverse):
    """One batch dim in front of each site's own shape, whether or not it lies in plates."""
    case, guide = CASES["regression"], AutoNaMIGuide(regression, inverse=inverse)
    args = case.arguments()
    guide(*args)
    scatter(guide)
    draws = Predictive(lambda *args: guide(*args) and None, num_samples=7)(*args)
    assert draws["w"].shape == (7, 2) and draws["s"].shape == (7,)
    each = [
        guide.log_prob({name: value[i] for name, value in draws.items()}, *args) for i in range(7)
    ]
    assert torch.allclose(guide.log_prob(draws, *args), torch.stack(each))


def test_accepts_the_draws_of_an_outer_plate_as_returned():
    case, guide = CASES["nested"], AutoNaMIGuide(CASES["nested"].model)
    args = case.arguments()
    with pyro.plate("outer", 4, dim=-3):
        values = guide(*args)
    assert guide.log_prob(values, *args).shape == (4,)


def test_a_users_family_is_not_taken_for_the_one_it_derives_from():
    """Latents of one kind are evaluated together, so kinds must not be inherited."""

    class Wide(NormalFamily):
        def elements(self, params, anchor=None):
            return NormalElements(params + torch.tensor([0.0, 1.0]), None, anchor)

    guide = AutoNaMIGuide(CHAIN, families={"a": Wide, "b": "normal", "c": "normal"})
    guide(*CASES["chain"].arguments())
    scatter(guide, 0.2)
    trace, expected = traced(guide, *CASES["chain"].arguments())
    values = values_of(trace, CASES["chain"])
    assert torch.allclose(guide.log_prob(values, *CASES["chain"].arguments()), expected)


def test_gradients_flow_to_parameters_and_values():
    guide, y = AutoNaMIGuide(CHAIN), torch.tensor(1.0)
    guide(y)
    scatter(guide)
    latents = {name: torch.randn((), requires_grad=True) for name in "abc"}
    guide.log_prob(latents, y).backward()
    assert all(value.grad.abs() > 0 for value in latents.values())
    assert all(parameter.grad is not None for parameter in guide.parameters())


def test_no_sites_and_no_draws_are_left_behind():
    guide, y = AutoNaMIGuide(CHAIN), torch.tensor(1.0)
    guide(y)
    state = torch.get_rng_state()
    with poutine.trace() as tracer:
        guide.log_prob({name: torch.tensor(0.1) for name in "abc"}, y)
    assert not [name for name, site in tracer.trace.nodes.items() if site["type"] == "sample"]
    assert torch.equal(torch.get_rng_state(), state)


def test_works_as_the_first_call():
    guide = AutoNaMIGuide(CHAIN)
    assert guide.log_prob({name: torch.tensor(0.1) for name in "abc"}, torch.tensor(1.0)).isfinite()


def two_latents(y, scale=1.0, mask=None):
    """z has a scale and a mask, w has neither."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 3), poutine.scale(scale=scale), poutine.mask(mask=mask):
        z = pyro.sample("z", dist.Normal(w, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_masks_of_the_model_apply_and_scales_do_not(inverse, anchor):
    """Whether or not the guide needs a run of the model for something else."""
    mask, y = torch.tensor([True, False, True]), torch.randn(3)
    guide = AutoNaMIGuide(two_latents, inverse=inverse, anchor=anchor)
    trace, _ = traced(guide, y, 0.25, mask)
    values = {name: trace.nodes[name]["value"] for name in ("w", "z")}
    z = trace.nodes["z"]
    assert z["scale"] == 0.25 and z["log_prob"][1] == 0
    expected = trace.nodes["w"]["log_prob"] + z["log_prob"].sum() / 0.25
    for scale in (0.25, 1.0):
        assert torch.allclose(guide.log_prob(values, y, scale, mask), expected)
