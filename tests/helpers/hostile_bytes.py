"""Hostile requests below and beside the fields of JSON: framing, encodings, headers, depth.

`hostile_requests` has wrong values of fields; here are bodies in other encodings, compressed, in
broken chunks or drop by drop, numbers and keys as JSON writes them in odd ways, deep and wide
documents, images and arrays that the model does not take, paths out of the adapters' root, query
strings, and headers that contradict each other. By hand, for more than the tests send:

    python -m tests.helpers.hostile_bytes http://127.0.0.1:8000 SEED COUNT
"""

from __future__ import annotations

import base64
import copy
import gzip
import json
import sys
import zlib
from random import Random
from typing import Any

from tests.helpers.hostile_requests import GOOD, Hostile, attack, http

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""Routes that a server with `--lora-root` has."""
_ROUTES = sorted(GOOD)
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_PATHS = (
    "..", ".", "/", "/etc", "/etc/passwd", "../../etc", "a/../../..", "link", "link/..", "a\x00b",
    "~", "~root", "$HOME", "file:///etc", "http://127.0.0.1:1/x", "//a", "a" * 5000, "é😀", " ",
    "a/" * 2000, "\\\\a\\b", "adapter", "adapter/", "./adapter", "adapter/../adapter", "-rf",
    "%2e%2e", "fifo", "empty", "/proc/self/environ", "/dev/zero", "\ud800",
)  # fmt: skip
_NUMBERS = (
    b"-0", b"-0.0", b"0e0", b"1e0", b"1E+2", b"1.0", b"3.0000000000000001", b"1e-400", b"00",
    b"+1", b"1_000", b".5", b"5.", b"0x10", b"1e", b"- 1", b"1e309", b"-1e309", b"1" * 400,
    b"0." + b"3" * 400, b"Infinity", b"-Infinity", b"NaN", b"nan", b"1n", b'"1"', b'"1e2"',
    b'" 1 "', b'"0x1"', b"tru", b"undefined", b"18446744073709551616", b"9007199254740993",
    b"-9223372036854775809",
)  # fmt: skip
_OF_NUMBERS = (
    "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "logprobs", "min_tokens", "min_p",
    "presence_penalty", "repetition_penalty", "truncate_prompt_tokens", "best_of", "priority",
    "stream", "echo", "num_speculative_tokens", "prompt_logprobs", "length_penalty",
)  # fmt: skip
_CHUNKED = (
    b"0\r\n\r\n",
    b"5\r\n{}\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\n{}\r\n",
    b"-1\r\n{}\r\n0\r\n\r\n",
    b"2;a=b\r\n{}\r\n0\r\nx: y\r\n\r\n",
    b"2\n{}\n0\n\n",
    b"0x2\r\n{}\r\n0\r\n\r\n",
    b"2" + b";x" * 40_000 + b"\r\n{}\r\n0\r\n\r\n",
    b"\r\n\r\n",
    b"2\r\n{}\r\n0\r\n" + b"t: u\r\n" * 3000 + b"\r\n",
    b"1\r\n{\r\n" * 3000 + b"0\r\n\r\n",
)
_FRAMING = (
    (b"content-length: 5", b"content-length: 6"),
    (b"content-length: 5, 5",),
    (b"content-length: -1",),
    (b"content-length: +2",),
    (b"content-length: 0x2",),
    (b"content-length: 2_0",),
    (b"content-length: 99999999999999999999",),
    (b"content-length: 1073741824",),
    (b"content-length:",),
    (b"content-length : 2",),
    (b"transfer-encoding: gzip, chunked",),
    (b"transfer-encoding: identity",),
    (b"transfer-encoding: chunked", b"transfer-encoding: chunked"),
    (b"transfer-encoding: chunked", b"content-length: 2"),
    (b"transfer-encoding: xchunked",),
)
_HEADERS = (
    b"content-type: application/xml",
    b"content-type: application/json\r\ncontent-type: text/xml",
    b"content-type: ",
    b"content-type: application/json; charset=\xff",
    b"content-encoding: br",
    b"content-encoding: zstd, gzip",
    b"accept: application/xml",
    b"accept-encoding: " + b"gzip, " * 5000,
    b"authorization: Basic Og==",
    b"authorization:",
    b"authorization: Bearer a\r\nauthorization: Bearer b",
    b"cookie: " + b"a=b; " * 5000,
    b"host: a\r\nhost: b",
    b"host: \xff\xfe",
    b"upgrade: websocket\r\nconnection: upgrade",
    b"upgrade: h2c\r\nhttp2-settings: AAAA",
    b"x-forwarded-for: " + b"1.1.1.1, " * 2000,
    b"x-forwarded-proto: javascript",
    b"x-request-id: a\x00b",
    b"x-request-id: \t",
    b"x y: z",
    b": z",
    b"nothing",
    b" folded: line",
    b"a: b\r\n folded",
    b"range: bytes=0-",
    b"if-none-match: *",
    b"origin: null",
    b"access-control-request-method: POST",
    b"expect: 200-ok",
    b"te: trailers, deflate;q=9",
    b"anthropic-beta: " + b"x," * 3000,
    b"x-request-timeout-ms: 99999999999999999999",
    b"x-request-timeout-ms: 1e3",
    b"traceparent: 00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-ff",
)
_TARGETS = (
    "/v1/completions?", "/v1/completions?a=b#c", "/v1/completions/", "//v1/completions",
    "/v1/../v1/completions", "/v1%2fcompletions", "/V1/Completions", "http://a/v1/completions",
    "/v1/completions?" + "a=b&" * 3000, "/v1/completions;x", "*", "v1/completions",
    "/v1/completions%00", "/v1/models/" + "a" * 9000, "/v1/models/..%2f..%2fetc",
    "/v1/models?limit=x", "/v1/responses/resp_" + "a" * 3000,
    "/v1/responses/x/input_items?limit=-1",
    "/v1/responses/x/input_items?limit=abc&order=up&after=%ff", "/v1/responses/x?stream=maybe",
    "/status.json?since=nan", "/status.json?since=-1e400", "/status.json?since=a&since=b",
    "/tokenizer_info?x", "/metrics?name=%00", "/health?\x7f", "/load?a[]=b", "/version/..;/",
    "/.git/config", "/docs/../../etc/passwd", "/page/..%5c..%5cetc", "/v1/embeddings/x",
    "/favicon.ico", "/robots.txt",
)  # fmt: skip
_PICTURES = (
    "data:image/png;base64,", "data:image/png;base64,!!!!", "data:,x",
    "data:image/svg+xml;base64,PHN2Zz4=",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgABhqAAAYagCAYAAAA=", "file:///etc/passwd",
    "ftp://a/b", "http://169.254.169.254/latest", "https://127.0.0.1:1/x.png", "https://a@b:c/",
    "javascript:1", "", "data:text/html;base64," + "A" * 60_000, "data:image/gif;base64,R0lGODlh",
    "//a/b", "https://[::1]/x",
)  # fmt: skip


def odd(rng: Random, fields: dict[str, list[str]]) -> Hostile:
    """Something that a client should not do."""
    makers = [_encoded, _framed, _number, _keys, _deep, _headers, _target, _media, _drops, _wide]
    if LOAD in fields:
        makers.append(_adapter)
    return rng.choice(makers)(rng)


def _good(rng: Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice(_ROUTES)
    return path, copy.deepcopy(GOOD[path])


def _encoded(rng: Random) -> Hostile:
    """A good body in another encoding, with a header that says so, says otherwise, or nothing."""
    path, body = _good(rng)
    text = json.dumps(body)
    name = rng.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "utf-7", "cp037", "utf-8-sig"))
    packed = rng.choice(("", "", "gzip", "deflate", "twice", "bomb", "cut"))
    data = text.encode(name)
    match packed:
        case "gzip":
            data = gzip.compress(text.encode())
        case "deflate":
            data = zlib.compress(text.encode())
        case "twice":
            data = gzip.compress(gzip.compress(text.encode()))
        case "bomb":
            data = gzip.compress(b" " * (1 << 26))
        case "cut":
            data = gzip.compress(text.encode())[:-9]
    headers = [b"content-type: application/json; charset=" + name.encode()]
    if packed:
        headers = [b"content-encoding: " + rng.choice((b"gzip", b"deflate", b"identity", b"x"))]
    return Hostile(f"{path}: {name} {packed}", http(path, data, *rng.choice((headers, []))))


def _framed(rng: Random) -> Hostile:
    """A body whose length is wrong, or said in two ways."""
    path, body = _good(rng)
    if rng.random() < 0.5:
        chunks = rng.choice(_CHUNKED)
        lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: a", b"transfer-encoding: chunked",
                 b"connection: close", b"content-type: application/json"]  # fmt: skip
        data = b"\r\n".join(lines) + b"\r\n\r\n" + chunks
        waits = len(chunks) < 9 or chunks.startswith(b"ff")  # the server, for the rest
        return Hostile(f"{path}: chunks {chunks[:30]!r}", data, leaves=0 if waits else None)
    framing = rng.choice(_FRAMING)
    version = rng.choice((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"))
    lines = [b"POST %s %s" % (path.encode(), version), b"host: a", b"connection: close", *framing,
             b"content-type: application/json"]  # fmt: skip
    data = b"\r\n".join(lines) + b"\r\n\r\n" + json.dumps(body).encode()
    # A length beyond the body: the server waits for the rest, and the client leaves.
    waits = any(b"999" in line or b"1073741824" in line for line in framing)
    return Hostile(f"{path}: {framing!r} {version!r}", data, leaves=0 if waits else None)


def _number(rng: Random) -> Hostile:
    """A number as JSON has it in odd ways, or as it does not have it."""
    path, body = _good(rng)
    name, number = rng.choice(_OF_NUMBERS), rng.choice(_NUMBERS)
    body.pop(name, None)
    data = json.dumps(body).encode()[:-1] + b', "%s": %s}' % (name.encode(), number)
    return Hostile(f"{path}: {name}={number[:40]!r}", http(path, data))


def _keys(rng: Random) -> Hostile:
    """Keys twice, empty, strange or of another case."""
    path, body = _good(rng)
    pairs = [(key, json.dumps(value)) for key, value in body.items()]
    match rng.choice(("twice", "twice other", "case", "strange", "many")):
        case "twice":
            pairs *= 2
        case "twice other":
            pairs += [(rng.choice(pairs)[0], rng.choice(("null", "[]", '"x"', "{}", "-1")))]
        case "case":
            pairs = [(key.upper(), value) for key, value in pairs]
        case "strange":
            keys = (
                "",
                " ",
                "\x00",
                "__class__",
                "__proto__",
                "a" * 9000,
                "\ud800",
                "é",
                "max-tokens",
            )
            pairs += [(rng.choice(keys), "1")]
        case _:
            pairs += [(f"x{number}", "1") for number in range(20_000)]
    data = ", ".join(f"{json.dumps(key)}: {value}" for key, value in pairs)
    return Hostile(f"{path}: keys {data[:90]}", http(path, f"{{{data}}}".encode()))


def _deep(rng: Random) -> Hostile:
    """A value that nests deep, where the field takes any value, an object or a list."""
    path = rng.choice(_GENERATING)
    body = copy.deepcopy(GOOD[path])
    depth = rng.choice((30, 200, 900, 5000, 100_000))
    name = rng.choice((
        "metadata", "chat_template_kwargs", "response_format", "tools", "messages", "stop", "input",
        "structured_outputs", "logit_bias", "prompt", "extra_body", "system", "text", "tool_choice",
    ))  # fmt: skip
    left, right = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"type":"array","items":', "}]"),
                              ('{"type":"object","properties":{"a":', "}}")))  # fmt: skip
    body.pop(name, None)
    deep = left * depth + rng.choice(("1", "null", '""', "{}")) + right * depth
    data = f'{json.dumps(body)[:-1]}{", " if body else ""}"{name}": {deep}}}'
    return Hostile(f"{path}: {name} {depth} deep {left!r}", http(path, data.encode()))


def _headers(rng: Random) -> Hostile:
    path, body = _good(rng)
    headers = rng.sample(_HEADERS, rng.choice((1, 1, 2)))
    return Hostile(f"{path}: {headers!r:.120}", http(path, json.dumps(body).encode(), *headers))


def _target(rng: Random) -> Hostile:
    target = rng.choice(_TARGETS)
    method = rng.choice((b"POST", b"GET", b"GET", b"DELETE", b"PRI", b"CONNECT", b"\xff", b""))
    body = b"" if method != b"POST" else json.dumps(GOOD["/v1/completions"]).encode()
    return Hostile(f"{method!r} {target[:80]}", http(target, body, method=method))


def _media(rng: Random) -> Hostile:
    """Images, audio and arrays, of which the demo takes none."""
    uri = rng.choice(_PICTURES)
    begins = (b"", b"PK\x03\x04", b"\x80\x02.", b"\x93NUMPY\x01\x00")
    array = base64.b64encode(rng.choice(begins)).decode()
    sound = {"type": "input_audio", "input_audio": {"data": array, "format": 3}}
    path, part = rng.choice((
        ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": uri}}),
        ("/v1/chat/completions", {"type": "image_url", "image_url": uri}),
        ("/v1/chat/completions", sound),
        ("/v1/chat/completions", {"type": "video_url", "video_url": {"url": uri}}),
        ("/v1/chat/completions", {"type": "file", "file": {"file_data": uri, "filename": "../a"}}),
        ("/v1/responses", {"type": "input_image", "image_url": uri, "detail": "x"}),
        ("/v1/responses", {"type": "input_file", "file_url": uri}),
        ("/v1/messages", {"type": "image", "source": {"type": "url", "url": uri}}),
        ("/v1/messages", {"type": "image", "source": {"type": "base64", "data": array}}),
        ("/v1/messages", {"type": "document", "source": {"type": "text", "data": [array]}}),
    ))  # fmt: skip
    body: dict[str, Any] = copy.deepcopy(GOOD[path])
    turns = [{"role": "user", "content": [part] * rng.choice((1, 1, 300))}]
    body["input" if path == "/v1/responses" else "messages"] = turns
    if rng.random() < 0.3:
        path = rng.choice(("/v1/completions", "/v1/chat/completions"))
        value = rng.choice((array, [array], {"dtype": "float64", "data": array}, 5, None, [[0.5]]))
        body = {**copy.deepcopy(GOOD[path]), "prompt_embeds": value, "multi_modal_data": value}
    return Hostile(f"{path}: {json.dumps(body)[:200]}", http(path, json.dumps(body).encode()))


def _drops(rng: Random) -> Hostile:
    """A good request that arrives a few bytes at a time, whole or not."""
    path, body = _good(rng)
    data = http(path, json.dumps(body).encode())
    if rng.random() < 0.4:
        return Hostile(f"{path}: drops and leaves", data[: rng.randrange(1, len(data))], leaves=0,
                       drops=True)  # fmt: skip
    return Hostile(f"{path}: drops", data, frozenset(body), drops=True)


def _wide(rng: Random) -> Hostile:
    """Long lists of what a route takes one or a few of."""
    path = rng.choice(_GENERATING)
    body: dict[str, Any] = copy.deepcopy(GOOD[path])
    many = rng.choice((50, 1000, 5000))
    turn = {"role": "user", "content": "a"}
    tool = body.get("tools", [{"type": "function", "function": {"name": "f"}}])[0]
    name, value = rng.choice((
        ("messages", [turn] * many),
        ("messages", [{"role": "system", "content": ""}] * many),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}] * many}]),
        ("tools", [tool] * many),
        ("tools", [copy.deepcopy(tool) | {"description": "a" * 60_000}] * 20),
        ("input", [turn] * many),
        ("stop_sequences", ["a"] * many),
        ("stop", [chr(33 + number) for number in range(90)]),
        ("prompt", ["a"] * many),
        ("prompt", [[5] * 20] * many),
        ("metadata", {str(number): "x" for number in range(many)}),
        ("include", ["x"] * many),
        ("modalities", ["text"] * many),
    ))  # fmt: skip
    body[name] = value
    known = frozenset(body) | GOOD[path].keys()
    return Hostile(f"{path}: {name} x {many}", http(path, json.dumps(body).encode()), known)


def _adapter(rng: Random) -> Hostile:
    """An adapter that is none, whose folder is not below the root, or whose name is strange."""
    path = rng.choice((LOAD, LOAD, LOAD, UNLOAD))
    names = ("a", "", "demo", "a" * 5000, "\x00", "../x", None, 3, [], "é", " ", "\ud800")
    body: dict[str, Any] = {"lora_name": rng.choice(names)}
    if path == LOAD:
        body["lora_path"] = rng.choice((*_PATHS, None, 5, ["a"], {}))
        if rng.random() < 0.3:
            body["load_inplace"] = rng.choice((True, None, "yes", 1))
        if rng.random() < 0.2:
            body["base_model_name"] = rng.choice((3, "a" * 9000, "../x"))
    elif rng.random() < 0.5:
        body["lora_int_id"] = rng.choice((-1, 2**70, "a", None, 0.5))
    return Hostile(f"{path}: {body!r:.150}", http(path, json.dumps(body).encode()), frozenset(body))


if __name__ == "__main__":
    counts, _ = attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), make=odd, loud=True)
    print(dict(counts))
