"""The data of the example programs: scikit-learn's digits and descriptions, read without importing scikit-learn."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int64]

DIGIT_SIDE = 32  # pixels
TRAIN_DIGITS = 1500  # the remaining 297 of the 1,797 digits are held out
SCENE_SIDE = 64  # pixels
SCENES = 600
TRAIN_SCENES = 576

UTTERANCES, TRAIN_UTTERANCES = 480, 440
FRAMES, BANDS = 96, 24  # of a spectrogram
PHONES, MOST_PHONES = 12, 6

PADDING, UNKNOWN = 0, 1  # token numbers


def sklearn_data(relative: str) -> Path:
    """A file or folder that scikit-learn ships; found without importing it, which would take a second."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "scikit-learn is not installed: its digits and texts are the training data (pip install scikit-learn)"
        )
    return Path(spec.submodule_search_locations[0]) / "datasets" / relative


def raw_digits() -> tuple[Bytes, Bytes]:
    """The 1,797 handwritten digits: images (1797, 8, 8) with values 0 to 16, and their labels (1797,)."""
    table = np.loadtxt(sklearn_data("data/digits.csv.gz"), delimiter=",", dtype=np.float32).astype(np.uint8)
    return table[:, :64].reshape(-1, 8, 8), table[:, 64]


def digits() -> tuple[Bytes, Bytes]:
    """The digits, enlarged to (1797, 32, 32) by linear interpolation with values 0 to 255, and their labels (1797,)."""
    images, labels = raw_digits()
    return enlarge(images.astype(np.float32) * (255.0 / 16.0), DIGIT_SIDE), labels


def enlarge(images: npt.NDArray[np.float32], side: int) -> Bytes:
    """Resize square images (N, S, S) to (N, ``side``, ``side``) by linear interpolation between pixel centres."""
    old = images.shape[1]
    centres = np.clip((np.arange(side) + 0.5) * old / side - 0.5, 0, old - 1)
    weights = np.maximum(0.0, 1.0 - np.abs(centres[:, None] - np.arange(old)[None, :])).astype(np.float32)
    enlarged: Bytes = np.rint(weights @ images @ weights.T).astype(np.uint8)
    return enlarged


def scenes() -> tuple[Bytes, Bytes]:
    """Cluttered pictures with up to four digits, and for every pixel whether it is a digit's ink.

    Returns:
        Images (600, 64, 64) with values 0 to 255 and masks of the same shape with values 0 and 1; always the same ones.
    """
    rng = np.random.default_rng(20)
    small, _ = raw_digits()
    ink = enlarge(small.astype(np.float32) * (255.0 / 16.0), 24)
    images = rng.integers(0, 90, (SCENES, SCENE_SIDE, SCENE_SIDE)).astype(np.uint8)
    masks = np.zeros_like(images)
    for image, mask in zip(images, masks, strict=True):
        for _ in range(6):  # bars as bright as the digits: brightness alone does not solve the task
            row, column = rng.integers(0, SCENE_SIDE, 2)
            height, width = rng.permutation((rng.integers(2, 5), rng.integers(10, 30)))
            image[row : row + height, column : column + width] = rng.integers(120, 255)
        for quadrant in range(4):
            if rng.random() < 0.25:
                continue
            row, column = np.array(divmod(quadrant, 2)) * 32 + rng.integers(0, 8, 2)
            digit = ink[rng.integers(len(ink))]
            window = np.s_[row : row + 24, column : column + 24]
            image[window] = np.maximum(image[window], digit)
            mask[window] |= digit > 100
    return images, masks


def _digit_records() -> Bytes:
    images, labels = digits()
    return np.concatenate([images.reshape(len(images), -1), labels[:, None]], axis=1)


def _scene_records() -> Bytes:
    return np.concatenate([part.reshape(SCENES, -1) for part in scenes()], axis=1)


def utterances() -> tuple[Bytes, Bytes]:
    """Made-up speech: spectrograms of words of 3 to 6 phones, each phone a pair of formants that glides and lasts.

    Returns:
        Spectrograms (UTTERANCES, FRAMES, BANDS) with values 0 to 255, and phones (UTTERANCES, MOST_PHONES) from 1 to
        PHONES, 0 where a word is over; always the same ones.
    """
    rng = np.random.default_rng(30)
    bands = np.arange(BANDS)
    formants = rng.uniform(2, BANDS - 3, (PHONES, 2))
    frames = np.zeros((UTTERANCES, FRAMES, BANDS))
    labels = np.zeros((UTTERANCES, MOST_PHONES), dtype=np.uint8)
    for sound, word in zip(frames, labels, strict=True):
        count = int(rng.integers(3, MOST_PHONES + 1))
        word[:count] = rng.integers(1, PHONES + 1, count)
        at = int(rng.integers(0, 8))
        for phone in word[word > 0]:
            length = int(rng.integers(8, 15))
            glide = np.linspace(-1.0, 1.0, length)[:, None] * rng.uniform(-1.5, 1.5)
            for formant in formants[phone - 1]:
                sound[at : at + length] += np.exp(-0.5 * (bands[None, :] - formant - glide) ** 2)
            at += length - 1
    noisy = 200.0 * frames + rng.uniform(0.0, 60.0, frames.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8), labels


def _utterance_records() -> Bytes:
    return np.concatenate([part.reshape(UTTERANCES, -1) for part in utterances()], axis=1)


def split_utterances(records: Bytes) -> tuple[Bytes, Bytes]:
    """Records of "utterances" back into spectrograms and phones."""
    return records[:, : FRAMES * BANDS].reshape(-1, FRAMES, BANDS), records[:, FRAMES * BANDS :]


RECORDS: dict[str, Callable[[], Bytes]] = {
    "digits": _digit_records,
    "scenes": _scene_records,
    "utterances": _utterance_records,
}
"""What a storage server can serve: name → records (N, bytes of one record)."""


def split_digits(records: Bytes) -> tuple[Bytes, Bytes]:
    """Records of "digits" back into images (N, 32, 32) and labels (N,)."""
    return records[:, :-1].reshape(-1, DIGIT_SIDE, DIGIT_SIDE), records[:, -1]


def split_scenes(records: Bytes) -> tuple[Bytes, Bytes]:
    """Records of "scenes" back into images and masks, (N, 64, 64) each."""
    images, masks = records.reshape(-1, 2, SCENE_SIDE, SCENE_SIDE).swapaxes(0, 1)
    return images, masks


def words(text: str) -> list[str]:
    """Lower-case words and numbers of a text, in order; everything else separates them."""
    return re.findall(r"[a-z]+|[0-9]+", text.lower())


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts as token numbers, one per class.

    Attributes:
        names: The class names.
        train: Per class the tokens to train on.
        test: Per class the tokens held out (the end of the text).
        vocabulary: Word → token number; 0 is padding and 1 stands for words that training never saw.
    """

    names: list[str]
    train: list[Tokens]
    test: list[Tokens]
    vocabulary: dict[str, int]


def corpus(held_out: float = 0.2, min_count: int = 2) -> Corpus:
    """scikit-learn's dataset descriptions: each description is a class, a passage is to be told which one it is from.

    Args:
        held_out: The fraction of each text, at its end, that is kept for testing.
        min_count: Words rarer than this in the training parts become the unknown word.
    """
    files = sorted(sklearn_data("descr").glob("*.rst"))
    texts = [words(file.read_text(encoding="utf-8")) for file in files]
    cuts = [int(len(text) * (1.0 - held_out)) for text in texts]
    counts = Counter(word for text, cut in zip(texts, cuts, strict=True) for word in text[:cut])
    kept = sorted(word for word, count in counts.items() if count >= min_count)
    vocabulary = {word: number for number, word in enumerate(kept, start=UNKNOWN + 1)}

    def encode(text: list[str]) -> Tokens:
        return np.array([vocabulary.get(word, UNKNOWN) for word in text], dtype=np.int64)

    return Corpus(
        names=[file.stem for file in files],
        train=[encode(text[:cut]) for text, cut in zip(texts, cuts, strict=True)],
        test=[encode(text[cut:]) for text, cut in zip(texts, cuts, strict=True)],
        vocabulary=vocabulary,
    )


def passages(text: Tokens, length: int) -> Tokens:
    """A text cut into consecutive passages (N, ``length``), the last one padded; at least one passage."""
    count = max(1, -(-len(text) // length))
    padded = np.full(count * length, PADDING, dtype=np.int64)
    padded[: len(text)] = text
    return padded.reshape(count, length)
