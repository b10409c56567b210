"""Models as programs that run without this package or the model's code: ONNX and PyTorch's torch.export."""

from __future__ import annotations

import io
import logging
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from fl_core.errors import UsageError, needs_package

NEEDED = ("onnx", "onnxscript")


def torch_export(model: nn.Module, example: Tensor) -> bytes:
    """Return a model in evaluation mode as a .pt2 file for ``torch.export.load``. It contains no pickle.

    Args:
        example: samples [n, *shape], n at least 2. The program takes any number of them.

    Raises:
        UsageError: PyTorch cannot trace the model, or would have to write a pickle into the file.
    """
    with _explain_errors("torch.export", model):
        program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("n")},))
    program._example_inputs = None  # the only part of the file that PyTorch would pickle
    file = io.BytesIO()
    torch.export.save(program, file)
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            start = archive.read(member)[:2]
            if start == b"PK" or (start[:1] == b"\x80" and member.filename.endswith((".pt", ".pkl"))):
                raise UsageError(
                    f"the program must be without pickles; torch.export would write {member.filename}. Use safetensors."
                )
    return file.getvalue()


def onnx(model: nn.Module, example: Tensor) -> bytes:
    """Return a model in evaluation mode as an ONNX file: input ``x`` [n, *shape], output ``logits`` [n, C].

    Raises:
        UsageError: a package is not installed, or PyTorch cannot trace the model.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise needs_package(" and ".join(NEEDED), "export to ONNX", "onnx")
    with _explain_errors("ONNX", model):
        program = torch.onnx.export(
            model,
            (example,),
            input_names=["x"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("n")},),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        return program.model_proto.SerializeToString()


@contextmanager
def _explain_errors(what: str, model: nn.Module) -> Iterator[None]:
    """Turn any error of a tracer into one line, and hide its warnings and logs."""
    level = logging.getLogger("torch").level
    try:
        logging.getLogger("torch").setLevel(logging.CRITICAL)
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:  # of many types, each of PyTorch's own
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{what} must be able to follow {type(model).__name__} ({first}). Use safetensors, which holds any model."
        ) from error
    finally:
        logging.getLogger("torch").setLevel(level)
