"""One guide trained by many processes: a binary tree of 31 Gaussian sites, against its exact posterior.

A step takes 256 simulations. One process makes them all, or each of several makes its part and the gradients are
averaged, by torch's `DistributedDataParallel` around the loss of `InferenceCompilation`. Seeds that differ between
processes, progress and checkpoints by the first alone, and an early stop that is the same for all need no code here.
Given its leaves, the tree's posterior is known by linear algebra, so the guide's error is measured in nats. Run with::

    python examples/distributed.py [--smoke] [--steps 2000] [--seed 0] [--device cpu] [--out out/distributed]
    torchrun --standalone --nproc_per_node=2 examples/distributed.py [the same options]

Training goes on from ``tree.ckpt`` in that folder if it is there; delete it to start anew.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
import torch.distributed
from study import argument_parser
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyro_nami import AutoNaMIGuide, InferenceCompilation
from pyro_nami.inference import JointDraws, Simulator

BATCH = 256  # of all processes together
LEARNING_RATE = 1e-2
SITES, INNER = 31, 15  # the last 16 are the leaves
LEAVES = [f"x_{i}" for i in range(INNER, SITES)]


def make_model(weights: Tensor) -> Callable[[], None]:
    """A tree X_0 ~ N(0, 1), X_i ~ N(w_i X_parent, 1) with weights ``(31,)``."""

    def model() -> None:
        values = [pyro.sample("x_0", dist.Normal(weights.new_zeros(()), 1.0))]
        for i in range(1, SITES):
            values.append(
                pyro.sample(f"x_{i}", dist.Normal(weights[i] * values[(i - 1) // 2], 1.0))
            )

    return model


def posterior_log_prob(weights: Tensor, draws: JointDraws) -> Tensor:
    """Exact log density of draws' latents given their leaves, in nats ``(draws,)``."""
    influence = torch.eye(SITES, dtype=torch.float64)
    for i in range(1, SITES):
        influence[i, (i - 1) // 2] = -weights[i]
    precision = influence.T @ influence
    values = (
        torch.stack([{**draws.latents, **draws.observed}[f"x_{i}"] for i in range(SITES)], -1)
        .double()
        .cpu()
    )
    latent = precision[:INNER, :INNER]
    mean = -torch.linalg.solve(latent, precision[:INNER, INNER:] @ values[:, INNER:].T).T
    return torch.distributions.MultivariateNormal(mean, precision_matrix=latent).log_prob(
        values[:, :INNER]
    )


def join(device: str) -> tuple[int, int, str]:
    """Joins the processes that ``torchrun`` started; returns own number, how many there are, and own device."""
    if not torch.distributed.is_torchelastic_launched():
        return 0, 1, device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), device


def main() -> None:
    """Trains, compares with the exact posterior, and writes the numbers."""
    arguments = argument_parser(__doc__, "out/distributed", steps=2000).parse_args()
    steps, count = (4, 512) if arguments.smoke else (arguments.steps, 4096)
    rank, processes, device = join(arguments.device)
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    pyro.set_rng_seed(arguments.seed)

    weights = 0.5 + 1.5 * torch.rand(SITES, generator=torch.Generator().manual_seed(0))
    with torch.device(device):
        model = make_model(weights.to(device))
        # as nothing would be left to train
        guide = AutoNaMIGuide(model, observed=LEAVES, exact=False)
        compilation = InferenceCompilation(
            model,
            guide,
            functools.partial(torch.optim.Adam, lr=LEARNING_RATE),
            batch_size=BATCH // processes,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, steps
            ),
            clip_norm=10.0,
            wrap=DistributedDataParallel if torch.distributed.is_initialized() else None,
        )
        start = time.perf_counter()
        history = compilation.fit(
            steps,
            validation=count,
            validate_every=250,
            checkpoint=None if arguments.smoke else arguments.out / "tree.ckpt",
        )
        seconds = time.perf_counter() - start
        if rank == 0:
            draws = Simulator(model, observed=LEAVES).draw(count)
            with torch.no_grad():
                found = guide.log_prob(draws.latents, observations=draws.observed)
    if rank == 0:
        gap = posterior_log_prob(weights, draws) - found.double().cpu()
        kl = gap.mean().item(), gap.std().item() / count**0.5
        numbers = {
            "processes": processes,
            "simulations": history.simulations,
            "seconds": seconds,
            "validation loss": history.validation[-1][1],
            "KL to the exact posterior": kl[0],
            "its error": kl[1],
        }
        name = f"{processes} process{'es' if processes > 1 else ''}"
        print(
            f"\n{name}: {history.simulations:,} simulations in {seconds:.0f} s, {count:,} trees held out"
        )
        print(
            "KL of the guide to the exact posterior of 15 latents: {:.4f} +- {:.4f} nats".format(
                *kl
            )
        )
        (arguments.out / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
