"""Latents that a model masks: derived where they count, against models without the rows that do not."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import steps
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from pyro.ops.indexing import Vindex

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.usefixtures("double", "own_parameters")
ROWS = 9
KNOWN = torch.tensor([True, False, True, True, False, True, False, True, True])
W = torch.linspace(-1.0, 1.0, ROWS, dtype=torch.float64)
Y = torch.tensor([0.3, -1.1, 2.0, 0.7, 1.5, -0.4, 3.1, 0.2, 1.0], dtype=torch.float64)
BINARY = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0, 1], dtype=torch.float64)
COUNTS = torch.tensor([1.0, 0, 3, 2, 4, 0, 7, 1, 2], dtype=torch.float64)


def partly_known(name, fn, likelihood, values, known, y, split, covariate=W):
    """Latents that are known in some rows: by `obs_mask`, or known and unknown rows as sites of their own."""
    if not split:
        with pyro.plate("rows", len(y)):
            z = pyro.sample(name, fn, obs=values, obs_mask=known)
            pyro.sample("y", likelihood(z, covariate), obs=y)
        return
    for suffix, rows in (("_observed", known), ("_unobserved", ~known)):
        with pyro.plate("rows" + suffix, int(rows.sum())):
            obs = values[rows] if suffix == "_observed" else None
            z = pyro.sample(name + suffix, fn, obs=obs)
            pyro.sample("y" + suffix, likelihood(z, covariate[rows]), obs=y[rows])


def effects(known=KNOWN, y=Y, split=False):
    m = pyro.sample("m", dist.Normal(0.0, 3.0))
    t = pyro.sample("t", dist.LogNormal(torch.tensor(0.0), 0.5))
    partly_known("z", dist.Normal(m, t), lambda z, w: dist.Normal(z, 0.7), W + 1, known, y, split)


def covariate(known=KNOWN, y=Y, split=False):
    m, a = (pyro.sample(name, dist.Normal(0.0, 3.0)) for name in "ma")
    b = pyro.sample("b", dist.Normal(torch.tensor(0.0), 2.0))
    partly_known(
        "z", dist.Normal(m, 1.0), lambda z, w: dist.Normal(a + b * z, 0.7), W + 1, known, y, split
    )


def rates(known=KNOWN, y=COUNTS, split=False):
    r = pyro.sample("r", dist.LogNormal(torch.tensor(0.0), 0.5))
    partly_known("z", dist.Gamma(2.0, r), lambda z, w: dist.Poisson(z), W + 2, known, y, split)


def log_rates(known=KNOWN, y=COUNTS, split=False):
    """Modes, or quadrature, of latents with an element an instance."""
    m = pyro.sample("m", dist.Normal(torch.tensor(0.0), 2.0))
    partly_known(
        "z", dist.Normal(m, 0.8), lambda z, w: dist.Poisson(z.exp()), W + 1, known, y, split
    )


def pairs_of_log_rates(known=KNOWN, y=COUNTS, split=False):
    """Normals about modes, of vectors."""
    m = pyro.sample("m", dist.Normal(torch.tensor(0.0), 2.0))
    fn = dist.Normal(m.unsqueeze(-1) + torch.zeros(2), 0.8).to_event(1)
    values = torch.stack((W + 1, W), -1)
    partly_known(
        "z", fn, lambda z, w: dist.Poisson((z[..., 0] - z[..., 1]).exp()), values, known, y, split
    )


def elbos(guide, model, *args, count=4):
    with torch.no_grad():
        return torch.tensor([-Trace_ELBO().loss(model, guide, *args) for _ in range(count)])


@pytest.mark.parametrize("model", [effects, covariate, rates])
def test_the_evidence_is_that_of_known_and_unknown_rows_as_sites_of_their_own(model):
    found = {}
    for split in (False, True):
        guide = AutoNaMIGuide(model)
        guide(split=split)
        assert {note.rule for note in guide.rules.values()} <= {"exact", "quadrature"}
        found[split] = elbos(
            guide, model, KNOWN, W.cos() + 1 if model is not rates else COUNTS, split
        )
        # far out in the tails of a grid one draw of a thousand is off by more
        off = (found[split] - found[split].median()).abs().sort().values
        assert off[-2] < 0.02
    assert found[False].median() == pytest.approx(float(found[True].median()), abs=0.02)


def crossed(known, y):
    """Two effects of a grid, of which one is known in part: one dense vector."""
    m = pyro.sample("m", dist.Normal(torch.tensor(0.0), 2.0))
    with pyro.plate("columns", y.shape[1], dim=-1):
        a = pyro.sample("a", dist.Normal(m, 1.5), obs=W[: y.shape[1]], obs_mask=known)
    with pyro.plate("rows", y.shape[0], dim=-2):
        b = pyro.sample("b", dist.Normal(m, 0.5))
        with pyro.plate("cells", y.shape[1], dim=-1):
            pyro.sample("y", dist.Normal(a + b, 0.7), obs=y)


def evidence_of_crossed(known, y):
    """Returns the log density of what is known of a, and y, as one vector with a Normal distribution."""
    rows, columns = y.shape
    of_m, a, b = torch.ones(rows * columns), torch.eye(columns), torch.eye(rows)
    load = torch.cat(
        (
            torch.cat((torch.ones(columns, 1), a, torch.zeros(columns, rows)), 1)[known],
            torch.cat((2 * of_m[:, None], a.repeat(rows, 1), b.repeat_interleave(columns, 0)), 1),
        )
    )
    scale = torch.cat((torch.tensor([2.0]), torch.full((columns,), 1.5), torch.full((rows,), 0.5)))
    noise = torch.cat((torch.zeros(int(known.sum())), torch.full((rows * columns,), 0.7)))
    covariance = (load * scale) @ (load * scale).T + torch.diag(noise.square())
    vector = torch.cat((W[:columns][known], y.flatten()))
    return dist.MultivariateNormal(torch.zeros(len(vector)), covariance).log_prob(vector)


def test_a_dense_block_with_masked_elements_is_exact_at_every_mask():
    y = torch.stack((Y[:4], Y[4:8], 1 - Y[:4]))
    guide = AutoNaMIGuide(crossed)
    masks = KNOWN[:4], ~KNOWN[:4], torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
    for known in masks:
        found = elbos(guide, crossed, known, y)
        assert guide.rules["a_unobserved"].rule == guide.rules["b"].rule == "exact"
        torch.testing.assert_close(
            found, evidence_of_crossed(known, y).expand(4), rtol=0, atol=1e-5
        )


def test_what_is_kept_of_a_block_in_training_goes_with_its_mask():
    y = torch.stack((Y[:4], Y[4:8]))
    guide = AutoNaMIGuide(crossed)
    for known in (KNOWN[:4], ~KNOWN[:4]):
        # after which other data are those of training
        losses = steps(crossed, guide, known, y, count=8)[2:]
        torch.testing.assert_close(
            -losses,
            evidence_of_crossed(known, y).float().expand(6),
            rtol=0,
            atol=1e-3,
            check_dtype=False,
        )


@pytest.mark.parametrize("model", [log_rates, pairs_of_log_rates])
def test_conditionals_about_modes_are_those_without_the_rows_that_are_known(model):
    found, m = {}, torch.tensor(0.4)
    for split in (False, True):
        guide = AutoNaMIGuide(model)
        guide(split=split)
        assert guide.rules["z_unobserved"].rule in ("newton", "quadrature")
        for known in (KNOWN, KNOWN.roll(1)):
            nodes = (
                poutine.trace(poutine.condition(guide, {"m": m}))
                .get_trace(known, split=split)
                .nodes
            )
            fn = nodes["z_unobserved"]["fn"]
            rows = slice(None) if split else ~known
            z = torch.linspace(-0.5, 1.5, ROWS)[slice(None) if not split else ~known]
            z = z if fn.event_dim == 0 else torch.stack((z, -z), -1)
            found.setdefault(split, []).append(fn.log_prob(z)[rows])
    for masked, apart in zip(found[False], found[True]):
        torch.testing.assert_close(masked, apart, rtol=1e-4, atol=1e-4)


def test_draws_where_a_latent_is_masked_are_of_its_prior_and_count_nothing():
    guide = AutoNaMIGuide(effects)
    guide()
    with pyro.plate("particles", 4000, dim=-2), torch.no_grad():
        nodes = poutine.trace(guide).get_trace()
    nodes.compute_log_prob()
    site = nodes.nodes["z_unobserved"]
    assert (site["log_prob"][..., KNOWN] == 0).all() and (site["log_prob"][..., ~KNOWN] != 0).all()
    noise = (site["value"] - nodes.nodes["m"]["value"]) / nodes.nodes["t"]["value"]
    assert noise[..., KNOWN].mean().abs() < 0.05 and noise[..., KNOWN].std() == pytest.approx(
        1.0, abs=0.05
    )


def test_a_latent_that_was_all_masked_at_the_first_call_is_named_where_it_counts():
    guide = AutoNaMIGuide(covariate)
    guide(torch.ones_like(KNOWN))
    with pytest.warns(
        UserWarning, match="All of 'z_unobserved' was masked at the guide's first call"
    ):
        guide(KNOWN)


# ---- discrete latents


def logistic(known=KNOWN, y=BINARY, split=False):
    p = pyro.sample("p", dist.Beta(torch.tensor(2.0), 2.0))
    a, b = (pyro.sample(name, dist.Normal(torch.tensor(0.0), 2.0)) for name in "ab")

    def likelihood(z, w):
        return dist.Bernoulli(logits=a + b * z + w)

    partly_known("z", dist.Bernoulli(p), likelihood, BINARY.flip(0), known, y, split)


def linear(known=KNOWN, y=Y, split=False):
    p = pyro.sample("p", dist.Beta(torch.tensor(2.0), 2.0))
    a, b = (pyro.sample(name, dist.Normal(torch.tensor(0.0), 2.0)) for name in "ab")
    partly_known(
        "z", dist.Bernoulli(p), lambda z, w: dist.Normal(a + b * z, 0.7), BINARY, known, y, split
    )


def mixture(known=KNOWN, y=Y, split=False):
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    a = pyro.sample("a", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    classes = torch.arange(ROWS) % 3
    partly_known(
        "z",
        dist.Categorical(p),
        lambda z, w: dist.Normal(Vindex(a)[..., z], 0.7),
        classes,
        known,
        y,
        split,
    )


@pytest.mark.parametrize("vectorized", [False, True], ids=["alone", "particles"])
@pytest.mark.parametrize("model", [logistic, linear, mixture])
def test_discrete_latents_are_enumerated_where_they_are_unknown(model, vectorized):
    guide = AutoNaMIGuide(model)
    guide()
    assert guide.rules["z_unobserved"].rule == "exact"
    states = torch.arange(3) if model is mixture else torch.arange(2.0)
    for known in (KNOWN, ~KNOWN, torch.ones_like(KNOWN)):
        with pyro.plate("particles", 5 if vectorized else 1, dim=-2), torch.no_grad():
            guided = poutine.trace(guide).get_trace(known)
            guided.compute_log_prob()
            values = {
                name: guided.nodes[name]["value"]
                for name in guided.nodes
                if name in ("p", "a", "b")
            }
            joint = []
            for state in states:
                z = state.expand(guided.nodes["z_unobserved"]["value"].shape)
                replayed = poutine.condition(model, {**values, "z_unobserved": z})
                nodes = poutine.trace(replayed).get_trace(known).nodes
                joint.append(
                    sum(
                        nodes[name]["fn"].log_prob(nodes[name]["value"])
                        for name in ("z_unobserved", "y")
                    )
                )
        expected, fn = torch.stack(joint).log_softmax(0), guided.nodes["z_unobserved"]["fn"]
        for state, log_prob in zip(states, expected):
            found = fn.log_prob(state.expand(log_prob.shape))
            torch.testing.assert_close(found[..., ~known], log_prob[..., ~known])
        assert (guided.nodes["z_unobserved"]["log_prob"][..., known] == 0).all()


@pytest.mark.parametrize("model", [logistic, linear, mixture])
def test_densities_are_those_of_known_and_unknown_rows_as_sites_of_their_own(model):
    """With the same weights, as only the conditionals of unknown rows differ in shape."""
    masked, apart = AutoNaMIGuide(model), AutoNaMIGuide(model)
    values = dict(masked())
    apart(split=True)
    z = values.pop("z_unobserved")
    exact = []
    for guide, split, at in ((masked, False, z), (apart, True, z[~KNOWN])):
        trace = poutine.trace(poutine.condition(guide, values)).get_trace(split=split)
        exact.append(trace.nodes["z_unobserved"]["fn"].log_prob(at))
    torch.testing.assert_close(exact[0][~KNOWN], exact[1])


# ---- padded rows


def padded(kind, y, seen):
    """A mixture, and a Normal beside it, in rows of which some are padding."""
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    a = pyro.sample("a", dist.Normal(torch.tensor([-1.0, 2.0]), 1.0).to_event(1))
    own = seen if kind == "distribution" else True
    with pyro.plate("rows", len(y)), poutine.mask(mask=seen if kind == "handler" else True):
        z = pyro.sample("z", dist.Categorical(p).mask(own))
        e = pyro.sample("e", dist.Normal(0.0, 1.0).mask(own))
        pyro.sample("y", dist.Normal(Vindex(a)[..., z], 0.5).mask(own), obs=y)
        pyro.sample("x", dist.Normal(e, 1.0).mask(own), obs=y.flip(0))


@pytest.mark.parametrize("kind", ["handler", "distribution"])
def test_padding_changes_no_density(kind):
    seen = torch.arange(ROWS) < 6
    y = Y.where(seen, torch.tensor(50.0))
    guide = AutoNaMIGuide(padded)
    values = guide(kind, y, seen)
    assert guide.rules["z"].rule == guide.rules["e"].rule == "exact"
    z, e = values["z"].where(seen, 1 - values["z"]), values["e"].where(seen, torch.tensor(7.0))
    other = {**values, "z": z, "e": e}
    assert torch.equal(guide.log_prob(values, kind, y, seen), guide.log_prob(other, kind, y, seen))
    loss = poutine.trace(guide).get_trace(kind, y, seen)
    loss.compute_log_prob()
    for name in ("z", "e"):
        assert (loss.nodes[name]["log_prob"][~seen] == 0).all()
        assert (loss.nodes[name]["log_prob"][seen] != 0).all()


@pytest.mark.parametrize("kind", ["handler", "distribution"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "learned"])
def test_padding_leaves_the_elbo_as_it_is(kind, exact):
    """Learned as well: a density that counted in padding would grow with its width."""
    seen = torch.arange(ROWS) < 6
    guide = AutoNaMIGuide(padded, exact=exact)
    steps(padded, guide, kind, Y, seen, count=30, lr=0.02)
    rows = poutine.trace(guide).get_trace(kind, Y, seen)
    rows.compute_log_prob()
    assert all((rows.nodes[name]["log_prob"][~seen] == 0).all() for name in ("z", "e"))


def subsampled(seen, y=Y, size=None):
    p = pyro.sample("p", dist.Beta(torch.tensor(2.0), 2.0))
    a = pyro.sample("a", dist.Normal(torch.tensor(0.0), 2.0))
    with pyro.plate("rows", len(y), subsample_size=size) as rows, poutine.mask(mask=seen[rows]):
        z = pyro.sample("z", dist.Bernoulli(p))
        pyro.sample("y", dist.Normal(a + 2 * z, 0.7), obs=y[rows])


@pytest.mark.filterwarnings("error")
def test_masks_of_subsampled_rows_are_theirs():
    guide = AutoNaMIGuide(subsampled)
    guide(KNOWN, Y, 4)
    assert guide.rules["z"].rule == "exact"
    for seen in (KNOWN, ~KNOWN):
        elbo = Trace_ELBO(3, vectorize_particles=True, max_plate_nesting=1)
        steps(subsampled, guide, seen, Y, 4, elbo=elbo)
        nodes = poutine.trace(guide).get_trace(seen, Y, 4)
        nodes.compute_log_prob()
        rows = nodes.nodes["rows"]["value"]
        assert ((nodes.nodes["z"]["log_prob"] == 0) == ~seen[rows]).all()


# ---- priors that are masked where their values are read


@pytest.mark.parametrize("kind", ["handler", "distribution"])
def test_a_masked_prior_of_what_data_read_is_flat(kind):
    """As for AutoNormal, whose density counts there: the posterior under a flat prior, not a point."""

    def model(y):
        with poutine.mask(mask=kind != "handler"):
            b = pyro.sample("b", dist.Normal(torch.tensor(0.0), 1.0).mask(kind == "handler"))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(b, 1.0), obs=y)

    guide = AutoNaMIGuide(model)
    steps(model, guide, Y, count=600, lr=0.02)
    drawn = Predictive(guide, num_samples=4000)(Y)["b"]
    assert drawn.mean() == pytest.approx(float(Y.mean()), abs=0.05)
    assert drawn.std() == pytest.approx(ROWS**-0.5, rel=0.1)
    assert "masked where something reads it" in str(guide.rules["b"])
