"""Certificates for tests, made on the spot."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cascade.settings.config import LinkTLS

NAME = "cascade-link"
PEM = serialization.Encoding.PEM


class Authority:
    """Signs certificates, into files below ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._path = self._issue("authority.pem", self._key, 1, x509.BasicConstraints(ca=True, path_length=0))

    def sign(self, file: str, *, name: str = NAME, days: int = 1) -> LinkTLS:
        """A new key with its certificate; out of date if ``days`` are negative."""
        key, private = ec.generate_private_key(ec.SECP256R1()), self._folder / f"{file}.key"
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        path = self._issue(f"{file}.crt", key, days, x509.SubjectAlternativeName([x509.DNSName(name)]), uses)
        private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        return LinkTLS(certificate=str(path), key=str(private), authority=str(self._path))

    def _issue(self, file: str, key: Any, days: int, *extensions: x509.ExtensionType) -> Path:
        now, path = datetime.now(UTC), self._folder / file
        issuer, subject = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (self._folder.name, file))
        begin, end = sorted((now + timedelta(days=days), now - timedelta(days=2 if days < 0 else 1)))
        made = x509.CertificateBuilder().issuer_name(issuer).subject_name(issuer if key is self._key else subject)
        made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
        made = made.not_valid_before(begin).not_valid_after(end)
        for extension in extensions:
            made = made.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        path.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(PEM))
        return path
