"""Object stores, read with the package obstore: S3 and stores with its API, GCS, Azure.

Keys, regions and endpoints are those that each store's own programs find. The object's ETag is sent as a condition with every
request.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import CheckpointError, NotFound, Unsupported, first_line
from weightsmith._base.files import show
from weightsmith._base.installation import install
from weightsmith._files.remote.addresses import Address, check_network, check_text, check_url, is_loopback
from weightsmith._files.remote.http import CHANGED_FIX, DOWNLOAD_FIX, NO_RANGES
from weightsmith._files.remote.retries import Again, lasting, no_panic, passes

if TYPE_CHECKING:
    from types import ModuleType


# ---- Where keys, regions and endpoints of object stores come from: for models that are read and for outputs that are written


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


_TIMEOUTS = {"connect_timeout": "10s", "timeout": "60s"}
_CHUNK_BYTES = 1 << 20


def obstore(where: str) -> ModuleType:
    """The package. Raises Unsupported where it is not installed."""
    try:
        import obstore as package
        import obstore.exceptions
        import obstore.store
    except ImportError:
        what = "the package obstore, which reads object stores, is not installed"
        raise Unsupported(what, where=where, fix=f"run {install('remote')}") from None
    return package


class Store:
    """A folder in an object store."""

    def __init__(self, address: Address) -> None:
        """Raises Unsupported without obstore, CheckpointError for settings that it does not accept."""
        self.where = str(address)
        self._obstore = obstore(self.where)
        endpoint, options = settings(address.scheme)
        self._endpoint = f"the endpoint {endpoint}" if endpoint else "the address"
        try:
            with no_panic():
                self._store = self._obstore.store.from_url(
                    str(address),
                    client_options={**_TIMEOUTS, "allow_http": allows_http(endpoint)},
                    retry_config={"max_retries": 0},  # retried by `retries`
                    **options,
                )
        except Exception as error:
            fix = f"check {self._endpoint} and the keys that the environment gives: see docs/remote.md"
            raise CheckpointError(f"the store cannot be opened: {first_line(error)}", where=self.where, fix=fix) from error

    def objects(self, subfolder: str = "") -> tuple[list[dict[str, Any]], list[str]]:
        """path, size and e_tag of every object of the folder itself, or of a subfolder; and its subfolders. Raises Again."""
        try:
            with no_panic():
                listing = self._obstore.list_with_delimiter(self._store, subfolder or None)
        except Exception as error:
            raise self.failure(error, self.where) from error
        return [dict(meta) for meta in listing["objects"]], [str(prefix).rstrip("/") for prefix in listing["common_prefixes"]]

    def file(self, name: str, nbytes: int, tag: str) -> StoreFile:
        """A file of the folder. tag: its ETag."""
        return StoreFile(self, name, nbytes, tag)

    def get(self, name: str, first: int, end: int, tag: str) -> Any:
        """obstore's answer to a request for a run of bytes."""
        options = {"range": (first, end), **({"if_match": tag} if tag else {})}
        with no_panic():
            return self._obstore.get(self._store, name, options=options)

    def head(self, name: str) -> Any:
        """Size and ETag of an object now."""
        with no_panic():
            return self._obstore.head(self._store, name)

    def failure(self, error: Exception, where: str) -> Exception:
        """What an exception of obstore means."""
        known = self._obstore.exceptions
        status = status_of(error)
        if isinstance(error, known.PreconditionError | known.NotModifiedError):
            return CheckpointError("the object has changed since it was first read", where=where, fix=CHANGED_FIX)
        if isinstance(error, known.NotFoundError | FileNotFoundError) or status == 404:
            return NotFound("no such object, or no such bucket", where=where, fix="Check the address.")
        if isinstance(error, known.PermissionDeniedError | known.UnauthenticatedError) or status in (401, 403):
            fix = "Check the keys, or the role, that the environment gives: see docs/remote.md."
            return CheckpointError("the store refuses access", where=where, fix=fix)
        why = f"{type(error).__name__}: {first_line(error)}"
        if "non-partial response" in str(error):
            return CheckpointError(NO_RANGES, where=where, fix=DOWNLOAD_FIX)
        if stays := lasting(error, self._endpoint):
            return CheckpointError(f"cannot be read: {stays.what}", where=where, fix=stays.fix)
        if status and not passes(status) and status >= 400:
            fix = f"Check {self._endpoint} and the keys that the environment gives: see docs/remote.md."
            return CheckpointError(f"the store refuses the request ({why})", where=where, fix=fix)
        return Again(f"the store does not answer as it should ({why})")


class StoreFile:
    """An object: `retries.Ranges`."""

    def __init__(self, store: Store, name: str, nbytes: int, tag: str) -> None:
        self.where = f"{store.where}/{name}"
        self.nbytes = nbytes
        self._store, self._name = store, name
        self.version = self._tag = _quoted(tag)

    def request(self, first: int, end: int) -> Iterator[bytes]:
        try:
            answer = self._store.get(self._name, first, end, self._tag)
            self._check(answer.meta)
            if tuple(answer.range) != (first, end):
                raise Again(f"bytes {first:,} to {end:,} were asked for, and bytes {answer.range} came")
            n_missing = end - first
            chunks = iter(answer.stream(min_chunk_size=_CHUNK_BYTES))
            while True:
                with no_panic():
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                piece = bytes(chunk)
                n_missing -= len(piece)
                if n_missing < 0:
                    raise Again(f"the answer has more than the {end - first:,} bytes that were asked for")
                yield piece
        except (Again, CheckpointError, GeneratorExit):
            raise
        except Exception as error:
            raise self._store.failure(error, self.where) from error

    def check_parts(self) -> None:
        """Every store has them."""

    def check_unchanged(self) -> None:
        try:
            meta = self._store.head(self._name)
        except Exception as error:
            raise self._store.failure(error, self.where) from error
        self._check(meta)

    def _check(self, meta: Any) -> None:
        size, tag = meta["size"], _quoted(meta.get("e_tag") or "")
        if size != self.nbytes or (tag and self._tag and tag != self._tag):
            then, now = (f"{self.nbytes:,} bytes", f"{size:,}") if size != self.nbytes else (show(self._tag), show(tag))
            what = f"the object has changed since it was first read: {then} then, {now} now"
            raise CheckpointError(what, where=self.where, fix=CHANGED_FIX)
        self._tag = self._tag or tag  # a list may lack what the object's answers have


def status_of(error: Exception) -> int:
    """The status in the text of an exception of obstore, whose errors of lists are all of one type; 0 without one."""
    status = re.search(r"(?:status(?: code)?:?|non-2xx status code:) ([0-9]{3})\b", str(error))
    return int(status[1]) if status is not None else 0


def _quoted(tag: str) -> str:
    """An ETag as answers have it: the lists of some stores leave the quotes out."""
    return tag if not tag or tag.startswith(('"', "W/")) else f'"{tag}"'
