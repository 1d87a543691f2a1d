"""What every test and doctest starts from: an empty parameter store, one seed, float32, validation on."""

from __future__ import annotations

import os
import random

import pyro
import pytest
import torch

# of every test's draws and, if it is not 0, of the order of tests
SEED = int(os.environ.get("PYRO_NAMI_SEED", "0"))


def pytest_collection_modifyitems(items):
    if SEED:
        random.Random(SEED).shuffle(items)
    # so that no process waits for one at the end
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh_session():
    before = torch.get_default_dtype()
    pyro.clear_param_store()
    pyro.set_rng_seed(SEED)
    with pyro.validation_enabled(True):
        yield
    torch.set_default_dtype(before)
    pyro.clear_param_store()


@pytest.fixture
def double():
    """Double precision for models, data and guides made in the test."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def own_parameters(request):
    """Every guide has parameters of its own, though all have one name, but where a test is of the store."""
    with pyro.settings.context(module_local_params="in_the_store" not in request.node.name):
        yield
