"""TLS: mutual on links between tiers, where both ends have a certificate of the same authority; one-sided towards clients."""

import contextlib
import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc

from cascade.errors import ConfigError
from cascade.settings.config import LinkTLS
from cascade.settings.router import ListenTLS


def check(tls: LinkTLS | ListenTLS) -> None:
    """Raise `ConfigError` if the files cannot be used. Files for links must pass a handshake with themselves."""
    server = _context(tls, ssl.PROTOCOL_TLS_SERVER)
    if isinstance(tls, ListenTLS):
        return
    server.verify_mode = ssl.CERT_REQUIRED
    try:
        _shake(_context(tls, ssl.PROTOCOL_TLS_CLIENT), server, tls.server_name)
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        raise ConfigError(
            f"link_tls.certificate is {tls.certificate!r}, which peers would refuse ({why.rstrip('.')}): "
            f"link_tls.authority must have signed it, for servers and clients and the name {tls.server_name!r}"
        ) from None


def server_credentials(tls: LinkTLS | ListenTLS) -> grpc.ServerCredentials:
    """Credentials of a server. Links require a certificate of the authority from callers, public endpoints do not.

    Changed files are reread for later connections.
    """

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        with contextlib.suppress(ConfigError):  # the files do not match yet: keep the old ones
            return configuration()
        return None

    def configuration() -> grpc.ServerCertificateConfiguration:
        pair = _read(tls, "key"), _read(tls, "certificate")
        return grpc.ssl_server_certificate_configuration([pair], _read(tls, "authority") if mutual else None)

    mutual = isinstance(tls, LinkTLS)
    # None keeps the old ones, which the stubs do not know
    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, mutual)  # type: ignore[arg-type]


def channel(address: str, options: Sequence[tuple[str, object]], tls: LinkTLS | None) -> grpc.aio.Channel:
    """A channel to a replica; its certificate must be for ``tls.server_name``, not its address. Raises `ConfigError`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(_read(tls, "authority"), _read(tls, "key"), _read(tls, "certificate"))
    named = [*options, ("grpc.ssl_target_name_override", tls.server_name)]
    return grpc.aio.secure_channel(address, credentials, options=named)


def _context(tls: LinkTLS | ListenTLS, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context, section = ssl.SSLContext(protocol), _section(tls)
    for field in ("certificate", "key"):
        _read(tls, field)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{section}.certificate {tls.certificate!r} and {section}.key {tls.key!r} are not a pair in PEM: {error}"
        ) from None
    if isinstance(tls, LinkTLS):
        _read(tls, "authority")
        try:
            context.load_verify_locations(tls.authority)
        except ssl.SSLError as error:
            raise ConfigError(f"link_tls.authority is {tls.authority!r}, which has no certificates in PEM: {error}") from None
    return context


def _read(tls: LinkTLS | ListenTLS, field: str) -> bytes:
    path = getattr(tls, field)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{_section(tls)}.{field} is {path!r}, which cannot be read: {error.strerror or error}") from None


def _section(tls: LinkTLS | ListenTLS) -> str:
    return "link_tls" if isinstance(tls, LinkTLS) else "router.listen.tls"


def _shake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """Perform a handshake in memory; raises `ssl.SSLError`."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)
