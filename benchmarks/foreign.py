"""Checkpoints as other projects store them, and networks of timm: right, refused, silent, or a raw error.

``python -m benchmarks.foreign`` builds the families of foreign.json offline and loads each as a user does. Then it
measures networks of timm by the default metrics. It adds to results/foreign.csv what is not there.
"""

from __future__ import annotations

import copy
import inspect
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import fedlayers as fl
from benchmarks.pairs import RESULTS
from diagnostics.metrics.base import DEFAULT
from fl_core.models import build
from fl_core.tree import first_tensor

TABLE = RESULTS / "foreign.csv"
DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Each family's network, the function below that stores it, and options of that function."""
FAMILIES = DATA["families"]


def network(kind: str) -> Any:
    """Return a small fresh network of a class of transformers, or of timm. Half precision loses nothing of it."""
    import timm
    import transformers

    torch.manual_seed(0)
    network_class, config_sizes = getattr(transformers, kind, None), DATA["sizes"]
    if kind == "CLIPModel":
        config_sizes = {"text_config": config_sizes, "vision_config": config_sizes}
    if network_class is None:
        net = timm.create_model(kind, num_classes=3, channels=(8,) * 4)
    else:
        net = network_class(network_class.config_class(**config_sizes))
    return net.half().float().eval()


def fresh(net: Any) -> Any:
    """Return a copy with other weights."""
    network_copy = copy.deepcopy(net)
    for tensor in network_copy.state_dict().values():
        tensor.add_(1)
    return network_copy


# --- ways to store a network: each returns what the user fills, and the right one ------


def in_folder(
    net: Any,
    path: Path,
    stored: str = "",
    into: str = "",
    to: str = "float",
    beside: str = "other",
    **how: Any,
) -> Any:
    """Store it, or only its body, as transformers does, next to another file."""
    getattr(getattr(net, stored, net), to)().save_pretrained(path, **how)
    torch.save({}, path / beside)
    return getattr(fresh(net.float()), into, fresh(net)), getattr(net, into, net)


def in_parts(net: Any, path: Path, new: str = "", old: str = "") -> Any:
    """Store it in a file of torch with an index, as transformers once did, under old names."""
    path.mkdir()
    state = {
        tensor_name.replace(new, old): tensor
        for tensor_name, tensor in net.state_dict().items()
    }
    torch.save(state, path / "part.bin")
    index = {"weight_map": dict.fromkeys(state, "part.bin")}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return fresh(net), net


def in_file(
    net: Any,
    path: Path,
    under: str = "",
    start: str = "",
    within: str = "",
    without: str = "-",
    to: str = "clone",
    other: str = "",
    more: Any = (),
    beside: str = "",
) -> Any:
    """Store it by torch.save, under a key and other names, and next to another state."""
    state = {
        start + tensor_name.replace("r1.0.", f"r1.0.{within}"): getattr(tensor, to)()
        for tensor_name, tensor in net.state_dict().items()
        if without not in tensor_name
    }
    other_state = {
        tensor_name: tensor + 1 for tensor_name, tensor in net.state_dict().items()
    }
    if other:
        state |= {
            other + tensor_name: tensor for tensor_name, tensor in other_state.items()
        }
    content = {under: state, **dict(more)} if under else state
    if beside:
        content[beside] = other_state
    torch.save(content, path)
    return fresh(net), net


def by_peft(
    net: Any, path: Path, kind: str = "Lora", wrapped: bool = False, **how: Any
) -> Any:
    """Store trained adapters of peft. The right network is that of its own loader."""
    import peft

    config = getattr(peft, f"{kind}Config")(**how)
    adapted_network = peft.get_peft_model(copy.deepcopy(net), config)
    for parameter in adapted_network.parameters():
        parameter.data += parameter.requires_grad * torch.randn_like(parameter) / 4
    adapted_network.save_pretrained(path)
    right_network = peft.PeftModel.from_pretrained(copy.deepcopy(net), path)
    return peft.get_peft_model(net, config) if wrapped else net, right_network


# --- what comes of them ----------------------------------------------------------------


def outcome_of(act: Callable[[], Any]) -> tuple[str, str]:
    """Return whether a call ends, is refused, or fails by a raw error, and the message."""
    try:
        act()
    except fl.UsageError as error:
        return "refused", str(error)
    except Exception as error:
        return "raw error", repr(error)
    return "right", ""


def load(family: str) -> tuple[str, str]:
    """Return whether a family's checkpoint loads as right, and what is said of it.

    A load is silent if the outputs differ from the right ones by more than 1e-5.
    """
    family_record = FAMILIES[family]
    options, net = (
        dict(family_record.get("options", {})),
        network(family_record["network"]),
    )
    token_ids, images = torch.randint(3, 60, (2, 5)), torch.randn(2, 3, 8, 8)
    examples = {
        "input_ids": token_ids,
        "decoder_input_ids": token_ids,
        "pixel_values": images,
    }
    stored_key, parameters = (
        options.pop("key", ""),
        inspect.signature(net.forward).parameters,
    )
    inputs = {
        input_name: examples.get(input_name, images)
        for input_name in parameters.keys() & {"x", *examples}
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stored"
        model, right_network = globals()[family_record["store"]](net, path, **options)
        with warnings.catch_warnings(record=True, action="always") as recorded_warnings:
            outcome, reason = outcome_of(
                lambda: fl.load_weights(path, into=model, key=stored_key)
            )
    with torch.no_grad():
        outputs: Any = [
            first_tensor(checked_model.eval()(**inputs))
            for checked_model in (model, right_network)
        ]
    if outcome == "right" and (outputs[0] - outputs[1]).abs().max() > 1e-5:
        outcome = "silent"
    messages = [
        str(warning.message)
        for warning in recorded_warnings
        if warning.category is UserWarning
    ]
    return outcome, "; ".join([reason, *messages]).strip("; ").replace(
        str(path), "PATH"
    )


def measure(network_name: str) -> tuple[str, str]:
    """Return whether a fresh network of timm passes through the default metrics, curvature for 20 seconds."""
    image_side = DATA["networks"][network_name]
    network = build(f"timm:{network_name}", (3, image_side, image_side), 3)
    data = dict.fromkeys(
        "ab", (torch.randn(2, 3, image_side, image_side), torch.arange(2))
    )
    return outcome_of(
        lambda: [
            fl.diagnose(network, data, metric_name, budget=20)
            for metric_name in DEFAULT
        ]
    )


def main() -> None:
    """Add what the table lacks, a row at a time."""
    table = pd.read_csv(TABLE, index_col="family")
    check_by_name = dict.fromkeys(FAMILIES, load) | dict.fromkeys(
        DATA["networks"], measure
    )
    for family, check in check_by_name.items():
        if family not in table.index:
            table.loc[family] = check(family)
            table.to_csv(TABLE)


if __name__ == "__main__":
    main()
