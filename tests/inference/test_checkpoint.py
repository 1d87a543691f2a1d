"""Checkpoints: nothing is lost, nothing is run, and no other structure is loaded."""

import functools
import os
import random

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CHAIN, COLLIDER, drawn_normal, learned, pair
from scripts import run_session
from torch.utils.data import DataLoader

from pyro_nami.inference import checkpoint as module
from pyro_nami.inference import latent_moves
from pyro_nami.inference.checkpoint import (
    check_structure,
    load_checkpoint,
    save_checkpoint,
)
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.simulate import Simulator
from pyro_nami.program.isolation import rng_state, set_rng_state

pytestmark = pytest.mark.filterwarnings("error")
Adam = functools.partial(torch.optim.Adam, lr=0.02)
ZERO = (torch.zeros(()),)


def hand_written(y, observations):
    loc = (
        pyro.param("loc", torch.zeros(()))
        + pyro.param("slope", torch.zeros(())) * observations["y"]
    )
    scale = pyro.param("scale", torch.ones(()), constraint=dist.constraints.positive)
    pyro.sample("z", dist.Normal(loc, scale))


def new(model=CHAIN, *, optim=Adam, guide=None, **options):
    """A session from the start: as after a new start of the program, whatever was trained before."""
    pyro.clear_param_store()
    pyro.set_rng_seed(11)
    guide = learned(model) if guide is None else guide
    return InferenceCompilation(model, guide, optim, **{"batch_size": 10, **options})


def state_of(compilation):
    return {name: value.detach().clone() for name, value in compilation._trainer.parameters.items()}


def simulations():
    draws = Simulator(CHAIN, ZERO).draw(40)
    return [
        {name: v[i] for name, v in {**draws.latents, **draws.observed}.items()} for i in range(40)
    ]


def varying(step):
    """Arguments that depend on every generator of random numbers."""
    return (torch.rand(()) + np.random.rand() + random.random(),), {}


def moved(x):
    """Its argument moves the latent, so that it matters to the simulations."""
    pair(dist.Normal(x, 1.0))()


def new_observed(model):
    """A session of a model that samples its data."""
    return new(model, guide=learned(model, observed=["y"]), observed=["y"])


def fit(compilation, steps, path=None, **options):
    return compilation.fit(
        steps, **{"args": ZERO, "progress": False, "checkpoint": path, **options}
    )


def assert_same(found, expected):
    assert found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )


OneCycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=13)
FALLING = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.9}
chain = pair(dist.Normal(0.0, 1.0))
SESSIONS = {
    "plain": (new, dict),
    "validated": (new, lambda: {"validation": 20, "validate_every": 3}),
    "scheduled": (lambda: new(scheduler=OneCycle, clip_norm=1.0), dict),
    "Pyro's optimizer": (lambda: new(optim=pyro.optim.ClippedAdam({"lr": 0.02, "lrd": 0.9})), dict),
    "Pyro's scheduler": (lambda: new(optim=pyro.optim.ExponentialLR(dict(FALLING))), dict),
    "offline": (new, lambda: {"data": DataLoader(simulations(), batch_size=10, shuffle=True)}),
    "refreshed": (new, lambda: {"data": Simulator(CHAIN, ZERO).draw(40), "refresh": 2}),
    "rarely refreshed": (new, lambda: {"data": Simulator(CHAIN, ZERO).draw(40), "refresh": 2}),
    "growing": (
        lambda: new(batch_size=lambda step: 20 if step > 4 else 8),
        lambda: {"data": Simulator(CHAIN, ZERO).draw(40), "refresh": 2},
    ),
    "hand-written": (lambda: new(chain, guide=hand_written), dict),
    "varying arguments": (lambda: new_observed(moved), lambda: {"args": varying}),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(name, tmp_path, monkeypatch):
    make, options = SESSIONS[name]
    if name == "rarely refreshed":
        monkeypatch.setattr(
            "pyro_nami.inference.latent_moves.elements_of_a_draw",
            lambda *args: 2 * latent_moves.WORK,
        )
    whole = make()
    history = fit(whole, 13, **options())
    expected = state_of(whole)
    for steps in (5, 9, 13):  # of which the first two end as an interruption would: at a checkpoint
        part = make()
        resumed = fit(part, steps, tmp_path / "c", checkpoint_every=2, **options())
    assert resumed.losses == history.losses and resumed.simulations == history.simulations
    if name != "validated":  # each part ends with a validation of its own
        assert_same(state_of(part), expected)


# ---- killed at any moment

SESSION = """
import functools, os, random, signal, sys, time, traceback
import numpy, pyro, torch, torch._dynamo  # which every child would import at its first step
import pyro.distributions as dist
from pyro_nami import AutoNaMIGuide
from pyro_nami.inference.compilation import InferenceCompilation

STEPS, EVERY, KILLS, path = 200, 4, 20, sys.argv[1]


def model(x):
    a = pyro.sample("a", dist.Normal(x, 1.0))
    pyro.sample("y", dist.Normal(a, 1.0))


class Pipe:  # a tracker that takes leave for every step, and tells of it
    def __init__(self, leave, file):
        self.leave, self.file = leave, file

    def log(self, name, value, step):
        if name == "loss":
            os.read(self.leave, 1)
            os.write(self.file, b"%d\\n" % step)


def arguments(step):  # that draw on every generator
    return (torch.rand(()) + numpy.random.rand() + random.random(),), {}  # which move the latent


def train(checkpoint, tracker=None):
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(model, observed=["y"], hidden_features=(8,), exact=False)
    compilation = InferenceCompilation(
        model, guide, functools.partial(torch.optim.Adam, lr=0.01), batch_size=10, clip_norm=10.0,
        observed=["y"],
        scheduler=functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=STEPS),
    )
    history = compilation.fit(
        STEPS, arguments, checkpoint=checkpoint, checkpoint_every=EVERY, validation=20, validate_every=20,
        progress=False, tracker=tracker,
    )
    losses, held_out = torch.tensor(history.losses, dtype=torch.float64), torch.tensor(history.validation)
    weights = {name: value for name, value in guide.state_dict().items() if torch.is_tensor(value)}
    return {"losses": losses, "held out": held_out, **weights}


def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


assert os.waitpid(child(lambda: torch.save(train(None), path + ".whole")), 0)[1] == 0
moments, kills, last, torn = random.Random(1), 0, 0, 0
while kills < KILLS:
    (leave, grant), (read, write) = os.pipe(), os.pipe()
    os.write(grant, b"." * 2 * EVERY)  # or a slow parent would find the child at its end
    pid = child(lambda: train(path, Pipe(leave, write)))
    os.close(write)
    steps = os.fdopen(read)
    first = int(steps.readline())
    assert last - EVERY < first <= last + 1, (first, last)  # nothing is lost but the steps since the checkpoint
    last, before = first, time.perf_counter()
    for _ in range(moments.randint(EVERY, 2 * EVERY - 2)):
        last = int(steps.readline())
    took = (time.perf_counter() - before) / (last - first)
    time.sleep(moments.random() * 2 * took)  # any moment of a step, or of the writing of a checkpoint
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    last = int((steps.read().split() or [last])[-1])
    kills += 1
    torn += os.path.exists(path + ".tmp")
assert os.waitpid(child(lambda: torch.save(train(path), path + ".resumed")), 0)[1] == 0
print(kills, "kills, at the last in step", last, "of", STEPS, "and", torn, "amid a write")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "fork"), reason="children are forked from a parent that has imported torch"
)
def test_a_run_killed_twenty_times_at_random_ends_as_if_never_killed(tmp_path):
    """A process of its own imports torch once, and forks the sessions; each goes on where the last was killed."""
    printed = run_session(SESSION, tmp_path / "run")
    assert printed.startswith("20 kills, at the last in step")
    whole, resumed = (
        torch.load(tmp_path / f"run.{end}", weights_only=True) for end in ("whole", "resumed")
    )
    assert len(whole["losses"]) == 200
    assert_same(resumed, whole)


@pytest.mark.parametrize("where", ["torch.save", "os.fsync", "os.replace"])
def test_a_write_that_is_cut_short_leaves_the_old_file(where, tmp_path, monkeypatch):
    path = tmp_path / "folder" / "c"
    save_checkpoint(path, {"x": torch.zeros(3)})

    def half(state, file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    def stop(*args):
        raise KeyboardInterrupt

    owner, name = where.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(module, owner), name, half if owner == "torch" else stop)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(path, {"x": torch.ones(3)})
    assert load_checkpoint(path)["x"].tolist() == [0, 0, 0]
    save_checkpoint(path, {"x": torch.ones(3)})  # over what was left behind
    assert load_checkpoint(path)["x"].tolist() == [1, 1, 1] and os.listdir(path.parent) == ["c"]


def test_the_bytes_are_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))
        )
    save_checkpoint(tmp_path / "c", {})
    assert calls == ["fsync", "replace"]


# ---- what is in it


def test_a_checkpoint_is_tensors_and_plain_python(tmp_path):
    path = tmp_path / "c"
    fit(new(), 4, path, validation=10, validate_every=2)
    state = torch.load(path, weights_only=True)
    keys = "structure guide best lowest optimization rng stream others history derived format"
    assert state.keys() == set(keys.split())
    assert "site 'a'" in state["structure"]
    assert len(state["history"]["losses"]) == 4 and len(state["history"]["validation"]) == 2
    assert state["rng"].keys() == {"torch", "cuda", "numpy", "python"}


def test_code_in_a_file_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    path = tmp_path / "c"
    torch.save({"format": 1, "guide": Evil()}, path)
    with pytest.raises(ValueError, match="a file of another kind"):
        fit(new(), 4, path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "c"
    torch.save({"weights": torch.zeros(3)}, path) if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match="Expected a checkpoint of"):
        load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none")


def test_a_finished_run_is_loaded_and_a_longer_one_goes_on(tmp_path):
    path = tmp_path / "c"
    first = new()
    losses, expected = fit(first, 6, path).losses, state_of(first)
    second = new()
    assert fit(second, 6, path).losses == losses
    assert_same(state_of(second), expected)
    assert fit(new(), 9, path).losses[:6] == losses


def test_patience_that_ran_out_stays_run_out(tmp_path):
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    options = {"validation": 50, "validate_every": 1, "patience": 2}
    first, second = new(optim=sgd, clip_norm=1.0), new(optim=sgd, clip_norm=1.0)
    steps = len(fit(first, 300, tmp_path / "c", **options).losses)
    assert steps < 300 and len(fit(second, 300, tmp_path / "c", **options).losses) == steps


# ---- structure


SITES_DIFFER = "site 'a': here .*site 'e': here e: latent.*; there absent"


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (COLLIDER, {}, SITES_DIFFER),
        (CHAIN, {"inverse": "mean_field"}, r"site 'a': here .*in the inverse a \| y; there"),
        (CHAIN, {"hidden_features": (7,)}, r"parameter '.*': here shape .*; there shape"),
        (CHAIN, {"exact": True}, r"site 'a': here .*in the inverse a \| y; there"),
    ],
    ids=["model", "inverse", "widths", "exact"],
)
def test_another_structure_is_refused_by_name(model, options, match, tmp_path):
    fit(new(), 2, tmp_path / "c")
    compilation = new(model, guide=learned(model, **options))
    compilation.step(*ZERO)
    before = state_of(compilation)
    with pytest.raises(ValueError, match=f"another model or guide. They differ at {match}"):
        fit(compilation, 4, tmp_path / "c")
    assert_same(state_of(compilation), before)


def test_many_differences_are_summed_up():
    with pytest.raises(ValueError, match="; and 2 more. Choose another path"):
        check_structure({f"site '{i}'": "latent" for i in range(7)}, {})


def test_sizes_of_plates_are_no_part_of_the_structure(tmp_path):
    for size in (3, 8):
        history = fit(new_observed(drawn_normal), size, tmp_path / "c", args=(size,))
    assert len(history.losses) == 8


@pytest.mark.parametrize(
    "optim",
    [pyro.optim.Adam({"lr": 0.1}), functools.partial(torch.optim.SGD, lr=0.1)],
    ids=["Pyro", "no scheduler"],
)
def test_another_kind_of_optimizer_is_refused(optim, tmp_path):
    scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    fit(new(scheduler=scheduler), 2, tmp_path / "c")
    with pytest.raises(ValueError, match="state of (pyro|torch); got one with scheduler and torch"):
        fit(new(optim=optim), 4, tmp_path / "c")


def test_a_pyro_optimizer_needs_parameters_in_the_store(tmp_path):
    with pyro.settings.context(module_local_params=True):
        compilation = new(optim=pyro.optim.Adam({"lr": 0.1}))
        with pytest.raises(NotImplementedError, match="module_local_params"):
            fit(compilation, 2, tmp_path / "c")
        assert len(fit(new(), 2, tmp_path / "c").losses) == 2


def test_random_number_generators_come_back_from_plain_data(tmp_path):
    np.random.randn(1), random.gauss(0, 1)  # both now hold a second normal draw back
    save_checkpoint(tmp_path / "c", {"rng": rng_state()})

    def draw():
        return (
            torch.rand(3).tolist(),
            np.random.randn(3).tolist(),
            random.random(),
            random.gauss(0, 1),
        )

    expected = draw()
    draw()
    set_rng_state(load_checkpoint(tmp_path / "c")["rng"])
    assert draw() == expected


@pytest.mark.cuda
def test_the_generator_of_the_device_comes_back(tmp_path):
    torch.rand(1, device="cuda")
    save_checkpoint(tmp_path / "c", {"rng": rng_state()})
    expected = torch.rand(3, device="cuda").tolist()
    set_rng_state(load_checkpoint(tmp_path / "c")["rng"])
    assert torch.rand(3, device="cuda").tolist() == expected
