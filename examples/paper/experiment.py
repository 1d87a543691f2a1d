"""What the paper's experiments share: options, cells that run side by side and resume, and how results are kept.

An experiment is a list of cells, such as one system at one seed. A script writes ``task(cell, run)``, which returns
what the cell measured as JSON values, and calls `run_cells`. Each finished cell is kept in a file of its own, so that
an interrupted run goes on where it was; `Run.checkpoint` is the place for what a cell keeps on the way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from tqdm import tqdm

HERE = Path(__file__).parent

Cell = Mapping[str, Any]


class Options(NamedTuple):
    """What a script was asked for.

    Attributes:
        setting: ``"smoke"``, ``"default"`` or ``"paper"``.
        results: folder for the figure and the numbers.
        parts: folder for what an interrupted run goes on from.
        extra: the script's own options by name.
    """

    setting: str
    device: str
    seeds: int
    jobs: int
    results: Path
    parts: Path
    extra: Mapping[str, Any]

    def choose(self, smoke: Any, default: Any, paper: Any) -> Any:
        """Returns the value that belongs to the setting."""
        return {"smoke": smoke, "default": default, "paper": paper}[self.setting]


class Run(NamedTuple):
    """What a cell is given besides itself.

    Attributes:
        options: the script's.
        checkpoint: a file to keep the state of the cell in, while it runs; it need not be there.
        tell: to be called with the share of the cell that is done, from 0 to 1.
    """

    options: Options
    checkpoint: Path
    tell: Callable[[float], None]

    def keep(self, state: Any) -> None:
        """Keeps tensors and plain Python as the state of the cell, with the random numbers' own, for `kept`."""
        random = [torch.get_rng_state()]
        if self.options.device != "cpu":
            random.append(torch.cuda.get_rng_state(self.options.device))
        part = self.checkpoint.with_suffix(".ckpt-part")
        torch.save({"state": state, "random": random}, part)
        part.replace(self.checkpoint)

    def kept(self) -> Any:
        """Returns what was kept, and goes on with the random numbers from there; None if nothing was."""
        if not self.checkpoint.exists():
            return None
        found = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        torch.set_rng_state(found["random"][0])
        for state in found["random"][1:]:
            torch.cuda.set_rng_state(state, self.options.device)
        return found["state"]

    def tracker(self, steps: int) -> StepTracker:
        """Returns a tracker for `InferenceCompilation.fit` that tells the share of its steps."""
        return StepTracker(self.tell, steps)


class StepTracker(NamedTuple):
    """Tells how far a fit is."""

    tell: Callable[[float], None]
    steps: int

    def __call__(self, name: str, value: float, step: int) -> None:
        self.tell(step / self.steps)


Task = Callable[[Cell, Run], Any]


def parse(
    doc: str | None,
    seeds: tuple[int, int, int],
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
    folder: Path = HERE,
) -> Options:
    """Reads the options that all scripts take; ``seeds`` are their numbers in smoke, default and paper.

    Results go to ``results`` in the scripts' ``folder``, and what an interrupted run goes on from to ``out``.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    setting = parser.add_mutually_exclusive_group()
    setting.add_argument(
        "--smoke",
        action="store_true",
        help="seconds: shows that all runs; the figures mean nothing",
    )
    setting.add_argument("--paper", action="store_true", help="the paper's full setting, for a GPU")
    parser.add_argument("--device", default="cpu", help="where to compute: cpu, cuda, cuda:1")
    parser.add_argument("--seeds", type=int, help=f"number of runs ({', '.join(map(str, seeds))})")
    parser.add_argument(
        "--jobs", type=int, help="processes side by side; one a CPU core, or one on a GPU"
    )
    parser.add_argument("--out", type=Path, help="folder for all that is written")
    if extra is not None:
        extra(parser)
    given = vars(parser.parse_args())
    smoke, paper, device, out = (given.pop(name) for name in ("smoke", "paper", "device", "out"))
    number, jobs = given.pop("seeds"), given.pop("jobs")
    chosen = "smoke" if smoke else "paper" if paper else "default"
    _check_device(parser, device)
    for name, value in (("seeds", number), ("jobs", jobs)):
        if value is not None and value < 1:
            parser.error(f"Expected --{name} of at least 1; got {value}.")
    parts = (out or Path("out") / folder.name) / chosen
    return Options(
        setting=chosen,
        device=device,
        seeds=number or dict(zip(("smoke", "default", "paper"), seeds))[chosen],
        jobs=jobs or (1 if smoke or device != "cpu" else os.cpu_count() or 1),
        results=out or (folder if chosen == "default" else parts) / "results",
        parts=parts,
        extra=given,
    )


def run_cells(
    name: str, task: Task, cells: Sequence[Cell], settings: Mapping[str, Any], options: Options
) -> list[Any]:
    """Returns what ``task`` measures in each cell, in order; cells that are done are read, not run again.

    Args:
        name: of the experiment, for the files.
        task: a function at the top level of a module. It runs in another process unless ``options.jobs`` is 1, with
            one thread, and with all seeds set from ``cell["seed"]``.
        cells: JSON values each.
        settings: JSON values that all cells share and that results depend on; a cell kept under others is not read.
    """
    folder = options.parts / name
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{_key(cell, settings)}.json" for cell in cells]
    waiting = [i for i, file in enumerate(files) if not file.exists()]
    if len(waiting) < len(cells):
        print(
            f"{len(cells) - len(waiting)} of {len(cells)} runs are kept in {folder}; delete it to run them again."
        )
    jobs = min(options.jobs, len(waiting))
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(cells))
    arguments = {i: (task, cells[i], options, files[i], i) for i in waiting}
    with tqdm(total=float(len(waiting)), desc=name, bar_format=_BAR, mininterval=0.5) as bar:
        try:
            if jobs <= 1:
                _share_with(shares, bar)
                for i in waiting:
                    _run_cell(*arguments[i])
            else:
                with ProcessPoolExecutor(jobs, context, _share_with, (shares,)) as pool:
                    futures = [pool.submit(_run_cell, *each) for each in arguments.values()]
                    _follow(futures, shares, bar)
        except KeyboardInterrupt:
            bar.close()
            print(
                f"Interrupted; what is done is kept in {folder}, and the same command goes on from there."
            )
            sys.exit(130)
    return [json.loads(file.read_text())["result"] for file in files]


def write_results(name: str, payload: Mapping[str, Any], options: Options) -> Path:
    """Prints the claims and writes the numbers to ``<results>/<name>.json``; returns where the figure goes.

    Args:
        payload: JSON values; ``payload["claims"]`` holds records of a ``claim``, whether it ``holds``, and ``why`` not.
    """
    print()
    for each in payload["claims"]:
        why = f" ({each['why']})" if each.get("why") and not each["holds"] else ""
        print(f"{'holds' if each['holds'] else 'FAILS'}: {each['claim']}{why}")
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"{name}.json"
    _write(file, {"setting": options.setting, "device": options.device, **payload}, indent=1)
    figure = options.results / f"{name}.png"
    print(f"\nWritten: {file}, {figure.name}")
    return figure


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints rows under a header, the first column to the left; numbers with four digits."""
    lines = [
        [*map(str, header)],
        *([f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in rows),
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print()
    for first, *rest in lines:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip())


def mean_and_error(values: Sequence[float] | torch.Tensor) -> tuple[float, float | None]:
    """Returns the mean over runs and its standard error, None for one run."""
    tensor = torch.as_tensor(values, dtype=torch.float64)
    count = len(tensor)
    return tensor.mean().item(), tensor.std().item() / count**0.5 if count > 1 else None


def draw_band(
    axes: Any,
    x: Sequence[float],
    curves: Any,
    label: str,
    *,
    sds: float | None = None,
    **style: Any,
) -> None:
    """Draws the mean of curves ``(runs, points)`` with a band of ``sds`` standard deviations, or one standard error."""
    values = torch.as_tensor(curves, dtype=torch.float64)
    mean, count = values.mean(0), len(values)
    sd = values.std(0) if count > 1 else torch.zeros_like(mean)
    width = sd * sds if sds is not None else sd / count**0.5
    (line,) = axes.plot(x, mean.tolist(), label=label, **style)
    axes.fill_between(
        x, (mean - width).tolist(), (mean + width).tolist(), color=line.get_color(), alpha=0.2, lw=0
    )


# ---- cells

_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.2f}/{total:.0f} runs [{elapsed}<{remaining}]"
_shares: Any = None
_bar: Any = None


def _share_with(shares: Any, bar: Any = None) -> None:
    global _shares, _bar
    _shares, _bar = shares, bar
    torch.set_num_threads(1)


def _run_cell(task: Task, cell: Cell, options: Options, file: Path, index: int) -> None:
    def tell(share: float) -> None:
        _shares[index] = share
        if _bar is not None:
            _show(_shares, _bar)

    pyro.clear_param_store()
    pyro.set_rng_seed(cell["seed"])
    checkpoint = file.with_suffix(".ckpt")
    result = task(cell, Run(options, checkpoint, tell))
    _write(file, {"cell": dict(cell), "result": result})
    checkpoint.unlink(missing_ok=True)
    tell(1.0)


def _show(shares: Any, bar: Any) -> None:
    bar.update(min(sum(shares), bar.total) - bar.n)  # shares may sum to a little more


def _follow(futures: Sequence[Future], shares: Any, bar: Any) -> None:
    """Waits for all, and raises the first error once the others are done."""
    left = set(futures)
    while left:
        _, left = wait(left, timeout=0.5, return_when=FIRST_COMPLETED)
        _show(shares, bar)
    for future in futures:
        future.result()


def _key(cell: Cell, settings: Mapping[str, Any]) -> str:
    whole = json.dumps([dict(cell), dict(settings)], sort_keys=True)
    words = "-".join(str(value) for value in cell.values() if isinstance(value, (str, int)))
    return f"{''.join(c if c.isalnum() else '-' for c in words)}-{hashlib.sha256(whole.encode()).hexdigest()[:10]}"


def _write(file: Path, value: Any, indent: int | None = None) -> None:
    """Writes JSON so that a reader finds the old file or the new one, never a part."""
    part = file.with_suffix(".part")
    text = json.dumps(value, indent=indent)
    if indent is not None:  # lists of numbers on one line
        text = re.sub(
            r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text
        )
    part.write_text(text + "\n")
    part.replace(file)


def _check_device(parser: argparse.ArgumentParser, device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        parser.error(
            f"Expected a device that is there; got --device {device} ({reason}). Without one: --device cpu."
        )
