"""Security of a server: a shared token and TLS."""

from __future__ import annotations

import hmac
import ipaddress
import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from gpuprof.domain.file_access import refuse_pipe
from gpuprof.errors import InputError

TOKEN_VARIABLE = "GPUPROF_TOKEN"
#: Minimum length in characters.
_LEAST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Security:
    """The token required of clients, and the server's certificate."""

    #: Required of clients (``Authorization: Bearer …``); empty: no authentication.
    token: str = field(default="", repr=False)
    context: ssl.SSLContext | None = None  #: TLS context with certificate and key, for HTTP/1.1; None: no encryption.
    #: ``certificate``, ``private_key``: PEM; empty: there are none.
    certificate: str = ""
    private_key: str = field(default="", repr=False)

    def admits(self, authorization: bytes) -> bool:
        """Return whether the value of an Authorization header holds the token, in constant time."""
        if not self.token:
            return True
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self.token.encode())


#: Neither authentication nor encryption.
OPEN = Security()


def server_security(token_file: Path | None, certificate: Path | None, key: Path | None) -> Security:
    """Read a server's token and certificate.

    ``token_file``: None: the token is in the environment (``GPUPROF_TOKEN``), or there is none; ``certificate`` and
    ``key``: PEM files: the chain, and its private key without a passphrase. Raises `InputError` when a file cannot be
    read, the two do not match, or all users can read or write the token or the key.
    """
    token = read_token(token_file)
    os.environ.pop(TOKEN_VARIABLE, None)  # workers do not need the token
    if certificate is None and key is None:
        return Security(token)
    if certificate is None or key is None:
        raise InputError("a certificate and its key go together", "give --tls-cert and --tls-key")
    text, _ = _text(certificate), _text(key)
    return Security(token, _server_context(certificate, key), text, _secret_text(key))


def _server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a TLS context with the certificate, which negotiates HTTP/1.1."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password="")  # without it OpenSSL would ask at the terminal
    except (ssl.SSLError, ValueError) as error:
        raise InputError(
            f"{certificate} and {key} are not a certificate and its key (PEM): {_reason(error)}",
            "give files that begin with -----BEGIN",
        ) from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def client_context(authority: Path | None) -> ssl.SSLContext:
    """Return a client's TLS context, which trusts ``authority`` (PEM) or, by default, the system's certificates.

    Raises `InputError` when the file holds no certificate.
    """
    if authority is None:
        return ssl.create_default_context()
    text = _text(authority)
    try:
        context = ssl.create_default_context(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(
            f"{authority} holds no certificate (PEM): {_reason(error)}", "give a file that begins with -----BEGIN"
        ) from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a server's own certificate will do
    return context


def read_token(file: Path | None) -> str:
    """Return the token in ``file``, else the token of the environment, else an empty token.

    Raises `InputError` when the file cannot be read or all users can read or write it, or the token is too short or
    has invisible characters.
    """
    where = str(file) if file is not None else f"${TOKEN_VARIABLE}"
    token = (_secret_text(file) if file is not None else os.environ.get(TOKEN_VARIABLE, "")).strip()
    if file is None and not token:
        return ""
    if len(token) < _LEAST_TOKEN or not all("!" <= letter <= "~" for letter in token):
        raise InputError(
            f"the token in {where} must be {_LEAST_TOKEN} visible ASCII characters or more, without spaces",
            "openssl rand -hex 32 makes one",
        )
    return token


def check_exposure(host: str, security: Security, insecure: bool) -> None:
    """Refuse an address that other machines can reach, without a token and TLS, unless ``insecure``.

    Raises `InputError` with the missing options.
    """
    if insecure or is_loopback(host):
        return
    missing = [label for label, setting in (("a token", security.token), ("TLS", security.context)) if not setting]
    if missing:
        raise InputError(
            f"{host} can be reached from other machines, which needs {' and '.join(missing)}",
            "--token-file FILE --tls-cert FILE --tls-key FILE; or --insecure",
        )


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, with an unknown address
        return False


def _text(path: Path) -> str:
    try:
        return refuse_pipe(path).read_text(encoding="ascii")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"{path} is not text", "a token is a line of ASCII, a certificate or key PEM") from None


def _secret_text(path: Path) -> str:
    """Return the text of a file; refuse files that every user of the machine may read or replace."""
    text = _text(path)
    mode = path.stat().st_mode
    for bit, verb in ((stat.S_IROTH, "read"), (stat.S_IWOTH, "write")):
        if mode & bit:
            raise InputError(f"every user of this machine can {verb} {path}", f"chmod 600 {path}")
    return text


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error) or "no PEM in it"
