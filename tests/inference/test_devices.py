"""Whatever simulates, trains, samples or weighs does so on the device of the model."""

import functools

import pytest
import torch
from models import conjugate_normal, conjugate_normal_evidence, conjugate_normal_guide

from pyro_nami import AutoNaMIGuide
from pyro_nami.checking.calibration import calibrate
from pyro_nami.inference.annealing import annealed_importance_sampling
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.importance import importance_sample
from pyro_nami.inference.simulate import Simulator

pytestmark = pytest.mark.cuda
DATA_SETS = torch.tensor([[0.3, -1.2, 2.0, 0.7], [1.0, 1.5, 0.5, 2.5], [-4.0, -3.0, -3.5, -2.0]])


@pytest.fixture
def y():
    return torch.zeros(4, device="cuda")


def test_annealing():
    y = DATA_SETS[0].cuda()
    options = {"num_chains": 1000, "num_temperatures": 25, "num_leapfrog_steps": 5}
    result = annealed_importance_sampling(conjugate_normal, None, y, **options)
    assert result.log_weights.is_cuda
    off = abs(result.log_evidence.item() - conjugate_normal_evidence(DATA_SETS[0]))
    assert off < 3 * result.log_evidence_error + 0.03 and result.log_evidence_error < 0.12


def test_importance_sampling(y):
    options = {"num_samples": 500, "observations": {"y": DATA_SETS}}
    draws = importance_sample(conjugate_normal, conjugate_normal_guide, y, **options)
    exact = torch.tensor([conjugate_normal_evidence(row) for row in DATA_SETS])
    assert draws.log_weights.is_cuda and draws.mean("mu").is_cuda and draws.resample(5)["mu"].is_cuda
    torch.testing.assert_close(draws.log_evidence.cpu(), exact, rtol=1e-5, atol=1e-5)


def test_simulation(y):
    state = torch.cuda.get_rng_state()
    simulator = Simulator(conjugate_normal, (y,))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert simulator.draw(3).observed["y"].is_cuda


def test_compilation(y):
    adam = functools.partial(torch.optim.Adam, lr=0.02)
    compilation = InferenceCompilation(conjugate_normal, AutoNaMIGuide(conjugate_normal), adam, batch_size=50)
    history = compilation.fit(50, (y,), validation=100, progress=False)
    assert history.losses[-1] < history.losses[0]
    assert all(parameter.is_cuda for parameter in compilation.guide.parameters())
    host = [{"mu": torch.zeros(10, 1), "y": torch.zeros(10, 4)}]
    assert compilation.fit(52, (y,), data=host, progress=False).losses


def test_calibration(y):
    result = calibrate(conjugate_normal, conjugate_normal_guide, y, seed=0)
    assert result.ranks["mu"].is_cuda
    assert result.passed
