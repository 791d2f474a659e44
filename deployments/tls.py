"""Mutual TLS on the links between tiers: both ends show a certificate of the same authority."""

import contextlib
import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc

from cascade.config import LinkTLS
from cascade.errors import ConfigError


def check(tls: LinkTLS) -> None:
    """Shake hands with ourselves; raises `ConfigError` for whatever would keep this process and its peers apart."""
    for field in ("certificate", "key", "authority"):
        _read(tls, field)
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    for context in (client, server):
        try:
            context.load_verify_locations(tls.authority)
        except ssl.SSLError as error:
            raise ConfigError(f"link_tls.authority is {tls.authority!r}, which has no certificates in PEM: {error}") from None
        try:
            context.load_cert_chain(tls.certificate, tls.key)
        except ssl.SSLError as error:
            raise ConfigError(
                f"link_tls.certificate {tls.certificate!r} and link_tls.key {tls.key!r} are no pair in PEM: {error}"
            ) from None
    try:
        _shake(client, server, tls.server_name)
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        raise ConfigError(
            f"link_tls.certificate is {tls.certificate!r}, which peers would refuse ({why.rstrip('.')}): "
            f"link_tls.authority must have signed it, for servers and clients and the name {tls.server_name!r}"
        ) from None


def server_credentials(tls: LinkTLS) -> grpc.ServerCredentials:
    """Let in who has a certificate of the authority. Files that change are read again for later connections."""

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        with contextlib.suppress(ConfigError):  # files that are just being exchanged: as before
            return configuration()
        return None

    def configuration() -> grpc.ServerCertificateConfiguration:
        pair = _read(tls, "key"), _read(tls, "certificate")
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=_read(tls, "authority"))

    # None means: as before, which the stubs do not know
    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, True)  # type: ignore[arg-type]


def channel(address: str, options: Sequence[tuple[str, object]], tls: LinkTLS | None) -> grpc.aio.Channel:
    """To a replica, which shows a certificate for ``tls.server_name`` whatever its address is; raises `ConfigError`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(_read(tls, "authority"), _read(tls, "key"), _read(tls, "certificate"))
    named = [*options, ("grpc.ssl_target_name_override", tls.server_name)]
    return grpc.aio.secure_channel(address, credentials, options=named)


def _read(tls: LinkTLS, field: str) -> bytes:
    path = getattr(tls, field)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"link_tls.{field} is {path!r}, which cannot be read: {error.strerror or error}") from None


def _shake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """Join both in memory; raises `ssl.SSLError`."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)
