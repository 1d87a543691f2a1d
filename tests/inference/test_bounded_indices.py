"""Models written for one draw, ``theta[group]``, on a device that ends the process where an index is out of bounds."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_nami import AutoNaMIGuide, amortize, importance_sample
from pyro_nami.program.isolation import bounded_indices

GROUP = torch.arange(40) % 9


class End(BaseException):
    """Of a process, which no handler of errors holds up."""


class Device(TorchDispatchMode):
    """A CPU with CUDA's answer to such indices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError) as error:
            if func.overloadpacket.__name__.startswith(
                ("index", "gather", "embedding")
            ) and "out of" in str(error):
                raise End(str(error)) from error
            raise


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with Device():
        yield


def offsets(prior, data, rows):
    def model(y=None):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        with pyro.plate("groups", 9):
            theta = pyro.sample("theta", prior(scale))
        with pyro.plate("rows", 40):
            return pyro.sample("y", data(rows(theta)), obs=y)

    return model


def normal(scale):
    return dist.Normal(0.0, scale)


MODELS = {
    "block": offsets(normal, lambda m: dist.Normal(m, 1.0), lambda t: t[GROUP]),
    "counts": offsets(normal, lambda m: dist.Poisson(m.exp()), lambda t: t.index_select(0, GROUP)),
    "learned": offsets(
        lambda s: dist.StudentT(4.0, 0.0, s),
        lambda m: dist.StudentT(4.0, m, 1.0),
        lambda t: t[GROUP],
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_no_run_ends_the_process(device, name):
    model = MODELS[name]
    y = model().detach()
    guide = AutoNaMIGuide(model)
    SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(y)
    assert importance_sample(model, guide, y, num_samples=20).log_weights.isfinite().all()
    posterior = amortize(model, observed=["y"], simulations=40, steps=3, progress=False)
    assert posterior({"y": y}, 20, num_temperatures=2).log_weights.isfinite().all()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[torch.tensor([3])],
        lambda x: x[:, torch.tensor([0, -3])],
        lambda x: x[torch.tensor([True, False, True]), torch.tensor([0, 2])],
        lambda x: x.index_select(1, torch.tensor([2])),
        lambda x: x.gather(1, torch.tensor([[0], [2], [1]])),
        lambda x: x.index_put((torch.tensor([3]),), torch.tensor(0.0)),
        lambda x: torch.nn.functional.embedding(torch.tensor([-1]), x),
    ],
)
def test_what_is_out_of_bounds(device, read):
    with bounded_indices(), pytest.raises(IndexError, match="Expected indices of a dim of size"):
        read(torch.zeros(3, 2))


def test_what_is_within(device):
    x = torch.arange(6.0).reshape(3, 2)
    with bounded_indices():
        assert x[torch.tensor([2, -3])].tolist() == [[4, 5], [0, 1]]
        assert x[torch.tensor([True, False, True]), torch.tensor([0, -1])].tolist() == [0, 5]
        assert x[torch.tensor([], dtype=torch.long)].shape == (0, 2)
