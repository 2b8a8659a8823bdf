"""The small endpoints: models, tokens, health, version, load and metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hetero_llm import __version__
from hetero_llm.core.errors import EngineDeadError, EngineHungError
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.chat_requests import conversation_prompt
from hetero_llm.server.context import Context
from hetero_llm.server.errors import ApiError, required, wrong
from hetero_llm.server.metrics import CONTENT_TYPE
from hetero_llm.server.protocol import DetokenizeRequest, TokenizeRequest
from hetero_llm.server.request_parsing import read_json, refuse_unsupported
from hetero_llm.server.responses import json_response
from hetero_llm.server.tool_requests import checked_tools

_OWNER = "hetero_llm"
_ANTHROPIC = "anthropic-version"
"""The header that Anthropic's clients send with each request; the list of models, which is on
OpenAI's route, then has Anthropic's form."""


class Info:
    """Handlers of the small endpoints of one server."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def no_files(self, request: Request) -> Response:
        """/v1/files and /v1/batches, which keep users' files on the server: there are none here."""
        reason = "the server keeps no files; `hetero-llm run-batch` answers a file of requests"
        raise ApiError(404, "not_found", reason)  # clients try 501 again

    # -- models -------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        context = self._context
        cards = [self._card(name) for name in (*context.names, *context.adapter_names())]
        listed: dict[str, Any] = {"object": "list", "data": cards}
        if _ANTHROPIC in request.headers:
            shown = [_anthropic_card(card) for card in cards]
            first, last = shown[0]["id"], shown[-1]["id"]
            listed = {"data": shown, "first_id": first, "last_id": last, "has_more": False}
        return json_response(listed)

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        name = request.path_params["model"]
        self._context.model_name(name)
        card = self._card(name)
        return json_response(_anthropic_card(card) if _ANTHROPIC in request.headers else card)

    def _card(self, name: str) -> dict[str, Any]:
        context = self._context
        adapter = context.adapters.find(name)
        root, parent = context.client.info.model, None
        if adapter is not None:
            root, parent = adapter.lora_path, adapter.base_model_name or context.names[0]
        virtual = context.prompt_adapters.find(name)
        if virtual is not None:
            root, parent = virtual.prompt_adapter_local_path, context.names[0]
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": context.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": _OWNER,
            "root": root,
            "parent": parent,
            "max_model_len": context.client.info.max_model_len,
            "permission": [permission],
        }

    # -- tokens -------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: of a prompt, or of a conversation through the chat template."""
        context = self._context
        body, _ = await read_json(request, TokenizeRequest, context.settings)
        context.model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise wrong("prompt", "send either prompt or messages")
        if body.prompt is not None:
            ids = await self._encode(body)
        else:
            refuse_unsupported(body)
            tools = checked_tools(body.tools, body.tool_choice, context.settings.limits)
            prompt = await conversation_prompt(context, body, tools)
            ids = prompt.token_ids or []
        pieces = None
        if body.return_token_strs:
            pieces = self._tokenizer().hf.convert_ids_to_tokens(ids)
        return json_response(
            {
                "count": len(ids),
                "max_model_len": context.client.info.max_model_len,
                "tokens": ids,
                "token_strs": pieces,
            }
        )

    async def _encode(self, body: TokenizeRequest) -> list[int]:
        """Encodes the prompt. An empty one is allowed: only special tokens may come of it."""
        tokenizer, text = self._context.tokenizer, body.prompt or ""
        special = body.add_special_tokens is not False
        if not text:
            return self._tokenizer().encode(text, add_special_tokens=special)
        return await tokenizer.encode(text, add_special_tokens=special, truncated=True)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        context = self._context
        body, _ = await read_json(request, DetokenizeRequest, context.settings)
        context.model_name(body.model)
        if body.tokens is None:
            raise required("tokens")
        tokenizer, ids = self._tokenizer(), body.tokens
        size = context.client.info.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise wrong("tokens", f"{token} is outside the vocabulary (0 to {size - 1})")
        text = await context.tokenizer.threads.run(
            lambda: tokenizer.decode(ids, skip_special_tokens=False), size=len(ids)
        )
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: what a client needs to use the same tokenizer."""
        hf = self._tokenizer().hf
        template = self._context.settings.chat_template or getattr(hf, "chat_template", None)
        return json_response(
            {
                "tokenizer_class": type(hf).__name__,
                "vocab_size": len(hf),
                "model_max_length": self._context.client.info.max_model_len,
                "bos_token": hf.bos_token,
                "eos_token": hf.eos_token,
                "pad_token": hf.pad_token,
                "unk_token": hf.unk_token,
                "chat_template": template,
            }
        )

    def _tokenizer(self) -> Tokenizer:
        return self._context.tokenizer.require("tokenizer")

    # -- health -------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """GET /health: empty, 200 or 503; with ?verbose=1 details, which need a key."""
        if not request.query_params.get("verbose"):
            return self._empty(self.state() in ("ready", "draining"))
        state = self.state()
        stats = self._context.client.stats()
        drafts = stats.metrics.get("spec_decode_num_drafts")
        details = {
            "state": state,
            "last_step_age_ms": round(stats.last_step_age * 1e3, 1),
            "num_steps": stats.num_steps,
            "queue": stats.queue,
            "running": stats.metrics.get("num_requests_running", 0),
            "waiting": stats.metrics.get("num_requests_waiting", 0),
            "kv": stats.metrics.get("kv_cache_usage_perc", 0.0),
            "draft": None if not drafts else {"drafts": drafts},
        }
        return json_response(details, 200 if state in ("ready", "draining") else 503)

    async def live(self, request: Request) -> Response:
        """GET /live: 503 if only a restart can help."""
        return self._empty(self.state() in ("ready", "draining"))

    async def ready(self, request: Request) -> Response:
        """GET /ready: 503 if load balancers should send no requests here now."""
        return self._empty(self.state() == "ready")

    def state(self) -> str:
        """ "ready", "draining", "hung" or "dead"."""
        try:
            self._context.client.check_health()
        except EngineHungError:
            return "hung"
        except EngineDeadError:
            return "dead"
        context = self._context
        return "draining" if context.leaving or context.draining else "ready"

    def _empty(self, fine: bool) -> Response:
        return Response(status_code=200 if fine else 503)

    # -- the rest -----------------------------------------------------------------------------

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        """GET /load: the number of running generation requests."""
        return json_response({"server_load": self._context.load})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(self._context.metrics.text(), headers={"content-type": CONTENT_TYPE})


def _anthropic_card(card: dict[str, Any]) -> dict[str, Any]:
    """A model as Anthropic's clients read it."""
    created = datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created,
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }
