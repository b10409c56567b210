"""The rows of a diagnosis that leave a site. With noise, only their values depend on the site's data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedlayers.remote.log import LOG
from fedlayers.remote.privacy import Account, Privacy, add_noise_to_numbers
from fl_core.errors import UsageError, check_known, listing
from fl_core.limits import LimitError
from fl_core.rows import records

if TYPE_CHECKING:
    import pandas as pd

Tables = Mapping[str, list[dict[str, Any]]]
"""Rows by origin: measured on the site's data, or on nulls."""


MOST_DRAWS = 1000
"""Maximum draws of a null. Each takes as long as the measurement itself."""


def check_nulls(names: Sequence[str], draws: int = 1) -> None:
    """Refuse nulls that combine all clients' samples or labels, and too many draws.

    Raises:
        UsageError: names them, and the nulls that are available.
    """
    from diagnostics.null import NULLS

    if draws > MOST_DRAWS:
        raise UsageError(f"null_draws must be at most {MOST_DRAWS} over sites; got {draws}. Ask for fewer.")
    together = [name for name in names if NULLS[check_known("null", name, NULLS)].together]
    if together:
        alone = listing(name for name, null in NULLS.items() if not null.together)
        raise UsageError(
            f"null must be one of {alone} over sites; got {listing(together)}. The others pool all samples."
        )


def check_values_alone(names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Refuse metrics whose rows reveal more of the samples than their values. Noise covers values only."""
    from diagnostics.diagnosis import chosen_metrics

    for metric in chosen_metrics(names):
        written = metric.contents(metric.settings(**options.get(metric.name, {})))
        if written:
            raise UsageError(
                f"rows of {metric.name} must name nothing of the samples; got {written} in their names. "
                "Leave it out: the site adds noise to values only."
            )


def own_rows(table: pd.DataFrame, client: str) -> list[dict[str, Any]]:
    """Return a client's own rows as JSON data, without variants that combine all clients' samples."""
    import pandas as pd

    from diagnostics.metrics.base import metric_or_placeholder

    pairs = zip(table["metric"], table["variant"], strict=True)
    single = [variant not in metric_or_placeholder(metric).pooled_variants for metric, variant in pairs]
    alone = pd.Series(single, table.index, dtype=bool)
    return records(table[(table["client"] == client) & alone])


def put_noised_values(shown: Tables, measure: Callable[[], Tables], privacy: Privacy, account: Account) -> None:
    """Measure the site's own data, and put the values with noise into rows of random data of the same shape.

    All values together are one release. It is recorded before the data are looked at. A value that the data lack or
    that is not finite counts as 0, and all of them do if the data cannot be measured: an error or a missing row would
    reveal something without noise. Standard errors do not leave.

    Args:
        shown: rows of random data, which leave with other values.
        measure: returns the rows of the site's own data.
    """
    known = {place: row for place, row in _by_place(shown).items() if row["value"] is not None}
    epsilon, delta = account.release(bool(known)), privacy.delta
    try:
        measured = _by_place(measure()) if known else {}
    except LimitError:
        raise
    except Exception as error:  # of any kind: which one it is may depend on the data
        LOG.warning(f"the site's data could not be measured, so that noise alone leaves: {error}")
        measured = {}
    found = [measured.get(place, {}).get("value") for place in known]
    fresh = add_noise_to_numbers([0.0 if x is None or not math.isfinite(x) else float(x) for x in found], privacy)
    for row, value in zip(known.values(), fresh, strict=True):
        how = f"noise, epsilon {epsilon:.3g} at delta {delta:g}"
        row |= {"value": value, "stderr": None, "estimator": ", ".join(filter(None, (row["estimator"], how)))}


def _by_place(tables: Tables) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return rows by table, by what they are of, and by their number among rows of the same."""
    placed: dict[tuple[Any, ...], dict[str, Any]] = {}
    count = Counter[tuple[Any, ...]]()
    for name, rows in tables.items():
        for row in rows:
            of = (name, *(row.get(column) for column in ("metric", "model", "variant", "layer")))
            placed[*of, count[of]] = row
            count[of] += 1
    return placed
