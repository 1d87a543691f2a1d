"""Observed values as users give them: one data set or several, and who is told of them."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_nami import AutoNaMIGuide
from pyro_nami.annealing.annealing import annealed_importance_sampling
from pyro_nami.checking.misspecification import misspecification
from pyro_nami.inference.importance import importance_sample
from pyro_nami.inference.observations import Observations, observed_names
from pyro_nami.inference.site_messages import plate_names, plate_nesting, with_idle_dims
from pyro_nami.program.runner import takes_observations


def crossed(y=None):
    """Plates of equal size, a site in one of them only, and one in none."""
    rows, columns = pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 3, dim=-1)
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with columns:
        pyro.sample("v", dist.Normal(z, 1.0).expand([2]).to_event(1))
        with rows:
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)
    pyro.deterministic("twice", 2 * z)
    pyro.factor("f", z)


TRACE = poutine.trace(crossed).get_trace()
SITES = {
    name: site
    for name, site in TRACE.nodes.items()
    if site["type"] == "sample" and "plate" not in name
}
SITES = {name: SITES[name] for name in ("z", "v", "y", "twice", "f")}


def test_plates_of_sites():
    assert plate_nesting(SITES.values()) == 2
    assert plate_nesting([SITES["z"]]) == 0
    assert [plate_names(SITES[name]) for name in ("z", "v", "y")] == [
        (),
        ("columns",),
        ("rows", "columns"),
    ]
    value = torch.arange(12.0).reshape(2, 3, 2)
    wide = with_idle_dims(value, SITES["v"], 2, 1)
    assert wide.shape == (2, 1, 3, 2)
    assert torch.equal(with_idle_dims(wide, SITES["v"], 2, 1), wide)
    with pytest.raises(
        ValueError, match=r"site 'v' of shape \(3, 2\) behind 2 batch dims; got \(2, 3, 2\)"
    ):
        with_idle_dims(value, SITES["v"], 2, 2)


def test_a_batch_as_large_as_the_plates_is_told_from_one_data_set_by_its_dims():
    y, v, z = torch.randn(3, 3, 3), torch.randn(3, 2), torch.randn(3)
    data = Observations({"y": y, "v": v, "z": z}, SITES, 2)
    assert data.num == 3
    assert {name: tuple(value.shape) for name, value in data.batch().items()} == {
        "v": (3, 2),  # one value for all data sets
        "y": (3, 3, 3),
        "z": (3, 1, 1),
    }
    one = data.one(1)
    assert torch.equal(one["y"], y[1]) and torch.equal(one["v"], v) and torch.equal(one["z"], z[1])
    assert data.batch(slice(1, 3))["y"].shape == (2, 3, 3)


def test_one_data_set_has_no_dim_and_a_batch_of_one_has():
    y = torch.randn(3, 3)
    assert Observations({"y": y}, SITES, 2).num is None
    batch = Observations({"y": y[None]}, SITES, 2)
    assert batch.num == 1 and batch.batch()["y"].shape == (1, 3, 3)
    assert Observations({}, SITES, 2).one() == {}


@pytest.mark.parametrize(
    "given", [np.zeros((3, 3)), [[0.0] * 3] * 3, torch.zeros(3, 3).double()], ids=type
)
def test_floats_get_the_dtype_of_the_site(given):
    assert Observations({"y": given}, SITES, 2).one()["y"].dtype == torch.float32


def test_integers_stay_integers():
    assert (
        Observations({"y": torch.zeros(3, 3, dtype=int)}, SITES, 2).one()["y"].dtype == torch.int64
    )


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": 0.0}, ValueError, "the model's sites, 'z', 'v', 'y'; got one of 'x'"),
        ({"f": 0.0}, ValueError, "got one of 'f'"),
        ({"twice": 0.0}, ValueError, "got one of 'twice'"),
        (
            {"v": torch.zeros(3)},
            ValueError,
            r"of shape \(3, 2\), or \(data sets, 3, 2\); got \(3,\)",
        ),
        (
            {"y": torch.zeros(5, 3, 3), "z": torch.zeros(4)},
            ValueError,
            "got 4 at 'z' and 5 before it",
        ),
        ({"y": torch.zeros(0, 3, 3)}, ValueError, "at least one; got 0 at 'y'"),
        (
            {"y": torch.zeros(4)},
            ValueError,
            r"of shape \(3, 3\), or \(data sets, 3, 3\); got \(4,\)",
        ),
        ({"y": torch.tensor(1.0)}, ValueError, r"got \(\)"),
        ({"y": "three"}, TypeError, "a tensor as the value of site 'y'; got str"),
        ({"y": None}, TypeError, "a tensor as the value of site 'y'; got None"),
    ],
)
def test_what_does_not_fit_is_an_error(given, error, message):
    with pytest.raises(error, match=message):
        Observations(given, SITES, 2)


def test_observations_that_are_no_mapping_are_an_error():
    y, guide = torch.zeros(3, 3), AutoNaMIGuide(crossed, observed=["y"])
    for call in (
        lambda: importance_sample(crossed, guide, num_samples=2, observations=y),
        lambda: annealed_importance_sampling(crossed, guide, observations=y),
        lambda: misspecification(crossed, observations=y),
    ):
        with pytest.raises(
            TypeError, match="as a mapping from observed sites to values; got a Tensor"
        ):
            call()


class Module(nn.Module):
    def forward(self, x=None, observations=None):
        pass


def reads(x, observations):
    pass


@pytest.mark.parametrize(
    ("fn", "model", "guide"),
    [
        (reads, True, True),
        (lambda x: None, False, False),
        (lambda *args, **kwargs: None, False, True),
        (Module(), True, True),
        (poutine.scale(reads, 2.0), True, True),
        (AutoNaMIGuide(crossed), False, True),
        (AutoNormal(reads), True, True),
        (AutoNormal(crossed), False, False),
        (torch.zeros, False, False),  # no signature
    ],
    ids=[
        "reads",
        "neither",
        "any",
        "module",
        "scaled",
        "nami",
        "normal of reads",
        "normal",
        "no signature",
    ],
)
def test_who_takes_observations(fn, model, guide):
    assert (takes_observations(fn), takes_observations(fn, is_guide=True)) == (model, guide)


def test_observed_sites_are_those_named_those_of_the_guide_and_those_given():
    guide = AutoNaMIGuide(crossed, observed="data")
    assert observed_names("data", guide, {"y": 0.0}) == ("data", "y")
    assert observed_names(("a", "y"), guide, {"y": 0.0}) == ("a", "y", "data")
    assert observed_names((), crossed) == ()
