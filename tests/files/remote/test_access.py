"""Models are read with the access that the stores' own tools have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from weightsmith._files.remote import stores as access

HOST = "https://acc.blob.core.windows.net"
EMULATED = "devstoreaccount1"
CONNECTION = "DefaultEndpointsProtocol=https;AccountName=acc;AccountKey=a2V5==;EndpointSuffix=core.windows.net"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "AZURITE", "STORAGE_EMULATOR"))]:
        monkeypatch.delenv(name)


def test_a_profile_gives_keys_region_and_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("botocore")
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-west-3\nendpoint_url = http://127.0.0.1:9\n")
    (tmp_path / "keys").write_text("[lab]\naws_access_key_id = id\naws_secret_access_key = s3cret\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    endpoint, options = access.settings("s3")
    assert endpoint == "http://127.0.0.1:9"
    assert options["config"] == {"region": "eu-west-3", "endpoint": endpoint}
    keys = options["credential_provider"]()
    assert (keys["access_key_id"], keys["secret_access_key"], keys["token"]) == ("id", "s3cret", None)
    monkeypatch.setenv("AWS_REGION", "us-east-2")
    monkeypatch.setenv("AWS_PROFILE", "none")  # obstore is asked, and says that there are no keys
    assert access.settings("s3") == ("", {})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, ("acc", HOST, "a2V5==", "")),
        (
            {"AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint=https://acc.blob.x/;SharedAccessSignature=?sv=1&sig=a%3D"},
            ("acc", "https://acc.blob.x", "", "sv=1&sig=a%3D"),
        ),
        (
            {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ACCOUNT_KEY": "key", "AZURE_STORAGE_SAS_TOKEN": "sas"},
            ("acc", HOST, "key", ""),
        ),
        (
            {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_SAS_TOKEN": "?sas"},
            ("acc", HOST, "", "sas"),
        ),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ENDPOINT": "http://h/acc/"}, ("acc", "http://h/acc", "", "")),
        (
            {"AZURE_STORAGE_USE_EMULATOR": "true"},
            (EMULATED, f"http://127.0.0.1:10000/{EMULATED}", access._EMULATED_KEY, ""),
        ),
    ],
)
def test_accounts_of_azure(variables: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert access.azure() == (None if expected is None else access.Azure(*expected))
    assert not any(secret and secret in repr(access.azure()) for secret in (expected or ())[2:])


def test_an_identity_of_azure_gives_obstore_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Identity:
        def get_token(self, scope: str) -> Any:
            assert scope == "https://storage.azure.com/.default"
            return type("Token", (), {"token": "t0ken", "expires_on": 1_800_000_000})

    monkeypatch.setattr(access, "azure_identity", Identity)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    endpoint, options = access.settings("az")
    assert endpoint == "https://acc.blob.core.windows.net"
    token = options["credential_provider"]()
    assert (token["token"], token["expires_at"].timestamp()) == ("t0ken", 1_800_000_000)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "key")
    assert "credential_provider" not in access.settings("az")[1]


@pytest.mark.slow
def test_application_default_credentials_give_obstore_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("google.auth.transport.requests")
    from datetime import UTC, datetime

    from google.oauth2.credentials import Credentials

    path = tmp_path / "adc.json"
    user = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r", "quota_project_id": "p"}
    path.write_text(json.dumps(user))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")

    def refresh(self: Any, request: Any) -> None:
        assert self.refresh_token == "r"
        self.token, self.expiry = "t0ken", datetime(2030, 1, 1)

    monkeypatch.setattr(Credentials, "refresh", refresh)
    endpoint, options = access.settings("gs")
    assert endpoint == ""
    assert options["credential_provider"]() == {"token": "t0ken", "expires_at": datetime(2030, 1, 1, tzinfo=UTC)}


def test_an_emulator_of_google_is_sent_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9023")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/none")
    endpoint, options = access.settings("gs")
    assert endpoint == "http://127.0.0.1:9023"
    assert options["config"] == {"base_url": endpoint, "skip_signature": True}
    assert options["credential_provider"]() == {"token": "none", "expires_at": None}  # obstore asks for one when it writes


@pytest.mark.parametrize(
    ("endpoint", "allowed"),
    [("http://127.0.0.1:9", True), ("http://store.example", False), ("https://store.example", False), ("", False)],
)
def test_plain_http_is_for_this_machine(endpoint: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert access.allows_http(endpoint) == allowed
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert access.allows_http(endpoint)
