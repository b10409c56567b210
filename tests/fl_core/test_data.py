"""Sources by name and by path, and the tensors that clients get from them."""

import inspect
import struct
import sys
import urllib.error
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import fl_core.data as data
from fl_core.data import files
from fl_core.data.named import small
from fl_core.data.partitions import make
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.registry import ROOT_VARIABLE
from fl_core.data.sources import Source
from fl_core.errors import RunError, UsageError
from fl_core.training import losses
from tests.conftest import refuses

SPLITS = ("train", "validation", "test")
RANDOM = np.random.default_rng(0)


def pooled(federated):
    """All samples of all clients and splits, in the order of the source."""
    parts = [(c, s) for c in federated.clients for s in SPLITS]
    rows = [federated.partition.indices[c.name][s] for c, s in parts]
    order = np.argsort(np.concatenate(rows))
    return (torch.cat([getattr(c.split(s), k) for c, s in parts])[order] for k in "xy")


def check_tensors(federated):
    for client in federated.clients:
        for split in (client.split(name) for name in SPLITS):
            assert split.x.dtype == torch.float32
            assert split.y.dtype == torch.int64
            assert split.x.is_contiguous()
            assert split.x.shape == (len(split), *federated.shape)
            assert len(split) >= 1
            assert torch.isfinite(split.x).all()
            assert 0 <= int(split.y.min()) <= int(split.y.max()) < federated.n_classes


class TestHeart:
    def test_has_the_published_hospitals_and_class_counts(self):
        heart = data.load("heart")
        check_tensors(heart)
        counts = sum(heart.class_counts(split) for split in SPLITS)
        assert heart.class_counts("train").sum(axis=1).tolist() == [193, 166, 28, 83]
        assert counts.loc["cleveland"].tolist() == [164, 55, 36, 35, 13]
        assert counts.loc["hungarian"].tolist() == [163, 98, 0, 0, 0]
        assert counts.loc["switzerland"].tolist() == [1, 12, 14, 16, 3]
        assert counts.loc["va"].tolist() == [29, 39, 29, 27, 6]

    def test_scales_seven_columns_by_fixed_numbers(self):
        # the first patient by hand: 63, 1, 1, 145, 233, 1, 2, 150, 0, 2.3
        source = data.DATASETS["heart"].open()
        expected = [
            (63 - 53.0872973) / 70.1459463**0.5,
            1,
            (1 - 3.23702703) / 0.817756772**0.5,
            (145 - 132.74405405) / 345.493057**0.5,
            (233 - 220.23648649) / 4884.30934**0.5,
            1,
            (2 - 0.64513514) / 0.592069868**0.5,
            (150 - 138.75459459) / 529.172208**0.5,
            0,
            (2.3 - 0.89532432) / 1.11317517**0.5,
        ]
        assert source.x[0].tolist() == pytest.approx(expected, rel=1e-6)
        assert source.shape == (10,)


@pytest.mark.parametrize("name", data.DATASETS.own)
def test_recipes_are_complete(name):
    recipe = data.recipe(name)
    losses.build(recipe.loss, **recipe.loss_options)
    assert len(recipe.mean) == len(recipe.std)
    assert all(std > 0 for std in recipe.std)
    assert recipe.note
    assert recipe.rounds > 0


STORED = Preprocessing(("a",), centre=(0.0,), spread=(1.0,))


def test_requests_that_cannot_be_met():
    dealt = data.load("digits", partition="dirichlet", alpha=1.0, clients=3).partition
    for dataset, options, message in (
        ("digits", {"indices": dealt, "clients": 4}, "clients.*got 4"),
        ("digits", {"indices": dealt, "splits": (0.5, 0.25, 0.25)}, "splits"),
        ("digits", {"indices": dealt, "max_samples": 1000}, r"\b1000\b.*\b1797\b"),
        ("digits", {"indices": data.load("heart").partition}, r"\b1797\b.*\b740\b"),
        ("digits", {"preprocessing": STORED}, "with the stored part"),
        ("digits", {"indices": dealt, "preprocessing": STORED}, "of digits; got a"),
        ("hart", {}, "'heart'"),
        ("nowhere/data.npz", {}, "nowhere/data.npz"),
        ("heart", {"scale": "standard"}, "scale.*heart"),
        ("digits", {"max_samples": 0}, "max_samples.*got 0"),
        ("digits", {"max_samples": 1798}, "max_samples.*1797"),
        ("digits", {"label_column": "y"}, "columns"),
    ):
        with refuses(message):
            data.load(dataset, **options)


def test_a_pool_is_the_beginning_of_a_shuffled_file_or_keeps_all_proportions():
    assert toy(shuffled=True).first(10).x[:, 0].tolist() == list(range(10))
    assert toy().first(10).x[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 60, 61, 62, 63]
    numbers = np.arange(100)
    pool = toy(owner=numbers % 2, is_train=numbers % 10 < 8).first(50)
    full = np.stack([toy().y, numbers % 2, numbers % 10 < 8])
    for cell in ([0, 0, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1]):
        whole, part = (
            sum(column.tolist() == cell for column in columns.T)
            for columns in (full, np.stack([pool.y, pool.owner, pool.is_train]))
        )
        assert abs(part - whole / 2) <= 1


def test_natural_clients_by_number_name_or_text(tmp_path):
    arrays = {"x": images(), "y": labels()}
    for key in files.OWNER_KEYS:
        names = np.array(["NA", "nobody", "south"])
        owner = {key: np.array([2, 0, 0] * 10), f"{key}_names": names}
        federated = data.load(save(tmp_path / "a.npz", **arrays, **owner))
        sizes = {client.name: len(client.train) for client in federated.clients}
        assert sizes == {"NA": 12, "south": 6}
    for owner, names in (([*"bac"], [*"abc"]), ([7, 5, 10], ["5", "7", "10"])):
        path = save(tmp_path / "a.npz", **arrays, client=np.array(owner * 10))
        assert [client.name for client in data.load(path).clients] == names


def toy(**fields):
    y = np.repeat([0, 1], [60, 40])
    return Source(
        "toy", np.arange(100, dtype=np.float32)[:, None], y, ("a", "b"), **fields
    )


def images(n=30, height=4, width=5, channels=3):
    tail = (channels,) if channels else ()
    return RANDOM.integers(0, 256, (n, height, width, *tail), dtype=np.uint8)


def save(path, **named_arrays):
    np.savez(path, **named_arrays)
    return path


def labels(n=30, classes=3):
    return np.arange(n) % classes


@pytest.mark.parametrize("channels", [0, 1, 3])
def test_images_become_channel_first_between_0_and_1(tmp_path, channels):
    x = images(60, channels=channels)
    federated = data.load(
        save(tmp_path / "a.npz", x=x, y=labels(60)[:, None]), partition="iid"
    )
    check_tensors(federated)
    got, y = pooled(federated)
    reference = (
        x.reshape(60, 4, 5, max(channels, 1)).astype(np.float64).transpose(0, 3, 1, 2)
        / 255
    )
    assert federated.shape == (max(channels, 1), 4, 5)
    assert got.numpy() == pytest.approx(reference, abs=1e-7)
    assert y.tolist() == labels(60).tolist()


def test_an_official_test_side_is_kept(tmp_path):
    x, y = images(100), labels(100)
    sides = {"x_train": x[:70], "y_train": y[:70], "x_test": x[70:], "y_test": y[70:]}
    path = save(tmp_path / "a.npz", **sides)
    federated = data.load(path, clients=2, partition="iid")
    for splits in federated.partition.indices.values():
        train, validation, test = (splits[name] for name in SPLITS)
        assert test.min() >= 70 > max(train.max(), validation.max())
        assert (len(train), len(validation)) == (28, 7)
    flagged = save(tmp_path / "b.npz", x=x, y=y, is_train=np.arange(100) < 70)
    assert data.load(flagged, clients=2, partition="iid").digest == federated.digest


ONE_NAN = np.where(np.arange(90).reshape(30, 3) == 31, np.nan, 1.0)
BAD = [
    ({"x": ONE_NAN}, r"x, row 10.*\[1\].*nan"),
    ({"x": np.full((30, 3), 1e39)}, r"x, row 0.*1e\+39"),
    ({"x": np.full((30, 3), "a")}, "features.*numbers"),
    ({"x": np.zeros(30)}, "features.*shape"),
    ({"x": np.zeros((30, 3, 8, 8), np.uint8)}, "images.*uint8"),
    ({"x": np.zeros((30, 8, 8, 3), np.int32)}, "images.*int32"),
    ({"y": labels() + np.where(np.arange(30) == 4, 0.5, 0)}, r"y, row 4.*1\.5"),
    ({"y": np.array(["1", "2", "ill"] * 10)}, "y, row 2.*'ill'"),
    (
        {"y": np.array(["a", "b", "d"] * 10), "classes": np.array(["a", "b", "c"])},
        r"y, row 2.*'d'.*\bc\b",
    ),
    ({"y": np.array(["a", "b", " "] * 10)}, "y, row 2.*label.*' '"),
    ({"y": np.where(np.arange(30) == 9, np.nan, 1)}, "y, row 9"),
    ({"y": np.array([1, 2**63, 0] * 10, np.uint64)}, "y, row 1.*below 2"),
    ({"y": np.zeros(30, int)}, "2 classes"),
    ({"y": np.zeros((30, 2), int)}, r"\[30, 2\].*y\.argmax\(axis=1\)"),
    ({"y": labels(29)}, r"\b30 .*\b29\b"),
    ({"y": np.int64(1)}, r"\b30 .*\b0\b"),
    ({"y": None}, "'y'"),
    ({"classes": np.array(["a", "b"])}, r"row 2 .*\b1\b.*got 2"),
    ({"classes": np.array(["a", "b", "a"])}, r"distinct.*'a'"),
    ({"classes": np.arange(3)}, "text.*int64"),
    ({"clients": labels()}, "'clients'.*'client'"),
    ({"client": labels(), "domain": labels()}, "domain.*client"),
    (
        {"client": labels(), "client_names": np.array(["a", "b"])},
        r"'client', row 2",
    ),
    ({"client_names": np.array(["a"])}, "client_names.*'client'"),
    ({"client": np.array(["a", " ", "c"] * 10)}, "row 1.*have a client.*' '"),
    (
        {"client": np.array(["a", "NA", "?"] * 10)},
        r"'client', row 1.*'NA'.*client_names",
    ),
    ({"client": labels() + 0.5}, "'client', row 0"),
    ({"is_train": np.ones(30, bool)}, "True"),
    ({"is_train": labels()}, "'is_train', row 2"),
    ({"x_test": images()}, "'x_test'.*x, y"),
    ({"y": np.array([1, "a"] * 15, dtype=object)}, "Python"),
]


def test_bad_arrays_are_refused_by_name_and_row(tmp_path):
    one = {"x": images(), "y": labels()}
    sides = {"x_train": images(), "y_train": labels()}
    sides |= {"x_test": images(), "y_test": labels()}
    named = {"classes": np.array(["a", "b", "c"])}
    wrong = np.where(np.arange(30) == 3, 7, labels())
    for plain, changes, message in (
        *((one, *case) for case in BAD),
        (sides, {"x_test": images(height=6)}, "test must.*uint8"),
        (sides, {"x_test": images(9)}, r"test:.*\b9\b.*\b30\b"),
        (sides, {"client": labels()}, r"'client'.*x_train"),
        (sides, {"y_test": wrong, **named}, r"test, y, row 3.*\b2\b.*\b7\b"),
    ):
        arrays = {
            k: values for k, values in (plain | changes).items() if values is not None
        }
        path = save(tmp_path / "a.npz", **arrays)
        with refuses(message) as refusal:
            data.load(path)
        assert "a.npz" in str(refusal.value)


def test_bad_tables_are_refused_by_column_and_line(tmp_path):
    path, header = tmp_path / "t.csv", "client,a,b,label"
    lines = [ROWS, [], ["0", "1"] * 5]
    for line, message in (
        ("north,x7,1,0", "'a', line 5.*'x7'"),
        ("north,,1,0", "'a', line 5.*empty"),
        (
            "north,1,nan,0",
            r"'b', line 5.*must be a number.*'nan'.*replace",
        ),
        ('north,1,"2,5",0', "'b', line 5.*must be a number.*'2,5'"),
        ("north,1,1e60,0", "'b', line 5"),
        ("north,1,1,0.5", r"'label', line 5.*0\.5"),
        ("north,1,1,cat", "'label', line 5.*'cat'"),
        ("north,1,1", r"line 5.*\b4\b.*\b3\b"),
        ("north,1,1,0,9", r"line 5.*\b4\b.*\b5\b"),
        (",1,1,0", "'client', line 5.*empty"),
        ("\n\nnorth,x7,1,0", "'a', line 7"),
    ):
        with refuses(message):
            data.load(write(path, [*ROWS[:3], line, *ROWS[4:]]))
    for lines, header, options, message in (
        (ROWS, "client,a,b,lable", {}, "label_column='lable'"),
        (ROWS, "ward,a,b,label", {"client_column": "wrd"}, "client_column='ward'"),
        (ROWS, "client,a,a,label", {}, "'a'"),
        (ROWS, "client,a,b,label", {"client_column": "label"}, "different columns"),
        ([], "client,a,b,label", {}, "no rows"),
        (["0", "1"] * 5, "label", {}, r"column.*features"),
    ):
        with refuses(message):
            data.load(write(path, lines, header), **options)
    path.write_text("")
    with refuses("empty file"):
        data.load(path)


def test_files_that_are_not_what_they_seem(tmp_path):
    np.savez(tmp_path / "twice.npz", x=np.zeros(3))
    with zipfile.ZipFile(tmp_path / "twice.npz", "a") as archive:
        archive.writestr("x", archive.read("x.npy"))
    for name, content, message in (
        ("text.npz", b"no archive", "readable"),
        ("empty.npz", b"", "readable"),
        ("one.npz", (np.lib.format.magic(1, 0)), "readable"),
        ("table.ods", b"", ""),
        ("twice.npz", None, "once"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with refuses(rf"{name}.*{message}") as refusal:
            data.load(path)
        assert "pickle" not in str(refusal.value)


def test_a_damaged_archive_is_refused_by_name(tmp_path):
    """Every byte turned over in its turn: refused by name, or the same samples."""
    np.savez(
        tmp_path / "whole.npz",
        x=np.arange(24, dtype=np.uint8)[:, None],
        y=np.arange(24) % 2,
    )
    whole, refused = (tmp_path / "whole.npz").read_bytes(), []
    path = tmp_path / "bad.npz"

    def read(path):
        return data.recipe(path), files.read(path).digest

    wanted = read(tmp_path / "whole.npz")
    for place, byte in enumerate(whole):
        path.write_bytes(whole[:place] + bytes([byte ^ 0xFF]) + whole[place + 1 :])
        try:
            stored = read(path)
        except UsageError as error:
            refused.append(str(error))
        else:
            assert stored == wanted
    assert len(refused) > len(whole) / 2
    assert all("bad.npz" in message for message in refused)


ROWS = [f"{('north', 'south')[k % 2]},{k},{k * 0.5},{k % 3}" for k in range(20)]


def write(path, lines, header="client,a,b,label"):
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


def draw(folder, count, *, size=(6, 4), mode="RGB", suffix=".png", value=None):
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(count):
        shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
        pixels = (
            RANDOM.integers(0, 256, shape, dtype=np.uint8)
            if value is None
            else np.full(shape, value, np.uint8)
        )
        Image.fromarray(pixels).save(folder / f"{k:02d}{suffix}")


def test_a_folder_of_clients_and_classes(tmp_path):
    for client, count in (("south", 4), ("north", 6)):
        draw(tmp_path / client / "owl", count)
        draw(tmp_path / client / "cat", count, suffix=".PNG")
    for passed_over in ("north/cat/notes.txt", "notes.csv"):
        (tmp_path / passed_over).write_text("a,b\n1,2\n")
    federated = data.load(tmp_path)
    check_tensors(federated)
    assert [client.name for client in federated.clients] == ["north", "south"]
    assert federated.classes == ("cat", "owl")
    assert federated.shape == (3, 4, 6)
    x, y = pooled(federated)
    with Image.open(tmp_path / "south" / "owl" / "03.png") as last:
        assert x[-1].numpy() == pytest.approx(
            np.asarray(last).transpose(2, 0, 1) / 255, abs=1e-7
        )
    assert y.tolist() == [0] * 6 + [1] * 6 + [0] * 4 + [1] * 4


def test_bad_folders_are_refused_by_file(tmp_path):
    with refuses(r"class/\*"):
        data.load(tmp_path)
    draw(tmp_path / "a", 3)
    draw(tmp_path / "b", 3)
    draw(tmp_path / "c" / "inner", 1)
    with refuses("layout"):
        data.load(tmp_path)
    (tmp_path / "c" / "inner" / "00.png").unlink()
    draw(tmp_path / "c", 1, size=(5, 4))
    with refuses(r"c/00\.png.*5x4.*a/00\.png.*6x4"):
        data.load(tmp_path)
    (tmp_path / "c" / "00.png").write_bytes(
        (tmp_path / "a" / "00.png").read_bytes()[:-40]
    )
    with refuses(r"c/00\.png"):
        data.load(tmp_path)


@pytest.mark.parametrize("form", ["EPS", "PPM"])
def test_an_image_of_another_format_is_not_read(tmp_path, monkeypatch, form):
    """Pillow would start Ghostscript for an EPS file, whatever its name."""
    started = []
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: started.append(1)
    )
    draw(tmp_path / "a", 3)
    draw(tmp_path / "b", 3)
    Image.new("RGB", (6, 4)).save(tmp_path / "a" / "00.png", format=form)
    for read in (
        files.read,
        lambda path: files.pixels([path / "a" / "00.png"]),
    ):
        with refuses(r"a/00\.png must be a readable image"):
            read(tmp_path)
    assert not started


def test_the_recipe_of_a_path_follows_from_its_samples(tmp_path):
    gray = save(tmp_path / "gray.npz", x=images(channels=0), y=labels())
    arrays = {"x": images(), "y": labels(), "domain": labels()}
    for path, model in (
        (save(tmp_path / "images.npz", **arrays), "cifar_cnn"),
        (write(tmp_path / "a.csv", ROWS), "mlp"),
        (gray, "fmnist_cnn"),
    ):
        recipe = data.recipe(path)
        assert recipe.model == model
        assert recipe.scale == ("standard" if model == "mlp" else "none")
        assert recipe.partition == ("dirichlet" if path == gray else "natural")
    with refuses("'digits'"):
        data.recipe("digit")
    with refuses("x_train"):
        data.recipe(save(tmp_path / "a.npz", y=labels()))


def write_idx(folder, prefix, x, y):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
        struct.pack(">IIII", 0x803, *x.shape) + x.tobytes()
    )
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
        struct.pack(">II", 0x801, len(y)) + y.tobytes()
    )


def write_mnist(folder, *prefixes):
    x = images(200, 28, 28, 0)
    y = np.random.default_rng(0).integers(0, 10, 200, np.uint8)
    for prefix in {*prefixes, "t10k"}:
        write_idx(folder, prefix, x, y)
    return x, y


@pytest.mark.parametrize(
    ("name", "folder", "prefix"),
    [
        ("mnist", "MNIST/raw", "train"),
        ("fashion_mnist", "FashionMNIST/raw", "train"),
        ("emnist", "EMNIST/raw", "emnist-byclass-train"),
    ],
)
def test_torchvision_s_files_are_read_in_order(
    tmp_path, monkeypatch, name, folder, prefix
):
    """EMNIST's images are turned upright."""
    x, y = write_mnist(tmp_path / folder, prefix)
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    federated = data.load(name, partition="iid", max_samples=100)
    check_tensors(federated)
    got, label = pooled(federated)
    recipe = data.recipe(name)
    shown = x.transpose(0, 2, 1) if name == "emnist" else x
    wanted = (shown[:100, None].astype(np.float64) / 255 - recipe.mean[0]) / recipe.std[
        0
    ]
    assert label.tolist() == y[:100].tolist()
    assert got.numpy() == pytest.approx(wanted, abs=1e-5)
    assert federated.classes[-1] == ("z" if name == "emnist" else federated.classes[9])


def test_a_packed_file_replaces_torchvision_s(tmp_path):
    x, y = images(120, 32, 32), np.sort(labels(120, 10))
    save(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x[::5], y_test=y[::5])
    whole = data.load("cifar10", data_root=tmp_path, partition="iid")
    assert whole.partition.n_samples == 120
    some = data.load("cifar10", data_root=tmp_path, partition="iid", max_samples=40)
    _, y = pooled(some)
    assert len(y.unique()) == 10


def test_fed_isic_keeps_the_four_diagnoses_of_the_class_weights(tmp_path):
    names = np.array(["MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"])
    y = np.arange(320) % 8
    arrays = {
        "x": images(320, 8, 8),
        "y": y,
        "is_train": np.arange(320) // 8 % 5 > 0,
        "classes": names,
    }
    save(
        tmp_path / "fed_isic.npz",
        **arrays,
        center=np.arange(320) // 80,
        center_names=np.array([*"abcd"]),
    )
    federated = data.load("fed_isic", data_root=tmp_path)
    assert federated.classes == ("BCC", "BKL", "MEL", "NV")
    assert federated.class_counts("test").to_numpy().tolist() == [[2, 2, 2, 2]] * 4
    diagnoses = names[y][np.isin(names[y], federated.classes)]
    assert [
        federated.classes[k] for k in list(pooled(federated))[1]
    ] == diagnoses.tolist()


def test_missing_files_are_refused_with_both_ways(tmp_path, monkeypatch):
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    ways = r"MNIST/raw/.*mnist\.npz.*FEDLAYERS_DATA_ROOT.*data_root="
    with refuses(ways):
        data.load("mnist")
    with refuses(r"folder.*gone"):
        data.load("mnist", data_root=tmp_path / "gone")
    with refuses(r"MNIST/raw/.*mnist\.npz.*download=True"):
        data.load("mnist", data_root=tmp_path)
    with refuses(r"pacs\.npz.*automatically"):
        data.load("pacs", data_root=tmp_path, download=True)


def test_a_failed_download_says_so_and_nothing_is_downloaded_unless_asked(
    tmp_path, monkeypatch
):
    import torchvision

    def refuse(self):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", refuse)
    with refuses(r"mnist.*route.*network", RunError):
        data.load("mnist", data_root=tmp_path, download=True)
    write_mnist(tmp_path / "MNIST/raw", "train")
    assert len(data.load("mnist", data_root=tmp_path, partition="iid").clients) == 5


OUTSIDE = """
import numpy as np
from fl_core.data import Source, dataset

def labels(n):
    return np.arange(n) % 2

def pair():
    return np.random.default_rng(0).normal(size=(60, 3)), labels(60)

def silos(data_root, download=False):
    return {name: (np.zeros((30, 3)), labels(30)) for name in ("north", data_root or "south")}

def source():
    return Source("mine", np.zeros((40, 3), np.float32), labels(40), ("a", "b"))

@dataset("coins", clients=3, partition="iid", model="mlp")
def coins():
    return pair()

def frame():
    return 3

def greedy(token):
    return pair()

def short():
    return np.zeros((5, 3)), labels(4)

NUMBER = 3
"""


@pytest.fixture
def outside(tmp_path, monkeypatch, own_members):
    own_members(data.DATASETS)
    (tmp_path / "data_of_this_test.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "data_of_this_test"
    sys.modules.pop("data_of_this_test", None)


@pytest.mark.parametrize(
    ("function", "clients", "partition"),
    [
        ("pair", 5, "dirichlet"),
        ("silos", 2, "natural"),
        ("source", 5, "dirichlet"),
        ("coins", 3, "iid"),
    ],
)
def test_a_function_from_outside_is_a_dataset(outside, function, clients, partition):
    name = f"{outside}:{function}"
    options = {"alpha": 5.0, "clients": 2} if partition == "dirichlet" else {}
    federated = data.load(name, **options)
    assert (federated.name, federated.partition.kind) == (name, partition)
    assert len(federated.clients) == options.get("clients", clients)
    recipe = data.recipe(name)
    assert (recipe.partition, recipe.model) == (partition, "mlp")
    assert data.is_code(name)
    if function == "silos":
        assert [
            client.name for client in data.load(name, data_root="west").clients
        ] == ["north", "west"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data_of_this_test:frame", r"frame.*\bint\. Give"),
        ("data_of_this_test:greedy", "'token'"),
        ("data_of_this_test:short", "5 samples.*4"),
        ("data_of_this_test:NUMBER", r"\bint\b"),
    ],
)
def test_what_is_no_dataset_from_outside_is_refused(outside, name, message):
    with refuses(message):
        data.load(name)
    with refuses(r"'notes'.*'modl'.*'model'"):
        data.dataset("notes", modl="mlp")


@pytest.mark.parametrize(
    ("kind", "labels", "inputs"),
    [("labels", False, True), ("neither", True, True), ("inputs", True, False)],
)
def test_known_federations_differ_in_what_they_say(kind, labels, inputs):
    """Test samples are the same digits at each client; what is planted alone makes them differ."""
    changed, plain = (data.load(f"known_{name}", seed=3) for name in (kind, "neither"))
    for client, other in zip(changed.clients, plain.clients, strict=True):
        size = len(client.train) + len(client.validation)
        assert (size, len(client.test)) == (240, 357)
        x, y = (client.test.x, other.test.x), (client.test.y, other.test.y)
        assert (torch.equal(*y), torch.equal(*x)) == (labels, inputs)
        assert torch.equal(*(part.flatten(1).sort().values for part in x))


def test_large_digits_are_the_digits_with_nine_pixels_for_one_and_a_rim():
    large, plain = small.large_digits(), small.digits()
    assert (large.name, large.x.dtype) == ("large_digits", np.uint8)
    assert np.array_equal(large.y, plain.y)
    for image, pixels in zip(large.x[:20], plain.x[:20, 0], strict=True):
        wanted = np.kron((255 * pixels.astype(float)).round(), np.ones((3, 3)))
        assert np.array_equal(image, np.pad(wanted, 2))


def test_laboratories_code_the_digits_in_three_ways():
    coded, plain = small.coded_digits(), small.digits()
    codes = [lambda k: k, lambda k: 9 - k, lambda k: (k + 3) % 10]
    assert len(coded.owner_names) == small.LABORATORIES == 30
    sizes = np.bincount(coded.owner, minlength=30)
    assert sizes.max() - sizes.min() <= 1
    for owner, label, digit in zip(coded.owner, coded.y, plain.y, strict=True):
        assert label == codes[owner % 3](digit)
    names = [name.partition(": ") for name in coded.owner_names]
    assert [number for number, *_ in names] == [f"lab {k:02d}" for k in range(1, 31)]
    assert [code for *_, code in names] == 10 * [*small.CODES]


def whole_numbers():
    """Yield each whole number that a function of samples takes, with a call."""
    pool, silos = toy(), {"a": (np.eye(30), labels()), "b": (np.eye(30), labels())}
    doors = {
        data.load: lambda keys: data.load(
            "digits", **{"partition": "non_iid_1", "clients": 3, **keys}
        ),
        data.from_clients: lambda keys: data.from_clients(silos, **keys),
        make: lambda keys: make(pool, "iid", **{"clients": 2, **keys}),
        Source.first: lambda keys: pool.first(keys["samples"]),
    }
    for function, call in doors.items():
        for parameter in inspect.signature(function).parameters.values():
            if str(parameter.annotation) in ("int", "int | None"):
                name = parameter.name.replace("samples", "max_samples")
                if function is data.load:
                    name = parameter.name
                yield pytest.param(call, parameter.name, name, id=f"{function.__name__}, {parameter.name}")  # fmt: skip


@pytest.mark.parametrize(("call", "argument", "name"), list(whole_numbers()))
def test_a_truth_value_and_a_fraction_are_no_whole_numbers(call, argument, name):
    for wrong in (True, 1.5):
        with refuses(f"{name} must be .*; got {wrong}"):
            call({argument: wrong})
    assert len(toy().first(np.int64(9))) == 9
