"""What calls between processes carry, as bytes: Ray hands bytes on as they are and takes anything else through cloudpickle."""

from __future__ import annotations

import pickle
from typing import Any


def packed(value: Any) -> bytes:
    """A value as bytes, for a call that would spend more on its arguments than on what it does with them."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    """The value again; for bytes that another process of the run packed, and no others."""
    return pickle.loads(data)
