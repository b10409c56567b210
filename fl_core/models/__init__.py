"""Models by name: the papers' networks, timm's, torchvision's, and any importable callable.

To add one, put a file with a function under :func:`model` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.lazy import attach

if TYPE_CHECKING:
    from fl_core.models.building import build, check_fit, copied, example
    from fl_core.models.layered import Layered
    from fl_core.models.registry import MODELS, describe, is_code, model, register

_HOMES = {
    "Layered": ".layered",
    "MODELS": ".registry",
    "build": ".building",
    "check_fit": ".building",
    "copied": ".building",
    "describe": ".registry",
    "example": ".building",
    "is_code": ".registry",
    "model": ".registry",
    "register": ".registry",
}
__all__ = ["MODELS", "Layered", "build", "check_fit", "copied", "describe", "example", "is_code", "model", "register"]
__getattr__, __dir__ = attach(__name__, _HOMES)
