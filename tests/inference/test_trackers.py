"""Trackers: what reaches TensorBoard and W&B, and what is said without them."""

import sys

import pytest

from pyro_nami.inference.trackers import TensorBoardTracker, WandbTracker


@pytest.mark.parametrize(
    ("tracker", "package", "args"),
    [(TensorBoardTracker, "torch.utils.tensorboard", ("x",)), (WandbTracker, "wandb", ())],
)
def test_trackers_name_the_package_that_they_need(tracker, package, args, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match="pip install"):
        tracker(*args)


def test_wandb_logs_to_the_given_run(monkeypatch):
    class Wandb:
        run = None

    class Run:
        logged: list = []

        def log(self, values, step):
            self.logged.append((values, step))

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    with pytest.raises(ValueError, match=r"wandb.init"):
        WandbTracker()
    tracker = WandbTracker(Run())
    tracker.log("loss", 1.5, 3)
    assert Run.logged == [({"loss": 1.5}, 3)]


def test_tensorboard_gets_scalars(monkeypatch):
    class Module:
        class SummaryWriter:
            def __init__(self, folder):
                self.calls = [folder]

            def add_scalar(self, *call):
                self.calls.append(call)

            def close(self):
                self.calls.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Module)
    tracker = TensorBoardTracker("folder")
    tracker.log("loss", 1.5, 3)
    tracker.close()
    assert tracker.writer.calls == ["folder", ("loss", 1.5, 3), "closed"]
