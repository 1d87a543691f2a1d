"""A compiled guide against sbi's neural posterior estimation, at the same simulations: a binary tree of depth 8.

127 latents, 128 observed leaves, all Gaussian, so that the KL divergence to the exact posterior is known. Every method
gets the same simulations, made once, and 10% of them to stop by; sbi (0.2x) runs with its defaults, the guide with
Adam and its step size along a cosine. Needs sbi (``pip install sbi``), which nothing else here does. Run with::

    python benchmarks/npe.py [--smoke] [--simulations 10000] [--epochs 100] [--methods guide,maf,nsf]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_nami import AutoNaMIGuide, InferenceCompilation
from pyro_nami.inference import JointDraws, Simulator

sys.path.append(str(Path(__file__).parent.parent / "examples" / "paper"))

from gaussian_tree import GaussianTree  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "npe.json"
BATCH = 200
LEARNING_RATE, PASSES = 2e-2, 20  # of the guide: step size and passes over the simulations
TARGET = 3.0  # times lower KL


def matrices(tree: GaussianTree, draws: JointDraws) -> tuple[Tensor, Tensor]:
    """Latents and leaves, ``(draws, sites)``."""
    z = torch.stack([draws.latents[name] for name in tree.latents], -1)
    x = torch.stack([draws.observed[name] for name in tree.observed], -1)
    return z, x


def batches(draws: JointDraws) -> Iterator[JointDraws]:
    """All draws in a new order, batch by batch, for ever."""
    while True:
        for index in torch.randperm(draws.num).split(BATCH):
            yield draws.select(index)


def guide(
    tree: GaussianTree, draws: JointDraws, test: JointDraws, passes: int
) -> tuple[Tensor, float]:
    """Log densities of the test latents under a compiled guide, and the seconds it took to train."""
    start = time.perf_counter()
    kept, held_out = (
        draws.select(slice(draws.num // 10, None)),
        draws.select(slice(0, draws.num // 10)),
    )
    steps = passes * -(-kept.num // BATCH)
    made = AutoNaMIGuide(tree, init_scale=1.0)
    compilation = InferenceCompilation(
        tree,
        made,
        functools.partial(torch.optim.Adam, lr=LEARNING_RATE),
        batch_size=BATCH,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    )
    compilation.fit(
        steps, (tree.example(),), data=batches(kept), validation=[held_out], progress=True
    )
    seconds = time.perf_counter() - start
    with torch.no_grad():
        return made.log_prob(test.latents, tree.example(), observations=test.observed), seconds


def npe(
    tree: GaussianTree, draws: JointDraws, test: JointDraws, epochs: int, estimator: str
) -> tuple[Tensor, float]:
    """Likewise by sbi."""
    from sbi.inference import NPE

    start = time.perf_counter()
    z, x = matrices(tree, draws)
    inference = NPE(density_estimator=estimator, show_progress_bars=False)
    density = inference.append_simulations(z, x).train(
        training_batch_size=BATCH, max_num_epochs=epochs
    )
    seconds = time.perf_counter() - start
    z, x = matrices(tree, test)
    with torch.no_grad():
        return density.log_prob(z.unsqueeze(0), condition=x).squeeze(0), seconds


def main() -> None:
    """Measures, prints and writes ``results/npe.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a small tree and the guide alone; writes no results"
    )
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument(
        "--epochs", type=int, default=100, help="passes of sbi over the simulations, at most"
    )
    parser.add_argument("--methods", default="guide,maf,nsf", help="separated by commas")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    depth, simulations, epochs = (
        (3, 300, 2) if arguments.smoke else (8, arguments.simulations, arguments.epochs)
    )
    if not arguments.smoke and importlib.util.find_spec("sbi") is None:
        print("sbi is not installed; to compare with it: pip install sbi")
        return
    tree = GaussianTree(depth, seed=0)
    pyro.set_rng_seed(0)
    simulator = Simulator(tree, (tree.example(),))
    draws, test = simulator.draw(simulations), simulator.draw(2000)
    exact = tree.posterior_log_prob(test.latents, test.observed)
    records: dict[str, Any] = {}
    print(f"depth {depth}: {len(tree.latents)} latents, {simulations:,} simulations")
    for method in ["guide"] if arguments.smoke else arguments.methods.split(","):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        if method == "guide":
            found, seconds = guide(tree, draws, test, min(epochs, PASSES))
        else:
            found, seconds = npe(tree, draws, test, epochs, method)
        kl = (exact - found.double()).mean().item()
        records[method] = {"kl": kl, "kl_per_latent": kl / len(tree.latents), "seconds": seconds}
        print(
            f"  {method:<6} KL {kl:10.3f} nats, {kl / len(tree.latents):.4f} a latent, {seconds:6.0f} s",
            flush=True,
        )
    if arguments.smoke:
        return
    record = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "depth": depth,
        "simulations": simulations,
        "epochs": epochs,
        "target_times": TARGET,
        "methods": records,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
