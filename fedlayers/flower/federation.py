"""What sites and their server exchange: packets, checked descriptions, and the data as one machine knows them.

A packet is JSON for names and numbers, and arrays for tensors, as Flower's records. The data are sizes of all clients,
and at a site its own samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fl_core.data import FederatedData, Partition
from fl_core.data.federated import ClientData, Split, digest_of
from fl_core.data.partitions import SPLITS
from fl_core.data.preprocessing import MOST_OUTSIDE, NO_FENCE, Preprocessing
from fl_core.display import printable
from fl_core.errors import (
    COUNT,
    NUMBER,
    NonFiniteError,
    RunError,
    UsageError,
    about,
    check_known,
    check_type,
    listing,
    validate,
    warn,
)
from fl_core.models.tokens import TokenShape
from fl_core.rows import CLASSIFICATION, REGRESSION
from fl_core.storage import (
    format_bytes,
    merge_trees,
    parsed_json,
    read_toml,
    split_trees,
)
from fl_core.tree import Tree

HEAD, TENSORS, JSON = "head", "tensors", "json"
TOML_BYTES = 2**20
MOST_JSON = 2**26
"""The largest number of characters of a packet's JSON."""
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UsageError, NonFiniteError, RunError)
}
"""Errors that keep their kind on the way to the server. Others become a RunError."""


@dataclass
class Packet:
    """The contents of a message between server and site.

    Attributes:
        head: names and numbers that JSON can hold.
        trees: named trees, each a dict of tensors by name.
    """

    head: dict[str, Any]
    trees: dict[str, Tree] = field(default_factory=dict)

    def records(self) -> RecordDict:
        """Return the packet as Flower's records."""
        text = json.dumps({**self.head, "trees": list(self.trees)})
        records = {HEAD: ConfigRecord({JSON: text})}
        if tensors := merge_trees(self.trees):
            arrays = {
                name: Array(tensor.contiguous()) for name, tensor in tensors.items()
            }
            records[TENSORS] = ArrayRecord(arrays)
        return RecordDict(records)


Keys = TypeVar("Keys")


def read_keys(path: Path, kind: type[Keys]) -> Keys:
    """Return the object of the dataclass ``kind`` that a TOML file describes.

    Raises:
        UsageError: the file cannot be read, a key is unknown or missing, or a value has
            another type or is out of range.
    """
    values, hints = read_toml(path, TOML_BYTES), get_type_hints(kind)
    with about(str(path)):
        for key, value in values.items():
            check_type(check_known("key", key, hints), value, hints[key])
        for key in hints:
            if key not in values and not hasattr(kind, key):
                raise UsageError(f"{key} must be given; got none. Add {key} = ...")
        return kind(**values)


def error_packet(error: Exception) -> Packet:
    """Return an error as a packet. Its head has ``error``, the kind of error or "", and ``text``, its message."""
    kind = next(
        (
            name
            for name, error_class in ERRORS.items()
            if isinstance(error, error_class)
        ),
        "",
    )
    text = str(error)
    if not kind:
        error_type = type(error).__name__
        text = f"{error_type}: {error}"
    return Packet({"error": kind, "text": text})


def packet_of(records: RecordDict, most_bytes: int) -> Packet:
    """Return the packet that :meth:`Packet.records` made into Flower's records.

    Args:
        records: the contents of Flower's message.
        most_bytes: the largest size of all arrays together.

    Raises:
        UsageError: they hold no packet, or one that is too large.
    """
    try:
        text = records.config_records[HEAD][JSON]
        if not isinstance(text, str) or len(text) > MOST_JSON:
            raise ValueError(f"its JSON must be a text of at most {MOST_JSON:,} signs")
        head = parsed_json(text)
        arrays = dict(records.array_records.get(TENSORS, {}))
        size = sum(len(array.data) for array in arrays.values())
        if size > most_bytes:
            limit_text = format_bytes(most_bytes)
            size_text = format_bytes(size)
            raise ValueError(f"arrays must have at most {limit_text}; got {size_text}")
        # a clone is aligned as torch aligns its own
        tensors = {
            name: torch.from_numpy(array.numpy()).clone()
            for name, array in arrays.items()
        }
        return Packet(head, split_trees(tensors, head.pop("trees")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        error_type = type(error).__name__
        raise UsageError(
            f"the message must be a packet of fedlayers; got {error_type}: {error}."
        ) from error


def raise_error(site: str, head: Mapping[str, Any]) -> None:
    """Raise the error in a site's message, if there is one.

    Args:
        site: the site's name, for the message.
        head: the head of its packet, in the form of :func:`error_packet` after an error.

    Raises:
        UsageError, RunError: the site's error of this kind. Errors of unknown kinds are a ``RunError``.
    """
    if "error" in head:
        beginning = f"site {site!r}: "  # a site may write any name into its text
        text = printable(" ".join(str(head.get("text")).split())[:2000])
        error_class = ERRORS.get(str(head["error"]), RunError)
        raise error_class(beginning + text.removeprefix(beginning))


# --- descriptions of sites --------------------------------------------------------------------------------------

OWN = "own"
"""The name of data that are not a registered dataset."""
FACTS = {
    "name": str,
    "samples": COUNT,
    "dataset": str,
    "task": str,
    "classes": [str],
    "shape": [COUNT],
    "tokens": COUNT,
    "words": str,
    "mean": [NUMBER],
    "std": [NUMBER],
    "images": bool,
    "target": [COUNT],
    "columns": [str],
    "worded": [bool],
    "scale": str,
    "impute": str,
    "clip": str,
}
KEPT = ("task", "classes", "target", "tokens", "mean", "std", "images", "columns")
"""The keys of :data:`FACTS` that :func:`common` passes on to every site."""
DESCRIPTION = {
    "sizes": [COUNT],
    "digest": str,
    "classes": [COUNT],
    "words": [[str]],
    "moments": ([[float]], None),
    "fences": ([[NUMBER]], None),
}
CLIPPED = {"known": [COUNT], "outside": [COUNT], "moments": ([[float]], None)}
Ends = tuple[tuple[float, ...], tuple[float, ...]]
"""The lower and the upper fences of a table's columns."""
MOST_SAMPLES = 10**9
FAR = 10.0
"""Standard deviations between means of a column from which a warning names the site.

The ratio of two standard deviations has the same limit.
"""
MOST_MOMENT = 1e300
"""The largest sum of squared differences of a column."""
LARGEST = 1e30
"""The largest size of a loss or another number from a site. Float32 holds it."""


def checked(site: str, values: Mapping[str, Any], form: object) -> dict[str, Any]:
    """Return a site's names and numbers, if they have the types of ``form``.

    Args:
        site: the site's name, for the message.
        values: the head of its packet.
        form: the type of each value by key, such as :data:`FACTS`.

    Raises:
        UsageError: they have not. The message names the site and the first fault.
    """
    if fault := validate(values, form):
        raise UsageError(f"site {site!r}: {fault}.")
    return dict(values)


def common(
    facts: Mapping[str, Any],
    sites: Mapping[str, Mapping[str, Any]],
    samples: Mapping[str, int],
    split_seed: int | None = None,
    ends: Ends = ((), ()),
) -> dict[str, Any]:
    """Return the description that all sites use, as JSON: the kind of their data, and the preparation of their tables.

    Args:
        facts: the facts of one site, which has the kind of data of all.
        sites: the description of each site (:meth:`Site.describe <fedlayers.flower.site.Site.describe>`), by name.
        samples: the number of samples that each site named first.
        split_seed: the seed that draws the test samples, if it is another one.
        ends: the lower and the upper fence of each column, beyond which all sites clip
            (:func:`settled`); empty without clipping.

    Returns:
        A dict with the keys :data:`KEPT` of the facts, and ``name``, ``split_seed``, ``shape``, ``preprocessing``,
        ``empty`` (classes without samples), ``sites`` (the sizes of the splits of each site) and ``digest``.

    Raises:
        UsageError: a site has no samples or too many, another number than it first named, or unknown classes.
    """
    for name, site in sites.items():
        has_all_splits = len(site["sizes"]) == len(SPLITS)
        has_all_splits &= len(site["words"]) == len(facts["worded"])
        if not has_all_splits or not 0 < sum(site["sizes"]) <= MOST_SAMPLES:
            raise UsageError(f"site {name!r} must have 1 to {MOST_SAMPLES:,} samples.")
        if sum(site["sizes"]) != samples[name]:
            raise UsageError(
                f"site {name!r} must have the {samples[name]:,} samples that it first named; "
                f"got {sum(site['sizes']):,}."
            )
        if max(site["classes"], default=-1) >= max(len(facts["classes"]), 1):
            raise UsageError(f"site {name!r} must have classes of the federation.")
    shape = list(facts["shape"])
    preparation = _preparation(facts, sites, ends)
    if preparation is not None and any(preparation.categories):
        shape[0] += sum(map(len, preparation.categories))
    present_classes = {*chain.from_iterable(site["classes"] for site in sites.values())}
    return {
        **{key: facts[key] for key in KEPT},
        "name": facts["dataset"] or OWN,
        "split_seed": split_seed,
        "shape": shape,
        "preprocessing": None if preparation is None else preparation.to_json(),
        "empty": [k for k in range(len(facts["classes"])) if k not in present_classes],
        "sites": {name: list(site["sizes"]) for name, site in sites.items()},
        "digest": digest_of({name: site["digest"] for name, site in sites.items()}),
    }


def widest(
    facts: Mapping[str, Any], sites: Mapping[str, Mapping[str, Any]]
) -> Ends | None:
    """Return the lowest lower and the highest upper fence of each column over all sites; None if no site has fences.

    Fences are the ends of a column's usual values, beyond which cells are clipped. If
    no site has fences for a column, its ends are those of float32.

    Args:
        facts: the facts of one site, with the shape of a sample.
        sites: the description of each site, by name.

    Raises:
        UsageError: a site has fences of another number of columns, or too large ones.
    """
    if not any(site["fences"] for site in sites.values()):
        return None
    width = facts["shape"][0]
    for name, site in sites.items():
        fences = site["fences"] or []
        has_all_columns = list(map(len, fences)) == [width] * 2
        if not has_all_columns or not np.abs(fences).max(initial=0) <= NO_FENCE:
            raise UsageError(
                f"fences of site {name!r} must be two numbers for each of {width} columns."
            )
    lows, highs = np.array([site["fences"] for site in sites.values()]).swapaxes(0, 1)
    low, high = lows.min(axis=0), highs.max(axis=0)
    open_ended = low > high
    open_ended[columns_of_words(facts, width)] = True
    low[open_ended], high[open_ended] = -NO_FENCE, NO_FENCE
    return tuple(low.tolist()), tuple(high.tolist())


def columns_of_words(facts: Mapping[str, Any], width: int) -> list[int]:
    """Return the places of the columns of words, which are neither clipped nor scaled whatever a site says of them.

    Args:
        facts: the facts of one site.
        width: the number of columns.
    """
    return [k for k, has_words in enumerate(facts["worded"][:width]) if has_words]


def settled(
    facts: Mapping[str, Any],
    ends: Ends,
    sites: Mapping[str, Mapping[str, Any]],
    replies: Mapping[str, Mapping[str, Any]],
) -> tuple[Ends, dict[str, dict[str, Any]]]:
    """Return the fences of the columns that are clipped, and the sites' descriptions with moments after clipping.

    A column with too many cells beyond its fences (:data:`MOST_OUTSIDE`) is not
    clipped. A warning names columns with clipped cells. Both fences are empty if no
    column has them.

    Args:
        facts: the facts of one site.
        ends: the fences of each column, as :func:`widest` returns them.
        sites: the description of each site, by name.
        replies: each site's values of the form :data:`CLIPPED`.

    Raises:
        UsageError: a site counts other columns, or more cells than it has.
    """
    low, high = map(np.array, ends)
    for name, site in replies.items():
        counts, n_samples = (site["outside"], site["known"]), sites[name]["sizes"][0]
        has_all_columns = list(map(len, counts)) == [len(low)] * 2
        if not has_all_columns or any(out > n for out, n in zip(*counts, strict=True)):
            raise UsageError(
                f"site {name!r} must count the cells of {len(low)} columns."
            )
        if max(site["known"], default=0) > n_samples:
            raise UsageError(
                f"site {name!r} must count cells of {n_samples:,} samples."
            )
        if facts["scale"] != "none" or facts["impute"] != "none":
            for moments in (sites[name]["moments"], site["moments"]):
                _check_moments(name, facts, moments, n_samples)
    known_counts, outside_counts = (
        np.sum([reply[key] for reply in replies.values()], axis=0)
        for key in ("known", "outside")
    )
    too_many = outside_counts > MOST_OUTSIDE * known_counts
    low[too_many], high[too_many] = -NO_FENCE, NO_FENCE
    if cells := [
        f"{name!r} ({count:,})"
        for name, count, is_kept in zip(
            facts["columns"], outside_counts, too_many, strict=False
        )
        if count and not is_kept
    ]:
        warn(
            "cells of training samples are far outside of all others and are clipped: "
            f"{listing(cells, 4)}. To keep them, write clip = 'none' in each site's file"
        )
    settled_sites = {}
    for name, site in sites.items():
        moments = site["moments"]
        if moments is not None:
            raw_moments, inner_moments = (
                np.array(moments),
                np.array(replies[name]["moments"]),
            )
            is_plain = np.zeros(
                raw_moments.shape[1], dtype=bool
            )  # the last can be targets
            is_plain[: len(too_many)] = too_many
            moments = np.where(is_plain, raw_moments, inner_moments).tolist()
        settled_sites[name] = {**site, "moments": moments}
    is_bounded = bool((np.abs([low, high]) < NO_FENCE).any())
    clips = (tuple(low.tolist()), tuple(high.tolist())) if is_bounded else ((), ())
    return clips, settled_sites


def _check_moments(
    name: str, facts: Mapping[str, Any], moments: Any, most: int
) -> None:
    """Refuse moments that no training samples have.

    Raises:
        UsageError: a site has sent such moments. The message names it.
    """
    numbers = facts["shape"][0] + (facts["task"] == REGRESSION)
    moments = moments or []
    if list(map(len, moments)) != [numbers] * 3:
        raise UsageError(f"site {name!r} must have moments of each column.")
    ends = ((0, most), (-LARGEST, LARGEST), (0, MOST_MOMENT))
    for row, (low, high) in zip(moments, ends, strict=True):
        if not all(low <= value <= high for value in row):
            raise UsageError(
                f"moments of site {name!r} must be those of its {most:,} training samples, from {low:g} to "
                f"{high:g}; got others."
            )


def _preparation(
    facts: Mapping[str, Any], sites: Mapping[str, Mapping[str, Any]], ends: Ends
) -> Preprocessing | None:
    """Return the preparation of all sites' tables together.

    It comes from the sites' words and moments (Chan et al. 1983). It is None for data
    that need none. With three sites or more, a warning names a site whose column has a
    far mean or standard deviation.

    Args:
        facts: the facts of one site.
        sites: the description of each site, by name.
        ends: the lower and upper fences; empty without clipping.

    Raises:
        UsageError: a site's moments are not possible, or no site has a value in a
            column.
    """
    is_prepared = facts["scale"] != "none" or facts["impute"] != "none"
    if not is_prepared and not any(facts["worded"]) and not ends[0]:
        return None
    columns = tuple(facts["columns"])
    words = [site["words"] for site in sites.values()]
    categories = tuple(
        tuple(sorted({*chain.from_iterable(lists)}))
        for lists in zip(*words, strict=True)
    )
    if not is_prepared:
        return Preprocessing(
            columns, categories=categories, lowest=ends[0], highest=ends[1]
        )
    is_regression = facts["task"] == REGRESSION
    for name, site in sites.items():
        _check_moments(name, facts, site["moments"], site["sizes"][0])
    moments = np.array([site["moments"] for site in sites.values()])
    count, means, spreads = moments.swapaxes(0, 1)
    total = count.sum(0)
    for k, name in enumerate(sites):
        other_moments = np.delete(moments, k, axis=0)
        counts = np.maximum(other_moments[:, 0].sum(0), 1)
        mean_of_others = (other_moments[:, 0] * other_moments[:, 1]).sum(0) / counts
        usual_variance = other_moments[:, 2].sum(0) / counts
        is_far = np.abs(means[k] - mean_of_others) > FAR * np.sqrt(usual_variance)
        with np.errstate(over="ignore"):
            is_far |= (usual_variance > 0) & (
                spreads[k] > FAR**2 * usual_variance * count[k]
            )
        if len(sites) > 2 and (is_far & (count[k] > 0)).any():
            column = [*columns, "target"][int(np.argmax(is_far & (count[k] > 0)))]
            warn(
                f"site {name!r}: the mean of {column} is {FAR:g} standard deviations or more from that of the others, "
                f"or its standard deviation is {FAR:g} times theirs"
            )
    mean = (count * means).sum(0) / np.maximum(total, 1)
    squares = (spreads + count * (means - mean) ** 2).sum(0)
    rows = sum(site["sizes"][0] for site in sites.values())
    if (total == 0).any():
        empty = [columns[k] for k in np.flatnonzero(total == 0) if k < len(columns)]
        raise UsageError(
            f"each column must have a value at some site; got none in {listing(empty)}. Leave it out."
        )
    spread = np.sqrt(squares / rows)
    spread[spread == 0] = 1.0
    words_at = columns_of_words(facts, len(columns))
    mean[words_at], spread[words_at] = 0.0, 1.0
    is_scaled = facts["scale"] != "none"
    target: tuple[float, ...] = ()
    if is_regression:
        target = (float(mean[-1]), float(spread[-1])) if is_scaled else ()
        mean, spread = mean[:-1], spread[:-1]
    centre = tuple(mean.tolist())
    return Preprocessing(
        columns,
        facts["scale"],
        facts["impute"],
        centre if facts["impute"] != "none" else (),
        centre if is_scaled else (),
        tuple(spread.tolist()) if is_scaled else (),
        categories,
        target=target,
        lowest=ends[0],
        highest=ends[1],
    )


def federated(found: Mapping[str, Any], own: ClientData | None = None) -> FederatedData:
    """Return the federation's data. Only a site's own samples are in it.

    Samples of others are meta tensors: they have sizes and no numbers.

    Args:
        found: the result of :func:`common`.
        own: the samples of the client at this site; None at the server.
    """
    shape: tuple[int, ...] = tuple(found["shape"])
    dtype = torch.float32
    if found["tokens"]:
        shape, dtype = TokenShape(shape, found["tokens"]), torch.int64

    def split(n: int) -> Split:
        x = torch.empty((n, *shape), dtype=dtype, device="meta")
        has_classes = found["task"] == CLASSIFICATION
        y = torch.empty(
            (n, *found["target"]),
            dtype=torch.int64 if has_classes else torch.float32,
            device="meta",
        )
        return Split(x, y)

    clients = tuple(
        own
        if own is not None and own.name == name
        else ClientData(name, *map(split, sizes))
        for name, sizes in found["sites"].items()
    )
    indices = {
        name: dict.fromkeys(SPLITS, np.empty(0, np.int64)) for name in found["sites"]
    }
    params = {"clients": len(clients)}
    if found["split_seed"] is not None:
        params["split_seed"] = found["split_seed"]
    partition = Partition("natural", params, 0, indices, 0, found["digest"])
    preprocessing = found["preprocessing"]
    return FederatedData(
        found["name"],
        shape,
        tuple(found["classes"]),
        clients,
        partition,
        source_digest=found["digest"],
        digest=found["digest"],
        mean=tuple(found["mean"]),
        std=tuple(found["std"]),
        images=found["images"],
        empty=tuple(found["empty"]),
        preprocessing=None
        if preprocessing is None
        else Preprocessing.from_json(preprocessing),
    )
