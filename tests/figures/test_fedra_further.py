"""FedRA where labels differ too, depths change or adapters sit elsewhere: what its three tables decide."""

from __future__ import annotations

import pandas as pd
import pytest

from figures.fedra import further
from fl_core import rows
from fl_core.errors import UsageError
from tests.figures.conftest import drawn

HEADER = {
    "runs": {name: {"config": config.to_json()} for name, config in further.RUNS.items()},
    "seeds": 3, "missing": [], "failed": {},
}  # fmt: skip
ORDER = {
    "alllarge": 0.5,
    "fedra": 0.4,
    "depthfl": 0.3,
    "inclusivefl": 0.3,
    "allsmall": 0.25,
}


def frame_of(
    ends: dict[str, float],
    setting_gains: dict[str, float] | None = None,
    seeds: int = 3,
) -> pd.DataFrame:
    """Rows of every run: 0.2 at the start, at the end that of its method, and of two clients a style one larger."""
    made = []
    for run in further.RUNS:
        setting, _, method = run.partition(".")
        end = ends[method] + (setting_gains or {}).get(setting, 0.0)
        for seed in range(seeds):
            for done, value in ((0, 0.2), (5, end + 0.002 * seed)):
                made += [
                    rows.row("accuracy", value + more, run=run, seed=seed, round=done, client=client, model="global",
                             split="test", n_samples=n)
                    for client, more, n in (("photo_0", 0.03, 10), ("photo_1", -0.01, 30), ("art_painting", 0.0, 7))
                ]  # fmt: skip
    return rows.frame(made)


def verdicts(name: str, frame: pd.DataFrame) -> list[bool | None]:
    """What the findings decide, of which none is compared with the paper."""
    drawing = drawn(name, HEADER, frame)
    assert "| method | seeds | photo | art painting | mean |" in drawing.text
    assert all(finding.verdict == "not comparable" for finding in drawing.findings)
    return [finding.held for finding in drawing.findings]


def test_a_styles_clients_count_by_their_test_samples() -> None:
    found = further.by_style(frame_of(ORDER), "end")
    assert list(found.index.get_level_values("style").unique()) == [
        "photo",
        "art_painting",
    ]
    assert found.loc[("labels.fedra", "photo"), 0] == pytest.approx(
        0.4 + (10 * 0.03 - 30 * 0.01) / 40
    )
    assert (
        further.by_style(frame_of(ORDER), "start").loc["labels.fedra"].round(9) == 0.2
    ).all(axis=None)


def test_table_2_names_its_weighting_and_what_others_give() -> None:
    frame = further.STUDY.read(further.STUDY.path())[1]
    drawing = drawn("fedra.table2", {**HEADER, "seeds": 3}, frame)
    at_end = frame[(frame["metric"] == "accuracy") & (frame["round"] == 10)]
    means = at_end.groupby(["run", "seed"])["value"].mean()
    every_client = 100 * (means["labels.fedra"] - means["labels.inclusivefl"]).mean()
    assert f"| every client alike | {every_client:+.1f} ± " in drawing.text
    assert (
        "weighting" not in drawn("fedra.table4", HEADER, frame).text
    )  # a client a style


@pytest.mark.parametrize("name", further.TABLES)
def test_differences_decide(name: str) -> None:
    as_published = verdicts(name, frame_of(ORDER))
    unjudged = (
        2 if name == "fedra.table6" else 1
    )  # levels, and what Tables 2 to 6 show together
    assert as_published == [True] * (len(as_published) - unjudged) + [None] * unjudged
    assert False in verdicts(name, frame_of({**ORDER, "fedra": 0.1}))
    few = verdicts(name, frame_of(ORDER, seeds=2))
    assert set(few) == {None}
    with pytest.raises(UsageError, match="none"):
        verdicts(name, frame_of(ORDER).assign(run="pretraining"))


def test_stored_rows_bear_out_why_nothing_is_compared() -> None:
    frame = further.STUDY.read(further.STUDY.path())[1]
    at_end = further.by_style(frame, "end")
    one, *others = (at_end.loc[f"{setting}.fedra"] for setting in further.PLACES)
    assert one.notna().all(axis=None)
    assert all(other.equals(one) for other in others), (
        "adapters do train: LAST_LAYER no longer holds"
    )


def test_places_that_differ_are_not_level() -> None:
    assert verdicts("fedra.table6", frame_of(ORDER, {"proj": 0.1}))[-3] is False


def test_published_means_are_read_for_every_run() -> None:
    two, four, six = (table.published() for table in further.TABLES.values())
    assert two.loc["labels.fedra"].round(4).to_dict() == {
        "DomainNet": 0.6161,
        "NICO++": 0.8544,
    }
    assert four.loc["drawn.inclusivefl", "NICO++"] == pytest.approx(0.8873)
    assert six["NICO++"].round(4).to_dict() == {
        "both.fedra": 0.8648, "both.inclusivefl": 0.8064, "proj.fedra": 0.8638, "proj.inclusivefl": 0.8183,
        "fc2.fedra": 0.8565, "fc2.inclusivefl": 0.8134,
    }  # fmt: skip
