"""What calls between processes carry, as bytes: Ray hands bytes on as they are and takes anything else through cloudpickle."""

from __future__ import annotations

import pickle
from typing import Any


def to_bytes(value: Any) -> bytes:
    """A value as bytes, for a call that would spend more on its arguments than on what it does with them."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def from_bytes(data: bytes) -> Any:
    """The value again; for bytes that another process of the run made, and no others."""
    return pickle.loads(data)
