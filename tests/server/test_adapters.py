"""Adapters of a server: flags, names, and what clients may load."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.config.args import resolve_server_args
from hetero_llm.core.errors import AdapterError, ConfigError, EngineDeadError
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.server.adapters import (
    LoraModule,
    ServedAdapters,
    ServedPromptAdapters,
    lora_modules_of,
    prompt_adapters_of,
)
from hetero_llm.server.serving import serve, settings_of
from hetero_llm.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine, demo_tokenizer
from tests.server.serving import LIMIT, Served, serving


def test_modules_by_name_and_as_json() -> None:
    words = ["sql=/adapters/sql=1", '{"name": "fr", "path": "/fr", "base_model_name": "b"}']
    assert lora_modules_of(words) == (
        LoraModule("sql", "/adapters/sql=1"),
        LoraModule("fr", "/fr", "b"),
    )


@pytest.mark.parametrize(
    "words",
    [["sql"], ["=path"], ["sql="], ["{"], ['{"name": "a"}'], ['{"name": "a", "path": 3}'],
     ['{"name": "a", "path": "b", "rank": 3}'], ["a=b", "a=c"],
     ['{"name": "a", "path": "b", "base_model_name": 3}'],
     ['{"name": "a", "name": "b", "path": "c"}']],
)  # fmt: skip
def test_modules_that_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"lora_modules={re.escape(repr(words[-1]))}"):
        lora_modules_of(words)


def test_json_nested_too_deeply() -> None:
    with pytest.raises(ConfigError, match="lora_modules=.*is not JSON"):
        lora_modules_of(['{"name":' * 100_000])


def test_a_module_cannot_have_the_models_name() -> None:
    with pytest.raises(ConfigError, match="lora_modules='demo': is a name of the model"):
        ServedAdapters(FakeEngine(None), [LoraModule("demo", "/a")], None, ["demo"])


def test_a_module_that_cannot_be_served_ends_the_start() -> None:
    adapters = ServedAdapters(FakeEngine(None), [LoraModule("a", "/broken")], None, ["demo"])
    with pytest.raises(ConfigError, match="lora_modules='a=/broken': .*DoRA"):
        asyncio.run(adapters.open_all())


class DeadEngine(FakeEngine):
    """An engine that died before it opened an adapter."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        raise EngineDeadError("the engine process ended")


def test_an_engine_that_dies_meanwhile_is_no_wrong_module() -> None:
    adapters = ServedAdapters(DeadEngine(None), [LoraModule("a", "/a")], None, ["demo"])
    with pytest.raises(EngineDeadError, match="the engine process ended"):
        asyncio.run(adapters.open_all())


class SlowEngine(FakeEngine):
    """An engine that opens an adapter when it is told to, and refuses a second number."""

    def __init__(self) -> None:
        super().__init__(None)
        self.may_open = asyncio.Event()
        self.known: dict[str, int] = {}

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        await self.may_open.wait()
        number = self.known.setdefault(lora_request.lora_name, lora_request.lora_int_id)
        assert number == lora_request.lora_int_id
        return await super().add_lora(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        await asyncio.sleep(0)
        return await super().remove_lora(lora_id)


def test_changes_at_the_same_time_come_one_after_the_other(tmp_path: Path) -> None:
    async def run() -> None:
        engine = SlowEngine()
        adapters = ServedAdapters(engine, [], str(tmp_path), ["demo"])

        def add(name: str, *, replaces: bool = False) -> asyncio.Task[None]:
            return asyncio.create_task(adapters.add(name, ".", None, replaces=replaces))

        same = [add("a"), add("a")]
        await asyncio.sleep(0)
        engine.may_open.set()
        first, second = await asyncio.gather(*same, return_exceptions=True)
        assert first is None and isinstance(second, AdapterError)
        assert "lora_name='a': is loaded already" in str(second)
        again, gone = add("a", replaces=True), asyncio.create_task(adapters.remove("a"))
        await asyncio.gather(again, gone)
        assert gone.result() and adapters.names() == [] and not engine.loras

    asyncio.run(run())


def test_a_name_keeps_its_number(tmp_path: Path) -> None:
    """A request may have made the engine open the adapter once more, after it was removed."""

    async def run() -> None:
        engine = SlowEngine()
        engine.may_open.set()
        adapters = ServedAdapters(engine, [], str(tmp_path), ["demo"])
        for _ in range(2):
            await adapters.add("a", ".", None, replaces=False)
            assert list(engine.loras) == [1] and engine.loras[1].load_inplace
            await adapters.remove("a")
        await adapters.add("b", ".", None, replaces=False)
        assert list(engine.loras) == [2]

    asyncio.run(run())


def test_only_folders_inside_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "in").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    engine = FakeEngine(None)
    adapters = ServedAdapters(engine, [], str(root), ["demo"])

    def add(name: str, path: str, **options: Any) -> None:
        asyncio.run(adapters.add(name, path, None, **{"replaces": False, **options}))

    for path in ("../outside", "/etc", "link", str(outside), "in/../../outside", "a\0b"):
        with pytest.raises(AdapterError, match="lora_path"):
            add("a", path)
    with pytest.raises(AdapterError, match="lora_name='demo': is a name of the model"):
        add("demo", "in")
    assert not engine.loras and adapters.names() == []
    add("a", "in")
    assert engine.loras[1].lora_path == str(root / "in")
    with pytest.raises(AdapterError, match="lora_name='a': is loaded already"):
        add("a", "in")
    add("a", str(root / "in"), replaces=True)
    assert list(engine.loras) == [1] and engine.loras[1].load_inplace
    assert asyncio.run(adapters.remove("a")) and not engine.loras
    assert not asyncio.run(adapters.remove("a"))


def test_flags() -> None:
    flags = {"lora_modules": ["a=/a"], "lora_root": "/r", "prompt_adapters": ["p=/p", "q=/q"]}
    settings = settings_of(resolve_server_args(flags))
    assert settings.prompt_adapters == (("p", "/p"), ("q", "/q"))
    assert settings.lora_modules == (LoraModule("a", "/a"),)
    assert settings.lora_root == "/r"


@pytest.fixture
def served(tmp_path: Path) -> Any:
    for name in ("one", "two", "broken"):
        (tmp_path / name).mkdir()
    settings = ServerSettings(
        lora_modules=(LoraModule("first", str(tmp_path / "one"), "parent"),),
        lora_root=str(tmp_path),
    )
    with serving(FakeEngine(demo_tokenizer()), settings) as running:
        opening = running.context.adapters.open_all()
        asyncio.run_coroutine_threadsafe(opening, running.loop).result(LIMIT)
        yield running


def ask(served: Served, model: str) -> Any:
    return served.post("/v1/completions", {"model": model, "prompt": "a b", "max_tokens": 2})


def test_the_model_of_a_request_is_an_adapter(served: Served) -> None:
    assert ask(served, "first").json()["model"] == "first"
    assert ask(served, "demo").json()["model"] == "demo"
    chat = {"model": "first", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert served.post("/v1/chat/completions", chat).json()["model"] == "first"
    names = [one and one.lora_name for one in served.engine.adapters]
    assert names == ["first", None, "first"]
    assert isinstance(served.engine.seen[0][1], Prompt)
    missing = ask(served, "second")
    assert missing.status_code == 404
    assert "available: demo, first" in missing.json()["error"]["message"]


def test_models_are_listed_with_their_parents(served: Served, tmp_path: Path) -> None:
    served.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "two"})
    cards = served.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("demo", "demo", None),
        ("first", str(tmp_path / "one"), "parent"),
        ("second", str(tmp_path / "two"), "demo"),
    ]
    assert served.http.get("/v1/models/first").json()["parent"] == "parent"


def test_loading_and_unloading(served: Served) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    answer = served.post(load, {"lora_name": "second", "lora_path": "two"})
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'second' added successfully."
    assert ask(served, "second").status_code == 200
    assert served.post(load, {"lora_name": "second", "lora_path": "two"}).status_code == 400
    again = {"lora_name": "second", "lora_path": "two", "load_inplace": True}
    assert served.post(load, again).status_code == 200
    answer = served.post(unload, {"lora_name": "second", "lora_int_id": 2})
    assert answer.text == "Success: LoRA adapter 'second' removed successfully."
    assert ask(served, "second").status_code == 404
    assert served.post(unload, {"lora_name": "second"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "two"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "../.."}, "lora_path"),
        ({"lora_name": "x", "lora_path": "broken"}, "use_dora"),
        ({"lora_name": "x" * 300, "lora_path": "two"}, "lora_name"),
        ({"lora_name": 3, "lora_path": "two"}, "lora_name"),
    ],
)
def test_bad_loads_name_the_field(served: Served, body: dict[str, Any], param: str) -> None:
    answer = served.post("/v1/load_lora_adapter", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert ask(served, "first").status_code == 200


def test_without_a_root_the_routes_do_not_exist() -> None:
    with serving(FakeEngine(None)) as running:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert running.post(path, {"lora_name": "a", "lora_path": "/a"}).status_code == 404
        assert "lora" not in str(list(running.http.get("/openapi.json").json()["paths"]))


def test_the_gauge_names_adapters(served: Served) -> None:
    figures = {"max_loras": 4, "lora_loads": 7, "lora_running/b": 2, "lora_running/a": 1}
    stats = served.engine.stats
    served.engine.stats = lambda: _with(stats(), {**figures, "lora_waiting/c": 1})
    lines = served.http.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:lora_requests_info{")]
    for label in ('max_lora="4"', 'running_lora_adapters="a,b"', 'waiting_lora_adapters="c"'):
        assert label in line
    assert any(line.startswith("hetero_llm:lora_loads_total") for line in lines)
    assert not any("lora_running" in line and "info" not in line for line in lines)


def _with(stats: Any, figures: dict[str, float]) -> Any:
    return replace(stats, metrics={**stats.metrics, **figures})


@pytest.mark.parametrize(
    ("flags", "engine_args", "reason"),
    [
        ({"lora_modules": ["a=/a"]}, {}, "lora_modules=.*needs enable_lora"),
        ({"lora_root": "/"}, {}, "lora_root='/': needs enable_lora"),
        ({"prompt_adapters": ["a=/a"]}, {}, "prompt_adapters=.*needs enable_prompt_adapter"),
        ({"lora_root": "/no/folder"}, {"enable_lora": True}, "lora_root=.*no such folder"),
    ],
)
def test_flags_that_cannot_be(
    flags: dict[str, Any], engine_args: dict[str, Any], reason: str
) -> None:
    """Before a model is loaded."""
    with pytest.raises(ConfigError, match=reason):
        serve({"model": "demo", **engine_args}, resolve_server_args(flags))


@pytest.mark.parametrize("words", [["sql"], ["=path"], ["sql="], ["a=b", "a=c"]])
def test_prompt_adapters_that_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"prompt_adapters={re.escape(repr(words[-1]))}"):
        prompt_adapters_of(words)


def test_prompt_adapters_that_end_the_start() -> None:
    engine = FakeEngine(None)
    with pytest.raises(ConfigError, match="prompt_adapters='demo': is a name of the model"):
        ServedPromptAdapters(engine, [("demo", "/a")], ["demo"])
    adapters = ServedPromptAdapters(engine, [("a", "/broken")], ["demo"])
    with pytest.raises(ConfigError, match="prompt_adapters='a=/broken': peft_type='LORA'"):
        asyncio.run(adapters.open_all())
    assert adapters.names() == []


def test_the_model_of_a_request_is_a_prompt_adapter(tmp_path: Path) -> None:
    settings = ServerSettings(prompt_adapters=(("polite", "/p"),), lora_root=str(tmp_path))
    with serving(FakeEngine(demo_tokenizer()), settings) as served:
        opening = served.context.prompt_adapters.open_all()
        asyncio.run_coroutine_threadsafe(opening, served.loop).result(LIMIT)
        assert ask(served, "polite").json()["model"] == "polite"
        assert ask(served, "demo").status_code == 200
        polite = PromptAdapterRequest("polite", 1, "/p", 5)
        assert served.engine.prompt_adapters == [polite, None]
        assert served.engine.adapters == [None, None]
        assert served.engine.opened == [polite]
        cards = served.http.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
            ("demo", "demo", None),
            ("polite", "/p", "demo"),
        ]
        taken = served.post("/v1/load_lora_adapter", {"lora_name": "polite", "lora_path": "."})
        assert "or of a prompt adapter" in taken.json()["error"]["message"]
