"""Request bodies: read with a limit, decoded strictly, checked by a model; every fault is a 4xx with a name."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect

from sparring.errors import GatewayError

__all__ = ["MAX_BODY_BYTES", "MAX_TOP_K", "Body", "read_body"]

MAX_BODY_BYTES = 16 * 2**20
MAX_TOP_K = 2**31 - 1  # what engines hold
_BODY_TIMEOUT_S = 60.0

_Model = TypeVar("_Model", bound="Body")


class Body(BaseModel):
    """Fields that a route reads. Others are accepted and ignored, as the imitated APIs do."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())


async def read_body(request: Request, model: type[_Model], *, invalid_status: int = 400) -> _Model:
    """
    Raises:
        GatewayError: 408 a body that does not come, 499 a client that goes away with it, 413 one over `MAX_BODY_BYTES`,
            400 one that is not UTF-8 or not a JSON object, `invalid_status` one whose fields are missing or of a wrong
            type.
    """
    document = _decode(await _read(request))
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = _path(first["loc"]) or "body"
        raise GatewayError(f"{where}: {first['msg']}", status=invalid_status, param=where) from error


async def _read(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0")
    parts: list[bytes] = []
    size = int(announced) if announced.isdecimal() else 0
    if size <= MAX_BODY_BYTES:
        size = 0
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for part in request.stream():
                    size += len(part)
                    if size > MAX_BODY_BYTES:
                        break
                    parts.append(part)
        except ClientDisconnect as error:
            raise GatewayError("the client disconnected", status=499) from error
        except TimeoutError as error:
            raise GatewayError(f"the request body did not come within {_BODY_TIMEOUT_S:g} s", status=408) from error
    if size > MAX_BODY_BYTES:
        raise GatewayError(f"the request body is over {MAX_BODY_BYTES} bytes", status=413)
    return b"".join(parts)


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        document = json.loads(raw.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
        if b"\\ud" in raw or b"\\uD" in raw:  # lone surrogates, which no answer could repeat
            document = json.loads(json.dumps(document, ensure_ascii=False).encode("utf-8", "replace"))
    except UnicodeDecodeError as error:
        raise GatewayError(f"the request body is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise GatewayError(f"the request body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise GatewayError(f"the request body is a JSON object, not a {type(document).__name__}")
    return document


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text[:40])


def _path(parts: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
