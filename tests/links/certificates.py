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


class Authority:
    """Signs certificates, into files below ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        own = _certificate(self._name, self._name, self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._path = folder / "authority.pem"
        self._path.write_bytes(_pem(own.sign(self._key, hashes.SHA256())))

    def sign(self, file: str, *, name: str = NAME, days: int = 1) -> LinkTLS:
        """A new key with its certificate; out of date if ``days`` are negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file)])
        made = _certificate(self._name, subject, key.public_key(), days)
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        made = made.add_extension(uses, critical=False)
        paths = self._folder / f"{file}.crt", self._folder / f"{file}.key"
        paths[0].write_bytes(_pem(made.sign(self._key, hashes.SHA256())))
        form = serialization.PrivateFormat.PKCS8
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return LinkTLS(certificate=str(paths[0]), key=str(paths[1]), authority=str(self._path))


def _certificate(issuer: x509.Name, subject: x509.Name, key: Any, days: int = 1) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    begin, end = sorted((now + timedelta(days=days), now - timedelta(days=2 if days < 0 else 1)))
    made = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(key)
    return made.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
