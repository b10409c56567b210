"""The file of a tokenizer: its parts are checked, and it is read and first used in a process with limits.

The library tokenizers is written in Rust, where a bad file can end the process, or take all memory or time. So
:func:`facts` starts another process, which runs this file.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from fl_core import storage
from fl_core.display import printable
from fl_core.errors import UsageError, check_known, needs_package

LENGTH = 64
"""Tokens of a sample, with the start token first. Longer texts are cut and shorter ones padded."""
NORMALIZERS = (
    *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
    *("Precompiled", "Prepend", "Replace", "Sequence", "Strip", "StripAccents"),
)
PRE_TOKENIZERS = (
    *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"),
    *("Metaspace", "Punctuation", "Sequence", "Split", "UnicodeScripts"),
    *("Whitespace", "WhitespaceSplit"),
)
PROCESSORS = (
    *("BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence"),
    "TemplateProcessing",
)
MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
PATTERN = 1000
"""Characters of a regular expression, or of a text that replaces others, at most."""
PARTS = 50
"""Steps of a tokenizer at most. A template may have four times as many entries and tokens."""
GROWTH = 1000
"""The largest factor by which all replacements together may lengthen a text."""
TOKENS = 2**22
"""Token ids at most. The largest vocabularies have a sixteenth."""
PADS = (
    *("[PAD]", "<pad>", "<|pad|>", "<|finetune_right_pad_id|>"),
    *("<|endoftext|>", "<|end_of_text|>", "</s>"),
)
"""Names of tokens for padding, the preferred first. The last three end texts.

A token that the tokenizer itself adds to texts is not used.
"""
SAMPLES = (
    *("a", "So good! It's 1,234.56 in 2024.\n\n  Ünïcödé 好的 😀", "a" * 2000),
    *(" " * 2000, "1" * 2000, "aA1 !?" * 400, "\n\t" * 1000, "\u0301" * 1000),
)
"""Texts that must not end the process, also long ones of one character."""
START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from fl_core.models.token_files import main; main(int(sys.argv[1]))"
)
"""Code that the process starts with. It finds modules in the folders that it is given, and nowhere else."""
SECONDS, MEGABYTES = 8, 256
"""Seconds of processor time and megabytes of memory of a process that reads a small file. A larger one gets more."""


def facts(content: bytes) -> dict[str, int]:
    """Return a tokenizer file's number of ``tokens``, id of padding ``pad``, and ``length`` of a sample.

    Args:
        content: the file's bytes.

    Raises:
        UsageError: a part is of no known kind or beyond a bound, the file is no
            tokenizer or has no padding, the process that tried it ended or took too
            long, or the library tokenizers is not installed.
    """
    return dict(_facts(content))  # the cached ones stay as they are


@functools.lru_cache(maxsize=4)
def _facts(content: bytes) -> dict[str, int]:
    try:
        import tokenizers  # noqa: F401 - the process imports it, too
    except ImportError:
        raise needs_package("tokenizers", "read texts by it", "lora") from None
    variables = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    variables.pop("PYTHONPATH", None)  # it is part of the paths
    seconds = SECONDS + len(content) // 2**20
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", START, str(len(content)), *_paths()],
            input=content,
            capture_output=True,
            env=variables,
            timeout=10 * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"it takes longer than {10 * seconds} s") from None
    if process.returncode:
        size_text = _megabytes(len(content))
        raise UsageError(
            f"the process that tried it ended with {process.returncode}, at most {seconds} s and "
            f"{size_text:,} MB"
        )
    answer = json.loads(process.stdout)
    if "fault" in answer:
        raise UsageError(answer["fault"])
    return dict(answer)


def _paths() -> list[str]:
    """Return the folders where modules are found here, but not the working directory, nor that of the script.

    Both may hold untrusted files, such as a ``tokenizers.py`` next to a model. They
    come last, and only if the packages are installed there.
    """
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    open_folders = {Path.cwd(), Path(script).resolve().parent}
    paths = [
        path for path in sys.path if path and Path(path).resolve() not in open_folders
    ]
    packages = (__name__.partition(".")[0], "tokenizers")
    return paths + [
        str(Path(str(sys.modules[name].__file__)).parents[1]) for name in packages
    ]


def _megabytes(size: int) -> int:
    return MEGABYTES + 24 * size // 2**20


def arrange(tokenizer: Any, length: int, pad: int) -> None:
    """Set a tokenizer to cut and pad texts to a length, by its own rules: side, strategy, stride and ids.

    Args:
        tokenizer: the tokenizer, which is changed.
        length: tokens of a text.
        pad: the id of padding.

    Raises:
        UsageError: its own tokens leave no room for a text.
    """
    truncation, padding = tokenizer.truncation or {}, tokenizer.padding or {}
    free_tokens = length - tokenizer.num_special_tokens_to_add(False)
    if free_tokens < 1:
        raise UsageError(
            f"it must leave room for a text in {length} tokens; it adds {length - free_tokens} of its own"
        )
    options = {
        key: truncation[key] for key in ("strategy", "direction") if key in truncation
    }
    stride = min(
        truncation.get("stride", 0), free_tokens // 2
    )  # each piece that is cut off takes memory
    tokenizer.enable_truncation(length, stride=stride, **options)
    keys = ("direction", "pad_type_id", "pad_token")
    options = {key: padding[key] for key in keys if key in padding}
    tokenizer.enable_padding(length=length, pad_id=pad, **options)


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be printed to standard error in the ``with`` block, as Rust does without Python's knowledge."""
    try:
        error_output = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(error_output, 2)
        os.close(error_output)


def check_ids(rows: list[list[int]], length: int, tokens: int) -> None:
    """Refuse texts with another number of ids, or with an id that the tokenizer does not have.

    Args:
        rows: the ids of each text.
        length: tokens of a text.
        tokens: number of token ids.

    Raises:
        UsageError: an id or a length is wrong. The message has its value.
    """
    lengths = {*map(len, rows)}
    if lengths - {length}:
        raise UsageError(
            f"it must cut and pad each text to {length} tokens; got {max(lengths)}"
        )
    largest = max(map(max, rows), default=0)
    if largest >= tokens:
        raise UsageError(f"its ids must be below {tokens:,}; got {largest:,}")


# --- in the process with limits ----------------------------------------------------------------------------------


def check(contents: Any) -> None:
    """Refuse a tokenizer's JSON with a part of another kind, or one that is beyond its bound.

    >>> check({"model": {"type": "BPE"}, "normalizer": {"type": "Replace", "pattern": {"Regex": "a" * 2000}}})
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: a regular expression must have at most 1,000 signs; got 2,000

    Raises:
        UsageError: there is such a part. The message names it.
    """
    if not isinstance(contents, dict) or not isinstance(contents.get("model"), dict):
        raise UsageError("it has no model")
    model = contents["model"]
    if (model_kind := model.get("type")) is not None:
        check_known("model of a tokenizer", str(model_kind), MODELS)
    if model.get("dropout"):
        raise UsageError("it must have no dropout, which would draw tokens at random")
    truncation = contents.get("truncation") or {}
    if isinstance(truncation, dict) and truncation.get("max_length") == 0:
        raise UsageError("it must cut texts to at least 1 token; got 0")
    steps: list[dict[str, Any]] = []
    for key, step_kinds in (
        ("normalizer", NORMALIZERS),
        ("pre_tokenizer", PRE_TOKENIZERS),
        ("post_processor", PROCESSORS),
    ):
        pending_parts = [contents.get(key)]
        while pending_parts:
            step = pending_parts.pop()
            if step is None:
                continue
            if not isinstance(step, dict):
                raise UsageError(f"its {key} is no object")
            check_known(f"{key} of a tokenizer", str(step.get("type")), step_kinds)
            steps.append(step)
            if len(steps) > PARTS:
                raise UsageError(f"it has more than {PARTS} steps")
            for name in ("normalizers", "pretokenizers", "processors"):
                inner_parts = step.get(name) or []
                pending_parts += (
                    inner_parts if isinstance(inner_parts, list) else [inner_parts]
                )
    growth = 1
    for step in steps:
        growth *= max(1, len(str(step.get("content") or "")))
        _check_step(step)
    if growth > GROWTH:
        raise UsageError(f"its replacements make texts up to {growth:,} times as long")


def _check_step(part: dict[str, Any]) -> None:
    pattern = part.get("pattern")
    texts = [*pattern.values()] if isinstance(pattern, dict) else [pattern]
    texts += [part.get("prepend"), part.get("replacement")]
    for text in texts:
        if isinstance(text, str) and len(text) > PATTERN:
            raise UsageError(
                f"a regular expression must have at most {PATTERN:,} signs; got {len(text):,}"
            )
    n_added = 0
    for key in ("single", "pair", "special_tokens"):
        value = part.get(key)
        if isinstance(value, list | dict):
            n_added += len(value)
        if isinstance(value, dict):
            n_added += sum(
                len(entry.get("ids") or ())
                for entry in value.values()
                if isinstance(entry, dict)
            )
    if n_added > 4 * PARTS:
        raise UsageError(f"a template adds {n_added:,} tokens")


def tried(content: bytes) -> dict[str, int]:
    """Return the facts of a tokenizer's file, by reading it and by using it on :data:`SAMPLES`.

    Raises:
        UsageError: as for :func:`facts`. Errors of the library tokenizers pass unchanged.
    """
    check(storage.parsed_json(content))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(content)
    words = tokenizer.get_vocab()
    tokens = max(words.values(), default=0) + 1
    if tokens > TOKENS:
        raise UsageError(f"its ids must be below {TOKENS:,}; got {tokens - 1:,}")
    length = min((tokenizer.truncation or {}).get("max_length", LENGTH), LENGTH)
    if tokenizer.padding:
        pad_ids = [tokenizer.padding["pad_id"]]
    else:
        tokenizer.no_truncation()
        used_ids = {*chain.from_iterable(_rows(tokenizer, SAMPLES[:2]))}
        pad_ids = [
            words[mark] for mark in PADS if words.get(mark, -1) not in (-1, *used_ids)
        ]
        tokenizer = Tokenizer.from_buffer(content)
    if not pad_ids:
        raise UsageError(
            "it has no token for padding. Name one of its tokens that no text has, such as that of an end: "
            "enable_padding(pad_id=ID, pad_token=TOKEN), and save it"
        )
    if pad_ids[0] >= tokens:
        raise UsageError(f"its padding must be one of its {tokens:,} ids; got {pad_ids[0]:,}")  # fmt: skip
    arrange(tokenizer, length, pad_ids[0])
    check_ids(_rows(tokenizer, SAMPLES), length, tokens)
    return {"tokens": tokens, "pad": pad_ids[0], "length": length}


def _rows(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text. Texts on which the tokenizer fails, as without a token for them, are left out."""
    rows = []
    for text in texts:
        with suppress(Exception):  # a panic is none
            rows.append(tokenizer.encode(text).ids)
    return rows


def _limit(what: int, most: int) -> None:
    """Lower a limit of this process. One that is lower already, as on a cluster, stays: it cannot be raised.

    Args:
        what: the limit, one of ``resource``'s constants.
        most: its new value, in that limit's unit.
    """
    _, hard_limit = resource.getrlimit(what)
    if hard_limit != resource.RLIM_INFINITY:
        most = min(most, hard_limit)
    resource.setrlimit(what, (most, most))


def main(size: int) -> None:
    """Read a tokenizer of ``size`` bytes from standard input, and write JSON to standard output.

    The JSON has the facts of :func:`tried`, or the key ``fault`` with a message. Limits
    on the time and memory of this process are lowered first. They grow with the size.
    """
    _limit(resource.RLIMIT_CPU, SECONDS + size // 2**20)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, _megabytes(size) * 2**20)
    answer: dict[str, Any]
    try:
        answer = tried(sys.stdin.buffer.read())
    except BaseException as error:  # a panic of Rust is no Exception
        answer = {"fault": printable(" ".join(str(error).split()))[:300].rstrip(".")}
    sys.stdout.write(json.dumps(answer))
