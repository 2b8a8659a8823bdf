"""Checks of the TLS flags before the model is loaded."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import ConfigError
from hetero_llm.utils.files import MIB, check_regular

_CERTIFICATE = "ssl_certfile"
_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
_MOST_FILE = 16 * MIB
_NEED_IT = ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "ssl_cert_reqs")


def check_tls(args: Mapping[str, Any]) -> None:
    """Checks that the server will do what the TLS flags ask for.

    Raises:
        ConfigError: a flag is given without a certificate, so that the server would answer
            everybody in plain HTTP; clients are to be checked, but against nothing; or a file
            cannot be used. What a pipe holds is not checked: it can be read once.
    """
    certificate = args[_CERTIFICATE]
    if certificate is None:
        for name in _NEED_IT:
            if args[name]:
                reason = "needs ssl_certfile: without a certificate the server speaks plain HTTP"
                raise ConfigError(name, args[name], reason)
        return
    wanted, authorities = args["ssl_cert_reqs"], args["ssl_ca_certs"]
    if wanted and authorities is None:
        raise ConfigError("ssl_cert_reqs", wanted, "needs ssl_ca_certs to check clients against")
    if authorities is not None and not wanted:
        reason = "is for clients' certificates, which ssl_cert_reqs=0 does not ask for"
        raise ConfigError("ssl_ca_certs", authorities, reason)
    files = {name: args[name] for name in _FILES if args[name] is not None}
    if any(Path(file).is_fifo() for file in files.values()):
        return
    for name, file in files.items():
        _used(name, file, partial(check_regular, file, most=_MOST_FILE))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def no_password() -> str:
        raise ConfigError("ssl_keyfile", args["ssl_keyfile"], "is encrypted; decrypt it first")

    _used(_CERTIFICATE, certificate, lambda: context.load_cert_chain(
        certificate, args["ssl_keyfile"], no_password
    ))  # fmt: skip
    if authorities is not None:
        _used("ssl_ca_certs", authorities, lambda: context.load_verify_locations(authorities))
    if args["ssl_ciphers"] is not None:
        ciphers = args["ssl_ciphers"]
        _used("ssl_ciphers", ciphers, lambda: context.set_ciphers(ciphers))


def _used(name: str, value: str, use: Any) -> None:
    try:
        use()
    except OSError as error:  # SSLError is one
        raise ConfigError(name, value, f"cannot be used: {error.strerror or error}") from None
