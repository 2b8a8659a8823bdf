"""TLS flags do what they ask for, or are refused before the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_llm.cli import main
from hetero_llm.config.args import resolve_server_args
from hetero_llm.core.errors import ConfigError
from hetero_llm.server.tls import check_tls
from tests.helpers.tls import CERTIFICATE, ENCRYPTED_KEY, KEY


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {"cert": CERTIFICATE, "key": KEY, "encrypted": ENCRYPTED_KEY, "text": "no PEM"}
    texts["both"] = CERTIFICATE + KEY
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in (*texts, "missing")}


def check(files: dict[str, str], **args: Any) -> None:
    named = {name: files.get(value, value) for name, value in args.items()}
    check_tls(resolve_server_args(named))


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"ssl_cert_reqs": 0},
        {"ssl_certfile": "cert", "ssl_keyfile": "key"},
        {"ssl_certfile": "both"},
        {"ssl_certfile": "both", "ssl_ca_certs": "cert", "ssl_cert_reqs": 2},
        {"ssl_certfile": "both", "ssl_ciphers": "ECDHE+AESGCM"},
    ],
)
def test_accepted(files: dict[str, str], args: dict[str, Any]) -> None:
    check(files, **args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"ssl_cert_reqs": 2, "ssl_ca_certs": "cert"}, "ssl_ca_certs=.*needs ssl_certfile"),
        ({"ssl_cert_reqs": 1}, "ssl_cert_reqs=1: needs ssl_certfile"),
        ({"ssl_keyfile": "key"}, "ssl_keyfile=.*speaks plain HTTP"),
        ({"ssl_ciphers": "HIGH"}, "ssl_ciphers='HIGH': needs ssl_certfile"),
        ({"ssl_certfile": "both", "ssl_cert_reqs": 2}, "needs ssl_ca_certs"),
        ({"ssl_certfile": "both", "ssl_ca_certs": "cert"}, "ssl_cert_reqs=0 does not ask for"),
        ({"ssl_certfile": "cert"}, "ssl_certfile=.*cannot be used"),
        ({"ssl_certfile": "missing"}, "ssl_certfile=.*No such file"),
        ({"ssl_certfile": "text"}, "ssl_certfile=.*cannot be used"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "encrypted"}, "ssl_keyfile=.*is encrypted"),
        (
            {"ssl_certfile": "both", "ssl_ca_certs": "text", "ssl_cert_reqs": 2},
            "ssl_ca_certs=.*cannot be used",
        ),
        ({"ssl_certfile": "both", "ssl_ciphers": "none such"}, "ssl_ciphers=.*cannot be used"),
    ],
)
def test_refused(files: dict[str, str], args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(files, **args)


def test_the_command_ends_at_once(files: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--ssl-cert-reqs", "2", "--ssl-ca-certs", files["cert"]]
    assert main(["serve", "demo", "--port", "0", *words]) == 2
    assert "needs ssl_certfile" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("wrong.pem", "wrong.pem", "ssl_certfile='wrong.pem': cannot be used: "),
        ("/dev/zero", "wrong.pem", "ssl_certfile='/dev/zero': cannot be used: is a device"),
        ("wrong.pem", "nowhere", "ssl_keyfile='nowhere': cannot be used: No such file"),
    ],
)
def test_files_are_read_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: str, key: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.pem").write_text("no certificate")
    with pytest.raises(ConfigError) as caught:
        check_tls(resolve_server_args({"ssl_certfile": certificate, "ssl_keyfile": key}))
    assert str(caught.value).startswith(message)
