"""Missing values: `obs_mask`, NaN and `poutine.mask`; factors read values and pattern, and nothing behind a mask."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import amortized, made_once, ready, steps
from pyro import poutine
from pyro.infer import Predictive

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("double")]
NAN, ROWS = float("nan"), 6
PATTERN = torch.tensor([True, False, True, True, False, True])
EVERY, NONE = torch.ones_like(PATTERN), torch.zeros_like(PATTERN)


def rows(y, observe):
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        observe(pyro.sample("z", dist.Normal(m, 1.0)))


def masked(y, mask):
    """`poutine.mask`: the values are there, but count for nothing."""

    @poutine.mask(mask=mask)
    def observe(z):
        pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    rows(y, observe)


def observed_in_part(y, mask):
    """`obs_mask`: the other entries are latents, y_unobserved."""
    rows(y, lambda z: pyro.sample("y", dist.Normal(z, 0.5), obs=y, obs_mask=mask))


def nan_marked(y, mask):
    """NaN marks what is missing; the model makes it so."""
    given = torch.where(mask, y, torch.full_like(y, NAN))
    rows(y, lambda z: pyro.sample("y", dist.NanMaskedNormal(z, 0.5), obs=given))


def groups(y, mask, county, counties):
    """Behind an index map: masked, or marked by NaN where there is no mask."""
    with pyro.plate("county", counties):
        alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)), poutine.mask(mask=mask):
        likelihood = dist.NanMaskedNormal if mask is True else dist.Normal
        pyro.sample("y", likelihood(alpha[..., county], 0.5), obs=y)


MODELS = [masked, observed_in_part, nan_marked]
ALL = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])


@made_once
def made(model, **options):
    """Returns a guide that was called on data with a pattern, and these data."""
    y = torch.randn(ROWS)
    return ready(model, y, PATTERN, **options), y


def filled(y, mask, value):
    return torch.where(mask, y, torch.tensor(value))


def densities(guide, *args):
    """Returns log q of every latent that has a factor, at fixed values."""
    size = len(args[0])
    values = {"m": torch.tensor(0.3), "z": torch.linspace(-1.0, 1.0, size)}
    trace = poutine.trace(poutine.condition(guide, values)).get_trace(*args)
    trace.compute_log_prob()
    return torch.cat([trace.nodes[name]["log_prob"].reshape(-1) for name in values])


# ---- nothing behind a mask is read


@ALL
@DIRECTIONS
@pytest.mark.parametrize("evidence", [True, False])
def test_what_stands_in_masked_entries_is_not_read_and_differs_from_any_value_that_is_there(
    model, inverse, evidence
):
    """Also where each is at the value that a missing one is read as, whichever that may be: 0, or the mean."""
    guide, y = made(model, inverse=inverse, evidence=evidence)
    before = densities(guide, y, PATTERN)
    assert before.isfinite().all()
    for filler in (0.0, -999.0, 1e30, NAN):
        assert torch.equal(densities(guide, filled(y, PATTERN, filler), PATTERN), before)
    for value in (0.0, 0.7):
        there = filled(y, PATTERN, value)
        changed = densities(guide, there, EVERY) != densities(guide, there, PATTERN)
        if inverse == "forward":  # z is one block, and m reads z
            assert changed[1]
        else:
            assert torch.equal(changed, torch.cat((torch.tensor([True]), ~PATTERN)))


@ALL
def test_masks_are_read(model):
    y = torch.randn(ROWS)
    guide = ready(model, y, PATTERN)
    before = densities(guide, y, PATTERN)
    assert torch.equal(densities(guide, filled(y, PATTERN, -999.0), PATTERN), before)
    assert not torch.equal(densities(guide, y, ~PATTERN), before)


@ALL
def test_what_stands_in_masked_entries_at_the_first_call_leaves_no_trace(model):
    """Not in the networks' shifts and scales, nor in the initial values."""
    y = torch.randn(ROWS)
    states = []
    for value in (0.0, -999.0, NAN):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        guide = amortized(model)
        guide(filled(y, PATTERN, value), PATTERN)
        states.append({k: v for k, v in guide.state_dict().items() if isinstance(v, torch.Tensor)})
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("marked_by_nan", [False, True])
def test_behind_an_index_map(marked_by_nan):
    """A group whose rows are all missing, and one with some: each reads its own rows and their pattern."""
    county, y, seen = torch.tensor([0, 0, 1, 1, 2, 2]), torch.randn(ROWS), EVERY.clone()
    seen[[1, 2, 3]] = False
    guide = ready(groups, y, True if marked_by_nan else EVERY, county, 3)

    def density(y, mask):
        condition = poutine.condition(guide, {"alpha": torch.zeros(3)})
        args = (filled(y, mask, NAN), True) if marked_by_nan else (y, mask)
        trace = poutine.trace(condition).get_trace(*args, county, 3)
        trace.compute_log_prob()
        return trace.nodes["alpha"]["log_prob"]

    missing = density(y, seen)
    assert missing.isfinite().all()
    assert (missing != density(y, EVERY)).tolist() == [True, True, False]
    assert torch.equal(density(filled(y, seen, -999.0), seen), missing)


@ALL
@DIRECTIONS
def test_training_does_not_depend_on_what_stands_there(model, inverse):
    """The same steps with other fillers: the same losses. (NaN behind a mask makes the model's own gradient NaN.)"""
    losses = []
    for filler in (0.0, -999.0):
        pyro.clear_param_store()
        guide, y = made(model, inverse=inverse, evidence=True)
        pyro.set_rng_seed(1)
        losses.append(steps(model, guide, filled(y, PATTERN, filler), PATTERN))
    assert torch.equal(*losses)


# ---- the pattern is read


@ALL
@pytest.mark.parametrize("first", [PATTERN, EVERY, NONE], ids=["some", "every", "none"])
def test_any_pattern_in_later_calls(model, first):
    """All there and none there included: four data sets, and dense and traced densities agree."""
    y = torch.randn(ROWS)
    if model is nan_marked and first is NONE:  # nothing tells what such data depends on
        with pytest.raises(ValueError, match="at least one value of site 'y'"):
            ready(model, y, first, inverse="reverse")
        return
    guide = ready(model, y, first, inverse="reverse")
    seen = []
    for pattern in (EVERY, NONE, ~PATTERN, PATTERN):
        trace = poutine.trace(guide).get_trace(y, pattern)
        values = {name: trace.nodes[name]["value"] for name in guide.bayesnet.latent}
        assert torch.allclose(guide.log_prob(values, y, pattern), trace.log_prob_sum())
        seen.append(densities(guide, y, pattern)[0].item())
    assert len(set(seen)) == 4


@ALL
def test_other_sizes_with_other_patterns(model):
    guide, _ = made(model, inverse="reverse", evidence=True)
    for size in (3, 20):
        y, pattern = torch.randn(size), torch.arange(size) % 3 > 0
        expected = densities(guide, y, pattern)
        assert torch.equal(densities(guide, filled(y, pattern, -999.0), pattern), expected)
        assert guide(y, pattern)["z"].shape == (size,)


# ---- the entries that are not observed


@DIRECTIONS
def test_unobserved_entries_are_predictive_latents(inverse):
    guide, y = made(observed_in_part, inverse=inverse, evidence=True)
    assert guide.inverse.predictive == frozenset({"y_unobserved"})
    trace = poutine.trace(guide).get_trace(y, PATTERN)
    fn = trace.nodes["y_unobserved"]["fn"]
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    assert torch.equal(fn.loc, trace.nodes["z"]["value"]) and (fn.scale == 0.5).all()


@pytest.mark.parametrize("parallel", [False, True])
def test_predictive_returns_the_unobserved_entries(parallel):
    """In y the observed entries are the data's, the others draws around z."""
    guide, y = made(observed_in_part, inverse="reverse", evidence=True)
    draws = Predictive(observed_in_part, guide=guide, num_samples=40, parallel=parallel)(y, PATTERN)
    assert draws["y"].shape == draws["y_unobserved"].shape == (40, ROWS)
    assert torch.equal(draws["y"][:, PATTERN], y[PATTERN].expand(40, -1))
    assert torch.equal(draws["y"][:, ~PATTERN], draws["y_unobserved"][:, ~PATTERN])
    assert draws["y"][:, ~PATTERN].std(0).min() > 0.1


# ---- the right posterior for any pattern


@ALL
def test_one_guide_is_right_for_every_pattern(model):
    """Trained by simulation on random patterns. m | the observed: N(sum / 1.25 / P, 1 / P), P = 1 + count / 1.25.

    Tolerances, 0.35 posterior sds and 20%, are about twice what the training leaves.
    """
    guide = amortized(model, inverse="reverse", init_scale=0.5)
    guide(torch.randn(ROWS), PATTERN)
    optimizer = torch.optim.Adam(guide.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.04, total_steps=250)
    name = "y_observed" if model is observed_in_part else "y"
    for _ in range(250):
        pattern = torch.rand(ROWS) < torch.rand(())
        m = torch.randn(256, 1)
        z = m + torch.randn(256, ROWS)
        y = z + 0.5 * torch.randn(256, ROWS)
        values = {"m": m, "z": z}
        if model is observed_in_part:
            values["y_unobserved"] = y
        if model is nan_marked:
            y = filled(y, pattern, NAN)
        loss = -guide.log_prob(values, y[0], pattern, observations={name: y}).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for pattern in (PATTERN, ~PATTERN, EVERY, NONE):
        y = torch.randn(()) + 1.1 * torch.randn(ROWS)
        with torch.no_grad(), pyro.plate("draws", 4000, dim=-2):
            m = guide(y, pattern)["m"]
        precision = 1 + pattern.sum() / 1.25
        assert abs(m.mean() - y[pattern].sum() / 1.25 / precision) < 0.35 * precision**-0.5
        assert abs(m.std() * precision**0.5 - 1) < 0.2
