"""Certificates for tests: an authority of their own, and what it signs for the loopback."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@dataclass(frozen=True)
class Authority:
    """A certificate authority; its certificate is ``<folder>/<name>.pem``."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, folder: Path, name: str) -> Authority:
        """A new one."""
        made = cls(folder, name, ec.generate_private_key(ec.SECP256R1()))
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        made._write(name, made.key, constraints, [])
        return made

    @property
    def certificate(self) -> Path:
        """The file of the certificate that clients trust."""
        return self.folder / f"{self.name}.pem"

    def sign(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """A certificate for hosts (names or addresses), and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.IPAddress(ipaddress.ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
            for host in hosts
        ]
        self._write(name, key, x509.BasicConstraints(ca=False, path_length=None), names)
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def server(self, name: str, *hosts: str) -> ssl.SSLContext:
        """Returns a server's TLS context with a certificate for hosts."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.sign(name, *hosts))
        return context

    def _write(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        constraints: x509.BasicConstraints,
        names: list[x509.GeneralName],
    ) -> None:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(constraints, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = builder.sign(self.key, hashes.SHA256())
        (self.folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (self.folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
