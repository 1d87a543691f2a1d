"""Simulations in processes: the same for any number of them; simulations that fail, and workers that die."""

import os

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_nami import from_simulator
from pyro_nami.inference import Simulator
from pyro_nami.inference.workers import drawn

PRIOR = dist.Normal(torch.zeros(1), 1.0).to_event(1)


def in_numpy(theta):
    return np.asarray(theta) + 0.1 * np.random.randn(*theta.shape)


def of(simulator):
    return Simulator(from_simulator(PRIOR, simulator), observed=["x"])


def test_draws_are_the_same_for_any_number_of_workers():
    found = []
    for workers in (1, 3):
        pyro.set_rng_seed(0)
        draws = drawn(of(in_numpy), 40, workers)
        assert draws.num == 40
        found.append(draws)
    theta, x = found[0].latents["theta"], found[0].observed["x"]
    assert torch.equal(theta, found[1].latents["theta"])
    assert torch.equal(x, found[1].observed["x"])
    assert len(theta.unique()) == len((x - theta).unique()) == 40  # parts have seeds of their own


def test_a_worker_that_dies_takes_one_simulation_with_it():
    def deadly(theta):
        if (theta > 1.5).any():
            os._exit(3)
        return theta

    simulator = Simulator(from_simulator(torch.zeros(9, 1), deadly), observed=["x"])
    simulator.program.model.model.priors["theta"] = PRIOR
    with pytest.warns(UserWarning, match=r"of 48 simulations failed.*died \(exit code 3\)"):
        draws = drawn(simulator, 48, 2)
    assert 30 < draws.num < 48 and (draws.latents["theta"] <= 1.5).all()


@pytest.mark.filterwarnings("ignore:The model cannot be simulated")
def test_simulations_of_a_model_that_fail_are_left_out():
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        if model.fails and float(z) > 0.5:
            raise ArithmeticError("diverged")
        pyro.sample("x", dist.Normal(float(z) + torch.zeros(()), 1.0))

    model.fails = False
    simulator = Simulator(model, observed=["x"])
    model.fails = True
    with pytest.warns(UserWarning, match="of 100 simulations failed.*ArithmeticError: diverged"):
        draws = drawn(simulator, 100)
    assert 40 < draws.num < 90 and (draws.latents["z"] <= 0.5).all()

    def broken():
        pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0))
        if model.fails:
            raise ArithmeticError("diverged")

    model.fails = False
    simulator = Simulator(broken, observed=["x"])
    model.fails = True
    with pytest.raises(ArithmeticError, match="diverged"):
        drawn(simulator, 100)


def test_what_was_drawn_before_an_interruption_is_kept():
    calls = []

    def model():
        calls.append(1)
        if len(calls) > 40:
            raise KeyboardInterrupt
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0))

    simulator = Simulator(model, observed=["x"])
    simulator.vectorized = False
    calls.clear()
    with pytest.raises(KeyboardInterrupt) as caught:
        drawn(simulator, 320)
    assert caught.value.draws.num == 40
