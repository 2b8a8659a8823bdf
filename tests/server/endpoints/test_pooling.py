"""The routes of models that pool, over real engines, and their refusal for models that generate."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_llm.engine.async_engine import AsyncLLMEngine
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.server.settings import Limits, ServerSettings
from tests.pooling.tiny_pooling import make_pooling_checkpoint, reference, text_of
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.usefixtures("forked_engines")

TEXTS = [text_of(length, length) for length in (1, 3, 40, 17, 100, 5)]
CLOSE = 2e-6
EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embedder")
    prompts = {"prompts": {"query": "w7 w8 "}, "default_prompt_name": None}
    return make_pooling_checkpoint(
        made, "BertModel", pooling="mean", prompts=prompts, changes={"is_matryoshka": True}
    )


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Served]:
    settings = ServerSettings(limits=Limits(pooling_inputs=300))
    engine = AsyncLLMEngine({"model": str(folder), "device": "cpu"}, served_names=("bge",))
    with serving(engine, settings) as served:
        yield served
        served.engine.process.kill()


@pytest.fixture(scope="module")
def crosser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("crosser")
    name, labels = (
        "BertForSequenceClassification",
        {"id2label": {0: "fits"}, "label2id": {"fits": 0}},
    )
    make_pooling_checkpoint(folder, name, changes=labels)
    with serving(AsyncLLMEngine({"model": str(folder), "device": "cpu"})) as served:
        yield served
        served.engine.process.kill()


def vectors(answer: Any) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return np.array([one["embedding"] for one in data])


def message(answer: Any, status: int = 400) -> tuple[str, str | None]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    return error["message"], error["param"]


def test_embeddings(embedder: Served, folder: Path) -> None:
    answer = embedder.post(EMBEDDINGS, {"input": TEXTS, "model": "bge", "user": "u"})
    np.testing.assert_allclose(vectors(answer), reference(folder, TEXTS, "mean"), atol=CLOSE)
    body = answer.json()
    assert body["object"] == "list" and body["model"] == "bge" and body["id"].startswith("embd-")
    assert body["data"][0]["object"] == "embedding"
    tokens = sum(len(text.split()) + 2 for text in TEXTS)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    assert body["usage"] == {**usage, "prompt_tokens_details": None}


def test_base64_has_the_bits_of_float(embedder: Served) -> None:
    floats = vectors(embedder.post(EMBEDDINGS, {"input": TEXTS}))
    form = {"encoding_format": "base64", "embed_dtype": "float32", "endianness": "little"}
    answer = embedder.post(EMBEDDINGS, {"input": TEXTS, **form})
    texts = [one["embedding"] for one in answer.json()["data"]]
    bits = np.array([np.frombuffer(base64.b64decode(text), "<f4") for text in texts])
    np.testing.assert_array_equal(bits, floats.astype(np.float32))


def test_forms_of_input_and_options(embedder: Served, folder: Path) -> None:
    ids = [[2, 6, 3], [2, 7, 8, 3]]
    single = vectors(embedder.post(EMBEDDINGS, {"input": ids[0]}))
    several = vectors(embedder.post(EMBEDDINGS, {"input": [*ids, "w0"]}))
    np.testing.assert_allclose(several[[0, 2]], np.repeat(single, 2, 0), atol=CLOSE)
    whole = reference(folder, TEXTS[2:3], "mean", normalize=False)
    cut = vectors(embedder.post(EMBEDDINGS, {"input": TEXTS[2], "dimensions": 8}))
    np.testing.assert_allclose(cut[0], whole[0, :8] / np.linalg.norm(whole[0, :8]), atol=CLOSE)
    plain = vectors(embedder.post(EMBEDDINGS, {"input": TEXTS[2], "normalize": False}))
    np.testing.assert_allclose(plain, whole, atol=1e-5)
    long = {"input": text_of(4000), "truncate_prompt_tokens": -1}
    wanted = reference(folder, [text_of(4000)], "mean", truncation=True, max_length=128)
    np.testing.assert_allclose(vectors(embedder.post(EMBEDDINGS, long)), wanted, atol=CLOSE)
    query = vectors(embedder.post(EMBEDDINGS, {"input": "w0", "prompt_name": "query"}))
    np.testing.assert_allclose(query, reference(folder, ["w7 w8 w0"], "mean"), atol=CLOSE)
    spaces = {"input": ["w0 w1", "w0" + " " * 4000 + "w1"]}  # which are no tokens
    same = vectors(embedder.post(EMBEDDINGS, spaces))
    np.testing.assert_allclose(same[0], same[1], atol=CLOSE)
    bare = embedder.post(EMBEDDINGS, {"input": "w0 w1", "add_special_tokens": False})
    assert bare.json()["usage"]["prompt_tokens"] == 2


def test_clients_at_once(embedder: Served, folder: Path) -> None:
    wanted = reference(folder, TEXTS, "mean")

    def ask(place: int) -> np.ndarray:
        return vectors(embedder.post(EMBEDDINGS, {"input": TEXTS[place % len(TEXTS)]}))[0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(48)))
    np.testing.assert_allclose(found, np.tile(wanted, (8, 1)), atol=CLOSE)


def test_the_openai_client(embedder: Served, folder: Path) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="-", max_retries=0) as client:
        for form in ({}, {"encoding_format": "float"}):  # without one it asks for base64
            made = client.embeddings.create(model="bge", input=TEXTS, **form)
            found = np.array([one.embedding for one in made.data])
            np.testing.assert_allclose(found, reference(folder, TEXTS, "mean"), atol=CLOSE)
        made = client.embeddings.create(model="bge", input="w0", dimensions=4)
        assert len(made.data[0].embedding) == 4 and made.usage.total_tokens == 3
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="bge", input="w0", dimensions=64)
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="w0")


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (EMBEDDINGS, {}, ("input is required", "input")),
        (EMBEDDINGS, {"input": []}, ("input must not be empty", "input")),
        (EMBEDDINGS, {"input": ""}, ("input='': is empty", "input")),
        (EMBEDDINGS, {"input": ["w0", ""]}, ("prompt 1: input='': is empty", "input")),
        (EMBEDDINGS, {"input": {"a": 1}}, ("input: must be a string or a list, not an object",
                                           "input")),
        (EMBEDDINGS, {"input": ["w0", 3]}, ("input[1]: must be a text or a list of token ids",
                                            "input[1]")),
        (EMBEDDINGS, {"input": [[1], []]}, ("input[1] must not be empty", "input[1]")),
        (EMBEDDINGS, {"input": [1, 99]}, ("input=99: is outside the vocabulary (0 to 95)",
                                          "input")),
        (EMBEDDINGS, {"input": [[5], [-1]]},
         ("prompt 1: input=-1: is outside the vocabulary (0 to 95)", "input")),
        (EMBEDDINGS, {"input": text_of(127)},
         ("input='129 tokens': exceeds max_model_len (128); truncate_prompt_tokens=-1 cuts it",
          "input")),
        (EMBEDDINGS, {"input": "w" * 6000},
         ("input: 6000 characters are more than 128 tokens, the model's limit; "
          "truncate_prompt_tokens=-1 cuts it", "input")),
        (EMBEDDINGS, {"input": ["w0"] * 301},
         ("input: 301 entries, at most 300 are accepted", "input")),
        (EMBEDDINGS, {"input": "w0", "embed_dtype": "float16"},
         ("embed_dtype: another type of vectors than float32 is not available", "embed_dtype")),
        (EMBEDDINGS, {"input": "w0", "endianness": "big"},
         ("endianness: another order of bytes than little-endian is not available", "endianness")),
        (EMBEDDINGS, {"input": "w0", "encoding_format": "hex"},
         ("encoding_format='hex': must be 'float' or 'base64'", "encoding_format")),
        (EMBEDDINGS, {"input": "w0", "dimensions": 0},
         ("dimensions=0: must be an integer of at least 1", "dimensions")),
        (EMBEDDINGS, {"input": "w0", "dimensions": 33},
         ("dimensions=33: the model's embeddings have 32 entries", "dimensions")),
        (EMBEDDINGS, {"input": "w0", "truncate_prompt_tokens": 129},
         ("truncate_prompt_tokens=129: must be at most max_model_len (128)",
          "truncate_prompt_tokens")),
        (EMBEDDINGS, {"input": "w0", "use_activation": True},
         ("use_activation=True: is for classifiers", "use_activation")),
        (EMBEDDINGS, {"input": "w0", "prompt_name": "x"},
         ("prompt_name='x': the model's prompts are 'query'", "prompt_name")),
        (EMBEDDINGS, {"messages": [{"role": "user", "content": "a"}]},
         ("messages: an embedding of a conversation is not available", "messages")),
        (EMBEDDINGS, {"input": "w0", "priority": 1},
         ("priority: priority scheduling is not available", "priority")),
        ("/classify", {"input": "w0"},
         ("task='classify': this model serves 'embed' and 'score'; a model for classes has a class "
          "that ends in ForSequenceClassification", "task")),
        ("/pooling", {"input": "w0", "task": "token_embed"},
         ("task='token_embed': is not available yet; use 'embed', 'classify' or 'score'", "task")),
        ("/score", {}, ("text_1 and text_2 are required", "text_1")),
        ("/score", {"text_1": "w0"}, ("text_1: send one of these pairs of fields: text_1 and "
                                      "text_2; data_1 and data_2; queries and documents",
                                      "text_1")),
        ("/score", {"text_1": ["w0", "w1"], "text_2": ["w0"]},
         ("text_2='1 texts': must be 2, as many as text_1 has, unless that is one text", "text_2")),
        ("/score", {"text_1": "w0", "text_2": ["w0", 3]}, ("text_2[1]: must be a text",
                                                           "text_2[1]")),
        ("/rerank", {"documents": ["w0"]}, ("query is required", "query")),
        ("/rerank", {"query": "w0"}, ("documents is required", "documents")),
        ("/rerank", {"query": "w0", "documents": []}, ("documents must not be empty",
                                                       "documents")),
        ("/rerank", {"query": "w0", "documents": ["w0", {"title": "a"}]},
         ("documents[1]: must be a text", "documents[1]")),
        ("/rerank", {"query": "w0", "documents": ["w0", ""]},
         ("prompt 1: documents='': is empty", "documents")),
        ("/rerank", {"query": "", "documents": ["w0"]}, ("query='': is empty", "query")),
        ("/rerank", {"query": "w0", "documents": ["w0"], "top_n": -1},
         ("top_n=-1: must be at least 0, which is all", "top_n")),
        ("/v1/completions", {"prompt": "w0"},
         ("the model 'bge' generates no text; it serves 'embed' and 'score'", "model")),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]},
         ("the model 'bge' generates no text; it serves 'embed' and 'score'", "model")),
    ],
)  # fmt: skip
def test_bad_requests(
    embedder: Served, path: str, body: dict[str, Any], wanted: tuple[str, str]
) -> None:
    assert message(embedder.post(path, body)) == wanted


def test_scores_of_embeddings(embedder: Served, folder: Path) -> None:
    rows = reference(folder, TEXTS, "mean")
    wanted = rows @ rows[1]
    answer = embedder.post("/v1/score", {"text_1": TEXTS[1], "text_2": TEXTS}).json()
    assert [one["index"] for one in answer["data"]] == list(range(len(TEXTS)))
    np.testing.assert_allclose([one["score"] for one in answer["data"]], wanted, atol=CLOSE)
    pairs = embedder.post("/score", {"queries": TEXTS, "documents": TEXTS}).json()
    np.testing.assert_allclose([one["score"] for one in pairs["data"]], 1.0, atol=CLOSE)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"query": TEXTS[1], "documents": TEXTS, "top_n": 3}
        answer = embedder.post(path, body).json()
        order = np.argsort(-wanted)[:3]
        assert [one["index"] for one in answer["results"]] == order.tolist()
        found = [one["relevance_score"] for one in answer["results"]]
        np.testing.assert_allclose(found, wanted[order], atol=CLOSE)
        assert answer["results"][0]["document"] == {"text": TEXTS[1]}


def test_a_cross_encoder(crosser: Served) -> None:
    documents = [TEXTS[0], {"text": TEXTS[2]}, TEXTS[1]]
    body = {"query": "w5", "documents": documents, "return_documents": False}
    answer = crosser.post("/rerank", body).json()
    scores = crosser.post("/score", {"text_1": "w5", "text_2": [TEXTS[0], TEXTS[2], TEXTS[1]]})
    by_index = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [by_index[i] for i in range(3)] == [one["score"] for one in scores.json()["data"]]
    assert sorted(by_index.values(), reverse=True) == list(
        one["relevance_score"] for one in answer["results"]
    )
    assert "document" not in answer["results"][0]
    raw = crosser.post("/score", {"text_1": "w5", "text_2": TEXTS[0], "activation": False}).json()
    squeezed = 1 / (1 + np.exp(-raw["data"][0]["score"]))
    assert squeezed == pytest.approx(by_index[0], abs=1e-6)
    classes = crosser.post("/classify", {"input": ["w1", "w2 w3"]}).json()
    assert [one["label"] for one in classes["data"]] == ["fits", "fits"]
    assert classes["data"][0]["num_classes"] == len(classes["data"][0]["probs"]) == 1
    pooled = crosser.post("/pooling", {"input": ["w1", "w2 w3"]}).json()
    assert [one["data"] for one in pooled["data"]] == [one["probs"] for one in classes["data"]]
    text, param = message(crosser.post(EMBEDDINGS, {"input": "w1"}))
    assert (text, param) == ("task='embed': this model serves 'classify' and 'score'", "task")


def test_invocations_go_where_the_body_belongs(embedder: Served, crosser: Served) -> None:
    documents = {"query": "w1", "documents": ["w2", "w1 w3"]}
    for served, body, key in (
        (embedder, {"input": "w1"}, "embedding"),
        (embedder, {"input": "w1", "task": "embed"}, "data"),
        (embedder, {"text_1": "w1", "text_2": "w2"}, "score"),
        (crosser, {"data_1": "w1", "data_2": "w2"}, "score"),
        (crosser, {"input": "w1"}, "probs"),
    ):
        assert key in served.post("/invocations", body).json()["data"][0]
    assert len(crosser.post("/invocations", documents).json()["results"]) == 2
    assert "it needs query" in message(embedder.post("/invocations", {"prompt": "w1"}))[0]


def test_deadlines_metrics_and_pages(embedder: Served) -> None:
    body = {"input": [TEXTS[4]] * 300}
    late = embedder.post(EMBEDDINGS, body, headers={"x-request-timeout-ms": "1"})
    assert message(late, 504) == ("there was no result within 0.001 s", None)
    embedder.wait(lambda: embedder.engine.num_unfinished == 0)
    done = embedder.post(EMBEDDINGS, {"input": "w0"}, headers={"x-request-id": "mine"})
    assert done.status_code == 200 and done.headers["x-request-id"] == "mine"
    assert done.json()["id"] == "embd-mine"
    metrics = embedder.http.get("/metrics").text
    for line in (
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="bge"} 1.0',
        'hetero_llm:aborted_requests_total{cause="timeout"} 1.0',
    ):
        assert line in metrics
    assert "vllm:e2e_request_latency_seconds_count" in metrics
    status = embedder.http.get("/status.json").json()
    assert status["engine"]["pooling"]["tasks"] == ["embed", "score"]
    paths = embedder.http.get("/openapi.json").json()["paths"]
    assert {EMBEDDINGS, "/v1/rerank", "/v1/score", "/classify", "/pooling"} <= paths.keys()
    assert embedder.http.get("/health").status_code == 200


@pytest.mark.parametrize("path", [EMBEDDINGS, "/rerank", "/score", "/classify", "/pooling"])
def test_a_model_that_generates_refuses(server: Served, path: str) -> None:
    text, param = message(server.post(path, {}))
    assert param == "model" and text == (
        "the model 'demo' generates text and does not pool; serve an embedding model, or this one "
        "with --runner pooling"
    )
    assert path not in server.http.get("/openapi.json").json()["paths"]


def test_keys_are_needed(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(tokenizer), ServerSettings(api_keys=("key",))) as served:
        for path in (EMBEDDINGS, "/v2/rerank", "/v1/score"):
            assert served.post(path, {"input": "a"}).status_code == 401
