"""Frames exchanged over a stream: two lengths, a header, a payload. Headers are JSON, except those of reports."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

VERSION = 4
"""Protocol version of the frames; a sandbox server may run a different release."""
LENGTHS = struct.Struct(">II")
_encode = json.JSONEncoder(separators=(",", ":")).encode  # created once: json.dumps creates an encoder per frame
_decode = json.JSONDecoder().raw_decode
OUTCOMES = ("exit", "signal", "timeout", "oom", "output_limit", "cancelled")
REPORT = struct.Struct(">IBBhQQddQII")
"""The result of a call in a compact form: id, index in OUTCOMES, flags, exit code or signal, bytes of stdout and
of stderr, seconds, CPU seconds, peak KiB of memory, processes killed by the OOM killer, and processes left behind.
With the flag CUT four more numbers follow: the bytes of the beginning and the end of each output."""
CUTS = struct.Struct(">4I")
SIGNAL, NO_CODE, LOST, CUT = 1, 2, 4, 8
"""Flags: the code is a signal number; there is no code; the session is over; some output was dropped."""
MAX_HEADER, MAX_PAYLOAD = 1 << 22, 1 << 28

Header = dict[str, Any]


def pack(header: Header, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    return pack_raw(_encode(header).encode(), payload)


def pack_raw(head: bytes, payload: bytes) -> bytes:
    """Encode one frame whose header is not JSON."""
    return LENGTHS.pack(len(head), len(payload)) + head + payload


class FrameReader:
    """Split a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[Header, bytes]]:
        """Add the next bytes and return the frames that are now complete.

        Raises:
            ValueError: the bytes are not frames.
        """
        buffer = self._buffer
        if not buffer and len(data) >= 8:  # the common case: exactly one whole frame
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
    """Decode a header; that of a report as {"id", "report"}. Raises ValueError if it is invalid."""
    if len(head) >= REPORT.size and head[0] != 0x7B:
        number, outcome = REPORT.unpack_from(head)[:2]
        if outcome >= len(OUTCOMES):
            raise ValueError(f"a report with outcome {outcome}")
        return {"id": number, "report": head}
    text = head.decode()
    header, end = _decode(text)
    if end != len(text) or type(header) is not dict:
        raise ValueError(f"a header that is not a JSON object: {text[:80]!r}")
    return header


def read_exactly(fd: int, count: int) -> bytes:
    """Read exactly `count` bytes from a blocking descriptor; raises EOFError if it ends first."""
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
    """Read the next frame from a blocking descriptor, as header bytes and payload; EOFError if it ends first."""
    head, payload = LENGTHS.unpack(read_exactly(fd, LENGTHS.size))
    body = read_exactly(fd, head + payload)
    return body[:head], body[head:]


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
