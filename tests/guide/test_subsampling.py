"""Mini-batches: own rows for local factors, none for the others, and an ELBO estimate that is unbiased.

The batches of a partition are enumerated. Latents are drawn once for all rows and then held, in guide and model, so
that the estimates of the batches must average to the full-data ELBO of the same guide exactly.
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Counted, made_once, scatter, steps
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from torch.autograd.functional import jacobian

from pyro_nami import AutoNaMIGuide

pytestmark = [
    pytest.mark.filterwarnings("error", "ignore:Failed to verify mean field restriction"),
    pytest.mark.usefixtures("double"),
]
ROWS, COUNTIES = 12, 4
COUNTY = torch.tensor([0, 3, 1, 1, 2, 0, 3, 3, 0, 2, 1, 3])


def rows_of(plate, y):
    """m, z_n and y_n for the rows of a plate that is entered."""
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    with plate as index:
        z = pyro.sample("z", dist.Normal(m, 1.0))
        pyro.sample("y", dist.Normal(z, 0.5), obs=y(index))


def grouped_rows_of(plate, y, county):
    """Row n of the mini-batch reads alpha[county[index[n]]]."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("county", COUNTIES):
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
    with plate as index:
        z = pyro.sample("z", dist.Normal(alpha[..., county[index]], 1.0))
        pyro.sample("y", dist.Normal(z, 0.5), obs=y[index])


def by_index(y, index):
    """The caller names the rows."""
    rows_of(pyro.plate("data", len(y), subsample=index), lambda _: y[index])


def by_size(y, size):
    """The plate chooses the rows."""
    rows_of(pyro.plate("data", len(y), subsample_size=size), lambda index: y[index])


def by_subsample(y, size):
    """`pyro.subsample` picks them out of the data."""
    rows_of(
        pyro.plate("data", len(y), subsample_size=size), lambda _: pyro.subsample(y, event_dim=0)
    )


def indexed(y, index, county=COUNTY):
    grouped_rows_of(pyro.plate("data", len(y), subsample=index), y, county)


def indexed_by_size(y, size, county=COUNTY):
    grouped_rows_of(pyro.plate("data", len(y), subsample_size=size), y, county)


class Setting:
    """One way to subsample: how model and guide are called on chosen rows.

    Args:
        model: a model of (y, size) or (y, index).
        named: whether its second argument is the index.
        create: whether the guide makes the plate.
    """

    def __init__(self, model, *, named, create=False):
        self.model, self.named, self.create = model, named, create
        self.index = torch.arange(ROWS)

    def guide(self, y, size, **options):
        """Returns a guide made on a mini-batch, every weight away from zero."""
        if self.create:
            options["create_plates"] = lambda y, size: pyro.plate(
                "data", len(y), subsample=self.index
            )
        self.index = torch.randperm(ROWS)[:size]
        guide = AutoNaMIGuide(self.model, **options)
        guide(y, self.index if self.named else size)
        scatter(guide)
        return guide

    def trace(self, function, values, y, index):
        """Returns a trace of model or guide with its latents, and its rows, held."""
        self.index = index
        values = {**values, "z": values["z"][index]}
        if not self.named:
            values["data"] = index
        args = y, index if self.named else len(index)
        trace = poutine.trace(poutine.condition(function, values)).get_trace(*args)
        trace.compute_log_prob()
        return trace

    def elbo(self, guide, values, y, index):
        model = self.trace(self.model, values, y, index)
        return (model.log_prob_sum() - self.trace(guide, values, y, index).log_prob_sum()).detach()


SETTINGS = {
    "subsample": Setting(by_index, named=True),
    "subsample_size": Setting(by_size, named=False),
    "pyro.subsample": Setting(by_subsample, named=False),
    "create_plates": Setting(by_size, named=False, create=True),
    "index map": Setting(indexed, named=True),
    "index map, subsample_size": Setting(indexed_by_size, named=False),
}
ALL = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
INDEXED = pytest.mark.parametrize("setting", list(SETTINGS.values())[-2:], ids=list(SETTINGS)[-2:])
INDEX = torch.tensor([7, 2, 5, 11])


@made_once
def called(setting, **options):
    y = torch.randn(ROWS)
    return setting.guide(y, 4, **options), y


def made(setting, inverse="reverse", **options):
    """Returns a guide that was made on a mini-batch, all data, and values of all latents."""
    return *called(setting, inverse=inverse, **options), values_of(setting)


def values_of(setting):
    values = {"z": torch.randn(ROWS)}
    if setting.model in (indexed, indexed_by_size):
        return {**values, "mu": torch.randn(()), "alpha": torch.randn(COUNTIES)}
    return {**values, "m": torch.randn(())}


# ---- the estimate


@ALL
def test_estimates_over_a_partition_average_to_the_full_data_elbo(setting):
    for made_on, size in ((4, 4), (1, 1), (4, ROWS)):
        pyro.clear_param_store()
        guide, y, values = made(setting)
        if made_on != 4:
            guide = setting.guide(y, made_on, inverse="reverse")
        full = setting.elbo(guide, values, y, torch.arange(ROWS))
        batches = (torch.randperm(ROWS) if size < ROWS else torch.arange(ROWS)).split(size)
        estimates = torch.stack([setting.elbo(guide, values, y, index) for index in batches])
        assert torch.allclose(estimates.mean(), full)
        if size < ROWS:
            assert estimates.std() > 0.1


@ALL
def test_model_and_guide_scale_their_rows_alike(setting):
    guide, y, values = made(setting)
    for function in (guide, setting.model):
        nodes = setting.trace(function, values, y, INDEX[:3]).nodes
        assert abs(nodes["z"]["scale"] - ROWS / 3) < 1e-9
        assert all(nodes[name]["scale"] == 1 for name in values if name != "z")


# ---- who reads what


@ALL
def test_local_factors_read_their_own_rows_as_in_the_full_data(setting):
    guide, y, values = made(setting)

    def local(y, index=INDEX):
        node = setting.trace(guide, values, y, index).nodes["z"]
        return node["log_prob"] / node["scale"]

    before, full = local(y), local(y, torch.arange(ROWS))
    for row in range(ROWS):
        moved = y.clone()
        moved[row] += 1
        assert torch.equal(local(moved) != before, row == INDEX)
    for index in (*torch.randperm(ROWS).split(5), torch.tensor([3])):
        assert torch.allclose(local(y, index), full[index])


@ALL
@pytest.mark.parametrize("inverse", ["auto", "forward", "reverse", "mean_field"])
def test_factors_outside_the_plate_do_not_read_a_minibatch(setting, inverse):
    guide, y, values = made(setting, inverse)
    runs = [(y, INDEX), (y + 5, INDEX), (y, torch.tensor([0, 1, 3, 4]))]
    before, *others = (setting.trace(guide, values, *run).nodes for run in runs)
    for other in others:
        for name in values.keys() - {"z"}:
            assert torch.equal(before[name]["log_prob"], other[name]["log_prob"])


@INDEXED
def test_a_row_reads_the_latent_of_its_own_group(setting):
    guide, y, values = made(setting, anchor=False)

    def local(alpha):
        return setting.trace(guide, {**values, "alpha": alpha}, y, INDEX).nodes["z"]["log_prob"]

    own = torch.nn.functional.one_hot(COUNTY[INDEX], COUNTIES).bool()
    assert torch.equal(jacobian(local, values["alpha"]) != 0, own)


@pytest.mark.parametrize("how", ["subsample", "subsample_size"])
def test_the_maps_of_rows_met_before_are_not_searched_for(how):
    """The runs of a call, once every row was in some mini-batch, are few and do not depend on the number of groups."""

    def mapped(y, index, size, counties, county):
        with pyro.plate("county", counties):
            alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample=index, subsample_size=size) as index:
            z = pyro.sample("z", dist.Normal(alpha[..., counties - 1 - county[index]], 1.0))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y[index])

    def cost(counties):
        county, y = torch.randint(counties, (30,)), torch.randn(30)
        pyro.clear_param_store()
        model = Counted(mapped)
        guide = AutoNaMIGuide(model, inverse="reverse")
        for index in (*torch.arange(30).split(6), torch.randperm(30)[:6]):
            given, size = (index, None) if how == "subsample" else (None, 6)
            conditioned = poutine.condition(guide, {"data": index})
            last = model.runs_of(conditioned, y, given, size, counties, county)
        return last

    assert cost(4) == cost(600) <= 8


def test_maps_of_other_data_are_not_reused():
    """Another county tensor: rows met before have other groups now."""
    guide, y, values = made(SETTINGS["index map"], anchor=False)
    held = {**values, "z": values["z"][INDEX]}
    for county in (COUNTY, COUNTY.flip(0), COUNTY.roll(1)):

        def local(alpha):
            run = poutine.condition(guide, {**held, "alpha": alpha})
            trace = poutine.trace(run).get_trace(y, INDEX, county)  # noqa: B023
            trace.compute_log_prob()
            return trace.nodes["z"]["log_prob"]

        own = torch.nn.functional.one_hot(county[INDEX], COUNTIES).bool()
        assert torch.equal(jacobian(local, values["alpha"]) != 0, own)


# ---- training


@pytest.mark.parametrize(
    "key, inverse, objective",
    [
        (key, inverse, (Trace_ELBO, TraceMeanField_ELBO)[(i + j) % 2])
        for i, key in enumerate(SETTINGS)
        for j, inverse in enumerate(("forward", "reverse"))
    ],
)
def test_training_on_minibatches(key, inverse, objective):
    """Each pair of values occurs."""
    setting = SETTINGS[key]
    guide, y, _ = made(setting, inverse)
    for _ in range(3):
        setting.index = torch.randperm(ROWS)[:4]
        args = y, setting.index if setting.named else 4
        steps(
            setting.model,
            guide,
            *args,
            count=1,
            elbo=objective(num_particles=2, vectorize_particles=True),
        )


@ALL
def test_prediction_with_the_full_data(setting):
    guide, y, values = made(setting)
    setting.index = torch.arange(ROWS)
    every = setting.index if setting.named else ROWS
    draws = Predictive(setting.model, guide=guide, num_samples=3, return_sites=list(values))(
        y, every
    )
    assert all(draws[name].squeeze(-1).shape == (3, *values[name].shape) for name in values)


def test_minibatches_reach_the_posterior_of_the_full_data():
    """m | y of the local model: N(12 * ybar / 1.25 / P, 1 / P), P = 1 + 12 / 1.25; within 0.3 sds and 15%."""
    y = torch.randn(ROWS) + 1.5
    guide = AutoNaMIGuide(by_size, inverse="reverse", init_scale=0.5)
    elbo = Trace_ELBO(num_particles=64, vectorize_particles=True)
    svi = SVI(by_size, guide, pyro.optim.ClippedAdam({"lr": 0.06, "lrd": 0.987}), elbo)
    for _ in range(300):
        svi.step(y, 4)
    precision = 1 + ROWS / 1.25
    with torch.no_grad(), pyro.plate("draws", 4000, dim=-2):
        m = guide(y, 4)["m"]
    assert abs(m.mean() - y.sum() / 1.25 / precision) < 0.3 * precision**-0.5
    assert abs(m.std() * precision**0.5 - 1) < 0.15
