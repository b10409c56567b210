"""The rows of a diagnosis that leave a site. With noise, only their values depend on the site's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from fedlayers.remote.privacy import Account, Privacy, add_noise_to_numbers
from fl_core.errors import UsageError, check_known, listing
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


def add_noise_to_rows(measured: Tables, shown: Tables, privacy: Privacy, account: Account) -> None:
    """Write measured values with noise into rows that were measured on random data of the same shape.

    All values together are one release. Standard errors do not leave.

    Raises:
        UsageError: the site's data give other rows, or lack a value. That would reveal something without noise.
    """
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for name in shown:
        pairs += zip_longest(shown[name], measured[name], fillvalue={})
    if any(_place(row) != _place(own) or (row["value"] is not None and own["value"] is None) for row, own in pairs):
        raise UsageError(
            "the site's rows must be those that random data of the same shape give; got others. "
            "Ask for fewer metrics or layers: the site adds noise to values only."
        )
    known = [(row, own["value"]) for row, own in pairs if row["value"] is not None]
    fresh = add_noise_to_numbers([value for _, value in known], privacy)
    epsilon, delta = account.release(bool(known)), privacy.delta
    for (row, _), value in zip(known, fresh, strict=True):
        how = f"noise, epsilon {epsilon:.3g} at delta {delta:g}"
        row |= {"value": value, "stderr": None, "estimator": ", ".join(filter(None, (row["estimator"], how)))}


def _place(row: Mapping[str, Any]) -> list[Any]:
    return [row.get(column) for column in ("metric", "model", "variant", "layer")]
