"""Where keys, regions and endpoints of object stores come from: for models that are read and for outputs that are written.

The library of a store (botocore, google-auth, azure-identity) looks in its standard places, and obstore is given what it
finds, so both have the same access. Where only obstore is installed, it looks into the environment itself. Nothing found
here is logged, shown or stored.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from weightsmith._files.remote.addresses import is_loopback
from weightsmith._files.remote.environment import check_network, check_text, check_url

GOOGLE_ENDPOINT = "https://storage.googleapis.com"
_GOOGLE_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_AZURE_SCOPE = "https://storage.azure.com/.default"
_AWS_MINUTES = 10
"""After so long obstore asks botocore again, which renews keys from then on until they expire."""
_EMULATED_ACCOUNT = "devstoreaccount1"
_EMULATED_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Public: the key of every Azurite."""


@dataclass(frozen=True, slots=True)
class Azure:
    """An account. key, sas: at most one is given, and with neither an identity of Azure is used."""

    account: str
    endpoint: str
    key: str = field(default="", repr=False)
    sas: str = field(default="", repr=False)


def settings(scheme: str) -> tuple[str, dict[str, Any]]:
    """The endpoint of a store, "" if it is the usual one, and what obstore is told beyond what it finds in the environment.

    Raises ParameterError for variables of the environment that no client can use.
    """
    check_network(scheme)
    return {"s3": _s3, "gs": _google, "az": _azure}[scheme]()


def allows_http(endpoint: str) -> bool:
    """Plain http is for stores on this machine, and for those whose user says so."""
    host = endpoint.partition("://")[2]
    return is_loopback(host) or _is_set("AWS_ALLOW_HTTP")


def _first(*names: str) -> str:
    """The first of these variables of the environment that is set; "" if none is. Raises ParameterError for a broken one."""
    return next((check_text(name, os.environ[name]) for name in names if os.environ.get(name)), "")


def _endpoint(*names: str) -> str:
    """`_first` of variables that hold an address."""
    return next((check_url(name, os.environ[name]) for name in names if os.environ.get(name)), "")


def _is_set(name: str) -> bool:
    return _first(name).lower() in ("1", "true")


# ---- S3


def aws_endpoint(session: Any = None) -> str:
    """The endpoint that the environment, or the profile of a session of botocore, names; "" for Amazon's."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"):
        _first(name)  # botocore and obstore read them
    endpoint = _endpoint("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if endpoint or session is None:
        return endpoint
    return check_url("endpoint_url in the AWS profile", str(session.get_scoped_config().get("endpoint_url", "")))


def aws_region(session: Any) -> str:
    """The region that the environment, or the profile of a session of botocore, names; "" if none."""
    return _first("AWS_REGION") or str(session.get_config_variable("region") or "")


def _s3() -> tuple[str, dict[str, Any]]:
    aws_endpoint()  # before botocore sees what it reads
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return aws_endpoint(), {}
    session = botocore.session.get_session()
    try:
        endpoint, region = aws_endpoint(session), aws_region(session)
        keys = None if _is_set("AWS_SKIP_SIGNATURE") else session.get_credentials()
    except BotoCoreError:  # no such profile: obstore says which keys it lacks
        return aws_endpoint(), {}
    config = {name: value for name, value in (("region", region), ("endpoint", endpoint)) if value}
    if keys is None:
        return endpoint, {"config": config}

    def fresh_keys() -> dict[str, Any]:
        now = keys.get_frozen_credentials()
        end = datetime.now(UTC) + timedelta(minutes=_AWS_MINUTES)
        for name, value in (("access key", now.access_key), ("secret access key", now.secret_key), ("token", now.token or "")):
            check_text(f"{name} of AWS", value)
        return {"access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token, "expires_at": end}

    return endpoint, {"config": config, "credential_provider": fresh_keys}


# ---- Google Cloud Storage


def google_endpoint() -> str:
    """The endpoint that the environment names; "" for Google's."""
    for name in ("GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"):
        if endpoint := _first(name).rstrip("/"):
            return check_url(name, endpoint if "://" in endpoint else f"http://{endpoint}")
    return ""


def _google_is_open() -> bool:
    """No keys are sent: to an emulator, and for what everyone may read."""
    return bool(_first("STORAGE_EMULATOR_HOST")) or _is_set("GOOGLE_SKIP_SIGNATURE")


def google_credentials() -> Any:
    """Credentials as google-auth finds them. Raises ImportError without it, its errors or ValueError."""
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.oauth2.service_account import Credentials

    if _google_is_open():
        return AnonymousCredentials()
    if text := _first("GOOGLE_SERVICE_ACCOUNT_KEY"):
        return Credentials.from_service_account_info(json.loads(text), scopes=_GOOGLE_SCOPES)
    if path := _first("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"):
        return Credentials.from_service_account_file(path, scopes=_GOOGLE_SCOPES)
    return google.auth.default(scopes=_GOOGLE_SCOPES)[0]


def _google() -> tuple[str, dict[str, Any]]:
    endpoint = google_endpoint()
    config: dict[str, Any] = {"base_url": endpoint} if endpoint else {}
    if _google_is_open():  # obstore signs what it writes all the same
        return endpoint, {"config": config | {"skip_signature": True}, "credential_provider": _no_token}
    try:
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import Request
    except ImportError:
        return endpoint, {"config": config}
    try:
        credentials = google_credentials()
    except (GoogleAuthError, ValueError, OSError):  # obstore says what it lacks
        return endpoint, {"config": config}

    def fresh_token() -> dict[str, Any]:
        credentials.refresh(Request())
        return {"token": credentials.token, "expires_at": credentials.expiry and credentials.expiry.replace(tzinfo=UTC)}

    return endpoint, {"config": config, "credential_provider": fresh_token}


def _no_token() -> dict[str, Any]:
    return {"token": "none", "expires_at": None}


# ---- Azure


def azure() -> Azure | None:
    """The account that the environment names, by its connection string or its name; None if there is none."""
    fields = dict(part.split("=", 1) for part in _first("AZURE_STORAGE_CONNECTION_STRING").split(";") if "=" in part)
    emulated = _is_set("AZURE_STORAGE_USE_EMULATOR") or bool(fields.get("UseDevelopmentStorage"))
    if emulated:
        host = _endpoint("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000"
        return Azure(_EMULATED_ACCOUNT, f"{host.rstrip('/')}/{_EMULATED_ACCOUNT}", _EMULATED_KEY)
    account = fields.get("AccountName") or _first("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    protocol, suffix = fields.get("DefaultEndpointsProtocol", "https"), fields.get("EndpointSuffix", "core.windows.net")
    endpoint = check_url("AZURE_STORAGE_CONNECTION_STRING", fields.get("BlobEndpoint", ""))
    endpoint = endpoint or _endpoint("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    if not account and not endpoint:
        return None
    endpoint = (endpoint or check_url("AZURE_STORAGE_ACCOUNT_NAME", f"{protocol}://{account}.blob.{suffix}")).rstrip("/")
    account = account or endpoint.partition("://")[2].partition(".")[0]
    if fields:
        return Azure(account, endpoint, fields.get("AccountKey", ""), fields.get("SharedAccessSignature", "").lstrip("?"))
    key = _first("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_KEY")
    return Azure(account, endpoint, key, "" if key else _first("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN").lstrip("?"))


def azure_identity() -> Any:
    """The identity of the user or the machine, of azure-identity. Raises ImportError without it."""
    from azure.identity import DefaultAzureCredential

    return DefaultAzureCredential()


def azure_token(identity: Any) -> Any:
    """A token of an identity, for stores: `token` and `expires_on`, in seconds since the epoch."""
    return identity.get_token(_AZURE_SCOPE)


def _azure() -> tuple[str, dict[str, Any]]:
    access = azure()
    if access is None:
        return "", {}
    keys = {"account_key": access.key, "sas_key": access.sas}
    config = {"account_name": access.account, "endpoint": access.endpoint} | {name: key for name, key in keys.items() if key}
    if access.key or access.sas or _is_set("AZURE_SKIP_SIGNATURE") or _first("AZURE_STORAGE_TOKEN"):
        return access.endpoint, {"config": config}
    try:
        identity = azure_identity()
    except ImportError:
        return access.endpoint, {"config": config}

    def fresh_token() -> dict[str, Any]:
        now = azure_token(identity)
        return {"token": now.token, "expires_at": datetime.fromtimestamp(now.expires_on, UTC)}

    return access.endpoint, {"config": config, "credential_provider": fresh_token}
