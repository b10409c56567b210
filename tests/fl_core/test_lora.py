"""Low-rank adapters: what is frozen and sent, exports, and what is refused."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

import fedlayers as fl
from fl_core import models, tree
from fl_core.layers import sizes
from fl_core.models import lora
from fl_core.plan import LayerPlan
from fl_core.run.runner import assemble, run
from fl_core.training import evaluate
from tests.conftest import BLOCKS, CONFIG, TOY, every_other, network, refuses

pytestmark = pytest.mark.skipif(
    find_spec("peft") is None, reason="peft is not installed"
)
ADAPTED = CONFIG.with_keys(adapt="lora:r=2", stack="off")


def test_the_base_stays_with_its_statistics_and_is_counted_once(tmp_path):
    """It is not stored. So a model with another one is refused."""
    start, model = network("norm"), network("norm")
    result = fl.run(ADAPTED, tmp_path / "run", data=TOY, model=model)
    adapted = result.engine.clients.client_runner.workspace.model
    base = tree.frozen_base(adapted)
    layers = result.engine.algorithm.task_info.layers
    trained = [name for layer in layers for name in layer.tensors]
    assert sorted(trained) == sorted(tree.named_tensors(adapted))
    for name, tensor in base.items():
        assert torch.equal(start.state_dict()[name.replace(".base_layer", "")], tensor)
    rows = result.to_frame()
    assert [*rows[rows.metric == "bytes_base"].value] == [tree.n_bytes(base)]
    assert fl.diagnose(result, metrics="grad_norm").values("grad_norm").all(axis=None)
    nn.init.ones_(model.fc1.weight)
    with refuses("other weights"):
        fl.diagnose(result, metrics="grad_norm")


def test_adapters_of_a_fused_layer_count_in_evaluation():
    class Encoder(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x.flatten(1, 2)).mean(1))

    encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    model = assemble(ADAPTED, data=TOY, model=Encoder(encoder, nn.Linear(6, 3))).model
    x = models.example(TOY.shape, n=5)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), model.train()(x), rtol=0, atol=1e-5)


def test_an_export_is_the_trained_model_with_grouped_convolutions(
    tmp_path,
):
    """They are left out by name: peft adapts them, and cannot merge them."""
    parts = [
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, groups=2),
        nn.Flatten(),
        nn.Linear(32, 3),
    ]
    net = nn.Sequential(*parts)
    from_python = {"data": TOY, "model": net}
    with pytest.warns(UserWarning, match="2 get no adapters and stay fixed"):
        engine = run(
            ADAPTED.with_keys(rounds=1, lr=0.1),
            tmp_path / "run",
            **from_python,
        )
    exported = fl.export(tmp_path / "run", tmp_path / "m.safetensors", **from_python)
    rebuilt, x = exported.model(model=net), TOY.clients[0].test.x
    trained = fl.load_models(tmp_path / "run", which="global", **from_python)[0]["a"]
    torch.testing.assert_close(
        evaluate.predict(rebuilt, x), evaluate.predict(trained, x), rtol=0, atol=1e-5
    )
    assert not any(name.startswith("2.") for name in engine.server.trees["model"])
    with refuses("unknown target of adapt '2'"):
        assemble(ADAPTED.with_keys(adapt="lora:targets=2"), **from_python)


@pytest.mark.parametrize(
    "algorithm",
    every_other(
        (
            *("depthfl", "scaffold", "fedrod", "pfedhn"),
            *("pfedgate", "fedra", "fedpft", "pfedpt"),
        ),
        of=4,
    ),
)
def test_algorithms_train_adapters_alone(algorithm):
    options = {"lora_targets": None} if algorithm in ("fedra", "depthfl") else {}
    config = ADAPTED.with_keys(rounds=1, algorithm=algorithm, options=options)
    config = config.with_keys(model="vit", model_options=BLOCKS["vit"])
    engine = run(config, data=TOY)
    names = {name for layer in engine.task_info.layers for name in layer.tensors}
    assert any("lora_B" in name for name in names)
    assert not any(name.startswith("blocks.") and "lora_" not in name for name in names)


def test_a_model_of_peft_has_its_factors_as_layers_and_sends_what_trains():
    """A copy that trains next to the unused original is one layer, and counts once."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 2, "target_modules": ["fc1"], "modules_to_save": ["fc3"]}
    model = get_peft_model(network("plain"), LoraConfig(**options))
    layers = fl.layers_of(model, models.example(TOY.shape))
    parts = ("fc1.lora_A", "fc1.lora_B", "fc1", "fc2", "fc3.modules_to_save.default")
    names = [layer.name.removeprefix("base_model.model.") for layer in layers]
    assert tuple(name.replace(".base_layer", "") for name in names) == parts
    counts = [*sizes(layers, model).values()]
    assert counts == [2 * 36, 8 * 2, 36 * 8 + 8, 8 * 6 + 6, 6 * 3 + 3]
    plan = LayerPlan(layers, ()).with_shared(layers[0].name)
    for algorithm, trained in (
        ("fedavg", counts[0] + counts[1] + counts[4]),
        ("fedper", counts[0]),
    ):
        result = fl.run(
            data=TOY,
            model=model,
            algorithm=algorithm,
            rounds=1,
            plan=plan if algorithm == "fedper" else None,
        )
        rows = result.to_frame()
        assert set(rows[rows.metric == "bytes_up"].value) == {4.0 * trained}
        assert type(result.models["a"]) is type(model)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_factors_have_own_rates_in_each_precision(precision, monkeypatch):
    """B begins at zero. So the first step is along its gradient alone, and the classifier's is the usual one."""
    seen = set()

    def run_with(adapt):
        config = ADAPTED.with_keys(
            adapt=adapt, precision=precision, rounds=1, batch_size=99
        )
        return run(config, data=TOY, model=network("plain")).server.trees["model"]

    def note(_module, _args, output):
        seen.add((torch.is_grad_enabled(), output.dtype))

    with nn.modules.module.register_module_forward_hook(note):
        usual, fast = run_with("lora:r=2"), run_with("lora:r=2,rates=lora_B:16")
    lower = torch.bfloat16 if precision == "bf16" else torch.float32
    assert (True, lower) in seen
    assert {dtype for grad, dtype in seen if not grad} == {torch.float32}
    for name, tensor in usual.items():
        assert tensor.dtype == torch.float32
        times = 16 if "lora_B" in name else 1
        torch.testing.assert_close(fast[name], times * tensor, rtol=1e-5, atol=1e-7)
    if precision == "bf16":
        vit = {"model": "vit", "model_options": BLOCKS["vit"]}
        with refuses("precision.*for the model"):
            run(CONFIG.with_keys(precision="bf16", **vit), data=TOY)
        monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
        with refuses("precision must be one that the device"):
            run_with("lora:r=2")
        config, net = CONFIG.with_keys(precision="bf16", stack="on"), network("plain")
        with refuses("stack must be auto or off"):
            assemble(config, data=TOY, model=net)


def test_a_dot_in_a_rank_pattern_is_a_dot_of_the_path():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4)), "a_0": nn.Linear(4, 4)})
    adapted = lora.adapt(
        nn.Sequential(model, nn.Linear(4, 2)),
        lora.Lora(2, rank_pattern=("a.0:1",)),
        "1",
        seed=0,
    )
    ranks = [len(p) for name, p in adapted.named_parameters() if "lora_A" in name]
    assert ranks == [1, 2]


def test_ranks_differ_by_target_and_what_gets_no_adapter_is_named():
    config = ADAPTED.with_keys(adapt="lora:r=2,targets=fc1+fc2,rank_pattern=fc2:1")
    task = assemble(config, data=TOY, model=network("plain"))
    shapes = {
        n: t.shape for n, t in tree.named_tensors(task.model).items() if "lora_A" in n
    }
    assert [shape[0] for shape in shapes.values()] == [2, 1]
    for key, entries in (
        ("rank_pattern", ("fc9:1", "fc2", "fc2:0", "fc2:9", "fc2:1+fc2:2")),
        ("rates", ("lora_C:2", "lora_B", "lora_B:0")),
    ):
        for entry in entries:
            config = ADAPTED.with_keys(adapt=f"lora:{key}={entry}")
            with refuses(key):
                assemble(config, data=TOY, model=network("plain"))
    attention = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    model = nn.Sequential(nn.Flatten(1, 2), attention, nn.Flatten(), nn.Linear(36, 3))
    notes = assemble(ADAPTED, data=TOY, model=model).notes()
    assert any("1.self_attn get no adapters" in note for note in notes)
