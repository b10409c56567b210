"""What is predicted: a number, one of two classes from one output, or classes of unequal weight."""

import numpy as np
import pandas as pd
import pytest

import fedlayers as fl
from diagnostics import measure
from diagnostics.metrics.base import DEFAULT, METRICS
from fedlayers.decision.choose import choose
from fedlayers.decision.compare import compare
from fl_core import tree
from fl_core.algorithms import registry
from fl_core.config import RunConfig
from fl_core.data import from_clients, load
from fl_core.data.partitions import PARTITIONS
from fl_core.errors import UsageError
from fl_core.records.store import Run
from fl_core.rounds.recorder import Recorder
from fl_core.rows import REGRESSION, TABLE, scores_of
from fl_core.run import runner
from tests.conftest import refuses

OF_NUMBERS = set(scores_of(REGRESSION))
SLOW = {"rounds": 2, "eval_every": 1, "lr": 0.02}


def numbers(n=90, flat=False):
    """Three silos with a linear target; with ``flat`` the last one's is always the same."""
    draw, silos = np.random.default_rng(0), {}
    for k, name in enumerate(("north", "south", "west")):
        x = draw.normal(size=(n - 20 * k, 5))
        y = x @ np.arange(5) / 3 + k + 0.1 * draw.normal(size=len(x))
        silos[name] = (x, np.full(len(x), 2.5) if flat and name == "west" else y)
    return silos


def federation(task=REGRESSION, **options):
    silos = numbers(**options)
    if task != REGRESSION:
        silos = {name: (x, (y > 1.5).astype(int)) for name, (x, y) in silos.items()}
    return from_clients(silos, task=task)


def played(data, **changes):
    return runner.run(RunConfig(**{**SLOW, **changes}), data=data)


@pytest.fixture
def table(tmp_path):
    """The silos as a .csv with a column ``client``."""
    lines = ["a,b,c,d,e,label,client"]
    for name, (x, y) in numbers(60).items():
        lines += [
            ",".join(f"{v:.4f}" for v in (*row, target)) + f",{name}"
            for row, target in zip(x, y, strict=True)
        ]
    path = tmp_path / "prices.csv"
    path.write_text("\n".join(lines))
    return path


def test_numbers_as_labels_are_never_taken_for_a_regression_unasked(table, tmp_path):
    x, y = numbers()["north"]
    np.savez(tmp_path / "prices.npz", x=x, y=y)
    for path in (table, tmp_path / "prices.npz"):
        with refuses(r"whole.*task='regression'"):
            load(path)
        assert load(path, task=REGRESSION).task == REGRESSION
    with refuses(r"whole.*task='regression'"):
        from_clients(numbers())
    with refuses("finite float32"):
        from_clients({"a": (x, np.full(len(x), np.nan))}, task=REGRESSION)
    with refuses(r"'heart' .*classes"):
        load("heart", task=REGRESSION)


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_training_lowers_the_loss_of_numbers_in_the_stacked_trainer_too(loss):
    results = {}
    for stack in ("on", "off"):
        how = {"loss": loss, "rounds": 12, "eval_every": 12, "stack": stack}
        rows = played(federation(), **how).listener(Recorder).rows
        results[stack] = {
            (r["metric"], r["round"], r["client"]): r["value"]
            for r in rows
            if r["split"] == "test"
        }
    assert results["on"] == pytest.approx(results["off"], rel=1e-3, abs=1e-3)
    for (name, number, client), after in results["on"].items():
        if name in ("loss", "mse", "mae") and number:
            assert after < results["on"][name, 0, client]


def test_a_run_of_a_table_of_numbers_is_resumed_and_compared(table, tmp_path):
    """Scored by MSE, MAE and R2, compared by R2, raced by the loss."""
    config = RunConfig(dataset=str(table), task=REGRESSION, **SLOW)
    assert runner.assemble(config).config.training.loss == "mse"
    whole = runner.run(config)
    runner.run(config, tmp_path / "run", until=1)
    resumed = runner.resume(tmp_path / "run")
    one, two = (tree.digest(run.server.trees["model"]) for run in (whole, resumed))
    assert one == two
    frame = Run(tmp_path / "run").rows()[1]
    assert set(frame.loc[frame["split"] == "test", "metric"]) == OF_NUMBERS
    names = ("local", "fedavg")
    comparison = compare(config, names, (0,), tmp_path / "compare")
    assert (comparison.score, set(comparison.table["rank"])) == ("r2", {1.0, 2.0})
    answer = choose(config, tmp_path / "choose", seeds=1)
    assert "log loss" not in answer.text() + answer.shown().to_string()
    assert "linear_local" in set(answer.table["way"])


def test_targets_of_a_table_are_standardised_and_scored_in_their_unit(tmp_path):
    """Targets near 1.7e9 keep their digits, and MSE is that of the predictions."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 3))
    y = 1.7e9 + 20 * x @ [1, 2, -1] + draw.normal(size=200)
    table = pd.DataFrame(x, columns=list("abc")).assign(label=y, client="north")
    keys = {**SLOW, "rounds": 8, "lr": 0.1, "task": REGRESSION}
    result = fl.run(data=table, out=tmp_path / "run", **keys)
    data = result.engine.data
    assert data.preprocessing.target == pytest.approx((1.7e9, y.std()), rel=0.1)
    arguments = {"data": table, "which": "global"}
    fl.export(tmp_path / "run", tmp_path / "m.safetensors", **arguments)
    rows = data.partition.indices["north"]["test"]
    predicted = (
        fl.predict(tmp_path / "m.safetensors", table.iloc[rows]).outputs[:, 0].numpy()
    )
    mse = np.mean((predicted - y[rows]) ** 2)
    assert result.scores["mse"]["global", "north"] == pytest.approx(mse, rel=1e-6)
    assert mse < y.var() / 4
    report = fl.diagnose(tmp_path / "run", table, "grad_norm", loss="mae")
    assert report.frame["value"].max() < 10  # of the standardised targets


def test_a_client_whose_target_does_not_vary_has_no_r2():
    with pytest.warns(UserWarning, match="'west' .*equal"):
        rows = played(federation(flat=True), algorithm="local").listener(Recorder).rows
    of_r2 = [row for row in rows if row["metric"] == "r2" and row["value"] is None]
    lacking = {(row["client"], row["status"]) for row in of_r2}
    assert lacking == {("west", TABLE["r2"].missing)}


def test_what_needs_classes_is_refused_by_name(table, tmp_path):
    for name, partitioning in PARTITIONS.members().items():
        if partitioning.by_class:
            with refuses(r"classes.*iid"):
                load(table, task=REGRESSION, partition=name)
    data = federation()
    task = runner.assemble(RunConfig(**SLOW), data=data)
    metrics = [name for name, metric in METRICS.members().items() if metric.classes]
    frame = measure.diagnose_task(task, [*DEFAULT, *metrics]).frame
    classes = frame["metric"].isin(metrics)
    assert frame.loc[classes, "status"].str.contains("not applicable.*classes").all()
    assert frame.loc[~classes, "value"].notna().all()
    for changes, says in (
        ({"class_weights": "balanced"}, "class_weights.*'mse'"),
        ({"loss": "cross_entropy"}, "numbers.*'cross_entropy'"),
    ):
        with refuses(says):
            runner.assemble(RunConfig(**changes), data=data)
    for weights in ("balanced", "1,2"):  # its targets are standardised
        config = RunConfig(dataset=str(table), task=REGRESSION, class_weights=weights)
        with refuses("class_weights must be left out for regression.*'mse'"):
            runner.assemble(config)


def _refused(algorithm):
    """Whether an algorithm does not take a table of classes either."""
    try:
        runner.assemble(
            RunConfig(algorithm=algorithm), data=federation("classification")
        )
    except UsageError:
        return True
    return False


@pytest.mark.parametrize(
    ("loss", "start"),
    [
        ("mse", 0),
        ("bce", 1),
        *(
            pytest.param(loss, k, marks=pytest.mark.slow)
            for loss, starts in (("mse", (1, 2, 3)), ("bce", (0, 2, 3)))
            for k in starts
        ),
    ],
)
def test_algorithms_that_compare_classes_refuse_a_single_output_and_all_others_train_it(
    loss, start
):
    data = federation(REGRESSION if loss == "mse" else "classification")
    algorithms = sorted(registry().items())[start::4]
    of_images = {name for name, _ in algorithms if _refused(name)}
    for name, algorithm in algorithms:
        changes = {"algorithm": name, "loss": loss, "rounds": 1}
        if algorithm.needs_logits:
            with refuses(rf"{name}\b.*output"):
                played(data, **changes)
        elif name not in of_images:
            rows = fl.run(data=data, **changes).engine.listener(Recorder).rows
            assert all(r["value"] is not None for r in rows if r["metric"] == "loss"), (
                name
            )


def test_balanced_weights_are_of_all_clients_training_samples():
    data = federation("classification")
    counts = data.class_counts().sum()
    for loss in ("cross_entropy", "bce", "focal"):
        criterion = runner.assemble(
            RunConfig(loss=loss, class_weights="balanced"), data=data
        ).criterion
        assert criterion.weights == pytest.approx(
            (counts.sum() / (2 * counts)).tolist()
        )
