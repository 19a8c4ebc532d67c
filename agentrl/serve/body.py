"""Read the body of a request, within limits of size and time."""

from __future__ import annotations

import asyncio
import zlib

from starlette.requests import Request

from agentrl.serve.api_errors import ApiError

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


async def body_within(request: Request, limit: int) -> bytes | None:
    """The body as it was sent; None as soon as it has more than `limit` bytes."""
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > limit:
            return None
    return bytes(found)


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The body, unpacked if it is compressed; `limit` holds for both forms.

    Raises:
        ApiError: it is too large, arrives too slowly, or is compressed in an unknown format or damaged.
    """
    too_large = ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    try:
        async with asyncio.timeout(timeout_s):
            packed = await body_within(request, limit)
    except TimeoutError:
        text = f"The request body took longer than {timeout_s:g} s."
        raise ApiError(408, text, code="request_timeout", headers={"Connection": "close"}) from None
    if packed is None:
        raise too_large
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return packed
    if encoding not in ("gzip", "deflate", "x-gzip"):
        text = f"The content-encoding {encoding[:50]!r} is not supported; send gzip, deflate, or plain JSON."
        raise ApiError(415, text, code="unsupported_encoding")
    unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        data = await asyncio.to_thread(unpacker.decompress, packed, limit + 1)
    except zlib.error as e:
        raise ApiError(400, f"The request body is not valid {encoding}: {e}", code="invalid_encoding") from None
    if len(data) > limit:
        raise too_large
    if not unpacker.eof:
        raise ApiError(
            400, f"The request body is cut off: its {encoding} data has no end.", code="invalid_encoding"
        )
    return data
