"""Tokenizers of today's models give the library's own ids, and a hostile one ends in one line."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from fl_core.data.sources import encode
from fl_core.models import token_files
from fl_core.models.tokens import LENGTH, Tokenizer
from tests.conftest import on_first_use, refuses
from tests.faults.limited import MEGABYTES, SECONDS, limited
from tests.made import lines

pytestmark = pytest.mark.skipif(
    find_spec("tokenizers") is None, reason="tokenizers is not installed"
)
library = on_first_use("tokenizers")
TEXTS = [entry["text"] for entry in lines()]
TEXTS += ["It's 1,234 in 2024!", "Ünïcödé 好的 😀  \n\n", " ".join(TEXTS[:20])]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = LLAMA.replace(r"\p{N}{1,3}", r"\p{N}")
GPT_4O = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip


def byte_level(pattern, marks, start=None, normalizer=None):
    """A tokenizer of bytes whose words a pattern splits."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.normalizer = normalizer
    steps = library.pre_tokenizers
    split = steps.Split(library.Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = steps.Sequence([split, steps.ByteLevel(False, use_regex=False)])  # fmt: skip
    trainer = library.trainers.BpeTrainer(
        vocab_size=400, special_tokens=marks, show_progress=False,
        initial_alphabet=steps.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    if start:
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, marks.index(start))]
        )
    return tokenizer


def llama_2():
    tokenizer = library.Tokenizer(library.models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))  # fmt: skip
    tokenizer.normalizer = library.normalizers.Sequence(
        [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
    )
    marks = ["<unk>", "<s>", "</s>"]
    trainer = library.trainers.BpeTrainer(vocab_size=200, special_tokens=marks, show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def bert():
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = library.trainers.WordPieceTrainer(vocab_size=200, special_tokens=marks, show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = library.processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    return tokenizer


def t5():
    tokenizer = library.Tokenizer(library.models.Unigram())
    tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace()
    marks = ["<pad>", "</s>", "<unk>"]
    trainer = library.trainers.UnigramTrainer(
        vocab_size=150, special_tokens=marks, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


def roberta():
    tokenizer = byte_level(GPT_2, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.post_processor = library.processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0)
    )
    return tokenizer


def gemma():
    tokenizer = library.Tokenizer(library.models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))  # fmt: skip
    tokenizer.normalizer = library.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = library.pre_tokenizers.Split("▁", "merged_with_previous")
    marks = ["<pad>", "<eos>", "<bos>", "<unk>"]
    trainer = library.trainers.BpeTrainer(vocab_size=200, special_tokens=marks, show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    return tokenizer


def albert():
    tokenizer = t5()
    steps = library.normalizers
    quotes = [steps.Replace("``", '"'), steps.Replace("''", '"')]
    tokenizer.normalizer = steps.Sequence([*quotes, steps.NFKD(), steps.StripAccents(), steps.Lowercase()])  # fmt: skip
    parts = library.pre_tokenizers
    tokenizer.pre_tokenizer = parts.Sequence(
        [parts.WhitespaceSplit(), parts.Metaspace()]
    )
    return tokenizer


KINDS = {
    "RoBERTa": (roberta, 1),
    "Gemma": (gemma, 0),
    "ALBERT": (albert, 0),
    "Llama 3": (lambda: byte_level(LLAMA, ["<|begin_of_text|>", "<|end_of_text|>"], "<|begin_of_text|>"), 1),
    "Llama 2": (llama_2, 2),
    "Qwen": (lambda: byte_level(QWEN, ["<|endoftext|>"], normalizer=library.normalizers.NFC()), 0),
    "GPT-4o": (lambda: byte_level(GPT_4O, ["<|endoftext|>"]), 0),
    "BERT": (bert, 0),
    "T5": (t5, 0),
}  # fmt: skip
"""A tokenizer, and the id that pads where it names none itself."""


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_of_todays_models_give_their_own_ids(kind, tmp_path):
    make, pad = KINDS[kind]
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reader = Tokenizer.read(str(tmp_path))
    assert (reader.pad, reader.length) == (pad, LENGTH)
    assert reader.tokens == tokenizer.get_vocab_size()
    ids, cut, side = reader.encode(TEXTS)
    assert ids.shape == (len(TEXTS), LENGTH)
    for text, row in zip(TEXTS, ids, strict=True):
        tokenizer.no_truncation()
        whole = tokenizer.encode(text).ids
        tokenizer.enable_truncation(LENGTH)
        encoded = tokenizer.encode(text).ids
        assert row[: len(encoded)].tolist() == encoded
        assert (row[len(encoded) :] == pad).all()
        cut -= len(whole) > LENGTH
    assert (cut, side) == (0, "right")


RULES = [
    ({"direction": "left", "stride": 9}, {"direction": "left", "pad_id": 1, "pad_token": "[UNK]"}),
    ({"strategy": "only_first"}, {"direction": "right", "pad_id": 0, "pad_token": "[PAD]", "pad_to_multiple_of": 8}),
    ({"direction": "right", "stride": 2}, {"direction": "left", "pad_id": 0, "pad_token": "[PAD]", "pad_type_id": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("cut", "fill"), RULES, ids=str)
def test_its_own_sides_and_ids_cut_and_pad(cut, fill, tmp_path):
    tokenizer = bert()
    tokenizer.enable_truncation(20, **cut)
    tokenizer.enable_padding(length=20, **fill)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reader = Tokenizer.read(str(tmp_path))
    texts = [*TEXTS[:20], " ".join(TEXTS[:9])]
    tokenizer.enable_padding(length=20, **fill | {"pad_to_multiple_of": None})
    wanted = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert np.array_equal(reader.encode(texts)[0], wanted)
    assert reader.pad == fill["pad_id"]
    place = "before their last" if cut.get("direction") == "left" else "after"
    with pytest.warns(UserWarning, match=f"are cut {place} 20 tokens"):
        encode([texts[-1]], where="t.csv", tokenizer=reader)


def changed(**parts):
    return lambda found: found.update(parts)


def regex(pattern):
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return changed(pre_tokenizer=split)  # fmt: skip


def replaced(*pairs):
    steps = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in pairs]  # fmt: skip
    return changed(normalizer={"type": "Sequence", "normalizers": steps})


def nested(depth):
    part = {"type": "Whitespace"}
    for _ in range(depth):
        part = {"type": "Sequence", "pretokenizers": [part]}
    return changed(pre_tokenizer=part)


CUT = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
FILL = {
    "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
    "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]",
}  # fmt: skip
TEMPLATE = {
    "type": "TemplateProcessing", "pair": [],
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
}  # fmt: skip
HOSTILE = {
    "a step of no known kind": changed(normalizer={"type": "Shell"}),
    "a long regular expression": regex("a" * 1001),
    "a slow regular expression": regex("(a+)+$|(x+x+)+y|(.*a){40}$"),
    "a broken regular expression": regex("(["),
    "texts that grow": replaced(*[("a", "aaaaaaaaaa")] * 4),
    "a long replacement": replaced(("a", "a" * 10**6)),
    "many steps": replaced(*[("a", "b")] * 60),
    "deep steps": nested(60),
    "steps deeper than JSON": nested(200),
    "a length of 0": changed(truncation={**CUT, "max_length": 0}),
    "no room for a text": changed(truncation={**CUT, "max_length": 2}),
    "a huge length": changed(truncation={**CUT, "max_length": 10**30}),
    "only the second text is cut": changed(truncation={**CUT, "strategy": "OnlySecond"}),
    "padding beyond the ids": changed(padding={**FILL, "pad_id": 10**9}),
    "ids beyond all": lambda found: found["model"]["vocab"].update(zzz=2**31),
    "ids of a template beyond all": changed(post_processor={
        **TEMPLATE, "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [10**6], "tokens": ["[CLS]"]}}
    }),
    "a template of many tokens": changed(post_processor={
        **TEMPLATE, "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2] * 9999, "tokens": ["[CLS]"] * 9999}}
    }),
    "dropout": changed(model={"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.5}),
    "no padding": lambda found: found["model"]["vocab"].update({"[NIL]": found["model"]["vocab"].pop("[PAD]")}),
    "another model": changed(model={"type": "Pickle"}),
    "no model": changed(model=None),
    "damaged signs": changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a word of 20 MB": lambda found: found["model"]["vocab"].update({"a" * 20_000_000: 300}),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "tokenizer.json"
    tokenizer = bert()
    tokenizer.save(str(path))
    return json.loads(path.read_text())


HARMLESS = {"a word of 20 MB", "a slow regular expression", "a huge length"}
"""Kinds that some version of the library takes."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_ends_in_one_line(kind, sound, tmp_path, capfd):
    """The library's own lines, such as the stack of a panic, are not printed."""
    stored = json.loads(json.dumps(sound)) | {"added_tokens": []}
    HOSTILE[kind](stored)
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    texts = ["so good " * 50, "x" * 3000]

    def act():
        Tokenizer.read(str(tmp_path)).encode(texts)

    message, megabytes, seconds = limited(act, ValueError)
    assert not capfd.readouterr().err
    assert "\n" not in message
    assert not message.startswith("raw")
    assert str(tmp_path) in message or kind in HARMLESS, message
    assert len(message) < 600
    assert megabytes < MEGABYTES
    assert seconds < SECONDS


def template(entries, ids=0):
    single = [{"Sequence": {"id": "A", "type_id": 0}}] * entries
    special = {"[CLS]": {"ids": [2] * ids}} if ids else {}
    return changed(post_processor={
        "type": "TemplateProcessing", "single": single, "special_tokens": special
    })  # fmt: skip


BOUNDS = [
    (lambda n: regex("a" * n), 1000, "1,000 signs; got 1,001"),
    (lambda n: replaced(("a", "a" * n)), 1000, "1,001 times"),
    (lambda n: replaced(("a", "a" * 10), ("a", "a" * 10), ("a", "a" * (n - 990))), 1000, "1,100 times"),
    (lambda n: replaced(*[("a", "")] * (n - 3)), 50, "more than 50 steps"),
    (lambda n: nested(n - 3), 50, "more than 50 steps"),
    (template, 200, "adds 201 tokens"),
    (lambda n: template(n - 200, 199), 200, "adds 201 tokens"),
    (lambda n: changed(truncation={**CUT, "max_length": 201 - n}), 200, "at least 1 token; got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "most", "message"), BOUNDS)
def test_a_part_at_its_bound_passes_and_one_more_does_not(part, most, message, sound):
    stored = json.loads(json.dumps(sound))
    part(most)(stored)
    token_files.check(stored)
    part(most + 1)(stored)
    with refuses(message):
        token_files.check(stored)


def test_a_sound_file_is_read_within_lower_limits(sound, tmp_path):
    """A limit of the processor's time that a cluster has set cannot be raised."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(sound))
    message, *_ = limited(lambda: Tokenizer.read(str(tmp_path)), ValueError)
    assert message == "no error"


def test_a_process_that_aborts_is_one_line(sound, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(json.dumps(sound))
    monkeypatch.setattr(token_files.sys, "executable", "/bin/false")
    with refuses("the process that tried it ended with 1"):
        Tokenizer.read(str(tmp_path))


def test_links_are_followed_and_pipes_are_not(sound, tmp_path):
    (tmp_path / "blob").write_text(json.dumps(sound))
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "blob")
    assert Tokenizer.read(str(tmp_path)).pad == 0
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with refuses("no regular file"):
        Tokenizer.read(str(tmp_path))
