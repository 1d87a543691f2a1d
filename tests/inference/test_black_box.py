"""Simulators with several parameters and data by name, with rows that fail, and without a simulator."""

from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_nami import from_simulator
from pyro_nami.inference import Simulator
from pyro_nami.inference.black_box import from_simulations

PRIOR = dist.Normal(torch.zeros(2), 1.0).to_event(1)


class Measured(NamedTuple):
    near: torch.Tensor
    far: torch.Tensor


def by_name(theta):
    """Two data of the same noise, and how often the simulator was run."""
    by_name.runs += 1
    noise = torch.randn(len(theta["a"]))
    return {"x": theta["a"][:, 0] + noise, "y": torch.stack([noise, theta["k"] + 0.5], -1)}


def test_parameters_and_data_have_names_and_data_of_a_row_are_of_one_run():
    by_name.runs = 0
    model = from_simulator({"a": PRIOR, "k": dist.Categorical(torch.ones(3))}, by_name)
    simulator = Simulator(model, observed=["x", "y"])
    by_name.runs = 0
    draws = simulator.draw(500)
    assert by_name.runs == 1 and simulator.latent == ("a", "k")
    a, k = draws.latents["a"], draws.latents["k"]
    x, y = draws.observed["x"], draws.observed["y"]
    torch.testing.assert_close(x, a[:, 0] + y[:, 0])
    torch.testing.assert_close(y[:, 1], k + 0.5)  # no cast to the category's dtype


def test_data_are_floats_also_of_a_discrete_prior():
    x = from_simulator(dist.Categorical(torch.ones(3)), lambda k: k.double() + 0.5)()
    assert x.dtype == torch.float32 and float(x) % 1 == 0.5


@pytest.mark.parametrize("pair", [tuple, Measured._make])
def test_a_tuple_has_names(pair):
    model = from_simulator(PRIOR, lambda theta: pair([theta[:, 0], theta]))
    names = ["near", "far"] if pair == Measured._make else ["x_0", "x_1"]
    assert list(model.data) == names and model()[names[1]].shape == (2,)


def test_rows_that_fail_are_nan_and_told():
    def failing(theta):
        if (theta[:, 0] > 1).any():
            raise RuntimeError("too large")
        return theta

    pyro.set_rng_seed(1)
    theta = torch.randn(200, 2)
    theta[:3, 0] = 0.0
    # the three rows by which the shape is found do not fail
    box = from_simulator(torch.zeros(5, 2), failing).model
    with pytest.warns(UserWarning, match=r"failed for \d+ of 200 rows.*RuntimeError: too large"):
        x = box.run({"theta": theta})["x"]
    assert torch.equal(x.isnan().any(-1), theta[:, 0] > 1)
    with pytest.raises(ValueError, match="too large"):  # nothing succeeds
        box.run({"theta": theta + 9.0})


def test_runs_that_show_shapes_alone_take_no_simulator():
    runs = []

    def counted(theta):
        runs.append(len(theta))
        return theta

    model = from_simulator(PRIOR, counted)
    Simulator(model.undrawn(), observed=["x"])
    assert len(runs) == 1 and model.undrawn()().eq(0).all()


def test_without_a_simulator_there_is_a_model_that_cannot_simulate():
    given = {"theta": torch.randn(50, 2), "n": torch.arange(50), "x": torch.zeros(50, 3)}
    model, values = from_simulations(PRIOR, given)
    assert model.data == {"n": 0, "x": 1} and values["n"].dtype == torch.float32
    with pytest.raises(ValueError, match="this model has a prior and simulations only"):
        model()
    for wrong in ({"x": given["x"]}, {"theta": given["theta"]}):
        with pytest.raises(ValueError, match="of the parameters 'theta' and of data; got '"):
            from_simulations(PRIOR, wrong)
    with pytest.raises(TypeError, match="as a mapping from 'theta' and names of data.*; got list"):
        from_simulations(PRIOR, [given])
    with pytest.raises(ValueError, match="names of their own for parameters and data; got 'x'"):
        from_simulator({"x": PRIOR}, lambda theta: theta)
