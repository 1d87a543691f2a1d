"""Reading binary images: both formats, the stand-in, and what is said of folders that hold neither."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from images import GREY, PACKED, halved, read_images


def write_packed(
    folder: Path, counts: tuple[int, int, int] = (30, 10, 12), pixels: int = 784
) -> dict:
    """Writes random images, label k in all of pixel row k; returns the arrays."""
    arrays = {}
    for part, count in zip(("train", "valid", "test"), counts):
        labels = np.sort(np.arange(count) % 10).astype(np.uint8)
        images = np.random.default_rng(0).integers(0, 2, (count, pixels), np.uint8)
        images[:, :10] = np.arange(10) == labels[:, None]
        arrays |= {part: np.packbits(images, axis=1), f"{part}_labels": labels}
    np.savez(folder / PACKED, **arrays)
    return arrays


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write_grey(folder: Path, compressed: bool) -> None:
    """Writes images of grey level 255 in pixel k of the first row for label k, and 0 elsewhere but for one at 128."""
    for first, count in ((0, 60), (2, 20)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = np.zeros((count, 28, 28), np.uint8)
        images[np.arange(count), 0, labels] = 255
        images[:, 5, 5] = 128
        for name, array in zip(GREY[first : first + 2], (images, labels)):
            content, ending = (gzip.compress(idx(array)), ".gz") if compressed else (idx(array), "")
            (folder / f"{name}{ending}").write_bytes(content)


def assert_labels_belong(images) -> None:
    for part in ("train", "valid", "test"):
        pixels, labels = getattr(images, part), getattr(images, f"{part}_labels")
        assert pixels.dtype == torch.float32 and labels.dtype == torch.int64
        assert ((pixels == 0) | (pixels == 1)).all()
        assert (pixels[:, :10].argmax(1) == labels).all()


def test_packed_images_are_read_and_shuffled_with_their_labels(tmp_path):
    write_packed(tmp_path)
    images = read_images(tmp_path)
    assert (len(images.train), len(images.valid), len(images.test)) == (30, 10, 12)
    assert images.side == 28 and "MNIST" in images.name
    assert_labels_belong(images)
    assert (images.test_labels.diff() < 0).any()
    assert all(torch.equal(a, b) for a, b in zip(images[2:], read_images(tmp_path)[2:]))


@pytest.mark.parametrize("compressed", [True, False])
def test_grey_images_are_drawn_once_and_split(tmp_path, compressed):
    write_grey(tmp_path, compressed)
    images = read_images(tmp_path)
    assert (len(images.train), len(images.valid), len(images.test)) == (50, 10, 20)
    assert_labels_belong(images)
    grey = torch.cat([images.train, images.valid, images.test])[:, 5 * 28 + 5]
    assert 20 < grey.sum() < 60  # 80 draws with probability 1/2
    assert torch.equal(images.train, read_images(tmp_path).train)


def test_packed_images_are_preferred(tmp_path):
    write_grey(tmp_path, True)
    write_packed(tmp_path)
    assert len(read_images(tmp_path).train) == 30


def test_digits_stand_in():
    pytest.importorskip("sklearn")
    images = read_images(None)
    assert (images.side, images.train.shape, len(images.valid), len(images.test)) == (
        8,
        (1197, 64),
        300,
        300,
    )
    assert "digits" in images.name
    assert (images.train_labels.bincount() > 100).all()


def test_without_scikit_learn_the_install_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        read_images(None)


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="none at .*absent(.|\n)*idx(.|\n)*Without --data"):
        read_images(tmp_path / "absent")
    with pytest.raises(ValueError, match=f"Expected {GREY[0]}.*got nothing"):
        read_images(tmp_path)
    write_grey(tmp_path, True)
    (tmp_path / f"{GREY[3]}.gz").unlink()
    with pytest.raises(ValueError, match=f"Expected {GREY[3]} in"):
        read_images(tmp_path)


def packed(folder, left_out=(), pixels=784, **others):
    arrays = write_packed(folder, pixels=pixels)
    kept = {name: array for name, array in {**arrays, **others}.items() if name not in left_out}
    np.savez(folder / PACKED, **kept)


def grey(folder, content):
    write_grey(folder, False)
    (folder / GREY[0]).write_bytes(content)


def broken_gz(folder):
    write_grey(folder, True)
    file = folder / f"{GREY[1]}.gz"
    file.write_bytes(file.read_bytes()[:-9])


def images_of(count, side):
    return idx(np.zeros((count, side, side), np.uint8))


MALFORMED = {
    "empty archive": (lambda folder: (folder / PACKED).write_bytes(b""), f"readable .*{PACKED}"),
    "cut archive": (
        lambda folder: (folder / PACKED).write_bytes(b"PK\x03\x04 cut"),
        f"readable .*{PACKED}",
    ),
    "text": (lambda folder: (folder / PACKED).write_bytes(b"no archive"), f"readable .*{PACKED}"),
    "no labels": (lambda folder: packed(folder, left_out=["test_labels"]), "test_labels"),
    "few labels": (
        lambda folder: packed(folder, test_labels=np.zeros(11, int)),
        "one label for each image",
    ),
    "small images": (lambda folder: packed(folder, pixels=64), "98 bytes"),
    "empty": (lambda folder: grey(folder, b""), "idx file"),
    "page": (lambda folder: grey(folder, b"<html>"), "idx file"),
    "cut": (lambda folder: grey(folder, images_of(60, 28)[:-1]), "bytes in"),
    "size": (lambda folder: grey(folder, images_of(60, 27)), "28 by 28"),
    "count": (lambda folder: grey(folder, images_of(59, 28)), "label each"),
    "broken gz": (broken_gz, "readable"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused(tmp_path, name):
    write, message = MALFORMED[name]
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_images(tmp_path)


def test_a_pixel_of_half_the_side_stands_for_at_least_two_of_four():
    whole = read_images(None)
    half = halved(whole)
    assert half.side == 4 and "4 by 4" in half.name
    assert torch.equal(half.test_labels, whole.test_labels)
    pixels = whole.valid[:5].reshape(5, 4, 2, 4, 2).sum((2, 4))
    assert torch.equal(half.valid[:5].reshape(5, 4, 4), (pixels >= 2).float())
