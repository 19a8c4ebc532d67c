"""The frames that cross a stream: two lengths, a header, a payload. Headers are JSON, those of reports are not."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

VERSION = 4
"""Of what the frames of the two sides say; a sandbox server may be of another release."""
LENGTHS = struct.Struct(">II")
_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes one for every frame
_decode = json.JSONDecoder().raw_decode
OUTCOMES = ("exit", "signal", "timeout", "oom", "output_limit", "cancelled")
REPORT = struct.Struct(">IBBhQQddQII")
"""What became of a call, quick to write and to read: id, place in OUTCOMES, flags, exit code or signal, bytes of
stdout and of stderr, seconds, seconds of CPU, KiB of memory at most, processes killed for want of memory, and left
behind. With the flag CUT four numbers follow: the bytes there are of begin and end of each output."""
CUTS = struct.Struct(">4I")
SIGNAL, NO_CODE, LOST, CUT = 1, 2, 4, 8
"""Flags: the code is a signal's number, is nothing; the session is over; some output was left out."""
MAX_HEADER, MAX_PAYLOAD = 1 << 22, 1 << 28

Header = dict[str, Any]


def pack(header: Header, payload: bytes = b"") -> bytes:
    """One frame."""
    return pack_raw(_encode(header).encode(), payload)


def pack_raw(head: bytes, payload: bytes) -> bytes:
    """One frame whose header is no JSON."""
    return LENGTHS.pack(len(head), len(payload)) + head + payload


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[Header, bytes]]:
        """Take the next bytes and return the frames that are now complete.

        Raises:
            ValueError: the bytes are not frames.
        """
        buffer = self._buffer
        if not buffer and len(data) >= 8:  # most often it is one whole frame
            head, payload = LENGTHS.unpack_from(data)
            if 8 + head + payload == len(data) and head <= MAX_HEADER and payload <= MAX_PAYLOAD:
                return [(decode(data[8 : 8 + head]), data[8 + head :])]
        buffer += data
        frames = []
        while len(buffer) >= 8:
            head, payload = LENGTHS.unpack_from(buffer)
            if head > MAX_HEADER or payload > MAX_PAYLOAD:
                raise ValueError(f"frame of {head}+{payload} bytes")
            end = 8 + head + payload
            if len(buffer) < end:
                break
            header = decode(buffer[8 : 8 + head])
            frames.append((header, bytes(buffer[8 + head : end])))
            del buffer[:end]
        return frames


def decode(head: bytes | bytearray) -> Header:
    """A header; that of a report as {"id", "report"}. Raises ValueError where it is none."""
    if len(head) >= REPORT.size and head[0] != 0x7B:
        number, outcome = REPORT.unpack_from(head)[:2]
        if outcome >= len(OUTCOMES):
            raise ValueError(f"a report with outcome {outcome}")
        return {"id": number, "report": head}
    text = head.decode()
    header, end = _decode(text)
    if end != len(text) or type(header) is not dict:
        raise ValueError(f"a header that is no JSON object: {text[:80]!r}")
    return header


def read_exactly(fd: int, count: int) -> bytes:
    """`count` bytes of a blocking descriptor, none beyond them; EOFError when it ends before."""
    data = os.read(fd, min(count, 1 << 20)) if count else b""
    parts, left = [data], count - len(data)
    while left:
        if not data:
            raise EOFError("stream ended inside a frame")
        data = os.read(fd, min(left, 1 << 20))
        parts.append(data)
        left -= len(data)
    return data if len(parts) == 1 else b"".join(parts)


def read_frame(fd: int) -> tuple[bytes, bytes]:
    """Header, as bytes, and payload of the next frame of a blocking descriptor; EOFError when it ends."""
    head, payload = LENGTHS.unpack(read_exactly(fd, LENGTHS.size))
    body = read_exactly(fd, head + payload)
    return body[:head], body[head:]


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
