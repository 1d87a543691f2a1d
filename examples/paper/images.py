"""Binary images for the experiments: statically binarized MNIST from a folder, or scikit-learn's bundled digits.

Pixels are drawn once and stay: 1 with the probability that the grey level gives, as in Larochelle and Murray 2011.
The split is 50,000 / 10,000 / 10,000 for training, validation and test, as in Webb et al. 2018, supplement D.1. Each
part is shuffled by a fixed seed, so that its first images are a sample of it.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SEED = 0
PACKED = "binarized_mnist.npz"
GREY = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
PARTS = ("train", "valid", "test")

EXPECTED = f"""\
Expected either {PACKED} (arrays train, valid and test: rows of 784 pixels by numpy.packbits; train_labels, valid_labels
and test_labels), or the four files
{", ".join(GREY)},
each with or without .gz: from the MNIST site or any copy of the idx files.
Without --data, scikit-learn's bundled digits stand in."""


class Images(NamedTuple):
    """Binary images in three parts.

    Attributes:
        name: of the data, for figures.
        side: pixels of a row.
        train, valid, test: pixels ``(images, side * side)``, 0 or 1.
        train_labels, valid_labels, test_labels: the digits, ``(images,)``, int64.
    """

    name: str
    side: int
    train: Tensor
    valid: Tensor
    test: Tensor
    train_labels: Tensor
    valid_labels: Tensor
    test_labels: Tensor


def read_images(folder: Path | None) -> Images:
    """Returns the images of a folder, or scikit-learn's digits for None.

    Args:
        folder: with ``binarized_mnist.npz``, which is preferred, or with the four idx files.

    Raises:
        ValueError: no such folder or files, or malformed ones; scikit-learn is needed and missing.
    """
    if folder is None:
        return _digits()
    if not folder.is_dir():
        raise ValueError(f"Expected a folder of images; there is none at {folder}.\n{EXPECTED}")
    if (folder / PACKED).exists():
        parts, labels = _packed(folder / PACKED)
    else:
        parts, labels = _grey(folder)
    return _images("MNIST, statically binarized", 28, parts, labels)


def halved(images: Images) -> Images:
    """Returns the images with half the side; a pixel is 1 where at least two of the four that it stands for are."""

    def pooled(x: Tensor) -> Tensor:
        return (F.avg_pool2d(x.view(-1, 1, images.side, images.side), 2) >= 0.5).float().flatten(1)

    name, side = f"{images.name}, {images.side // 2} by {images.side // 2}", images.side // 2
    parts = {part: pooled(getattr(images, part)) for part in PARTS}
    return images._replace(name=name, side=side, **parts)


def _images(name: str, side: int, parts: list[np.ndarray], labels: list[np.ndarray]) -> Images:
    """Returns the parts shuffled, images and labels alike."""
    generator = torch.Generator().manual_seed(SEED)
    orders = [torch.randperm(len(part), generator=generator) for part in parts]
    pixels = [torch.from_numpy(part)[order].float() for part, order in zip(parts, orders)]
    digits = [torch.from_numpy(label)[order].long() for label, order in zip(labels, orders)]
    return Images(name, side, *pixels, *digits)


def _packed(file: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    try:
        with np.load(file) as arrays:
            rows = [arrays[part] for part in PARTS]
            labels = [arrays[f"{part}_labels"] for part in PARTS]
        parts = [np.unpackbits(row, axis=1) for row in rows]
    except (OSError, EOFError, KeyError, ValueError, TypeError, BadZipFile, zlib.error) as error:
        raise ValueError(
            f"Expected a readable {file}; got {type(error).__name__}: {error}.\n{EXPECTED}"
        ) from error
    if any(
        part.shape[1] != 784 or label.shape != (len(part),) for part, label in zip(parts, labels)
    ):
        shapes = {part: array.shape for part, array in zip(PARTS, rows)}
        raise ValueError(
            f"Expected 98 bytes and one label for each image in {file}; got {shapes}.\n{EXPECTED}"
        )
    _check_labels(labels, file)
    return parts, labels


def _grey(folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns pixels drawn once from Bernoulli(grey level / 255), and the labels."""
    files = [_find(folder, name) for name in GREY]
    images, labels, test, test_labels = (_idx(file) for file in files)
    for pair in ((images, labels, files[0]), (test, test_labels, files[2])):
        if pair[0].shape[1:] != (28, 28) or pair[1].shape != pair[0].shape[:1]:
            raise ValueError(
                f"Expected images of 28 by 28 with a label each in {pair[2]}; "
                f"got {pair[0].shape} and {pair[1].shape}.\n{EXPECTED}"
            )
    _check_labels([labels, test_labels], files[1])
    generator = torch.Generator().manual_seed(SEED)
    drawn = [_binarized(grey, generator) for grey in (images, test)]
    order = torch.randperm(len(images), generator=generator).numpy()
    cut = len(images) * 5 // 6
    train, valid = order[:cut], order[cut:]
    return [drawn[0][train], drawn[0][valid], drawn[1]], [labels[train], labels[valid], test_labels]


def _binarized(grey: np.ndarray, generator: torch.Generator) -> np.ndarray:
    levels = torch.from_numpy(grey.reshape(len(grey), -1)).float() / 255
    return torch.bernoulli(levels, generator=generator).byte().numpy()


def _find(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.exists():
            return file
    found = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
    raise ValueError(f"Expected {name} in {folder}; got {found}.\n{EXPECTED}")


def _idx(file: Path) -> np.ndarray:
    """Returns the array of an idx file of bytes: two zeros, type 8, the number of dims, each size, and the data."""
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"Expected a readable {file}; got {type(error).__name__}: {error}.\n{EXPECTED}"
        ) from error
    dims = content[3] if len(content) > 3 and content[:3] == b"\0\0\x08" else 0
    start = 4 + 4 * dims
    if dims not in (1, 3) or len(content) < start:
        raise ValueError(
            f"Expected an idx file of bytes at {file}; got {content[:4]!r} at its start.\n{EXPECTED}"
        )
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    if len(content) - start != int(np.prod(shape)):
        raise ValueError(
            f"Expected {shape} bytes in {file}; got {len(content) - start} in all.\n{EXPECTED}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _check_labels(labels: list[np.ndarray], file: Path) -> None:
    if any(len(label) == 0 or label.max() > 9 for label in labels):
        raise ValueError(f"Expected labels from 0 to 9 in {file}; got others, or none.\n{EXPECTED}")


def _digits() -> Images:
    """Returns the 1,797 digits of 8 by 8, split 1,197 / 300 / 300; a pixel is 1 above half of the full grey level."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "Expected scikit-learn, whose digits stand in where no --data is given: pip install scikit-learn, "
            "or pass --data FOLDER with MNIST."
        ) from error
    bunch = load_digits()
    pixels = (bunch.data > 8).astype(np.uint8)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(SEED)).numpy()
    cuts = [len(order) - 600, len(order) - 300]
    parts, labels = (np.split(array[order], cuts) for array in (pixels, bunch.target))
    return _images("scikit-learn digits, binarized", 8, parts, labels)
