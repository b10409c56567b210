"""Folders of transformers: the library's own logits, in float32, and nothing of a stranger's configuration runs."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from fl_core import models
from fl_core.models.folders import CODE, from_transformers
from fl_core.models.tokens import Tokenizer, TokenShape
from tests.conftest import on_first_use, refuses
from tests.faults.limited import MEGABYTES, SECONDS, limited

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="no transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
hf = on_first_use("transformers")
WORDS, LENGTH, PAD = 30, 7, 3
SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_labels": 3, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OTHERS = {
    "distilbert": {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 16},
    "albert": {"embedding_size": 8},
    "llama": {"rope_theta": 500.0, "num_key_value_heads": 1},
    "mistral": {"num_key_value_heads": 2},
    "qwen2": {"rope_theta": 700.0, "num_key_value_heads": 1},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2},
    "gemma2": {"head_dim": 8, "num_key_value_heads": 1},
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 16},
}
NAMES = (
    *("bert", "distilbert", "roberta", "xlm-roberta", "electra", "albert", "mpnet"),
    *("deberta-v2", "gpt2", "llama", "mistral", "qwen2", "modernbert"),
    *("gemma2", "gpt_neox", "xlnet"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a tiny classifier by its name, made once."""
    folders = {}

    def make(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("folder")
            torch.manual_seed(0)
            kind = hf.CONFIG_MAPPING[name]
            config = kind(**SIZES | OTHERS.get(name, {}))
            model = hf.AutoModelForSequenceClassification.from_config(config)
            model.save_pretrained(folders[name])
        return folders[name]

    return make


def build(folder, n_classes=3):
    reader = Tokenizer(str(folder), "", WORDS, PAD, LENGTH)
    shape = TokenShape((LENGTH,), WORDS, reader)
    return from_transformers(str(folder), shape, n_classes, {})


def edit(made, target, change):
    """Copy a folder by links, as in a cache of models, with a changed configuration."""
    source = made("bert")
    for file in source.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | change))
    return target


def logits(model):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, WORDS, (5, LENGTH), generator=generator)
    ids[1:, -2:] = PAD
    with torch.no_grad():
        return model.eval()(input_ids=ids, attention_mask=(ids != PAD).long()).logits


@pytest.mark.parametrize("name", NAMES)
def test_it_gives_the_logits_of_transformers(name, made, capfd):
    folder = made(name)
    capfd.readouterr()
    outputs = logits(build(folder))
    assert capfd.readouterr() == ("", "")
    whole = hf.AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    )
    torch.testing.assert_close(outputs, logits(whole), rtol=0, atol=1e-5)


def test_keys_of_older_configurations_are_read(made, tmp_path):
    """A base of rotations stands at the top in them, and in a group of its own today."""
    config = json.loads((made("llama") / "config.json").read_text())
    base = config.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": base}))
    (tmp_path / "model.safetensors").symlink_to(made("llama") / "model.safetensors")
    torch.testing.assert_close(logits(build(tmp_path)), logits(build(made("llama"))))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_trained_in_32(kind, made, tmp_path):
    edit(made, tmp_path, {"dtype": str(kind).removeprefix("torch.")})
    stored = load_file(made("bert") / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    halves = {key: value.to(kind) for key, value in stored.items()}
    save_file(halves, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="float32, in which it is trained: .*float16"):
        model = build(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for key, value in model.state_dict().items():
        assert torch.equal(value, halves[key].float())


def test_other_keys_and_a_fresh_classifier_are_named(made, tmp_path):
    edit(made, tmp_path, {"my_own_key": 1, "extra": {"a": 2}})
    with pytest.warns(UserWarning, match="my_own_key") as notes:
        model = build(tmp_path, n_classes=5)
    assert any("starts fresh: classifier" in str(note.message) for note in notes)
    assert not hasattr(model.config, "my_own_key")
    assert logits(model).shape == (5, 5)


STRANGE = "somebody/kernel"
HARMFUL = [
    {"_attn_implementation": STRANGE},
    {"attn_implementation": STRANGE},
    {"_attn_implementation_internal": STRANGE},
    {"_experts_implementation": STRANGE},
    {"text_config": {"_attn_implementation": STRANGE}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    {"auto_map": {"AutoModelForSequenceClassification": "mine.Net"}},
    {"extra_files": ["/etc/passwd"]},
    {"transformers_weights": "other.safetensors"},
    {"backbone": "somebody/backbone", "use_pretrained_backbone": True},
    {"kernel_config": {"a": STRANGE}},
]


@pytest.mark.parametrize("change", HARMFUL, ids=str)
def test_keys_that_load_code_are_refused(change, made, tmp_path):
    with refuses("which loads code or other files"):
        build(edit(made, tmp_path, change))


def test_no_key_reaches_the_loader_of_kernels(made, tmp_path, monkeypatch):
    """Truth values of older versions are no names: they are dropped."""

    def loaded(*args, **keys):
        raise AssertionError("a kernel was asked for")

    kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    monkeypatch.setattr(kernels, "get_kernel", loaded, raising=False)
    monkeypatch.setattr(kernels, "load_and_register_attn_kernel", loaded, raising=False)  # fmt: skip
    change = {"_attn_implementation_autoset": True, "auto_map": None}
    assert build(edit(made, tmp_path, change)).config._attn_implementation == "eager"
    declared = hf.BertConfig().to_dict()
    assert not any(CODE.fullmatch(key) for key in declared)


BOMBS = {
    "layers": {"num_hidden_layers": 10**6},
    "many layers": {"num_hidden_layers": 500},
    "width": {"hidden_size": 10**6, "num_attention_heads": 2},
    "words": {"vocab_size": 2 * 10**7},
    "positions": {"max_position_embeddings": 3 * 10**7},
    "a huge number": {"intermediate_size": 10**300},
    "a negative number": {"num_hidden_layers": -1},
    "a text": {"hidden_size": "16"},
    "deep": {"a": json.loads('{"a":' * 900 + "1" + "}" * 900)},
    "a long list": {"architectures": ["a"] * 10**5},
    "a long text": {"hidden_act": "a" * 900_000},
    "another model": {"model_type": "gpt2"},
    "no model": {"model_type": "../x"},
    "a model of images": {"model_type": "vit"},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_vast_model_is_refused_before_it_takes_memory(name, made, tmp_path):
    folder = edit(made, tmp_path, BOMBS[name])
    message, megabytes, seconds = limited(lambda: build(folder), ValueError)
    assert str(folder) in message or "model_type" in message, message
    assert "\n" not in message
    assert len(message) < 1000
    assert megabytes < MEGABYTES
    assert seconds < SECONDS


def test_weights_that_are_too_few_are_refused(made, tmp_path):
    folder = edit(made, tmp_path, {"num_hidden_layers": 4})
    with refuses(r"must have the 15,\d+ numbers of the model"):
        build(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    with refuses("no regular file"):
        build(folder)


def test_a_model_whose_pass_fails_is_one_line(made, tmp_path):
    """Its configuration is sound in itself, and no length of texts fits to it."""
    folder = edit(made, tmp_path, {"chunk_size_feed_forward": LENGTH + 1})
    shape = TokenShape((LENGTH,), WORDS, Tokenizer(str(folder), "", WORDS, PAD, LENGTH))
    with refuses("chunked") as refused:
        models.build(f"hf:{folder}", shape, 3)
    assert "\n" not in str(refused.value)
