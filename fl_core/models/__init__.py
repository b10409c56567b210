"""Models by name: the papers' networks, timm's, torchvision's, and any importable callable.

To add one, put a file with a function under :func:`model` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.lazy import attach

if TYPE_CHECKING:
    from fl_core.models.building import build as build
    from fl_core.models.building import check_fit as check_fit
    from fl_core.models.building import copied as copied
    from fl_core.models.building import example as example
    from fl_core.models.layered import Layered as Layered
    from fl_core.models.registry import (
        MODELS as MODELS,
    )
    from fl_core.models.registry import (
        describe as describe,
    )
    from fl_core.models.registry import (
        is_code as is_code,
    )
    from fl_core.models.registry import (
        model as model,
    )
    from fl_core.models.registry import (
        register as register,
    )

__getattr__, __dir__, __all__ = attach(__name__, __file__)
