"""On a GPU: parameters follow the data, and everything else works as on the CPU."""

from __future__ import annotations

import pyro
import pytest
import torch
from models import eight_schools, scatter
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.cuda


def data(device="cuda"):
    return torch.linspace(-2.0, 3.0, 8, device=device), torch.linspace(0.5, 1.5, 8, device=device)


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("vectorized", [False, True])
def test_training_on_the_device_of_the_data(inverse, vectorized):
    options = (
        {"num_particles": 4, "vectorize_particles": True, "max_plate_nesting": 1}
        if vectorized
        else {}
    )
    guide = AutoNaMIGuide(eight_schools, inverse=inverse)
    svi = SVI(eight_schools, guide, Adam({"lr": 0.01}), Trace_ELBO(**options))
    losses = torch.tensor([svi.step(*data()) for _ in range(3)])
    assert losses.isfinite().all()
    assert all(parameter.is_cuda for parameter in guide.parameters())
    assert all(buffer.is_cuda for buffer in guide.buffers())
    assert all(value.is_cuda for value in guide(*data()).values())


def test_densities_and_summaries_on_the_device():
    guide = AutoNaMIGuide(eight_schools)
    guide(*data())
    scatter(guide)
    latents = {name: value.detach() for name, value in guide(*data()).items()}
    assert guide.log_prob(latents, *data()).is_cuda
    assert guide.median(*data())["theta"].is_cuda
    draws = Predictive(eight_schools, guide=guide, num_samples=3, parallel=True)(*data())
    assert all(value.is_cuda for value in draws.values())


def test_a_guide_moves_between_devices():
    guide = AutoNaMIGuide(eight_schools)
    guide(*data("cpu"))
    scatter(guide)
    latents = {name: value.detach() for name, value in guide(*data("cpu")).items()}
    expected = guide.log_prob(latents, *data("cpu"))
    pyro.clear_param_store()
    guide.to("cuda")
    moved = guide.log_prob({name: value.cuda() for name, value in latents.items()}, *data())
    assert moved.is_cuda and torch.allclose(moved.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_a_state_from_the_gpu_loads_on_the_cpu():
    guide = AutoNaMIGuide(eight_schools)
    guide(*data())
    scatter(guide)
    state = guide.state_dict()
    state = {
        key: value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
    latents = {name: value.detach() for name, value in guide(*data()).items()}
    expected = guide.log_prob(latents, *data()).cpu()
    pyro.clear_param_store()
    other = AutoNaMIGuide(eight_schools)
    other.load_state_dict(state)
    got = other.log_prob({name: value.cpu() for name, value in latents.items()}, *data("cpu"))
    assert torch.allclose(got, expected, rtol=1e-3, atol=1e-3)
