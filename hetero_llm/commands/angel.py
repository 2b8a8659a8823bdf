"""What `run` adds to the arguments that are given: Angel-vLLM's defaults and chat templates.

Its page also turns trust_remote_code on and takes float16 for every model; here both keep the
defaults of `serve`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_llm.config.angel_templates import FOLDER, TEMPLATE_ROWS, TemplateRow, find_row
from hetero_llm.config.args import Status, resolve_engine_args, spec_of
from hetero_llm.core.errors import ConfigError
from hetero_llm.utils.env import AngelNames

logger = logging.getLogger(__name__)

DEFAULTS = {"model": "/data/model", "port": 8501}
MOST_CONTEXT = 8192
_NAME = "model"
_PLATFORM_FILE = "ti_model_config.json"
_OF_THE_MODEL = (
    "model",
    "revision",
    "download_dir",
    "trust_remote_code",
    "load_format",
    "allow_pickle_weights",
    "model_impl",
    "hf_overrides",
)


def with_angels_defaults(
    engine: Mapping[str, Any], server: Mapping[str, Any], names: AngelNames
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine's and the server's arguments with what `run` adds; what is given stays.

    Raises:
        ConfigError: CONV_TEMPLATE is unknown, the template of the model is not public, or an
            argument is wrong.
        ModelLoadError: the model's configuration cannot be read.
    """
    engine, server = dict(engine), dict(server)
    if names.disable_mem_cache is not None:
        logger.warning("DISABLE_MEM_CACHE has no effect: no copy of the files is kept in memory")
    own = names.model_id or _NAME
    server.setdefault("served_model_name", list(dict.fromkeys((own, str(engine["model"])))))
    row = _row(engine, names)
    if row is not None:
        _add_row(row, engine, server, names)
    if engine.get("max_model_len") is None:
        longest = _context(engine)
        if longest > MOST_CONTEXT:
            logger.warning(
                "run serves a context of %d tokens of the model's %d; --max-model-len %d for all",
                MOST_CONTEXT,
                longest,
                longest,
            )
        engine["max_model_len"] = min(longest, MOST_CONTEXT)
    return engine, server


def _row(engine: Mapping[str, Any], names: AngelNames) -> TemplateRow | None:
    known = [name for row in TEMPLATE_ROWS for name in row.names]
    if names.conv_template is not None and names.conv_template not in known:
        raise ConfigError("CONV_TEMPLATE", names.conv_template, f"must be {', '.join(known)}")
    if names.conv_template is None and names.model_id is None:
        if Path(str(engine["model"]), _PLATFORM_FILE).exists():
            logger.warning("%s is not read: set MODEL_ID or CONV_TEMPLATE", _PLATFORM_FILE)
        return None
    return find_row(names.conv_template, names.model_id)


def _add_row(
    row: TemplateRow, engine: dict[str, Any], server: dict[str, Any], names: AngelNames
) -> None:
    name, value = ("CONV_TEMPLATE", names.conv_template)
    if value is None:
        name, value = "MODEL_ID", names.model_id
    added: list[str] = []
    if "chat_template" not in server:
        if row.unpublished:
            reason = "the conversation format of these models is not public; give --chat-template"
            raise ConfigError(name, value, reason)
        if row.template is not None:
            server["chat_template"] = str(FOLDER / row.template)
            added.append(f"--chat-template {row.template}")
    for option, wanted in row.options.items():
        if option not in engine:
            engine[option] = wanted
            added.append(f"--{option.replace('_', '-')} {wanted}")
    sampling = dict(engine.get("override_generation_config") or {})
    if row.stop_token_ids and "stop_token_ids" not in sampling:
        stops = list(row.stop_token_ids)
        engine["override_generation_config"] = {**sampling, "stop_token_ids": stops}
        added.append(f"stop_token_ids {stops}")
    if row.tool_call_parser is not None and "tool_call_parser" not in server:
        spec = spec_of("tool_call_parser")
        if spec is not None and spec.status is Status.EFFECTIVE:
            server |= {"enable_auto_tool_choice": True, "tool_call_parser": row.tool_call_parser}
            added.append(f"--tool-call-parser {row.tool_call_parser}")
        else:
            logger.warning("%s=%s: tool calling is not available yet", name, value)
    if added:
        logger.warning("%s=%s adds %s", name, value, ", ".join(added))


def _context(engine: Mapping[str, Any]) -> int:
    """The model's context length in tokens."""
    from hetero_llm.config.engine_config import EngineConfig
    from hetero_llm.engine.resolve import find_model

    given = {name: engine[name] for name in _OF_THE_MODEL if name in engine}
    load = EngineConfig.from_args(resolve_engine_args(given)).load
    return find_model(load, weights=False)[1].max_model_len
