"""Models by name: the papers' networks, timm's, torchvision's, and any importable callable.

To add one, put a file with a function under :func:`model` here.
"""

# ruff: noqa: F401 - the names below are imported on first use, by `attach`

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.lazy import attach

if TYPE_CHECKING:
    from fl_core.models.building import build, check_fit, copied, example
    from fl_core.models.layered import Layered
    from fl_core.models.registry import MODELS, describe, is_code, model, register

__getattr__, __dir__, __all__ = attach(__name__, __file__)
