"""Discrete latents of few values are drawn from their exact conditional: against sums over all states."""

from __future__ import annotations

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.ops.indexing import Vindex
from pyro.poutine.messenger import Messenger

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.usefixtures("double", "own_parameters")
Y = torch.tensor([-3.1, 2.4, 0.2, -2.0, 3.3, 0.1, 7.0], dtype=torch.float64)
SEEN = torch.tensor([True, False, True, True, False, True, True])


def assigned(kind, z, values):
    """Returns the value of each row's component, ``(*batch, rows)``."""
    if kind is dist.OneHotCategorical:
        return (z * values).sum(-1)
    if kind is dist.Bernoulli:
        return torch.where(z > 0, values[..., 1], values[..., 0])
    return Vindex(values)[..., z]


def mixture(kind, y, mask=True, weight=1.0):
    """A mixture whose weights and components are drawn before the assignments."""
    size = 2 if kind is dist.Bernoulli else 3
    w = pyro.sample("w", dist.Dirichlet(torch.ones(size)))
    loc = pyro.sample("loc", dist.Normal(torch.zeros(size), 3.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(size), 0.3).to_event(1))
    prior = kind(w[..., 1]) if kind is dist.Bernoulli else kind(w)
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", prior)
        fn = dist.Normal(assigned(kind, z, loc), assigned(kind, z, scale))
        with poutine.mask(mask=mask), poutine.scale(scale=weight):
            pyro.sample("y", fn, obs=y)


def log_posterior(values, y, mask=True, weight=1.0):
    """Returns log p(z = k | w, loc, scale, y), ``(*batch, rows, k)``."""
    components = dist.Normal(values["loc"], values["scale"]).log_prob(y[:, None])
    return (
        values["w"].log() + weight * components * torch.as_tensor(mask).double()[..., None]
    ).log_softmax(-1)


def states(kind):
    if kind is dist.OneHotCategorical:
        return torch.eye(3)
    return torch.arange(2.0) if kind is dist.Bernoulli else torch.arange(3)


def made(model, *args, exact=("z",), **options):
    guide = AutoNaMIGuide(model, **options)
    guide(*args)
    assert guide.conjugate == exact
    return guide


KINDS = pytest.mark.parametrize(
    "kind",
    [dist.Categorical, dist.OneHotCategorical, dist.Bernoulli],
    ids=lambda kind: kind.__name__,
)


@KINDS
@pytest.mark.parametrize(
    "mask, weight", [(True, 1.0), (SEEN, 1.0), (True, 0.3)], ids=["all", "masked", "scaled"]
)
def test_assignments_given_the_globals_are_the_softmax(kind, mask, weight):
    def model(y, mask=mask):
        mixture(kind, y, mask, weight)

    guide = made(model, Y)
    for y, seen in (
        (Y, mask),
        (1.0 - Y.flip(0), mask),
        (Y[:4], mask if mask is True else mask[:4]),
    ):
        with torch.no_grad():
            nodes = poutine.trace(guide).get_trace(y, seen).nodes
            values = {name: nodes[name]["value"] for name in ("w", "loc", "scale")}
            expected = log_posterior(values, y, seen, weight)
            for k, state in enumerate(states(kind)):
                z = state.expand((len(y), *state.shape))
                torch.testing.assert_close(
                    nodes["z"]["fn"].log_prob(z), expected[..., k], rtol=1e-8, atol=1e-8
                )
            z = nodes["z"]["value"]
            sites = {**values, "z": z}
            rest = (
                guide.log_prob({**sites, "z": states(kind)[0].expand(z.shape)}, y, seen)
                - expected[:, 0].sum()
            )
            found = guide.log_prob(sites, y, seen) - nodes["z"]["fn"].log_prob(z).sum()
            torch.testing.assert_close(found, rest, rtol=1e-8, atol=1e-8)


@KINDS
def test_particles_have_assignments_of_their_own(kind):
    guide = made(lambda y: mixture(kind, y), Y)
    with pyro.plate("particles", 5, dim=-2), torch.no_grad():
        nodes = poutine.trace(guide).get_trace(Y).nodes
    values = {name: nodes[name]["value"] for name in ("w", "loc", "scale")}
    assert values["w"].shape[:-1] == (5, 1)
    expected = log_posterior(values, Y)
    for k, state in enumerate(states(kind)):
        z = state.expand((5, len(Y), *state.shape))
        torch.testing.assert_close(
            nodes["z"]["fn"].log_prob(z), expected[..., k], rtol=1e-8, atol=1e-8
        )


def groups(y, group):
    """Each group's state decides of all of its rows: those below it in a plate, and those of another site."""
    p = pyro.sample("p", dist.Beta(torch.tensor(2.0), 2.0))
    with pyro.plate("groups", y.shape[1], dim=-1):
        z = pyro.sample("z", dist.Bernoulli(p))
        pyro.sample("x", dist.Poisson(1 + 2 * z), obs=group)
        with pyro.plate("rows", y.shape[0], dim=-2):
            pyro.sample("y", dist.Normal(z, 1.5), obs=y)


def test_rows_below_an_instance_and_its_other_children_add_up():
    y, counts = Y[:6].reshape(2, 3), torch.tensor([0.0, 5.0, 2.0])
    guide = made(groups, y, counts)
    nodes = poutine.trace(guide).get_trace(y, counts).nodes
    p, fn = nodes["p"]["value"], nodes["z"]["fn"]
    odds = p.log() - (-p).log1p()
    for z, sign in ((torch.ones(()), 1), (torch.zeros(()), -1)):
        odds = odds + sign * (
            dist.Poisson(1 + 2 * z).log_prob(counts) + dist.Normal(z, 1.5).log_prob(y).sum(0)
        )
    torch.testing.assert_close(fn.logits.detach(), odds.detach())


def mixed_globals(y, learned):
    """A mixture whose globals a guide has parameters for."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("y", dist.Normal(assigned(dist.Categorical, z, loc), learned), obs=y)


@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
def test_the_gradient_does_not_depend_on_the_assignments(elbo):
    """log p(z, y | loc) - log q(z | loc, y) is log p(y | loc) whatever z is: no score function is left."""
    args = Y, torch.tensor(1.3)
    guide, found, drawn = made(mixed_globals, *args), [], set()
    loc = guide(*args)["loc"].detach().requires_grad_()
    model, at = (poutine.condition(fn, {"loc": loc}) for fn in (mixed_globals, guide))
    for seed in range(10):
        pyro.set_rng_seed(seed)
        drawn.add(tuple(at(*args)["z"].tolist()))
        pyro.set_rng_seed(seed)
        loss = elbo().differentiable_loss(model, poutine.block(at, expose=["z"]), *args)
        found.append(torch.autograd.grad(loss, loc)[0])
    mixed = torch.tensor([0.3, 0.7]).log() + dist.Normal(loc, args[1]).log_prob(Y[:, None])
    evidence = mixed.logsumexp(-1).sum() + dist.Normal(0.0, 3.0).log_prob(loc).sum()
    (expected,) = torch.autograd.grad(-evidence, loc)
    assert len(drawn) > 1
    torch.testing.assert_close(torch.stack(found), expected.expand(10, -1), rtol=1e-8, atol=1e-8)


class _SameDraw(Messenger):
    """Draws one site by the same noise, whatever the seed; gradients go through it."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def _pyro_sample(self, msg):
        if msg["name"] == self.name and not msg["done"]:
            with torch.random.fork_rng(()):
                torch.manual_seed(0)
                msg["value"], msg["done"] = msg["fn"].rsample(), True


def test_the_gradient_of_the_guides_parameters_depends_on_the_globals_alone():
    """That of `Trace_ELBO`: as z has no score function, what it is decides of nothing."""
    args = Y, torch.tensor(1.3)
    guide, found, drawn = made(mixed_globals, *args, rules={"loc": "learned"}), [], set()
    parameters = [p for p in guide.parameters() if p.requires_grad]

    def same_globals(*args):
        with _SameDraw("loc"):
            return guide(*args)

    for seed in range(10):
        pyro.set_rng_seed(seed)
        trace = poutine.trace(same_globals).get_trace(*args)
        drawn.add(tuple(trace.nodes["z"]["value"].tolist()))
        pyro.set_rng_seed(seed)
        loss = Trace_ELBO().differentiable_loss(mixed_globals, same_globals, *args)
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
        found.append(torch.cat([grad.flatten() for grad in grads]))
    assert len(drawn) > 1 and found[0].abs().max() > 0
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-8, atol=1e-8)


def test_the_bound_is_the_sum_over_all_states():
    args = Y, torch.tensor(1.3)
    guide = made(mixed_globals, *args)
    values = {name: value.detach() for name, value in guide(*args).items()}
    joint = []
    for z in itertools.product(range(2), repeat=len(Y)):
        given = {**values, "z": torch.tensor(z)}
        joint.append(
            poutine.trace(poutine.condition(mixed_globals, given)).get_trace(*args).log_prob_sum()
        )
    nodes = poutine.trace(poutine.condition(guide, values)).get_trace(*args).nodes
    now = poutine.trace(poutine.condition(mixed_globals, values)).get_trace(*args).log_prob_sum()
    found = nodes["z"]["fn"].log_prob(values["z"]).sum()
    torch.testing.assert_close(
        found.detach(), now - torch.stack(joint).logsumexp(0), rtol=1e-8, atol=1e-8
    )


def several(y, read):
    with pyro.plate("states", 4):
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(read(z), 1.0), obs=y)


INDEX = torch.tensor([0, 1, 1, 2, 3, 3, 0])


@pytest.mark.parametrize(
    "read",
    [
        lambda z: z.sum(-1, keepdim=True),
        lambda z: z[..., INDEX] + z[..., INDEX.flip(0)],
        lambda z: z[..., INDEX] * z[..., INDEX.flip(0)],
    ],
    ids=["sum", "pairs", "products"],
)
def test_states_that_data_couple_are_not_enumerated(read):
    made(lambda y: several(y, read), Y, exact=())


def hidden_chain(y):
    z = pyro.sample("z0", dist.Bernoulli(torch.tensor(0.4)))
    for t, value in enumerate(y):
        if t:
            z = pyro.sample(f"z{t}", dist.Bernoulli(0.2 + 0.6 * z))
        pyro.sample(f"y{t}", dist.Normal(z, 1.0), obs=value)


def test_a_short_chain_of_states_is_enumerated_as_a_whole():
    names = ("z0", "z1", "z2")
    guide = made(hidden_chain, Y[:3], exact=names)
    joint, found = [], []
    for state in itertools.product(torch.tensor([0.0, 1.0]), repeat=3):
        values = dict(zip(names, state))
        run = poutine.trace(poutine.condition(hidden_chain, values)).get_trace(Y[:3])
        joint.append(run.log_prob_sum())
        found.append(guide.log_prob(values, Y[:3]).detach())
    expected = torch.stack(joint).log_softmax(0)
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("count, exact", [(64, ("z",)), (65, ())])
def test_64_values_are_the_most(count, exact):
    def model(y):
        z = pyro.sample("z", dist.Categorical(torch.ones(count)))
        pyro.sample("y", dist.Normal(z / 10.0, 1.0), obs=y)

    made(model, Y[0], exact=exact)


# ---- several latents together


def binary(name, share):
    return pyro.sample(name, dist.Bernoulli(share))


def common_datum(x):
    """Four causes of one datum, which its noise does not tell apart."""
    a, b, c, d = (binary(name, share) for name, share in zip("abcd", (0.3, 0.4, 0.5, 0.2)))
    pyro.sample("x", dist.Normal(a + 2 * b + 1.5 * c * d + a * d, 0.7), obs=x)


def sprinkler(x):
    """Rain moves whether the sprinkler is on, and both wet the grass."""
    a = binary("a", 0.2)
    b = binary("b", 0.4 - 0.39 * a)
    pyro.sample("x", dist.Bernoulli(0.01 + 0.8 * a + 0.1 * b + 0.08 * a * b), obs=(x > 0).double())


def steps_of_three(x):
    """A chain too short for a loop, of latents of three values, in a plate, one of them one-hot."""
    moves = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.3, 0.6]], dtype=x.dtype)
    with pyro.plate("rows", 3):
        a = pyro.sample("a", dist.Categorical(moves[0]))
        b = pyro.sample("b", dist.OneHotCategorical(Vindex(moves)[a]))
        pyro.sample("x", dist.Normal((b * torch.arange(3)).sum(-1) - a, 1.0), obs=x + Y[:3])


def joint_states(model, x):
    """Returns the log joint density of all states, ``(states, rows)``, and these, from runs of the model."""
    trace = poutine.trace(model).get_trace(x)
    supports = {
        name: list(trace.nodes[name]["fn"].enumerate_support(expand=True))
        for name in trace.stochastic_nodes
        if name in "abcd"
    }
    states = [dict(zip(supports, each)) for each in itertools.product(*supports.values())]
    heights = []
    for state in states:
        run = poutine.trace(poutine.condition(model, state)).get_trace(x)
        run.compute_log_prob()
        heights.append(sum(run.nodes[name]["log_prob"] for name in (*state, "x")))
    return torch.stack(heights), states


def enumerated(model, x, states):
    guide = AutoNaMIGuide(model)
    guide(x)
    assert set(guide.conjugate) == set(states[0])
    return guide


@pytest.mark.parametrize("model", [common_datum, sprinkler, steps_of_three])
def test_latents_that_data_join_are_enumerated_together(model):
    x = torch.tensor(2.2, dtype=torch.float64)
    heights, states = joint_states(model, x)
    guide = enumerated(model, x, states)
    with torch.no_grad():
        found = torch.stack([guide.log_prob(state, x) for state in states])
        loss = Trace_ELBO(5, vectorize_particles=True, max_plate_nesting=1).loss(model, guide, x)
    rows = heights.reshape(len(states), -1)
    assert loss == pytest.approx(-float(rows.logsumexp(0).sum()), abs=1e-9)
    expected = rows.log_softmax(0).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_latents_drawn_before_leave_the_states_exact():
    """Given the location, the three binary latents have eight states."""

    def model(x):
        loc = pyro.sample("loc", dist.StudentT(4.0, 0.0, 1.0))
        a, b, c = (binary(name, 0.3) for name in "abc")
        pyro.sample("x", dist.Normal(loc + a + 2 * b - c, 0.5), obs=x)

    x = torch.tensor(1.2, dtype=torch.float64)
    guide = enumerated(model, x, [dict.fromkeys("abc")])
    for loc in torch.tensor([-1.0, 0.4], dtype=torch.float64):
        given = poutine.condition(model, {"loc": loc})
        heights, states = joint_states(given, x)
        found = torch.stack([guide.log_prob({**state, "loc": loc}, x) for state in states]).detach()
        torch.testing.assert_close(
            found.log_softmax(0), heights.log_softmax(0), rtol=1e-8, atol=1e-8
        )


def test_more_states_than_a_run_takes_leave_the_first_latents_to_be_learned():
    def model(x):
        total = sum(binary(f"z{i}", 0.3) for i in range(9))
        pyro.sample("x", dist.Normal(total, 1.0), obs=x)

    guide = AutoNaMIGuide(model)
    guide(torch.tensor(1.0))
    (learned,) = set(guide.rules) - set(guide.conjugate)
    assert "512 states, more than 256" in guide.rules[learned].reason
