"""Training in two processes: the same as in one with all simulations, and the same in both."""

import json
import math
import os

import pytest
import torch
import torch.distributed
from scripts import ROOT, python, run_session

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="torch is built without gloo",
    ),
]

SESSION = '''
import contextlib, functools, io, math, os, sys, traceback, warnings

import pyro
import pyro.distributions as dist
import torch
import torch.distributed
from models import COLLIDER
from torch.nn.parallel import DistributedDataParallel

from pyro_nami import AutoNaMIGuide
from pyro_nami.inference import Simulator
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.losses import CompilationLoss
from pyro_nami.inference.simulate import Batch

warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)  # of fork, in a process with threads
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
folder, ZERO, STEPS = sys.argv[1], (torch.zeros(()),), 200
simulator = Simulator(COLLIDER, ZERO)


class Spy(torch.nn.Module):
    """Notes the data of all simulations that are trained on."""

    def __init__(self, loss):
        super().__init__()
        self.loss, self.seen = loss, []

    def forward(self, batch):
        self.seen.append(batch.draws.observed["d"].flatten())
        return self.loss(batch)


def new(processes, batch_size, seed=0, optim=None, **options):
    """Training from the start, seeded alike in all processes as scripts do."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    spies = []

    def wrap(loss):
        spies.append(Spy(loss))
        return DistributedDataParallel(spies[0]) if processes > 1 else spies[0]

    guide = AutoNaMIGuide(COLLIDER, exact=False, init_scale=1.0, hidden_features=options.pop("hidden_features", ()))
    optim = optim or functools.partial(torch.optim.Adam, lr=0.05)
    compilation = InferenceCompilation(COLLIDER, guide, optim, batch_size=batch_size, wrap=wrap, **options)
    compilation.spies = spies
    return compilation


def found(compilation, history):
    guide = compilation.guide
    return {
        "losses": torch.tensor(history.losses),
        "held out": torch.tensor(history.validation),
        "simulations": history.simulations,
        "non-finite": history.non_finite,
        "seen": torch.cat([torch.zeros(0), *compilation.spies[0].seen]),
        "weights": torch.cat([value.detach().flatten() for value in guide.parameters()]),
    }


def fit(compilation, steps, **options):
    return found(compilation, compilation.fit(steps, ZERO, **{"progress": False, **options}))


def fresh(rank, processes):
    """The whole of training on fresh simulations, and how far the guide is from the exact posterior then."""
    schedule = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=STEPS)
    compilation = new(processes, 200 // processes, clip_norm=20.0, scheduler=schedule)
    result = fit(compilation, STEPS, validation=200, validate_every=50)
    pyro.set_rng_seed(1)
    draws = simulator.draw(10_000)
    covariance = COLLIDER.posterior(0.0)[1]
    mean = draws.observed["d"].unsqueeze(-1) * COLLIDER.posterior(1.0)[0]
    values = torch.stack([draws.latents[name] for name in COLLIDER.latent], -1)
    with torch.no_grad():
        losses = CompilationLoss(compilation.guide)(Batch(ZERO, {}, draws))
    gap = losses + torch.distributions.MultivariateNormal(mean, covariance).log_prob(values)
    return {**result, "gap": gap.mean(), "its error": gap.std() / 100}


def given(rank, processes):
    """Given simulations, of which each process has a part: a third of the last, with some that are not finite."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        batches = [simulator.draw(30) for _ in range(12)]
    batches[3].observed["d"][25:28] = torch.nan
    parts = [torch.arange(30)] if processes == 1 else [torch.arange(20), torch.arange(20, 30)]
    data = [batch.select(parts[rank]) for batch in batches]
    compilation = new(processes, 30, seed=3 + rank, hidden_features=(8,), clip_norm=3.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(compilation, 24, data=data)
    return {**result, "warned": sum("not finite" in str(one.message) for one in caught)}


def resumed(rank, processes):
    """A run in one go, and one in two sessions; the path is the first process's, and the others' is left alone."""
    ending = str(rank)
    options = {"validation": 20, "validate_every": 5, "checkpoint_every": 4}  # the last at the end
    whole = fit(new(processes, 10), 20, **options)
    path = os.path.join(folder, "checkpoint" + ending)
    first = fit(new(processes, 10), 10, checkpoint=path, **options)
    second = fit(new(processes, 10), 20, checkpoint=path if rank == 0 else None, **options)
    return {"whole": whole, "first": first, "second": second}


def other_number(rank, processes):
    """Two processes go on from the checkpoint of one, and one from that of two."""
    path = os.path.join(folder, "one")
    if rank == 0:
        fit(new(1, 10), 4, checkpoint=path)
    torch.distributed.barrier()
    two = fit(new(processes, 10), 8, checkpoint=path)
    torch.distributed.barrier()
    return {"two": two, "one": fit(new(1, 10), 12, checkpoint=path) if rank == 0 else None}


def stopped(rank, processes):
    """Each process has held-out simulations of its own, and alone would stop at another step."""
    pyro.set_rng_seed(10 + rank)
    held_out = [simulator.draw(5)]
    optim = functools.partial(torch.optim.SGD, lr=0.02)
    return fit(new(processes, 5, optim=optim, clip_norm=5.0), 300, validation=held_out, validate_every=1, patience=4)


def ended(rank, processes):
    """An iterator that ends after 5 batches in the one and after 3 in the other."""
    return fit(new(processes, 5), 9, data=iter([simulator.draw(5) for _ in range(5 - 2 * rank)]))


def empty(rank, processes):
    """The second process has no finite simulation in one batch of three."""
    batches = [simulator.draw(50) for _ in range(3)]
    if rank == 1:
        batches[1].latents["a"][:] = torch.inf
    try:
        fit(new(processes, 50), 3, data=batches)
    except ValueError as error:  # 50 of 200 simulations are too many
        return str(error)


def infinite(rank, processes):
    """In the first step the second process alone has a loss that is not finite; it made other weights."""
    batches = [simulator.draw(5) for _ in range(2)]
    if rank == 1:
        batches[0].latents["a"][0] = 1e200
    compilation = new(processes, 5, seed=rank, hidden_features=(8,))
    try:
        fit(compilation, 2, data=batches)
    except ValueError as error:
        return {**found(compilation, compilation.history), "message": str(error)}


class Log(list):
    def log(self, name, value, step):
        self.append(step)


def shown(rank, processes):
    tracker, screen = Log(), io.StringIO()
    with contextlib.redirect_stderr(screen):
        fit(new(processes, 5), 3, progress=True, tracker=tracker)
    return {"logged": list(tracker), "shown": screen.getvalue()}


def child(rank):
    pid = os.fork()
    if pid == 0:
        try:
            where = "file://" + os.path.join(folder, "meeting")
            torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
            parts = (fresh, given, resumed, other_number, stopped, ended, empty, infinite, shown)
            results = {part.__name__: part(rank, 2) for part in parts}
            torch.save(results, os.path.join(folder, f"rank{rank}"))
            torch.distributed.destroy_process_group()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


children = [child(rank) for rank in range(2)]
torch.save({part.__name__: part(0, 1) for part in (fresh, given)}, os.path.join(folder, "alone"))
while children:
    pid, status = os.wait()
    children.remove(pid)
    if status:
        for other in children:  # it waits for the one that failed
            os.kill(other, 9)
        sys.exit(1)
'''


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two processes found, and one alone. They are forked from one that has imported torch."""
    if not hasattr(os, "fork"):
        pytest.skip("processes are forked")
    folder = tmp_path_factory.mktemp("distributed")
    run_session(SESSION, folder)
    names = ("rank0", "rank1", "alone")
    return {
        **{name: torch.load(folder / name, weights_only=True) for name in names},
        "folder": folder,
    }


def both(results, part, *keys):
    """A part of what each process found."""
    found = [results[rank][part] for rank in ("rank0", "rank1")]
    for key in keys:
        found = [one[key] for one in found]
    return found


def differ(first, second):
    return len(first) > 0 and torch.cat([first, second]).unique().numel() == len(first) + len(
        second
    )


def test_two_processes_reach_the_loss_of_one_with_all_simulations(results):
    """min_q E[-log q] is the exact posterior's; what training leaves of it is noise of a few thousandths of a nat."""
    two, alone = results["rank0"]["fresh"], results["alone"]["fresh"]
    assert two["simulations"] == alone["simulations"] == 200 * 200
    for one in (two, alone):
        assert one["its error"] < 2e-3 and -3e-3 < one["gap"] < 0.01
    assert abs(two["gap"] - alone["gap"]) < 5e-3
    # over the last 100 steps, 20,000 simulations each
    mean, other = (one["losses"][-100:].mean() for one in (two, alone))
    assert abs(mean - other) < 5e-3 + 4 * two["losses"][-100:].std() * math.sqrt(2 / 100)
    assert two["held out"].shape == (4, 2)


def test_weights_and_history_are_the_same_in_both_and_simulations_differ(results):
    for key in ("weights", "losses", "held out"):
        first, second = both(results, "fresh", key)
        assert torch.equal(first, second)
    first, second = both(results, "fresh", "seen")
    assert len(first) == len(second) == 100 * 200 and differ(first, second)


def test_a_step_on_parts_of_a_batch_is_a_step_on_the_batch(results):
    """Parts of unequal size and simulations that are not finite included; initial weights are the first's."""
    alone = results["alone"]["given"]
    assert alone["non-finite"] == {"d": 6}
    for one in both(results, "given"):
        assert torch.allclose(one["losses"], alone["losses"], rtol=1e-9, atol=0.0)
        assert torch.allclose(one["weights"], alone["weights"], rtol=1e-7, atol=1e-9)
        assert one["non-finite"] == {"d": 6} and one["simulations"] == 30 * 24
    assert both(results, "given", "warned") == [1, 0]


def test_training_goes_on_to_the_same_bits_from_the_first_processs_file(results):
    for one in both(results, "resumed"):
        for key in ("losses", "held out", "weights"):
            assert torch.equal(one["second"][key], one["whole"][key])
        assert torch.equal(
            torch.cat([one["first"]["seen"], one["second"]["seen"]]), one["whole"]["seen"]
        )
    assert differ(*both(results, "resumed", "whole", "seen"))
    assert (results["folder"] / "checkpoint0").exists() and not (
        results["folder"] / "checkpoint1"
    ).exists()


def test_another_number_of_processes_goes_on_with_simulations_that_differ(results):
    first, second = both(results, "other_number", "two")
    assert differ(first["seen"], second["seen"]) and torch.equal(
        first["weights"], second["weights"]
    )
    assert first["simulations"] == second["simulations"] == 40 + 2 * 40
    alone = results["rank0"]["other_number"]["one"]
    assert len(alone["losses"]) == 12 and alone["simulations"] == 120 + 40


def test_training_stops_at_the_same_step_in_both(results):
    for part, steps in (("stopped", range(1, 300)), ("ended", [3])):
        first, second = both(results, part)
        assert len(first["losses"]) == len(second["losses"]) in steps
        for key in ("held out", "weights"):
            assert torch.equal(first[key], second[key])


def test_what_is_not_finite_in_one_is_known_to_both(results):
    for message in both(results, "empty"):
        assert (
            "at most 10% of the simulations" in message
            and "50 of 200" in message
            and "'a'" in message
        )
    first, second = both(results, "infinite")
    assert torch.equal(first["weights"], second["weights"]) and first["weights"].isfinite().all()
    for message in (first["message"], second["message"]):
        assert "in step 1 " in message and "'a' (values up to 1e+200)" in message


def test_the_first_process_alone_shows_and_logs(results):
    assert both(results, "shown", "logged") == [[1, 2, 3], []]
    first, second = both(results, "shown", "shown")
    assert "compiling" in first and second == ""


def test_the_example_runs_under_torchrun(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = python(*torchrun, ROOT / "examples" / "distributed.py", "--smoke", "--out", tmp_path)
    assert done.code == 0, done.errors
    assert (
        done.printed.count("KL of the guide") == 1
        and "2 processes: 1,024 simulations" in done.printed
    )
    assert json.loads((tmp_path / "results.json").read_text())["processes"] == 2
