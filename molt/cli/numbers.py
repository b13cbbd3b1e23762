"""Numbers that verbs take as flags: each with its bounds, so that a wrong one is told before anything is read."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

Count = Annotated[int, Parameter(validator=Number(gte=1))]
"""1 or more."""
Natural = Annotated[int, Parameter(validator=Number(gte=0))]
"""0 or more."""
Size = Annotated[float, Parameter(validator=Number(gt=0))]
"""Above 0."""
Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
"""From 0 to 1."""
