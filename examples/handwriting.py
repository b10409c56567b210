"""Write scikit-learn's digits as images of ten constructed writers: python -m examples.handwriting FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

WRITERS = 10
SIDE = 32
SLANT = 0.6
"""The largest slant, in pixels to the side for each pixel down."""


def main(folder: str, seed: int = 0) -> None:
    """Write the images as FOLDER/writer/digit/number.png, and say what they are.

    Each image belongs to one writer. Writers differ only in their constructed slant.
    """
    digits = load_digits()
    owner = np.random.default_rng(seed).permutation(len(digits.images)) % WRITERS
    slants = np.linspace(-SLANT, SLANT, WRITERS)
    for number, (pixels, digit, writer) in enumerate(
        zip(digits.images, digits.target, owner, strict=True)
    ):
        image = Image.fromarray((pixels * 255 / 16).astype(np.uint8)).resize(
            (SIDE, SIDE)
        )
        slant = float(slants[writer])
        image = image.transform(
            (SIDE, SIDE), Image.Transform.AFFINE, (1, slant, -slant * SIDE / 2, 0, 1, 0)
        )
        home = Path(folder) / f"writer_{writer}" / str(digit)
        home.mkdir(parents=True, exist_ok=True)
        image.save(home / f"{number:04d}.png")
    print(f"{len(owner):,} images of {SIDE} x {SIDE} by {WRITERS} constructed writers")


if __name__ == "__main__":
    main(*sys.argv[1:])
