"""Frames of the worker link: bytes to messages.  Written by `wire.codec.encode`, as all messages are."""

from typing import Final

import msgspec

from kici.wire.codec import decode
from kici.wire.worker_messages import WorkerMessage, WorkerOrder

_from_worker: Final = msgspec.json.Decoder(WorkerMessage)
_orders: Final = msgspec.json.Decoder(WorkerOrder)


def decode_from_worker(frame: bytes | str) -> WorkerMessage:
    """Raises `BadFrame` or `UnknownType`."""
    return decode(_from_worker, frame)


def decode_order(frame: bytes | str) -> WorkerOrder:
    """Raises `BadFrame` or `UnknownType`."""
    return decode(_orders, frame)
