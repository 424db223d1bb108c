"""Step frames: all frames that one engine step has for one gateway, and the decoding that survives a broken one."""

import msgspec
from msgspec import Struct

from protocol import wire
from protocol.errors import ProtocolError
from protocol.messages import Frame, UnreadableFrame


class StepFrame(Struct, frozen=True, array_like=True):
    """All frames that one engine step has for one gateway: one NATS message."""

    v: int
    worker_id: str
    frames: tuple[Frame, ...]


class _SealedStep(Struct, array_like=True):
    """A StepFrame whose frames have not been decoded."""

    v: int
    worker_id: str
    frames: tuple[msgspec.Raw, ...]


class _FrameHead(Struct, array_like=True):
    tag: str
    request_id: str
    attempt: int
    seq: int


_step_decoder = msgspec.msgpack.Decoder(StepFrame)
_sealed_step_decoder = msgspec.msgpack.Decoder(_SealedStep)
_frame_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_frame_head_decoder = msgspec.msgpack.Decoder(_FrameHead)


def decode_step(payload: bytes, sender: str = "") -> StepFrame:
    """Decode a StepFrame; a frame that cannot be read becomes an ``UnreadableFrame``.

    ``sender``: the worker whose own subject it came on; empty: it came on one that all may publish to. Raises
    ProtocolError, also where the frames are in another worker's name.
    """
    try:
        step = _step_decoder.decode(payload)
    except wire.UNDECODABLE:
        step = _decode_apart(payload)
    wire.check_version(step.v)
    if sender and sender != step.worker_id:
        raise ProtocolError(f"{sender} sends frames in the name of {step.worker_id}")
    return step


def _decode_apart(payload: bytes) -> StepFrame:
    wire.check_array_version(payload)
    step = wire.decode(_sealed_step_decoder, payload)
    return StepFrame(step.v, step.worker_id, tuple(_decode_frame(bytes(frame)) for frame in step.frames))


def _decode_frame(frame: bytes) -> Frame | UnreadableFrame:
    try:
        return _frame_decoder.decode(frame)
    except wire.UNDECODABLE as error:
        head = wire.decode(_frame_head_decoder, frame, "frame")
        return UnreadableFrame(head.request_id, head.attempt, head.seq, head.tag, str(error))
