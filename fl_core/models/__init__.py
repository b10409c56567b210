"""Models by name: the papers' networks, timm's, torchvision's, and any importable callable.

To add one, put a file with a function under :func:`model` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.registry import attach

if TYPE_CHECKING:
    from fl_core.models.building import (
        MODELS as MODELS,
        build as build,
        check_fit as check_fit,
        copy_user_model as copy_user_model,
        describe as describe,
        example as example,
        is_code as is_code,
        model as model,
        output_notes as output_notes,
        outputs_of as outputs_of,
    )
    from fl_core.models.papers import Layered as Layered

__getattr__, __dir__, __all__ = attach(__name__, __file__)
