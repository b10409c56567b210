"""Names, quotation marks, groups and texts of a table: each is read right, or refused in one line."""

import itertools
import unicodedata
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fl_core import data
from fl_core.data import files
from fl_core.data.loading import as_data
from fl_core.data.reading import PLAIN, Reading
from fl_core.data.sources import Source
from fl_core.data.table.prepare import find_faults
from tests.conftest import refuses

# --- names -----------------------------------------------------------------------------------------------------

FORMS = [unicodedata.normalize(form, "m\u00fcde") for form in ("NFC", "NFD")]


def test_one_name_has_one_form(tmp_path):
    """A name in the other form of Unicode is the same, as it is typed; two forms in one column are refused."""
    column = unicodedata.normalize("NFD", "gr\u00f6\u00dfe")
    frame = pd.DataFrame({
        "client": [FORMS[1]] * 20,
        column: [FORMS[1] if k % 3 else "wach" for k in range(20)],
        "label": [FORMS[1] if k % 2 else "wach" for k in range(20)],
    })  # fmt: skip
    frame.to_csv(tmp_path / "t.csv", index=False)
    for source in (as_data(frame), files.read(tmp_path / "t.csv")):
        assert isinstance(source, Source)
        assert source.owner_names == (FORMS[0],)
        assert source.classes == source.categories[0] == (FORMS[0], "wach")
        assert source.columns == ("gr\u00f6\u00dfe",)
    for name in frame:
        table = frame.copy()
        table.loc[:3, name] = FORMS[0]
        findings = find_faults(table, PLAIN)
        assert "Unicode" in str(findings.error)
        exec("\n".join(findings.repairs), {}, {"table": table})
        assert find_faults(table, PLAIN).source.digest


# --- open quotation marks --------------------------------------------------------------------------------------


def test_open_quotation_marks_are_found(tmp_path):
    """One mark or two, in each column, with commas or tabs. Texts of several lines are no fault."""
    fault = r"line 12: (a quotation mark must be closed|every line must have)"
    for order in itertools.permutations(("client", "text", "label")):
        for first, other, second in itertools.product(order, order, (None, 11, 20)):
            rows = [
                {"client": f"h{k % 2}", "label": str(k % 2), "text": f"visit {k}"}
                for k in range(40)
            ]
            rows[10][first] = f'"{rows[10][first]}'
            if second is not None:
                rows[second][other] = f'"{rows[second][other]}'
            for suffix, sign in ((".csv", ","), (".tsv", "\t")):
                lines = [order, *([row[name] for name in order] for row in rows)]
                path = tmp_path / f"t{suffix}"
                path.write_text("\n".join(map(sign.join, lines)))
                with refuses(fault):
                    files.read(path)
    texts = [f"h{k % 2},{k % 2},visit {k} fine" for k in range(40)]
    texts[10], texts[39] = 'h0,0,"fine, well\nyes, no, maybe"', 'h1,1,"last\nline"'
    path.with_suffix(".csv").write_text("\n".join(["client,label,text", *texts]))
    assert len(files.read(path.with_suffix(".csv"))) == 40


# --- rows that belong together ---------------------------------------------------------------------------------


def visits(patients=40):
    """Return several rows of each patient. Two hospitals have the same numbers of patients."""
    draw, patient = np.random.default_rng(0), np.repeat(np.arange(patients), 5)
    base = draw.normal(size=(2, patients))
    return pd.DataFrame({
        "hospital": np.repeat(["north", "south"], patients * 5),
        "patient_id": np.tile(patient, 2),
        "v": np.concatenate([base[0, patient], base[1, patient]]) + 0.1 * draw.normal(size=2 * patients * 5),
        "died": np.tile(patient % 2, 2),
    })  # fmt: skip


BY_PATIENT = Reading(
    client_column="hospital", label_column="died", group_column="patient_id"
)


@pytest.mark.parametrize("partition", ["natural", "iid"])
@pytest.mark.parametrize("splits", [None, (0.4, 0.3, 0.3)])
def test_a_group_is_in_one_split_of_one_client(partition, splits):
    frame = visits()
    clients = None if partition == "natural" else 3
    federated = data.load(
        as_data(frame, BY_PATIENT), partition=partition, clients=clients, splits=splits
    )
    places = {}
    for client, parts in federated.partition.indices.items():
        for split, rows in parts.items():
            for row in rows:
                group = (frame.hospital[row], frame.patient_id[row])
                places.setdefault(group, set()).add((client, split))
    assert len(places) == 80
    assert all(len(group_places) == 1 for group_places in places.values())
    assert federated.shape == (1,)


def test_groups_need_a_partition_that_keeps_them():
    source = as_data(visits(), BY_PATIENT)
    with refuses(r"group_column must be left out with partition 'dirichlet'.*iid"):
        data.load(source, partition="dirichlet", clients=2)
    with refuses("group_column must be one of .* group_column='patient_id'"):
        as_data(visits(), replace(BY_PATIENT, group_column="person"))
    few = as_data(visits(2), BY_PATIENT)
    with refuses("client 'north' must have at least 3 groups; got 2"):
        data.load(few)


# --- texts -----------------------------------------------------------------------------------------------------


def test_long_texts_are_noted_and_letters_without_spaces_are_tokens(tmp_path):
    path = tmp_path / "t.csv"
    lines = "client,label,text" + "\nh0,0,好很棒\nh1,1,好很棒" * 20
    path.write_text(lines)
    assert set(files.read(path).words) == set("好很棒")
    path.write_text(lines.replace("好很棒", "word " * 120))
    with pytest.warns(UserWarning, match="40 of 40 texts are cut after 63 tokens"):
        files.read(path)


@pytest.mark.parametrize("noise", [b"\xff\x81\n" * 40, bytes(range(9)) * 40])
def test_bytes_that_are_no_text_are_refused(tmp_path, noise):
    path = tmp_path / "noise.csv"
    path.write_bytes(noise)
    with refuses("must be a text table"):
        data.load(str(path))
