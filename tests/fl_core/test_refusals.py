"""What a run cannot do is refused in one line that names the key, and nothing is written."""

import copy

import pytest
from torch import nn

from diagnostics.measure import instruments
from fl_core.config import RunConfig
from fl_core.run import runner
from tests.conftest import BLOCKS, CONFIG, TOY, kind_for, network, refuses

OF_OPTIONS = [
    ("fedavg", {"mu": 1}, "fedavg.*'mu'"),
    ("fedprox", {"mu": None}, "mu must be a number.*None"),
    ("fedrep", {"head_epochs": "1.5"}, "head_epochs must be a whole"),
    ("heurpfedla", {"k": 4}, r"\bk\b.*3.*4"),
    ("fedra", {"depths": (4,)}, "depths.*3.*4"),
    ("fedra", {"depths": (1,), "random_depths": True}, "random_depths"),
    ("inclusivefl", {"depths": (1, 1, 1, 1, 1)}, "depths.*4 clients.*5"),
    ("allsmall", {"depth": 4}, "depth.*3.*4"),
    ("depthfl", {"exits": (3,)}, "exits.*2.*3"),
    ("alllarge", {"lora_targets": "attn.prj"}, "'attn.prj'.*'attn.proj'"),
    ("alllarge", {"lora_targets": ()}, "lora_targets.*layer"),
    ("fedpft", {"heads": 5}, "heads.*6.*5"),
    ("fedpft", {"feature_epochs": 3}, "feature_epochs.*1.*3"),
    ("pfedpt", {"pad": 3}, "6 x 6.*pad=3"),
    ("vanilla", {"unfreeze": "0"}, "unfreeze.*fc1, fc2.*1"),
    ("vanilla", {"unfreeze": "0,x"}, "unfreeze.*'x'"),
    ("vanilla", {"unfreeze": "0,-2"}, "unfreeze.*-2"),
    ("vanilla", {"base": "fedbaby"}, "'fedbaby'.*'fedbabu'"),
    ("vanilla", {"base": "anti"}, "base.*anti"),
    ("vanilla", {"base": "fedprox", "nu": 1}, "vanilla.*'nu'.*mu"),
    ("vanilla", {"base": "playerfl"}, "base.*playerfl.*plan=auto"),
]
OF_KEYS = {
    "lora_targets": {"adapt": "lora", "algorithm": "fedra", "model": "vit"},
    "method.*dora": {"adapt": "dora:r=2"},
    "key.*rank": {"adapt": "lora:rank=2"},
    "once": {"adapt": "lora:r=2,r=3"},
    "number": {"adapt": "lora:r=two"},
    "at most 36": {"adapt": "lora:r=37"},
    "alpha": {"adapt": "lora:alpha=nan"},
    "dropout": {"adapt": "lora:dropout=1"},
    "attn": {"adapt": "lora:targets=attn"},
    "fc3": {"adapt": "lora:targets=fc3"},
    "batchnorm": {"adapt": "lora", "batchnorm": "local"},
    "batch_size.*20": {"adapt": "lora", "algorithm": "playerfl", "batch_size": 20},
    "epochs.*1": {"algorithm": "playerfl", "epochs": 0},
    "'gpu'": {"device": "gpu"},
}
OF_DATA = {
    r"heart_mlp.*\(1, 8, 8\)": {"dataset": "digits", "model": "heart_mlp"},
    "alpha.*5.*2": {"loss": "focal", "loss_options": {"alpha": [1.0, 2.0]}},
    "clients": {"clients": 3},
    "mu must be a number": {"algorithm": "fedprox", "options": {"mu": 0.1j}},
    "fedpft.*images.*contrast=false": {"algorithm": "fedpft", "batch_size": 16},
    "pfedpt.*images": {"algorithm": "pfedpt"},
    "momentum.*'adamw'": {"optimizer": "adamw", "momentum": 0.9},
    "amsgrad.*'sgd'": {"optimizer": "sgd", "amsgrad": True},
}


def refused(config, message, out, **given):
    with refuses(message) as caught:
        runner.run(config, out, instruments=instruments, **given)
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(("name", "options", "message"), OF_OPTIONS)
def test_options(name, options, message, tmp_path):
    config = CONFIG.with_keys(algorithm=name, options=options)
    model = network(kind_for(name, "plain"))
    refused(config, message, tmp_path / "run", data=TOY, model=model)


@pytest.mark.parametrize("message", OF_KEYS)
def test_keys(message, tmp_path):
    config = CONFIG.with_keys(**OF_KEYS[message])
    objects = {"data": TOY, "model": network("plain")}
    if config.model.model:
        config = config.with_keys(model_options=BLOCKS["vit"])
        del objects["model"]
    refused(config, message, tmp_path / "run", **objects)


@pytest.mark.parametrize("message", OF_DATA)
def test_data(message, tmp_path):
    refused(RunConfig(**OF_DATA[message]), message, tmp_path / "run")


def test_models(tmp_path):
    lambdas = network("plain")
    lambdas.hidden = lambda: None
    shallow = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    module = network("plain")
    module.draws = (k for k in ())
    for keys, model, message in (
        ({}, nn.Sequential(nn.Flatten(), nn.Linear(35, 3)), r"\(1, 6, 6\)"),
        ({}, copy.deepcopy(shallow).double(), r"\.float\(\).*float64"),
        ({}, module, r"copy\.deepcopy"),
        ({}, nn.Sequential(nn.Flatten(), nn.Linear(36, 10)), r"\(2, 3\).*\(2, 10"),
        ({"workers": 2, "stack": "off"}, lambdas, "lambda.*without workers"),
        ({"algorithm": "fedra"}, network("plain"), "Sequential.*timm:vit"),
        ({"algorithm": "playerfl"}, shallow, "playerfl.*2 layers.*1"),
        ({"algorithm": "fedrod"}, nn.Sequential(shallow, nn.Softplus()), "linear"),
    ):
        config = CONFIG.with_keys(**keys)
        refused(config, message, tmp_path / "run", data=TOY, model=model)
