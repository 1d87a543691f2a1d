"""Evidence that adds: the posterior contracts with the number of instances, at sizes never trained on as well.

The models are linear-Gaussian with known variances, so every factor's exact conditional is a Normal in closed form, and
a factor is compared with it at 20, 200 and 2,000 instances after it was fitted at 5 to 50. Means and precisions of a
factor are read off its log density, which is quadratic, by differentiation.
"""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import amortized, local_normals, minimize, noise, scatter
from models import varying_intercept as groups
from pyro import poutine
from pyro.infer.autoguide import init_to_feasible, init_to_value

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("double")]
NOISE = 0.5
STEPS = 2000
LEARNED_MEAN = {"mu": "learned"}


def hierarchy(size, y=None):
    """mu, then z_n | mu, then y_n | z_n: y_n | mu has variance 1 + NOISE^2."""
    local_normals(y, rows=size, likelihood=noise(NOISE))


def hierarchy_posterior(y):
    """Returns mean and precision of mu given y ``(*sets, N)``."""
    weight = 1 / (1 + NOISE**2)
    precision = 1 + y.shape[-1] * weight
    return weight * y.sum(-1) / precision, torch.tensor(precision)


def slope(x, y=None):
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(b * x, NOISE), obs=y)


def crossed(county, counties, day, days, y=None):
    with pyro.plate("county", counties):
        alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
    with pyro.plate("day", days):
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    with pyro.plate("obs", len(day)):
        pyro.sample("y", dist.Normal(alpha[..., county] + beta[..., day], NOISE), obs=y)


def conditional(guide, name, values, *args, **kwargs):
    """Returns mean and precision of a latent given the others and the data, one for each of its instances."""
    value = values[name].clone().requires_grad_()
    trace = poutine.trace(poutine.condition(guide, {**values, name: value})).get_trace(
        *args, **kwargs
    )
    trace.compute_log_prob()
    log_prob = trace.nodes[name]["log_prob"].sum()
    (slope,) = torch.autograd.grad(log_prob, value, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), value, create_graph=True)
    return value - slope / curve, -curve


def divergence(found, exact):
    """Returns KL(found || exact) in nats, the mean over instances of Normals given as (mean, precision)."""
    (mean, precision), (exact_mean, exact_precision) = found, exact
    ratio = exact_precision / precision
    return 0.5 * (ratio - 1 - ratio.log() + exact_precision * (mean - exact_mean) ** 2).mean()


def fit(guide, name, loss, weigh=False):
    """Minimizes without noise over what the exact family needs: evidence, and constants beside it.

    Args:
        guide: a guide without hidden layers.
        name: the latent whose factor is fitted.
        loss: a function that returns the loss.
        weigh: whether instances may weigh differently.
    """
    output = guide.network.places[name].group.mlp.output_unconstrained
    with torch.no_grad():
        # a share of the precision worth a descent
        output[guide.network.places[name].factor.num_params, -1] += math.log(300)
    bias = torch.zeros_like(output)
    bias[:, -1] = 1
    output.register_hook(bias.mul)
    optimizer = torch.optim.LBFGS(
        [output, *guide.network.evidence.parameters()] if weigh else [output],
        max_iter=200,
        line_search_fn="strong_wolfe",
        tolerance_change=1e-9,
    )
    minimize(optimizer, loss)


def means_and_sds(found, exact):
    """Returns the largest errors of means, in exact sds, and of sds, relative."""
    (mean, precision), (exact_mean, exact_precision) = found, exact
    sd = exact_precision**-0.5
    return ((mean - exact_mean) / sd).abs().max().item(), (
        precision**-0.5 / sd - 1
    ).abs().max().item()


# ---- the exact posterior is in the family


@pytest.mark.parametrize("anchor", [True, False])
def test_a_global_mean_at_forty_times_the_size(anchor):
    guide = amortized(
        hierarchy, hidden_features=(), init_scale=0.5, anchor=anchor, rules=LEARNED_MEAN
    )
    training = [torch.randn(()) + 1.1 * torch.randn(size) for size in (5, 8, 16, 30, 50)]
    # whose spread is that of all: networks read in logs what is over ten times that away
    guide(50, training[-1])

    def found(y):
        values = {"mu": torch.tensor(0.1), "z": torch.zeros(len(y))}
        return conditional(guide, "mu", values, len(y), y)

    fit(guide, "mu", lambda: sum(divergence(found(y), hierarchy_posterior(y)) for y in training))
    for size in (20, 200, 2000):
        y = torch.randn(()) + 1.1 * torch.randn(size)
        mean, sd = means_and_sds(found(y), hierarchy_posterior(y))
        assert mean < 0.01 and sd < 0.01, (size, mean, sd)


def test_a_slope_whose_instances_weigh_differently():
    """Instance n knows b with precision (x_n / NOISE)^2: its weight depends on its covariate."""
    guide = amortized(slope, hidden_features=(), init_scale=0.5, exact=False)

    def data(sets, size):
        x = 2 * torch.randn(size)
        return x, torch.randn(sets, 1) * x + NOISE * torch.randn(sets, size)

    def found(x, y):
        with pyro.plate("sets", len(y), dim=-2):
            values = {"b": torch.full((len(y), 1), 0.2)}
            mean, precision = conditional(guide, "b", values, x, observations={"y": y})
        return mean.squeeze(-1), precision.squeeze(-1)

    def exact(x, y):
        precision = 1 + (x**2).sum() / NOISE**2
        return (x * y).sum(-1) / NOISE**2 / precision, precision

    training = [data(10, size) for size in (5, 5, 8, 8, 16, 30, 50)]
    x, y = training[-1]
    # whose spread no other data are over ten times of, which networks read in logs
    guide(x, y[y.std(-1).argmax()])
    # an instance's slope is its covariate, the second of its inputs, but for what `fit` finds
    with torch.no_grad():
        guide.network.evidence[0].heads_weight_unconstrained[1] = torch.tensor([0.0, 1.0, 0.0])
    fit(
        guide,
        "b",
        lambda: sum(divergence(found(*each), exact(*each)) for each in training),
        weigh=True,
    )
    for size in (20, 200, 2000):
        each = data(3, size)
        mean, sd = means_and_sds(found(*each), exact(*each))
        assert mean < 0.05 and sd < 0.02, (size, mean, sd)


def test_groups_of_any_size_and_number():
    """alpha_j given mu: its own rows, few at the fit, many later; empty groups have the prior."""
    guide = amortized(groups, inverse="reverse", hidden_features=(), init_scale=0.5, exact=False)

    def data(counties, most):
        county = torch.cat(
            [torch.full((int(torch.randint(1, most + 1, ())),), j) for j in range(counties)]
        )
        mu = torch.randn(())
        alpha = mu + torch.randn(counties)
        return county, counties, alpha[county] + NOISE * torch.randn(len(county)), mu

    def found(county, counties, y, mu):
        values = {"mu": mu, "alpha": torch.full((counties,), 0.3)}
        return conditional(guide, "alpha", values, county, counties, y)

    def exact(county, counties, y, mu):
        precision = 1 + torch.zeros(counties).index_add(0, county, torch.ones(len(y))) / NOISE**2
        return (
            mu + torch.zeros(counties).index_add(0, county, y) / NOISE**2
        ) / precision, precision

    training = [data(6, 12) for _ in range(4)]
    # whose spread no other data are over ten times of, which networks read in logs
    guide(*data(30, 12)[:3])
    fit(guide, "alpha", lambda: sum(divergence(found(*each), exact(*each)) for each in training))
    county, counties, y, mu = data(30, 200)
    for each in (training[0], (county, counties, y, mu), (county, counties + 2, y, mu)):
        mean, sd = means_and_sds(found(*each), exact(*each))
        assert mean < 0.01 and sd < 0.01, (mean, sd)


@pytest.mark.slow
def test_training_by_simulation_reaches_sizes_never_trained_on():
    """N log-uniform in 5..50, and 20, 200 and 2,000 tried, by 100 data sets each.

    What is learned of a single instance may be off by a constant: by 0.011 at seed 0 and 0.022 at seed 7, after twice
    as many steps. Deviations of the posteriors are 0.24, 0.08 and 0.03.
    """
    guide = amortized(hierarchy, exact=False)
    guide(20, torch.randn(20))
    optimizer = torch.optim.Adam(guide.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=STEPS)

    def simulate(sets, size):
        m = torch.randn(sets, 1)
        z = m + torch.randn(sets, size)
        return {"mu": m, "z": z}, z + NOISE * torch.randn(sets, size)

    for _ in range(STEPS):
        size = round(math.exp(math.log(5) + math.log(10) * torch.rand(()).item()))
        values, y = simulate(64, size)
        loss = -guide.log_prob(values, size, observations={"y": y}).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for size, wide in ((20, 0.15), (200, 0.15), (2000, 0.25)):
        values, y = simulate(100, size)
        with pyro.plate("sets", 100, dim=-2):
            mean, precision = conditional(guide, "mu", values, size, observations={"y": y})
        exact_mean, exact_precision = hierarchy_posterior(y)
        sd = exact_precision**-0.5
        assert (mean.squeeze(-1) - exact_mean).abs().mean() < 0.05, size
        assert (precision**-0.5 / sd - 1).abs().mean() < wide, size


# ---- by construction, whatever the weights


def scatter_evidence(guide):
    """Moves what the evidence is made of, and leaves the rest of the guide at its initial values."""
    with torch.no_grad():
        for parameter in guide.network.evidence.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def naturals(mean, precision):
    return torch.stack((precision, precision * mean))


@pytest.mark.parametrize(
    "families", [None, {"mu": "flow"}, "flow"], ids=["normal", "flow", "all flows"]
)
@pytest.mark.parametrize("anchor", [True, False])
def test_precision_and_weighted_mean_are_sums_over_instances(families, anchor):
    """Of the union of two sets and of k copies of one: P - P_0 and P mean - P_0 mean_0 add."""
    guide = amortized(
        hierarchy, families=families, anchor=anchor, init_scale=0.5, rules=LEARNED_MEAN
    )
    guide(6, torch.randn(6))
    scatter_evidence(guide)

    def found(y):
        # at the mode, near which an untrained spline is the identity
        values = {"mu": torch.tensor(0.05), "z": torch.zeros(len(y))}
        return naturals(*conditional(guide, "mu", values, len(y), y))

    one, other = torch.randn(6), torch.randn(9)
    both = torch.cat((one, other))
    base = found(one) + found(other) - found(both)
    assert (found(one)[0] > base[0]) and base[0] > 0
    for copies in (2, 7):
        assert torch.allclose(found(one.repeat(copies)) - base, copies * (found(one) - base))
    assert torch.allclose(base[0], torch.tensor(4.0)), (
        "the precision of init_scale, but for evidence"
    )


def assert_rows_add(guide, name, values, before, after):
    """In one call with 0, 1, 2 and 50 copies of one row, at arguments before the rows' members and after them."""
    scatter_evidence(guide)
    copies = torch.tensor([0, 1, 2, 50])
    own = torch.arange(4).repeat_interleave(copies)
    found = naturals(
        *conditional(guide, name, values, *before, own, *after, torch.full((53,), 1.3))
    )
    step = found[:, 1] - found[:, 0]
    assert step[0] > 0
    assert torch.allclose(found, found[:, :1] + step.unsqueeze(-1) * copies)


def test_the_evidence_of_a_group_is_that_of_its_own_rows():
    guide = amortized(groups, inverse="reverse", init_scale=0.5, exact=False)
    guide(torch.tensor([0, 1, 1, 2]), 3, torch.randn(4))
    assert_rows_add(guide, "alpha", {"mu": torch.tensor(0.3), "alpha": torch.zeros(4)}, (), (4,))


def test_the_evidence_of_a_blocks_member_is_that_of_its_own_rows():
    """Member by member of the block that a crossed design makes, whose size is fixed but not the number of rows."""
    guide = amortized(crossed, init_scale=0.5, init_loc_fn=init_to_feasible, exact=False)
    guide(torch.arange(8) % 5, 5, torch.arange(8) % 4, 4, torch.randn(8))
    (block,) = [each.factor for each in guide.network.places.values() if each.factor.joint]
    assert block.name == "beta" and block.num_elements == 4 and len(block.pseudo) == 1
    values = {"alpha": torch.zeros(5), "beta": torch.zeros(4)}
    assert_rows_add(guide, "beta", values, (torch.arange(53) % 5, 5), (4,))


@pytest.mark.parametrize("families", [None, "flow"])
@pytest.mark.parametrize("model", [hierarchy, slope, groups])
def test_evidence_can_be_turned_off(model, families):
    args = {
        hierarchy: (6, torch.randn(6)),
        slope: (torch.randn(6), torch.randn(6)),
        groups: (torch.tensor([0, 1, 2, 2, 1, 0]), 3, torch.randn(6)),
    }[model]
    with pyro.settings.context(module_local_params=True):
        plain = amortized(model, inverse="reverse", evidence=False, families=families, exact=False)
        guide = amortized(model, inverse="reverse", families=families, exact=False)
        for one in (plain, guide):
            one(*args)
    assert not any("evidence" in name for name, _ in plain.named_parameters())
    assert any("evidence" in name for name, _ in guide.named_parameters())
    assert sum(p.numel() for p in plain.parameters()) < sum(p.numel() for p in guide.parameters())


def test_families_without_evidence_have_none():
    guide = amortized(hierarchy, families={"mu": "mixture"}, rules=LEARNED_MEAN)
    guide(6, torch.randn(6))
    assert not guide.network.places["mu"].factor.pseudo and not list(
        guide.network.evidence.parameters()
    )


# ---- the first step


@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize("families", [None, "flow"])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_guide_starts_at_init_loc_fn_and_init_scale(anchor, families, scale):
    """Within 1% of the scale, at data far from the location as well."""
    start = {"mu": torch.tensor(0.4), "alpha": torch.tensor([0.3, 0.3, 0.3, 0.3])}
    county = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3])
    guide = amortized(
        groups,
        inverse="reverse",
        anchor=anchor,
        families=families,
        init_loc_fn=init_to_value(values=start),
        init_scale=scale,
        exact=False,
    )
    y = 50 + 10 * torch.randn(10)
    guide(county, 4, y)
    for name in start:
        mean, precision = conditional(guide, name, start, county, 4, y)
        assert ((mean - start[name]).abs() < 0.01 * scale).all()
        assert ((precision**-0.5 / scale - 1).abs() < 0.01).all()


def test_every_parameter_of_the_evidence_learns_from_the_first_step():
    guide = amortized(hierarchy, rules=LEARNED_MEAN)
    y = 1 + torch.randn(8)
    guide(8, y)
    (-guide.log_prob({"mu": torch.tensor(1.0), "z": y}, 8, y)).backward()
    for name, parameter in guide.network.evidence.named_parameters():
        assert (parameter.grad != 0).any(), name
    assert [*guide.network.evidence.named_parameters()]


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_evidence_adds_beside_every_encoder(pooling):
    """What it adds to the precision is in proportion to the rows, whatever the network makes of their features."""
    guide = amortized(hierarchy, pooling=pooling, exact=False)
    guide(6, torch.randn(6))
    scatter(guide, 0.1)
    y, copies = torch.randn(6), torch.tensor([100, 200, 400])

    def precisions():
        found = []
        for size in (6 * copies).tolist():
            values = {"mu": torch.tensor(0.0), "z": torch.zeros(size)}
            found.append(conditional(guide, "mu", values, size, y.repeat(size // 6))[1])
        return torch.stack(found)

    whole = precisions()
    with torch.no_grad():
        log_weight = guide.network.places["mu"].group.mlp.output_unconstrained[
            guide.network.places["mu"].factor.num_params
        ]
        log_weight.zero_()[-1] = -30.0  # next to no evidence
    added = whole - precisions()
    assert added[0] > 0.1
    assert torch.allclose(added, added[0] * copies / copies[0])
