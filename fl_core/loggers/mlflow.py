"""Loggers for trackers of experiments: MLflow and TensorBoard."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from fl_core.errors import UsageError
from fl_core.loggers.base import LoggedRun, Logger, logger, scalars
from fl_core.rows import Row

EXPERIMENT = "fedlayers"
"""The experiment of all runs, unless the environment sets MLFLOW_EXPERIMENT_NAME."""
MOST = 1000  # metrics per request to MLflow
_STRANGE = re.compile(
    r"[^\w\-./ ]|(?<=/)[./]|^[./]|/$", re.ASCII
)  # not allowed by MLflow in a metric's name
_TAG = "fedlayers.run"


@logger
class MLflow(Logger):
    """Metrics of a run on the server, or in the folder, that MLFLOW_TRACKING_URI names.

    A resumed run continues in the same MLflow run. Repeated rounds are there twice, with equal values. MLflow's own
    usage reports are disabled unless the environment sets MLFLOW_DISABLE_TELEMETRY.
    """

    name = "mlflow"
    needs = ("mlflow",)

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        try:
            self.client = mlflow.MlflowClient()
            found = self.client.get_experiment_by_name(name)
            self.experiment = (
                self.client.create_experiment(name)
                if found is None
                else found.experiment_id
            )
        except Exception as error:  # its store or the network may raise anything
            reason = str(error).strip().partition("\n")[0]
            raise UsageError(
                f"MLflow cannot write to {mlflow.get_tracking_uri()}: {reason}. "
                "Set MLFLOW_TRACKING_URI to a server or, with MLFLOW_ALLOW_FILE_STORE=true, to a folder such as "
                "file:mlruns."
            ) from error

    def begin(self, run: LoggedRun) -> None:
        from mlflow.entities import Param

        found: Any = []
        if run.id:
            found = self.client.search_runs(
                [self.experiment], f"tags.`{_TAG}` = '{run.id}'", max_results=1
            )
        if found:
            self.run = found[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        name = None if run.path is None else run.path.name
        self.run = self.client.create_run(
            self.experiment, tags={_TAG: run.id}, run_name=name
        ).info.run_id
        given = {key: value for key, value in run.config.items() if value is not None}
        self.client.log_batch(
            self.run,
            params=[Param(key, str(value)[:6000]) for key, value in given.items()],
        )

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        found = [
            Metric(_STRANGE.sub("_", each.curve), each.value, now, each.round)
            for each in scalars(rows)
        ]
        for start in range(0, len(found), MOST):
            self.client.log_batch(self.run, metrics=found[start : start + MOST])

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if finished else "FAILED")


@logger
class TensorBoard(Logger):
    """Scalars for `tensorboard --logdir`, in the folder tensorboard of the run's directory.

    Without a directory they are in the default folder of PyTorch's SummaryWriter, below ``runs``. After a resume,
    points of repeated rounds are replaced.
    """

    name = "tensorboard"
    needs = ("tensorboard",)

    def begin(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = None if run.path is None else str(run.path / "tensorboard")
        self.writer = SummaryWriter(
            folder, purge_step=run.done + 1 if run.done else None
        )
        self.writer.add_text(
            "configuration", f"```\n{json.dumps(run.config, indent=1)}\n```", run.done
        )

    def log(self, rows: Sequence[Row]) -> None:
        for each in scalars(rows):
            self.writer.add_scalar(each.curve, each.value, each.round)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()
