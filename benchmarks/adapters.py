"""Public packages as benchmark sides: each runs a job's rounds through its own interface."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import multiprocessing
import os
import pickle
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import training
from benchmarks.sides import PATIENCE, Job, Plain, Side
from fl_core.data import FederatedData, Split
from fl_core.errors import RunError, UsageError

VARIABLE = "PFLLIB"
"""The environment variable that names a checkout of PFLlib, which is on no package index."""
UNUSED = (
    "auto_break", "batch_num_per_client", "client_drop_rate", "dlg_eval", "dlg_gap", "few_shot",
    "fine_tuning_epoch_new", "goal", "learning_rate_decay", "learning_rate_decay_gamma", "num_new_clients",
    "random_join_ratio", "save_folder_name", "send_slow_rate", "time_select", "top_cnt", "train_slow_rate",
)  # fmt: skip
"""PFLlib's arguments that no benchmark uses."""


def checkout() -> Path:
    """Return the folder of PFLlib's modules, from the environment.

    Raises:
        UsageError: no checkout is named, or the path has none.
    """
    named_path = os.environ.get(VARIABLE, "")
    folder = Path(named_path).resolve() / "system"
    if not (folder / "flcore" / "servers" / "serveravg.py").is_file():
        raise UsageError(
            f"{VARIABLE} must name a checkout of PFLlib; got {named_path!r}. Clone github.com/TsingZ0/PFLlib."
        )
    return folder


def arguments(**used: Any) -> SimpleNamespace:
    """Return PFLlib's parsed arguments, with everything else switched off."""
    settings = {"device": "cpu", "eval_gap": 1, "time_threthold": float("inf")}
    return SimpleNamespace(**dict.fromkeys(UNUSED, 0), **{**settings, **used})


@contextmanager
def pfllib(job: Job) -> Iterator[Side]:
    """Yield PFLlib's FedAvg server and clients on its own data files.

    A round is PFLlib's ``train`` without the evaluation.
    """
    data, device = job.data(), str(job.config.execution.device)
    with tempfile.TemporaryDirectory() as folder:
        _pfllib_files(Path(folder) / "dataset" / "random", data)
        system_folder = (
            Path(folder) / "system"
        )  # where its programs run: they look for ../dataset
        system_folder.mkdir()
        sys.path.insert(0, str(checkout()))
        with contextlib.chdir(system_folder):
            with contextlib.redirect_stdout(io.StringIO()):
                server = importlib.import_module("flcore.servers.serveravg").FedAvg(
                    arguments(
                        algorithm="FedAvg",
                        batch_size=job.batch,
                        dataset="random",
                        device=device,
                        global_rounds=10**6,
                        join_ratio=job.taken / job.clients,
                        local_epochs=1,
                        local_learning_rate=job.lr,
                        model=job.model(data).to(device),
                        num_classes=job.classes,
                        num_clients=job.clients,
                    ),
                    0,
                )
            if (
                job.config.training.optimizer != "sgd"
            ):  # which is the one that its clients make
                for client in server.clients:
                    client.optimizer = job.optimizer(client.model.parameters())
            steps = 0

            def count(*_: Any) -> None:
                nonlocal steps
                steps += 1

            def run() -> int:
                steps_before = steps
                server.selected_clients = server.select_clients()
                server.send_models()
                for client in server.selected_clients:
                    client.train()
                server.receive_models()
                server.aggregate_parameters()
                return steps - steps_before

            register_optimizer_step_post_hook(count)
            yield Plain(run, lambda: list(server.global_model.parameters()))


def _pfllib_files(folder: Path, data: FederatedData) -> None:
    """Write the clients' samples as PFLlib's dataset scripts do: a compressed archive per client and split."""
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for k, client in enumerate(data.clients):
            split_data = client.split(split)
            content = np.array(
                {"x": split_data.x.numpy(), "y": split_data.y.numpy()}, dtype=object
            )
            np.savez_compressed(folder / split / f"{k}.npz", data=content)


@contextmanager
def flower(job: Job) -> Iterator[Side]:
    """Yield Flower's simulation of FedAvg, whose clients train in Ray actors as the bare loop does.

    The simulation runs in a thread and waits before each round until it is asked for. An actor makes the data once.
    """
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {
        "RAY_worker_niceness": "0"
    }  # not below every other process of the machine, as Ray would have it
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    model = job.model(job.data())
    peaks: dict[int, int] = {}  # of each actor in the last round
    requests: queue.Queue[bool] = queue.Queue()
    answers: queue.Queue[int | list[str]] = queue.Queue()  # steps, or what went wrong

    class Over(Exception):
        """Raised to tell Flower that no further round is wanted."""

    class OnDemand(FedAvg):
        def configure_train(self, *args: Any, **options: Any) -> Any:
            if not requests.get():
                raise Over
            return super().configure_train(*args, **options)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            arrays, metrics = super().aggregate_train(server_round, replies)
            failures = [reply.error.reason for reply in replies if reply.has_error()]
            if arrays is not None and not failures:
                model.load_state_dict(arrays.to_torch_state_dict())
            records = [reply.content["metrics"] for reply in replies if not failures]
            peaks.clear()
            for record in records:
                actor = int(record["actor"])
                peaks[actor] = max(peaks.get(actor, 0), int(record["peak"]))
            answers.put(failures or sum(int(record["steps"]) for record in records))
            return arrays, metrics

    server, clients = ServerApp(), ClientApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        share = job.taken / job.clients
        strategy = OnDemand(
            share, 0.0, min_train_nodes=job.taken, min_available_nodes=job.clients
        )
        with contextlib.suppress(Over):
            strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=10**6)

    clients.train()(functools.partial(_flower_client, pickle.dumps(job)))
    actors = job.config.execution.workers or training.WORKERS
    gpus = int(job.config.execution.device != "cpu")
    resources = {
        # a cluster of its own, although another one may run here
        "init_args": {"address": "local", "num_cpus": actors, "num_gpus": gpus},
        "client_resources": {"num_cpus": 1, "num_gpus": gpus / actors},
    }
    arguments = (server, clients, job.clients, "ray", resources)
    simulation = threading.Thread(target=run_simulation, args=arguments, daemon=True)
    simulation.start()

    def run() -> int:
        requests.put(True)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and simulation.is_alive():
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=5)
                if isinstance(answer, list):
                    raise RunError(answer[0])
                return answer
        raise RunError(
            f"the simulation must answer within {PATIENCE:g} s; got nothing. Run it on an idle machine."
        )

    try:
        yield Plain(run, lambda: list(model.parameters()), lambda: sum(peaks.values()))
    finally:
        requests.put(False)
        simulation.join()


@functools.cache
def _flower_job(pickled: bytes) -> tuple[Job, list[Split], nn.Module]:
    job = pickle.loads(pickled)
    data, device = job.data(), job.config.execution.device
    torch.set_num_threads(1)
    trains = [
        Split(client.train.x.to(device), client.train.y.to(device))
        for client in data.clients
    ]
    return job, trains, job.model(data).to(device)


def _flower_client(pickled: bytes, message: Any, context: Any) -> Any:
    """Train one client within a Ray actor, and reply with its weights and metrics."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    job, trains, model = _flower_job(pickled)
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    split = trains[int(context.node_config["partition-id"])]
    steps = training.plain_epoch(model, split, job.batch, job.optimizer)
    counts = {"num-examples": len(split), "steps": steps, "actor": os.getpid()}
    metrics = MetricRecord({**counts, "peak": torch.cuda.max_memory_allocated()})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


@contextmanager
def pfl(job: Job) -> Iterator[Side]:
    """Yield pfl-research's federated averaging, with as many processes as this package has workers."""
    ranks = job.config.execution.workers or 1
    with socket.socket() as port_socket:
        port_socket.bind(("127.0.0.1", 0))
        port = port_socket.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(1, ranks)]
    helpers = [
        context.Process(target=_pfl_helper, args=(child_end, job, rank, ranks, port))
        for rank, (_, child_end) in enumerate(pipes, start=1)
    ]
    try:
        for helper in helpers:
            helper.start()
        run_rank, model = _pfl_rank(job, 0, ranks, port)

        def run() -> int:
            for parent_end, _ in pipes:
                parent_end.send(True)
            return run_rank() + sum(parent_end.recv() for parent_end, _ in pipes)

        yield Plain(run, lambda: list(model.parameters()))
    finally:
        for parent_end, _ in pipes:
            with contextlib.suppress(OSError):
                parent_end.send(False)
        for helper in helpers:
            helper.join(10)
            helper.kill()


def _pfl_helper(link: Connection, job: Job, *place: int) -> None:
    """Take part in each requested round, and reply with the number of steps of this process."""
    run, _ = _pfl_rank(job, *place)
    while link.recv():
        link.send(run())


def _pfl_rank(
    job: Job, rank: int, ranks: int, port: int
) -> tuple[Callable[[], int], nn.Module]:
    """Return a function that does one process's part of a round, and the model, which is the same in all processes."""
    if (
        ranks > 1
    ):  # as torch's own launcher sets them, from which the package learns of the others
        os.environ |= {
            "TORCHELASTIC_RUN_ID": "peers",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
        }
    torch.set_num_threads(1)
    multiprocessing.current_process().name = (
        "MainProcess"  # it takes any other for a process that only loads data
    )
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    data = job.data()
    net: Any = job.model(data)
    net.loss = lambda x, y: nn.functional.cross_entropy(net(x), y)
    net.metrics = dict
    averaging_optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = PyTorchModel(
        net, lambda parameters, lr: job.optimizer(parameters), averaging_optimizer
    )
    np.random.seed(0)  # by which all processes draw the same clients
    users = [
        Dataset((client.train.x, client.train.y), user_id=str(k))
        for k, client in enumerate(data.clients)
    ]
    user_indices = range(len(users))
    federated_data = FederatedDataset(
        users.__getitem__,
        MinimizeReuseUserSampler(user_indices),
        dict.fromkeys(user_indices, job.samples),
    )
    algorithm, backend = (
        FederatedAveraging(),
        SimulatedBackend(federated_data, federated_data),
    )
    settings = NNAlgorithmParams(10**6, 10**6, job.taken, None)
    training_settings = NNTrainHyperParams(job.batch, 1, job.lr)
    steps, done = 0, 0

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += optimizer is not averaging_optimizer

    register_optimizer_step_post_hook(count)

    def run() -> int:
        nonlocal done
        steps_before, done = steps, done + 1  # round 0 would be evaluated
        contexts, _, _ = algorithm.get_next_central_contexts(
            model, done, settings, training_settings
        )
        for context in contexts or ():
            client_statistics, metrics = backend.gather_results(
                model, algorithm, central_context=context
            )
            algorithm.process_aggregated_statistics(
                context, metrics, model, client_statistics
            )
        return steps - steps_before

    return run, net


@contextmanager
def fedjax(job: Job) -> Iterator[Side]:
    """Yield fedjax's federated averaging with its default backend, which compiles a client's step."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if not hasattr(
        jax, "tree_map"
    ):  # the name that fedjax 0.0.17 knows; newer JAX has it under tree_util only
        jax.tree_map = jax.tree_util.tree_map
    import fedjax as package
    import optax

    data = job.data()
    model = job.model(data)
    params, forward = _to_jax(model)
    steps = 0

    class Counted(package.ClientDataset):
        def shuffle_repeat_batch(self, *args: Any, **options: Any) -> Any:
            nonlocal steps
            for batch in super().shuffle_repeat_batch(*args, **options):
                steps += 1
                yield batch

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        del rng
        return optax.softmax_cross_entropy_with_integer_labels(
            forward(params, batch["x"]), batch["y"]
        ).mean()

    optimizer_by_name = {
        "sgd": lambda: package.optimizers.sgd(job.lr),
        "adamw": lambda: package.optimizers.create_optimizer_from_optax(
            optax.adamw(job.lr, weight_decay=job.decay)
        ),
    }
    algorithm = package.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        optimizer_by_name[str(job.config.training.optimizer)](),
        package.optimizers.sgd(1.0),
        package.ShuffleRepeatBatchHParams(batch_size=job.batch, num_epochs=1),
    )
    clients = []
    for client in data.clients:
        x = client.train.x
        x = x.permute(0, 2, 3, 1) if x.ndim == 4 else x
        clients.append(
            Counted({"x": x.contiguous().numpy(), "y": client.train.y.int().numpy()})
        )
    state, done = algorithm.init(params), 0

    def run() -> int:
        nonlocal state, done
        steps_before = steps
        chosen_clients = np.random.default_rng(done).choice(
            len(clients), job.taken, replace=False
        )
        random_keys = jax.random.split(jax.random.PRNGKey(done), job.taken)
        state, _ = algorithm.apply(
            state,
            [
                (k, clients[k], random_key)
                for k, random_key in zip(chosen_clients, random_keys, strict=True)
            ],
        )
        jax.block_until_ready(state.params)
        done += 1
        return steps - steps_before

    yield Plain(run, lambda: _from_jax(state.params))


def _to_jax(model: nn.Module) -> tuple[list[Any], Callable[[list[Any], Any], Any]]:
    """Return a chain of modules as JAX code: parameters and forward pass. Images are in JAX's order [n, H, W, C]."""
    import jax
    from jax import lax

    leaf_modules = [module for module in model.modules() if not list(module.children())]
    for module in leaf_modules:
        if not isinstance(
            module, (nn.Conv2d, nn.Linear, nn.ReLU, nn.MaxPool2d, nn.Flatten)
        ):
            raise UsageError(
                f"modules must be Conv2d, Linear, ReLU, MaxPool2d or Flatten for JAX; got {module}."
            )
    params = []
    for module in leaf_modules:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            weight = module.weight.T
            if isinstance(module, nn.Conv2d):
                weight = module.weight.permute(2, 3, 1, 0)
            params.append(
                {
                    "w": jax.numpy.array(weight.detach()),
                    "b": jax.numpy.array(module.get_parameter("bias").detach()),
                }
            )

    def forward(params: list[Any], x: Any) -> Any:
        layers = iter(params)
        for module in leaf_modules:
            if isinstance(module, nn.Conv2d):
                layer = next(layers)
                dimension_names = ("NHWC", "HWIO", "NHWC")
                x = (
                    lax.conv_general_dilated(
                        x,
                        layer["w"],
                        module.stride,
                        "VALID",
                        dimension_numbers=dimension_names,
                    )
                    + layer["b"]
                )
            elif isinstance(module, nn.Linear):
                layer = next(layers)
                x = x @ layer["w"] + layer["b"]
            elif isinstance(module, nn.MaxPool2d):
                window = (1, module.kernel_size, module.kernel_size, 1)
                x = lax.reduce_window(
                    x,
                    -jax.numpy.inf,
                    lax.max,
                    window,
                    (1, module.stride, module.stride, 1),
                    "VALID",
                )
            elif isinstance(
                module, nn.Flatten
            ):  # in PyTorch's order, so that the weights behind it are the same
                x = (x.transpose(0, 3, 1, 2) if x.ndim == 4 else x).reshape(len(x), -1)
            else:
                x = jax.nn.relu(x)
        return x

    return params, forward


def _from_jax(params: list[Any]) -> list[Tensor]:
    """Return the parameters of :func:`_to_jax` in the layout of the PyTorch model."""
    layers = []
    for layer in params:
        weight = torch.from_numpy(np.array(layer["w"]))
        layers += [
            weight.permute(3, 2, 0, 1) if weight.ndim == 4 else weight.T,
            torch.from_numpy(np.array(layer["b"])),
        ]
    return layers
