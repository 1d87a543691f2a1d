"""Many simulations, in processes of their own if asked for; those that fail are left out, and told.

Each part of the simulations is a process of its own, so that one that dies takes with it no other. Its seed is one of
Pyro's random numbers, and parts are as large for any number of processes, so that simulations do not depend on it.
"""

from __future__ import annotations

import multiprocessing
import pickle
import warnings
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.messages import check_counts, warn
from pyro_nami.program.isolation import seed_rng

__all__ = ["PartOfDraws", "drawn"]

# Parts that simulations are made in. At ten times more, starting processes takes longer than quick simulations; at ten
# times less, processes wait for the last of them, and more is made anew where one dies.
PARTS = 32
# Simulations that fail one by one, before any succeeds, after which the model is taken to be wrong. At ten times more,
# a mistake shows late; at ten times less, a model that fails for most draws is refused.
MOST_FAILED = 30
SEEDS = 2**31  # numbers that seeds are drawn from


class PartOfDraws(KeyboardInterrupt):
    """Ctrl-C while simulations were drawn; ``draws`` are those that were finished, None if there are none."""

    draws: JointDraws | None = None


class _Part(NamedTuple):
    """Simulations of one part, how many failed, why the last did, and what was warned of."""

    draws: JointDraws | None
    failed: int = 0
    reason: Exception | None = None
    warned: tuple[str, ...] = ()


def drawn(
    simulator: Simulator, num: int, num_workers: int = 0, progress: bool = False
) -> JointDraws:
    """Returns joint draws, fewer than asked for where simulations fail.

    Args:
        simulator: of the model.
        num: of draws.
        num_workers: processes to draw them in; 0 for none but this one.
        progress: whether to show a progress bar.

    Raises:
        PartOfDraws: Ctrl-C.
        Exception: that of the model, if the first simulations fail one and all.

    Warns:
        UserWarning: how many simulations failed, or died with their process, and why.
    """
    parts: list[_Part] = []
    try:
        if num_workers:
            check_counts(num=num, num_workers=num_workers)
            _in_processes(simulator, num, num_workers, progress, parts.append)
        else:
            # one run makes all simulations, or each makes one
            size = num if simulator.vectorized else -(-num // PARTS)
            for count in _sizes(num, size):
                parts.append(_part(simulator, count))
                _check(parts)
    except KeyboardInterrupt as error:
        interrupted = PartOfDraws()
        interrupted.draws = _joined(parts)
        raise interrupted from error
    failed = sum(part.failed for part in parts)
    for message in dict.fromkeys(message for part in parts for message in part.warned):
        warn(message)
    draws, reasons = _joined(parts), [part.reason for part in parts if part.reason is not None]
    if draws is None:
        raise reasons[0]
    if failed:
        warn(
            f"{failed} of {num} simulations failed, and were left out, first by {type(reasons[0]).__name__}: "
            f"{reasons[0]}. The posterior is that of data of simulations that do not fail."
        )
    return draws


def _sizes(num: int, size: int) -> list[int]:
    return [min(size, num - done) for done in range(0, num, size)]


def _joined(parts: list[_Part]) -> JointDraws | None:
    """Returns the draws of all parts; None if there are none."""
    found = [part.draws for part in parts if part.draws is not None]
    return found[0].joined(found[1:]) if len(found) > 1 else next(iter(found), None)


def _check(parts: list[_Part]) -> None:
    """Raises the error of the model, if many simulations failed and none succeeded."""
    none_succeeded = all(part.draws is None for part in parts)
    if none_succeeded and sum(part.failed for part in parts) >= MOST_FAILED:
        raise next(part.reason for part in parts if part.reason is not None)


def _part(simulator: Simulator, num: int) -> _Part:
    """Returns simulations, drawn one by one where they cannot be drawn together, as some of them fail."""
    try:
        return _Part(simulator.draw(num))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a model raises
        parts = [_Part(None, 1, error)]  # at least one failed; the others are drawn anew
    for _ in range(num - 1):
        if len(parts) >= MOST_FAILED and all(part.draws is None for part in parts):
            break
        parts.append(_part(simulator, 1))
    failed = sum(part.failed for part in parts)
    return _Part(_joined(parts), failed, parts[0].reason)


# ---- in processes


class _Task(NamedTuple):
    """A part to draw."""

    num: int
    seed: int
    place: int  # of the part among all


def _in_processes(
    simulator: Simulator, num: int, workers: int, progress: bool, take: Callable[[_Part], Any]
) -> None:
    """Draws parts in processes; hands them on in their order, also when it is interrupted."""
    sizes = enumerate(_sizes(num, -(-num // PARTS)))
    waiting = deque(_Task(size, _seed(), place) for place, size in sizes)
    running: dict[Any, tuple[Any, _Task]] = {}
    found: list[tuple[int, _Part]] = []
    bar = tqdm(total=num, desc="simulating", disable=not progress, mininterval=0.2)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                task = waiting.popleft()
                process, connection = _started(simulator, task)
                running[connection] = process, task
            for ready in wait(list(running)):
                process, task = running.pop(ready)
                part = _received(ready)
                process.join()
                if (
                    part is None
                ):  # of one simulation at least; the others are drawn anew, in a process each
                    died = RuntimeError(f"its worker died (exit code {process.exitcode})")
                    part = _Part(None, 1, died)
                    others = range(task.num - 1)
                    waiting.extend(_Task(1, _seed(), task.place) for _ in others)
                found.append((task.place, part))
                _check([part for _, part in found])
                bar.update(part.failed + (part.draws.num if part.draws else 0))
    finally:
        bar.close()
        for process, _ in running.values():
            process.terminate()
            process.join()
        for _, part in sorted(found, key=lambda pair: pair[0]):
            take(part)


def _seed() -> int:
    return int(torch.randint(SEEDS, ()))


def _started(simulator: Simulator, task: _Task) -> tuple[Any, Connection]:
    """Returns a process that draws a part, and the connection that it sends it by.

    A process is a copy of this one where the system can make such, so that a model need not be pickled.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods() and simulator.device.type == "cpu"
    context: Any = multiprocessing.get_context("fork" if can_fork else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(simulator, task, sender), daemon=True)
    with warnings.catch_warnings():
        # threads of torch are not used in the copy
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        process.start()
    sender.close()
    return process, receiver


def _work(simulator: Simulator, task: _Task, sender: Connection) -> None:
    """Draws a part, and sends it."""
    torch.set_num_threads(1)  # those of the process that was copied are not there
    seed_rng(task.seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part = _part(simulator, task.num)
    part = part._replace(warned=tuple(dict.fromkeys(str(each.message) for each in caught)))
    try:
        sent = pickle.dumps(part)
    except Exception:  # noqa: BLE001  an error that cannot be pickled
        sent = pickle.dumps(part._replace(reason=RuntimeError(repr(part.reason))))
    sender.send_bytes(sent)
    sender.close()


def _received(connection: Any) -> _Part | None:
    """Returns the part that a process sent; None if it died."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    finally:
        connection.close()
