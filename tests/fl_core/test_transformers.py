"""Classes of transformers, built offline, train as a plain loop of torch does, with adapters and without."""

from importlib.util import find_spec
from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedlayers as fl
from fl_core import tree
from fl_core.config import with_own
from fl_core.models.adapter import original
from fl_core.run.runner import assemble
from tests.conftest import CONFIG, every_other, on_first_use

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
hf = on_first_use("transformers")
N, WORDS, WIDTH = 12, 20, 16
SIZES = {  # each configuration takes its own of these
    "vocab_size": WORDS, "num_labels": 3, "image_size": 8, "patch_size": 4, "d_ff": WIDTH,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_decoder_layers": 1, "hidden_size": WIDTH, "intermediate_size": WIDTH,
}  # fmt: skip
INPUTS = {
    "input_ids": lambda: torch.randint(3, WORDS, (N, 5)),
    "decoder_input_ids": lambda: torch.randint(3, WORDS, (N, 5)),
    "attention_mask": lambda: torch.randint(2, (N, 5)),
    "pixel_values": lambda: torch.randn(N, 3, 8, 8),
}


def spans(output, y):
    ends = torch.stack([output["start_logits"], output["end_logits"]], 2)
    return cross_entropy(ends, y[:, :2], reduction="none").mean(1)


def contrast(output, y):
    alike = output["text_embeds"] @ output["image_embeds"].T
    return cross_entropy(alike, torch.arange(len(y)), reduction="none")


LOSSES = {"BertForQuestionAnswering": spans, "CLIPModel": contrast}
KINDS = {  # inputs, and the number of labels if each position of the last input has one
    "BertForSequenceClassification": ("input_ids attention_mask", 0),
    "DistilBertForSequenceClassification": ("input_ids", 0),
    "RobertaForSequenceClassification": ("input_ids", 0),
    "ViTForImageClassification": ("pixel_values", 0),
    "GPT2LMHeadModel": ("input_ids", WORDS),
    "LlamaForCausalLM": ("input_ids", WORDS),
    "BertForTokenClassification": ("input_ids", 3),
    "T5ForConditionalGeneration": ("input_ids decoder_input_ids", WORDS),
    "BertForQuestionAnswering": ("input_ids", 5),
    "CLIPModel": ("pixel_values input_ids", WORDS),
}
WAYS = [*product(KINDS, ("fedavg", "fedper"), (None, "lora:r=2"))]


@pytest.mark.parametrize("way", every_other(WAYS, of=9), ids=str)
def test_it_trains_as_a_plain_loop_and_sends_what_trains(way):
    """Full batches leave nothing to draw, and the loss is that of transformers itself."""
    kind, algorithm, adapt = way
    names, labels = KINDS[kind]
    torch.manual_seed(0)
    sizes, loss = SIZES, LOSSES.get(kind)
    if loss is not None:
        sizes = SIZES | {"num_labels": 2, "text_config": SIZES, "vision_config": SIZES}
    net = getattr(hf, kind)(getattr(hf, kind).config_class(**sizes)).train()
    for part in net.children():
        part.eval()  # and stays so, without dropout
    data = {}
    for client in ("a", "b"):
        x = {name: INPUTS[name]() for name in names.split()}
        data[client] = x, [*x.values()][-1] % labels if labels else torch.arange(N) % 3
    config = CONFIG.with_keys(algorithm=algorithm, adapt=adapt, batch_size=N, lr=0.5)
    config, from_python = with_own(config, data, net, loss=loss)
    result = fl.run(config, **from_python)
    task = assemble(config, **from_python)
    model, clients = original(task.model).eval(), task.data.clients
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    sent = trained if result.plan is None else trained.keys() & result.plan.body_tensors
    assert (len(sent) == len(trained)) == (algorithm == "fedavg")
    states = [tree.clone(trained) for _ in clients]
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    for _ in range(result.done):
        for client_state, client in zip(states, clients, strict=True):
            tree.assign(trained, client_state)
            _, named = task.data.shape.layout.unpack(client.train.x, torch.float32)
            optimizer.zero_grad()
            y = client.train.y
            if loss is None:
                model(**named, labels=y).loss.backward()
            else:
                loss(model(**named), y).mean().backward()
            optimizer.step()
            client_state |= tree.clone(trained)
        mean = tree.mean(states, task.data.weights)
        for client_state in states:
            client_state |= tree.select(mean, sent)
    for client, client_state in zip(clients, states, strict=True):
        parameters = dict(result.models[client.name].named_parameters())
        torch.testing.assert_close(
            tree.select(parameters, trained), client_state, rtol=0, atol=1e-6
        )
    rows = result.to_frame().groupby("metric")["value"].unique()
    size = tree.n_bytes(tree.select(trained, sent))
    assert rows["bytes_up"] == rows["bytes_down"] == [size]
