"""The result of a run: its scores, its plan, its models and its picture, also while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fl_core import rows, tree
from fl_core.display import MANY, Displayed, Summary, in_order, printable
from fl_core.errors import ByName, UsageError, listing, plural
from fl_core.models.adapter import original
from fl_core.progress import Cell
from fl_core.records.store import Run
from fl_core.rounds.recorder import LoggedRun, Logger, Recorder
from fl_core.rounds.steering import EarlyStopping, rule_of
from fl_core.rows import OF_CLASS, SCORES, Row, main_score
from fl_core.run import restore

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import nn

    from fl_core.plan import LayerPlan
    from fl_core.rounds.engine import Engine


@dataclass(frozen=True, repr=False)
class RunResult(Displayed):
    """The result of :func:`fl.run <fedlayers.runs.run>`.

    >>> import fedlayers as fl
    >>> result = fl.run(dataset="heart", algorithm="fedper", rounds=2, progress=False)
    >>> result.plan
    LayerPlan([fc1] [fc2] [fc3] fc4; [] = shared, by all_but_last)
    >>> result.scores.loc["personal"].index.tolist()
    ['cleveland', 'hungarian', 'switzerland', 'va']
    >>> sorted(result.models)
    ['cleveland', 'hungarian', 'switzerland', 'va']

    Attributes:
        engine: the engine with the state of the last round.
        path: the run directory; None if nothing was kept on disk.
        model, data: the model and data from Python, as they were given; None if the configuration names them.
    """

    engine: Engine
    path: Path | None = None
    model: Any = None
    data: Any = None

    def __fspath__(self) -> str:
        """Return the run directory, for functions that take one.

        Raises:
            UsageError: nothing was kept on disk.
        """
        if self.path is None:
            raise UsageError(
                "the result must have a run directory; got none. Run it with out=."
            )
        return str(self.path)

    @property
    def done(self) -> int:
        """Return the number of rounds that were trained."""
        return self.engine.done

    @property
    def plan(self) -> LayerPlan | None:
        """Return the plan in force: which layers are shared. None if the algorithm has no plan."""
        return self.engine.algorithm.plan

    def to_frame(self) -> pd.DataFrame:
        """Return all rows of the run as a tidy table."""
        if self.path is None:
            return self.engine.listener(Recorder).frame()
        return Run(self.path).rows()[1]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Return the scores on test samples at the end, a line per model and client, a column per metric.

        Under a stopping rule each model is scored at its best round, as
        :func:`final_rows` does. A score that no client has is left out, and so is a
        client without any score.
        """
        return self._final.pivot_table(
            index=["model", "client"], columns="metric", values="value", sort=False
        )

    @cached_property
    def _final(self) -> pd.DataFrame:
        rule = rule_of(self.engine)
        last_rows = final_rows(
            self.to_frame(), self.done, {} if rule is None else rule.best
        )
        return last_rows[last_rows["metric"].isin(list(SCORES))]

    @cached_property
    def models(self) -> dict[str, nn.Module]:
        """Return the module with which each client predicts at the end: its personal one, or the global one.

        Under a stopping rule it is the one of its best round, as for :attr:`scores`. Its ``label_names``
        are the names of its classes.

        Raises:
            UsageError: a client holds a part of a model.
        """
        trees_by_client, best = {}, self._best()
        for number, name in enumerate(self.engine.names):
            if best is None:
                trees = self.engine.models(number)
            else:
                trees = {"personal": best[number]}
            trees_by_client[name] = trees.get(rows.used_model(trees), {})
        return self._modules(trees_by_client)

    @cached_property
    def local_models(self) -> dict[str, nn.Module]:
        """Return each client's module after its local training in the last round, before aggregation.

        Under a stopping rule it is the one of the best round. Diagnoses measure these
        modules. Clients that did not train in that round are missing. A run keeps the
        modules of at most :data:`~fl_core.rounds.engine.LOCAL_MODELS` clients. The dict
        is empty if it kept none in memory.

        Raises:
            UsageError: a client holds a part of a model, or the run directory has no
                such models.
        """
        if self.path is not None:
            return restore.load_models(self.path, **self.own)[0]
        stopping = [
            listener
            for listener in self.engine.listeners
            if isinstance(listener, EarlyStopping)
        ]
        if stopping:
            return self._modules(stopping[0].local)
        return self._modules(self.engine.clients.kept.get("local", {}))

    def _modules(self, trees: Mapping[str, tree.Tree]) -> dict[str, nn.Module]:
        """Return copies of the network with each client's tensors, by client.

        Raises:
            UsageError: a client has only a part of the model.
        """
        client_runner = self.engine.clients.client_runner
        module = client_runner.workspace.model
        modules = ByName("client")
        for name, client_tree in trees.items():
            if client_tree.keys() < tree.named_tensors(module).keys():
                raise UsageError(
                    f"client {name!r} has only a part of the model. Choose a client with the whole model."
                )
            model = tree.copied(module).cpu()
            tree.load(model, client_tree)
            modules[name] = restore.with_labels(
                original(model.eval()),
                self.engine.data.classes,
                client_runner.criterion,
            )
        return modules

    def _best(self) -> Sequence[tree.Tree] | None:
        """Return each client's main model of the best round, in the clients' order.

        The result is None without a stopping rule, without a best round yet, or if the
        best models were not kept.
        """
        rule = rule_of(self.engine)
        if rule is None or rule.main not in rule.best:
            return None
        if self.path is None:
            best_models = self.engine.listener(EarlyStopping).best
            if best_models is None:
                return None
            return best_models[1]
        checkpoint = Run(self.path).checkpoint(rule.best[rule.main])
        models = restore.trees_of(checkpoint, self.engine.algorithm)[rule.main]
        return [models[name] for name in self.engine.names]

    def plot(self, metric: str = "", ax: Axes | None = None) -> Axes:
        """Draw a score over the rounds, the mean over clients (:func:`diagnostics.plots.runs.learning`).

        Args:
            metric: name of the score. If it is empty, the task's main score is drawn,
                such as macro-F1 for classes and R2 for numbers.
            ax: the axes. None makes a new figure.

        Returns:
            The axes with the curve.

        Raises:
            UsageError: the rows have no such score.
        """
        from diagnostics import plots

        return plots.learning(
            self.to_frame(), metric or main_score(self.scores.columns), ax=ax
        )

    @property
    def own(self) -> dict[str, Any]:
        """Return the data and the model from Python that the run directory does not hold, by argument name.

        The dict is empty for a run without a directory, and if the configuration names
        both.
        """
        names = () if self.path is None else Run(self.path).config["own"]
        return {name: getattr(self, name) for name in names}

    def layer_map(self, width: float = 16.0, **map_arguments: Any) -> Figure:
        """Measure the layers after the stored rounds, and draw them (:func:`diagnostics.plots.layer_map`).

        Args:
            width: width of the picture in cm.
            map_arguments: arguments of :func:`fl.through_time <diagnostics.through_time.through_time>`.

        Raises:
            UsageError: the run was given no directory, so its rounds are not stored.
        """
        from diagnostics.through_time import through_time

        return through_time(self, **map_arguments).layer_map(width)

    def summary(self) -> Summary:
        """Return a table of scores on test samples, with the plan if there is one."""
        layers = None if self.plan is None else self.plan.by_layer()
        return Summary.of_frame(repr(self), self.scores, layers)

    def __repr__(self) -> str:
        engine = self.engine
        clients = len(engine.names)
        clients_text = ""
        if clients <= MANY:
            names = ", ".join(engine.names)
            clients_text = f": {names}"
        lines = [
            f"{plural(self.done, 'round')} of {engine.algorithm.name} on {engine.data.name}, "
            f"{plural(clients, 'client')}{clients_text}"
        ]
        if self.plan is not None:
            lines.append(repr(self.plan))
        if not self.scores.empty:
            main_metric = main_score(self.scores.columns)
            score_rows = self._final[self._final["metric"] == main_metric]
            lacks_score = rows.without_score(score_rows)
            means = []
            for model, model_rows in score_rows.groupby("model", sort=False):
                mean = rows.client_mean(model_rows, lacks_score)
                means.append(f"{model} {mean:.3f}")
            means_text = ", ".join(means)
            lines.append(
                f"{main_metric} on test samples, mean over clients: {means_text}"
            )
            lines += rows.left_out(score_rows[lacks_score])
        return "\n".join([*lines, *([] if self.path is None else [str(self.path)])])


def final_rows(
    frame: pd.DataFrame, round: int, best: Mapping[str, int] | None = None
) -> pd.DataFrame:
    """Return the rows of a run on test samples after a round.

    Args:
        frame: all rows of the run.
        round: the number of completed rounds.
        best: the best round of each model under a stopping rule, in place of ``round``.
            A model that it lacks has that of the model that clients use, or ``round``
            if that one has none either. None or an empty one leaves ``round`` in force.
    """
    test_rows = frame[frame["split"] == "test"]
    best = best or {}
    models = [*test_rows["model"].unique()]
    common_round = best.get(rows.used_model(models), round)
    round_of_model = {model: best.get(model, common_round) for model in models}
    return test_rows[test_rows["round"] == test_rows["model"].map(round_of_model)]


def scores_text(
    frame: pd.DataFrame, round: int, best: Mapping[str, int] | None = None
) -> str:
    """Return the test scores after a round as text: for each model a line per client, and their weighted mean.

    Beyond eight clients it shows the lowest, the median and the highest of each score. The mean is weighted by training
    samples.

    Args:
        frame: the rows of a run.
        round: the number of completed rounds.
        best: as for :func:`final_rows`.
    """
    last_rows = final_rows(frame, round, best)
    title = f"test split, round {round}"
    if best:
        rounds = listing(f"{model} {best_round}" for model, best_round in best.items())
        title = f"test split, best round on validation ({rounds})"
        round_of_model = dict(zip(last_rows["model"], last_rows["round"], strict=True))
        for model, used_round in round_of_model.items():
            if model not in best:
                title += f"; {model} has none: round {used_round}"
    if last_rows.empty:
        return f"{title}: no scores"
    lacks_score, count = (
        rows.without_score(last_rows),
        last_rows["client"].nunique(),
    )
    is_condensed = count > MANY
    parts = {}
    for model, model_rows in last_rows.groupby("model"):
        table = model_rows.pivot_table(index="client", columns="metric", values="value")
        table = table.reindex(in_order(table.index))
        by_metric = model_rows.groupby("metric")
        mean = pd.Series(
            {name: rows.client_mean(scores, lacks_score) for name, scores in by_metric}
        )
        if is_condensed:
            table = table.quantile([0.0, 0.5, 1.0])
            table.index = ["lowest", "median", "highest"]
        if len(table) > 1:
            table.loc[f"all {model_rows['client'].nunique()}"] = mean
        parts[model] = table
    shown_table = pd.concat(parts, names=["model", "client"]).rename(index=printable)
    positive = rows.positive_in(last_rows)
    class_scores = [name for name in OF_CLASS if name in shown_table]
    if positive and class_scores:
        positive_name = printable(positive)
        title += f"; {listing(class_scores)} of class {positive_name!r}"
    if count > 1:
        title += "; all: their mean, weighted by training samples"
    title = "\n".join(
        [
            title,
            *rows.left_out(last_rows[lacks_score & last_rows["metric"].isin(SCORES)]),
        ]
    )
    return f"{title}\n{shown_table.round(4).to_string()}"


# --- the picture of runs that train, drawn again in a notebook's cell --------------------------------------------


class Live:
    """One picture of several runs on validation samples, or on test samples if there are no others.

    As a context manager, it draws a last time at the end of the block.
    """

    def __init__(self) -> None:
        self.cell = Cell()
        self.frames: dict[str, pd.DataFrame] = {}

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *error: object) -> None:
        self.draw()

    def add(self, run: str, frame: pd.DataFrame) -> None:
        """Replace the rows of a run, and draw all runs if the last picture is a second old.

        Args:
            run: a name that identifies the run, such as its path.
            frame: all rows of the run so far.
        """
        self.frames[run] = frame
        if self.cell.due:
            self.draw()

    def draw(self) -> None:
        """Draw the main score over the rounds, a line for each algorithm in the rows.

        Nothing is drawn before the first rows.
        """
        from diagnostics import plots

        if not self.frames:
            return
        frame = pd.concat(self.frames.values(), ignore_index=True)
        main_metric = main_score(frame["metric"].unique())
        split = "test"
        if (frame["split"] == "validation").any():
            split = "validation"
        self.cell.show_figure(plots.learning(frame, main_metric, split=split))


@dataclass
class LiveRun(Logger):
    """Adds one run to a picture while it trains.

    Args:
        live: the picture. The code that made it draws it a last time.
        label: the run's name there; by default that of its algorithm.
    """

    live: Live
    label: str = ""

    def begin(self, run: LoggedRun) -> None:
        """Add the rows that a resumed run has already."""
        self.run = str(run.path)
        self.rows: list[Row] = []
        if run.path is not None and run.done:
            self.rows += rows.records(Run(run.path).rows()[1])

    def log(self, new: Sequence[Row]) -> None:
        """Add the rows of a round to the picture, and draw it if it is a second old."""
        self.rows += new
        if self.live.cell.due:
            self.close(finished=False)

    def close(self, finished: bool) -> None:
        """Give all rows so far to the picture, which draws them if it is a second old.

        Without rows it does nothing, and ``finished`` makes no difference.
        """
        if self.rows:
            frame = rows.frame(self.rows)
            label = self.label or frame["algorithm"]
            self.live.add(self.run, frame.assign(algorithm=label))
