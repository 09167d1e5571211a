"""Messages between a device and its child processes: a JSON header followed by bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("!I")


def pack(header: Mapping[str, object], payload: bytes = b"") -> bytes:
    """Joins a header and bytes to one message."""
    text = json.dumps(header).encode()
    return _LENGTH.pack(len(text)) + text + payload


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Splits a message of :func:`pack`.

    Raises:
        ValueError: If it is none.
    """
    if len(message) < _LENGTH.size:
        raise ValueError("message too short")
    (length,) = _LENGTH.unpack_from(message)
    header = json.loads(message[_LENGTH.size : _LENGTH.size + length])
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    return header, message[_LENGTH.size + length :]
