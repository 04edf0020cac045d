"""The HTTP server's certificate from the --ssl-* flags, checked before the server listens."""

import ssl
from dataclasses import dataclass

from scheduler.config import SchedulerOptions
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Https:
    """Paths of PEM files; `cert_reqs` is 0, 1 or 2 as in the ssl module."""

    keyfile: str
    certfile: str
    ca_certs: str | None
    cert_reqs: int


def read_https(options: SchedulerOptions) -> Https | None:
    """Return the files for HTTPS, None for plain HTTP. Raises ConfigError for unusable files."""
    if options.ssl_keyfile is None or options.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            if getattr(options, name) is not None:
                given = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{given} is set, but HTTPS needs both --ssl-keyfile and --ssl-certfile")
        if options.ssl_cert_reqs != "0":
            raise ConfigError(f"--ssl-cert-reqs {options.ssl_cert_reqs} needs --ssl-keyfile and --ssl-certfile")
        return None
    if options.ssl_cert_reqs != "0" and options.ssl_ca_certs is None:
        raise ConfigError(f"--ssl-cert-reqs {options.ssl_cert_reqs} needs --ssl-ca-certs to check certificates against")
    _check(options.ssl_keyfile, options.ssl_certfile, options.ssl_ca_certs)
    return Https(options.ssl_keyfile, options.ssl_certfile, options.ssl_ca_certs, int(options.ssl_cert_reqs))


def _check(keyfile: str, certfile: str, ca_certs: str | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-certfile {certfile} with --ssl-keyfile {keyfile} cannot be used: {error}") from error
    try:
        if ca_certs is not None:
            context.load_verify_locations(ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-ca-certs {ca_certs} cannot be used: {error}") from error
