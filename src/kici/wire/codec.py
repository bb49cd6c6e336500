"""Frames: bytes to messages and back."""

from typing import Final, TypeVar

import msgspec

from kici.wire.messages import FRAME_BYTES_MAX, AgentMessage, CoordinatorMessage, Message

T = TypeVar("T")

_encoder: Final = msgspec.json.Encoder()
_from_agent: Final = msgspec.json.Decoder(AgentMessage)
_from_coordinator: Final = msgspec.json.Decoder(CoordinatorMessage)


class _Tag(msgspec.Struct):
    type: str


_tag: Final = msgspec.json.Decoder(_Tag)


class BadFrame(ValueError):
    """Not a message: too large, not JSON, or fields of wrong types."""


class UnknownType(ValueError):
    """A well-formed message of a type that we do not know."""

    def __init__(self, what: str) -> None:
        super().__init__(f"unknown message type {what!r}")
        self.what = what


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_from_agent(frame: bytes | str) -> AgentMessage:
    """Raises `BadFrame` or `UnknownType`."""
    return decode(_from_agent, frame)


def decode_from_coordinator(frame: bytes | str) -> CoordinatorMessage:
    """Raises `BadFrame` or `UnknownType`."""
    return decode(_from_coordinator, frame)


def decode(decoder: "msgspec.json.Decoder[T]", frame: bytes | str) -> T:
    """Any union of messages.  Raises `BadFrame` or `UnknownType`."""
    if len(frame) > FRAME_BYTES_MAX:
        raise BadFrame(f"frame of {len(frame)} bytes is over the limit of {FRAME_BYTES_MAX}")
    try:
        return decoder.decode(frame)
    except msgspec.ValidationError as error:
        if str(error).startswith("Invalid value ") and str(error).endswith("- at `$.type`"):
            raise UnknownType(_type_of(frame)) from None
        raise BadFrame(str(error)) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadFrame(str(error)) from error


def _type_of(frame: bytes | str) -> str:
    try:
        return _tag.decode(frame).type[:100]
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadFrame(str(error)) from error
