"""A folder of transformers reads texts by its own tokenizer, and gives the model that takes them."""

import json
import sys
from importlib.util import find_spec

import pandas as pd
import pytest
import torch

import fedlayers as fl
from fl_core.config import RunConfig
from fl_core.errors import RunError
from fl_core.models.adapter import original
from fl_core.models.tokens import Tokenizer
from fl_core.run.runner import assemble
from fl_core.tree import copied
from tests.conftest import CONFIG, on_first_use, refuses
from tests.made import lines

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="no transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
hf, library = on_first_use("transformers"), on_first_use("tokenizers")
LENGTH = 12
TEXTS = [entry["text"] for entry in lines()]
KINDS = {"WordPiece": "[PAD]", "BPE": "<|endoftext|>", "WordLevel": "[PAD]", "Unigram": "<pad>"}  # fmt: skip


def tokenizer(kind="WordPiece", pad="[PAD]"):
    """A tokenizer of the texts whose padding is not the first token."""
    built = library.Tokenizer(getattr(library.models, kind)())
    built.pre_tokenizer = library.pre_tokenizers.Whitespace()
    trainer = getattr(library.trainers, f"{kind.replace('PE', 'pe')}Trainer")
    special = {"special_tokens": ["[UNK]", "[CLS]", pad]}
    built.train_from_iterator(TEXTS, trainer(vocab_size=90, show_progress=False, **special))  # fmt: skip
    built.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    built.enable_truncation(LENGTH)
    return built


@pytest.fixture(scope="module", autouse=True)
def _imports():
    """Import what all tests need once, so that no test is charged for it."""
    assert callable(hf.AutoModelForSequenceClassification.from_config)


@pytest.fixture
def folder(tmp_path):
    """Write a folder of a tiny encoder with a tokenizer, and return its path."""

    def write(written_tokenizer=None):
        written_tokenizer = written_tokenizer or tokenizer()
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
        sizes |= {
            "intermediate_size": 8,
            "vocab_size": written_tokenizer.get_vocab_size(),
        }
        torch.manual_seed(1)
        path = tmp_path / "folder"
        hf.BertModel(hf.BertConfig(**sizes)).save_pretrained(path)
        written_tokenizer.save(str(path / "tokenizer.json"))
        return path

    return write


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "t.csv"
    pd.DataFrame(lines()).drop(columns="day").to_csv(path, index=False)
    return path


def by_hand(made, model, texts):
    """The logits of one text at a time, which then has no padding."""
    made.no_padding()
    net = original(copied(model)).eval()
    ids = [torch.tensor([made.encode(text).ids]) for text in texts]
    with torch.no_grad():
        return torch.cat([net(input_ids=sample).logits for sample in ids])


@pytest.mark.parametrize("kind", KINDS)
def test_texts_become_its_ids_and_the_model_has_its_weights(kind, folder, table):
    built = tokenizer(kind, KINDS[kind])
    config = CONFIG.with_keys(dataset=str(table), model=f"hf:{folder(built)}")
    task = assemble(config)
    built.enable_padding(length=LENGTH, pad_id=2, pad_token=KINDS[kind])
    wanted = torch.tensor([built.encode(text).ids for text in TEXTS])
    client = task.data.client("north")
    rows = task.data.partition.indices["north"]["train"]
    assert torch.equal(client.train.x, wanted[rows])
    few = [TEXTS[row] for row in rows[:5]]
    with torch.no_grad():
        outputs = task.model.eval()(client.train.x[:5])
    torch.testing.assert_close(outputs, by_hand(built, task.model, few))
    stored = hf.BertModel.from_pretrained(folder(built)).state_dict()
    assert all(torch.equal(stored[k], v) for k, v in task.model.bert.state_dict().items())  # fmt: skip


def test_a_stored_run_has_it_and_its_model_predicts_new_texts(folder, table, tmp_path):
    built = tokenizer()
    name, out, texts = f"hf:{folder(built)}", tmp_path / "run", ["so good!", TEXTS[3]]
    jsonl = tmp_path / "t.jsonl"
    jsonl.write_text("\n".join(map(json.dumps, lines())))
    config = CONFIG.with_keys(model=name, dataset=str(jsonl), rounds=1)
    fl.run(config, out=out)
    stored = fl.resume(out).models["north"]
    trained = fl.run(config.with_keys(dataset=str(table))).models["north"]
    for one, other in zip(stored.parameters(), trained.parameters(), strict=True):
        assert torch.equal(one, other)
    fl.export(out, tmp_path / "m.safetensors", client="north")
    logits = fl.predict(tmp_path / "m.safetensors", texts).logits
    torch.testing.assert_close(logits, by_hand(built, trained, texts))
    tokenizer("WordLevel").save(str(tmp_path / "folder/tokenizer.json"))
    with refuses("tokenizer.json must read texts as before"):
        fl.predict(tmp_path / "m.safetensors", texts)
    with pytest.raises((RunError, ValueError), match="data"):
        fl.load_models(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.rename(p.with_name("other")), "tokenizer.json is missing"),
        (lambda p: p.write_text("{}"), "must be a tokenizer"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"[PAD]", b"[NIL]")), "token for padding"),
        (lambda p: (p.parent / "config.json").write_text('{"model_type": "x"}'), "must be built"),
        (lambda p: (p.parent / "model.safetensors").unlink(), "model.safetensors must be a file"),
        (lambda p: hf.ViTModel(hf.ViTConfig(num_hidden_layers=1)).save_pretrained(p.parent), "must be built"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused(change, message, folder, table):
    path = folder()
    change(path / "tokenizer.json")
    with refuses(message):
        assemble(RunConfig(dataset=str(table), model=f"hf:{path}"))


class PanicException(BaseException):
    """As an error of the library that is no Exception."""


@pytest.mark.parametrize(
    ("error", "message"),
    [(PanicException, "the library ended: no luck"), (ValueError, "before: no luck")],
)
def test_an_error_while_texts_are_read_is_told_in_its_words(
    folder, monkeypatch, error, message
):
    reader = Tokenizer.read(str(folder()))

    def fail(content):
        raise error("no luck")

    monkeypatch.setattr(library.Tokenizer, "from_buffer", fail)
    with refuses(message):
        reader.encode(["so good!"])


def test_without_the_package_the_install_is_named(folder, monkeypatch):
    path = str(folder())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refuses("Run pip install"):
        Tokenizer.read(path)


def test_data_without_texts_are_refused(folder):
    with refuses("Leave out tokenizer"):
        assemble(RunConfig(dataset="heart", model=f"hf:{folder()}"))
