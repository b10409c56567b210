"""The datasets by name: each is a recipe and a function that opens it.

A dataset is added by one function under :func:`register`. Training-time augmentation is not part of a dataset.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from fl_core.data import arrays, files, tables
from fl_core.data.recipes import TEXT, Recipe
from fl_core.data.sources import Source
from fl_core.errors import RunError, UsageError, check_known, listing

ROOT_VARIABLE = "FEDLAYERS_DATA_ROOT"
Opener = Callable[[str | os.PathLike[str] | None, bool], Source]

REGISTRY: dict[str, tuple[Recipe, Opener]] = {}

_PAPER = "PLayer-FL, Table A.4 and released code"
_OURS = "no published recipe; values of the nearest dataset that has one"
_CIFAR100 = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))


def register(name: str, recipe: Recipe) -> Callable[[Opener], Opener]:
    """Decorator that makes ``opener(data_root, download) -> Source`` a dataset; its normalisation is the recipe's.

    Raises:
        ValueError: the name is taken.
    """
    if name in REGISTRY:
        raise ValueError(f"dataset {name!r} is registered already")

    def add(opener: Opener) -> Opener:
        REGISTRY[name] = (recipe, opener)
        return opener

    return add


def open_named(name: str, *, data_root: str | os.PathLike[str] | None = None, download: bool = False) -> Source:
    """A registered dataset as a source.

    Args:
        data_root: folder below which the files are; None = the environment's ``FEDLAYERS_DATA_ROOT``.
        download: let torchvision fetch its files if they are missing.

    Raises:
        UsageError: an unknown name, or files that are missing or do not fit; the message says where they belong.
        RunError: a download failed.
    """
    recipe, opener = REGISTRY[check_known("dataset", name, REGISTRY)]
    return replace(opener(data_root, download), name=name, mean=recipe.mean, std=recipe.std)


_HEART_COLUMNS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
_HEART_SCALE = {  # column: (mean, variance), fixed by the released code; not the statistics of these rows
    "age": (53.0872973, 70.1459463),
    "cp": (3.23702703, 0.817756772),
    "trestbps": (132.74405405, 345.493057),
    "chol": (220.23648649, 4884.30934),
    "restecg": (0.64513514, 0.592069868),
    "thalach": (138.75459459, 529.172208),
    "oldpeak": (0.89532432, 1.11317517),
}
_HEART_ALPHA = [0.12939189, 0.18108108, 0.22331081, 0.22364865, 0.24256757]


@register(
    "heart",
    Recipe(
        clients=4,
        partition="natural",
        model="heart_mlp",
        batch=32,
        rounds=20,
        lr=5e-2,
        loss="player_focal",
        loss_options={"gamma": 3.0, "alpha": _HEART_ALPHA},
        note=_PAPER,
    ),
)
def _heart(data_root: str | os.PathLike[str] | None, download: bool) -> Source:
    """Fed-Heart-Disease: 740 patients of four hospitals, 10 features, diagnosis 0..4 (PLayer-FL).

    Rows with a blank in the ten columns are dropped; seven columns are standardised with fixed numbers.
    """
    path = Path(__file__).with_name("heart.csv")
    rows = tables.csv_rows(path)
    _, header = next(rows)
    used = [header.index(column) for column in _HEART_COLUMNS]
    kept = [cells for _, cells in rows if all(cells[k] for k in used)]
    x = np.array([[float(cells[k]) for k in used] for cells in kept])
    for k, column in enumerate(_HEART_COLUMNS):
        if column in _HEART_SCALE:
            mean, variance = _HEART_SCALE[column]
            x[:, k] = (x[:, k] - mean) / variance**0.5
    y, classes = arrays.labels(np.array([int(cells[header.index("num")]) for cells in kept]), str(path))
    hospitals = np.array([cells[header.index("hospital")] for cells in kept])
    owner, owner_names = arrays.owners(hospitals, str(path))
    return Source("heart", arrays.features(x, str(path)), y, classes, owner, owner_names)


@register(
    "digits",
    Recipe(partition="iid", model="mlp", batch=32, rounds=20, lr=1e-2, note="chosen to train well within seconds"),
)
def _digits(data_root: str | os.PathLike[str] | None, download: bool) -> Source:
    """scikit-learn's 1,797 handwritten digits, [1, 8, 8] pixels scaled to 0..1."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (bunch.images / 16).astype(np.float32)[:, None]
    return Source("digits", x, bunch.target.astype(np.int64), tuple(str(k) for k in bunch.target_names))


@register(
    "large_digits",
    Recipe(model="pfedla_cnn", batch=32, rounds=30, note="chosen to train well within a minute"),
)
def _large_digits(data_root: str | os.PathLike[str] | None, download: bool) -> Source:
    """The same digits as grey images of 28 x 28, for networks that need such: each pixel 3 x 3, a rim of 2."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = np.round(bunch.images * (255 / 16)).astype(np.uint8).repeat(3, axis=1).repeat(3, axis=2)
    x = np.pad(x, ((0, 0), (2, 2), (2, 2)))
    return Source("large_digits", x, bunch.target.astype(np.int64), tuple(str(k) for k in bunch.target_names))


def at_hand(*names: str, data_root: str | os.PathLike[str] | None = None) -> str:
    """The first of some registered datasets whose files are there: the one that is wished for, then those that will do.

    Raises:
        UsageError: a name that is not registered, or none of them is there; says where their files belong.
    """
    reasons = []
    for name in names:
        try:
            open_named(check_known("dataset", name, REGISTRY), data_root=data_root)
        except UsageError as error:
            if name not in REGISTRY:
                raise
            reasons.append(str(error))
        else:
            return name
    raise UsageError("; ".join(reasons) or "at_hand needs the name of a dataset")


def _torchvision(name: str, kind: str, folder: str) -> Opener:
    """Opener of a dataset whose training side torchvision reads below the data root; else ``NAME.npz`` there.

    The official test side is never used: every client is tested on its own distribution.
    """

    def opener(data_root: str | os.PathLike[str] | None, download: bool) -> Source:
        root = find_root(name, data_root, folder)
        packed = root / f"{name}.npz"
        present = (root / folder).is_dir()
        if not present and packed.is_file():
            return training_side(files.read_npz(packed))
        if not present and not download:
            raise UsageError(_missing(name, root, folder))
        return _read_torchvision(name, kind, root, folder, download)

    return opener


def _read_torchvision(name: str, kind: str, root: Path, folder: str, download: bool) -> Source:
    import torchvision

    options = {"split": "byclass"} if kind == "EMNIST" else {}
    try:
        data = getattr(torchvision.datasets, kind)(root, train=True, download=download, **options)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        if download:
            raise RunError(f"{name} could not be downloaded to {root}: {error}") from error
        raise UsageError(
            f"{name}: torchvision cannot read {root / folder}, whose files are incomplete or damaged ({error}); "
            f"remove the folder, or load with download=True"
        ) from error
    x = np.asarray(data.data)
    if kind == "EMNIST":
        x = np.ascontiguousarray(x.transpose(0, 2, 1))  # stored with rows and columns exchanged
    where = str(root / folder)
    y, _ = arrays.labels(np.asarray(data.targets), where, data.classes)
    return Source(name, arrays.features(x, where), y, tuple(data.classes), shuffled=True)


def _packed(name: str, change: Callable[[Source], Source] = lambda source: source) -> Opener:
    """Opener of a dataset that is ``NAME.npz`` below the data root and that nobody can download for the user."""

    def opener(data_root: str | os.PathLike[str] | None, download: bool) -> Source:
        path = find_root(name, data_root) / f"{name}.npz"
        if not path.is_file():
            raise UsageError(_missing(name, path.parent))
        return change(files.read_npz(path))

    return opener


def training_side(source: Source) -> Source:
    """Only the training side of a source with an official test set."""
    if source.is_train is None:
        return source
    return replace(source.take(np.flatnonzero(source.is_train)), is_train=None)


def only_classes(source: Source, names: tuple[str, ...]) -> Source:
    """The samples of the named classes, which are numbered in the order of ``names``.

    Raises:
        UsageError: a class that the source does not have.
    """
    for name in names:
        check_known(f"class of {source.name}", name, source.classes)
    new = np.full(len(source.classes), -1, dtype=np.int64)
    new[[source.classes.index(name) for name in names]] = np.arange(len(names))
    kept = source.take(np.flatnonzero(new[source.y] >= 0))
    return replace(kept, y=new[kept.y], classes=names)


def find_root(name: str, data_root: str | os.PathLike[str] | None, folder: str | None = None) -> Path:
    """The data root as an existing folder.

    Raises:
        UsageError: no data root is named, or it is not there.
    """
    root = data_root or os.environ.get(ROOT_VARIABLE)
    if not root:
        raise UsageError(
            f"{name} needs a data root: pass data_root (--data-root) or set {ROOT_VARIABLE}; "
            f"looked for there: {_layouts(name, folder)}"
        )
    if not Path(root).is_dir():
        raise UsageError(f"{name}: the data root {root} is not a folder; looked for in it: {_layouts(name, folder)}")
    return Path(root)


def _layouts(name: str, folder: str | None) -> str:
    torchvision = f"{folder}/ (torchvision's layout) or " if folder else ""
    return f"{torchvision}{name}.npz"


def _missing(name: str, root: Path, folder: str | None = None, file: str = "") -> str:
    present = sorted(entry.name for entry in root.iterdir())
    way = "; torchvision fetches it with download=True" if folder else "; it cannot be downloaded automatically"
    return f"{name}: no {file or _layouts(name, folder)} below {root}{way}; there are: {listing(present) or 'no files'}"


for _name, _kind, _folder, _recipe in (
    (
        "mnist",
        "MNIST",
        "MNIST/raw",
        Recipe(samples=10_000, model="fmnist_cnn", mean=(0.1307,), std=(0.3081,), note=_OURS),
    ),
    (
        "fashion_mnist",
        "FashionMNIST",
        "FashionMNIST/raw",
        Recipe(samples=10_000, model="fmnist_cnn", mean=(0.2860,), std=(0.3530,), note=_PAPER),
    ),
    (
        "emnist",
        "EMNIST",
        "EMNIST/raw",
        Recipe(samples=15_000, model="fmnist_cnn", rounds=75, mean=(0.1736,), std=(0.3317,), note=_PAPER),
    ),
    (
        "cifar10",
        "CIFAR10",
        "cifar-10-batches-py",
        Recipe(samples=50_000, mean=_CIFAR100[0], std=_CIFAR100[1], note=f"{_PAPER}, with CIFAR-100's statistics"),
    ),
    (
        "cifar100",
        "CIFAR100",
        "cifar-100-python",
        Recipe(samples=50_000, mean=_CIFAR100[0], std=_CIFAR100[1], note=_OURS),
    ),
):
    register(_name, _recipe)(_torchvision(_name, _kind, _folder))

for _name, _samples in (("tiny_imagenet", 100_000), ("tiny_imagenet32", 50_000)):  # 64 x 64; 32 x 32, half the classes
    register(_name, Recipe(samples=_samples, mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821), note=_OURS))(
        _packed(_name, training_side)
    )

register(
    "pacs",
    Recipe(
        clients=4,
        partition="natural",
        rounds=60,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        note=f"{_OURS}; one client a style, ImageNet's statistics",
    ),
)(_packed("pacs"))

ISIC_CLASSES = ("BCC", "BKL", "MEL", "NV")
"""The four of eight diagnoses that PLayer-FL keeps, in the order of its class weights."""

register(
    "fed_isic",
    Recipe(
        clients=4,
        partition="natural",
        rounds=60,
        loss="player_focal",
        loss_options={"gamma": 1.0, "alpha": [0.87868852, 0.88131148, 0.82793443, 0.41206557]},
        mean=(0.585, 0.500, 0.486),
        std=(0.229, 0.224, 0.225),
        model="isic_cnn",
        note=f"{_PAPER}; the official folds, images as stored",
    ),
)(_packed("fed_isic", lambda source: only_classes(source, ISIC_CLASSES)))


@register(
    "airline_tweets",
    Recipe(clients=6, partition="natural", **TEXT, rounds=20, note=f"{_OURS}: Sent-140's, at a smaller width"),
)
def _airline_tweets(data_root: str | os.PathLike[str] | None, download: bool) -> Source:
    """14,640 tweets to six airlines, which are the clients: negative, neutral or positive."""
    path = find_root("airline_tweets", data_root) / "airline_tweets.jsonl"
    if not path.is_file():
        raise UsageError(_missing("airline_tweets", path.parent, file=path.name))
    found = tables.read_jsonl(path, client_column="airline")
    if found.classes != ("0", "1", "2"):
        raise UsageError(f"{path}: labels are {listing(found.classes)}; expected 0, 1 and 2")
    return replace(found, classes=("negative", "neutral", "positive"))
