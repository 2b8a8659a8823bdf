"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import logging

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from hetero_llm.server.context import Context
from hetero_llm.server.errors import ApiError, required
from hetero_llm.server.request_parsing import read_json

logger = logging.getLogger(__name__)


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """`load_inplace`: the adapter may replace one of this name."""

    lora_name: str | None = None
    lora_path: str | None = None
    base_model_name: str | None = None
    load_inplace: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """`lora_int_id` is vLLM's and not used: names are unique."""

    lora_name: str | None = None
    lora_int_id: int | None = None


class AdapterEndpoints:
    """Handlers of one server."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter"""
        body, _ = await read_json(request, LoadAdapterRequest, self._context.settings)
        if not body.lora_name:
            raise required("lora_name")
        if not body.lora_path:
            raise required("lora_path")
        self._context.check_open()
        await self._context.adapters.add(
            body.lora_name,
            body.lora_path,
            body.base_model_name,
            replaces=bool(body.load_inplace),
        )
        logger.info("adapter %r was loaded", body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter"""
        body, _ = await read_json(request, UnloadAdapterRequest, self._context.settings)
        if not body.lora_name:
            raise required("lora_name")
        self._context.check_open()
        if not await self._context.adapters.remove(body.lora_name):
            reason = f"the adapter {body.lora_name[:128]!r} does not exist here"
            raise ApiError(404, "model_not_found", reason, param="lora_name")
        logger.info("adapter %r was unloaded", body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
