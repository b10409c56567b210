"""Values that annotations of fields and parameters forbid, for tests of all refusals of a kind at once."""

import math
from typing import Literal, get_args, get_origin, get_type_hints

from fl_core.errors import Bound, OneOf

NUMBERS = (-1, 0, 0.5, 1, 1.5, 2, math.nan, math.inf)


def forbidden(stated):
    """Yield each name with values of another type, of another name, or out of bounds."""
    for name, hint in get_type_hints(stated, include_extras=True).items():
        parts = (hint, *get_args(hint))
        kinds = {getattr(part, "__origin__", part) for part in parts}
        stated_bounds = [b for part in parts for b in getattr(part, "__metadata__", ())]
        named = any(isinstance(bound, OneOf) for bound in stated_bounds)
        if named or Literal in {get_origin(part) for part in parts}:
            yield name, "no such name"
        elif kinds & {int, float} and str not in kinds:
            yield name, "x"
        elif bool in kinds:
            yield name, 7
        for bound in stated_bounds:
            for number in NUMBERS if isinstance(bound, Bound) else ():
                if not math.isfinite(number) or not bound.holds(number):
                    yield name, number
