"""Images are read as a viewer shows them."""

import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from fl_core.data import files, load
from fl_core.data.inputs import Inputs
from fl_core.data.reading import Reading
from tests.conftest import refuses

TURNED = {  # how the pixels of each orientation are shown
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: x.swapaxes(0, 1)[::-1, ::-1],
    8: lambda x: np.rot90(x),
    9: lambda x: x,  # no orientation
}


def pixels_of(image, path, **how):
    """Save an image and read it again."""
    image.save(path, **how)
    return files.pixels([path], gray=False)[0][0]


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_the_orientation_is_applied(tmp_path, orientation, suffix):
    stored = np.random.default_rng(0).integers(0, 255, (4, 6), dtype=np.uint8)
    tag = Image.Exif()
    tag[0x0112] = orientation
    got = pixels_of(
        Image.fromarray(stored), tmp_path / f"a.{suffix}", exif=tag, quality=100
    )
    shown = TURNED[orientation](stored)[..., None].repeat(3, -1)
    assert got.shape == shown.shape
    assert np.abs(got.astype(int) - shown).max() <= (0 if suffix == "png" else 8)


def test_images_of_other_sizes_are_cropped_scaled_and_shown_in_the_table(
    tmp_path,
):
    """A wide image keeps its middle, by runs and by predictions; the table says what was done."""
    wide, tag = np.zeros((8, 16, 4), np.uint8), Image.Exif()
    wide[:, 4:12] = (250, 0, 0, 255)
    wide[:, [0, 15]] = (0, 0, 0, 0)
    tag[0x0112] = 3
    for k in range(20):
        folder = tmp_path / "data" / f"ward {k % 2}" / f"class {k // 2 % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(wide if k else wide[:, 4:12]).save(
            folder / f"{k}.png", exif=tag
        )
    with refuses("one size.*image_size=8"):
        files.read(tmp_path / "data")
    federated = load(tmp_path / "data", image_size=4, scale="imagenet")
    red = torch.tensor([(250 / 255 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    x = federated.clients[0].train.x
    assert torch.allclose(x, red[:, None, None].expand_as(x), atol=1e-5)
    image = federated.table.columns[1]
    assert (image.inputs, image.taken_as) == (48, "pixels in 0..1")
    assert image.odd == (
        "20 turned by EXIF, 20 transparent, laid on white, 20 cropped and scaled to 4x4"
    )
    inputs = Inputs.from_federation(federated, Reading(image_size=4))
    new = Inputs.from_json(inputs.to_json()).samples(tmp_path / "data" / "ward 0").x
    assert torch.allclose(new[0], x[0])
    with refuses("colour images"):
        load("digits", scale="imagenet")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_images_lie_on_white(tmp_path, mode):
    ink, alpha = np.full((2, 2), 40, np.uint8), np.array([[0, 255], [0, 255]], np.uint8)
    if mode == "P":
        image, how = Image.fromarray(alpha // 255, "P"), {"transparency": 0}
        image.putpalette([10, 10, 10, 40, 40, 40])
    else:
        image, how = (
            Image.fromarray(np.stack([*[ink] * (len(mode) - 1), alpha], axis=-1), mode),
            {},
        )
    assert (
        pixels_of(image, tmp_path / "a.png", **how)
        == np.where(alpha[..., None] > 0, 40, 255)
    ).all()


def shades(count=256, tint=0):
    """Return an image with a palette of greys, or of greys with one coloured entry."""
    codes = (np.arange(1, 25)[::-1] * count // 24 - 1).astype(np.uint8)
    image = Image.fromarray(codes.reshape(4, 6), "P")
    entries = np.linspace(9, 250, count).astype(int)[:, None].repeat(3, 1)
    entries[-1, 2] -= tint
    image.putpalette(entries.ravel().tolist())
    return image


STORED = {
    "1": (Image.new("1", (6, 4), 1), True),
    "L": (Image.new("L", (6, 4), 7), True),
    "LA": (Image.new("LA", (6, 4), (7, 0)), True),
    "greys": (shades(), True),
    "few greys": (shades(4), True),
    "a tint": (shades(tint=1), False),
    "few and a tint": (shades(16, tint=9), False),
    "RGB": (Image.new("RGB", (6, 4), (7, 7, 7)), False),
}
"""Images, and whether they are stored in grey."""


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("suffix", ["png", "gif", "tif"])
def test_grey_images_have_one_channel(tmp_path, name, suffix):
    image, gray = STORED[name]
    if suffix == "gif" and image.mode in ("LA", "RGB"):
        pytest.skip("a GIF has a palette")
    path = tmp_path / f"a.{suffix}"
    image.save(path)
    colours, _ = files.pixels([path], gray=False)
    x, _ = files.pixels([path])
    if gray:
        colours = colours[..., 0]
    assert (x == colours).all()
    assert x.shape == colours.shape


@pytest.mark.parametrize("mode", ["L", "RGB", "LA", "RGBA"])
def test_16_bits_are_refused(tmp_path, mode):
    """Pillow would round RGB to 8 bits in silence."""
    path = tmp_path / "a.png"
    Image.new(mode, (4, 2)).save(path)
    png = bytearray(path.read_bytes())
    png[19], png[24] = 2, 16  # in the header half as many pixels of 16 bits
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    path.write_bytes(png)
    with refuses("at most 8 bits a channel; got"):
        files.pixels([path])


@pytest.mark.parametrize("suffix", ["webp", "tif", "bmp", "gif"])
def test_folders_of_splits_are_no_clients_and_other_files_are_counted(tmp_path, suffix):
    for part, count in (("train", 20), ("val", 6), ("test", 6)):
        for kind in ("cat", "dog"):
            (tmp_path / part / kind).mkdir(parents=True)
            for k in range(count):
                shade = np.full((8, 8, 3), k, dtype=np.uint8)
                Image.fromarray(shade).save(
                    tmp_path / part / kind / f"{k}.{suffix}",
                    save_all=suffix != "bmp",
                    append_images=[Image.fromarray(255 - shade)],
                )
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.warns(UserWarning, match="splits") as caught:
        source = files.read(tmp_path)
    message = " ".join(str(note.message) for note in caught)
    assert "notes.txt" in message
    assert (source.owner, source.classes) == (None, ("cat", "dog"))
    assert (~source.is_train).sum() == 12
    assert source.x.max() < 40
    frames = "" if suffix == "bmp" else "64 animated, of which the first frame"
    assert source.table.columns[0].odd == frames
    for part in ("train", "test"):
        (tmp_path / "flat" / part).mkdir(parents=True)
        Image.fromarray(shade).save(tmp_path / "flat" / part / "0.png")
    with refuses("got test, train"):
        files.read(tmp_path / "flat")
    (tmp_path / "only").mkdir()
    (tmp_path / "train").rename(tmp_path / "only" / "train")
    with pytest.warns(UserWarning, match="named train are splits.*and test"):
        assert files.read(tmp_path / "only").is_train is None
    (tmp_path / "only" / "train").rename(tmp_path / "train")
    (tmp_path / "test").rename(tmp_path / "bern")
    with refuses("got bern, flat, train, val"):
        files.read(tmp_path)
