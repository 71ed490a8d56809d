"""Variables of the environment that libraries cannot use: one error, which names the variable and shows no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_help import LINEAR, make_models, run_process
from weightsmith._base.errors import ParameterError
from weightsmith._files.remote.addresses import check_hub, check_network
from weightsmith._files.remote.stores import settings


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "ALL_PROXY", "HF_ENDPOINT"])
@pytest.mark.parametrize(
    "value", ["http://host:99999", "http://host:port", "ftp://host", "http://", "http://[::1", "http://host\r\n", "http://h h"]
)
def test_addresses_that_no_client_can_use(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ParameterError) as caught:
        check_hub()
    assert caught.value.finding.where == name
    assert caught.value.finding.fix


@pytest.mark.parametrize("value", ["http://user:secret@host:3128", "host:3128", "socks5://127.0.0.1:1080", "https://host", ""])
def test_proxies_that_clients_use(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", value)
    check_network()


def test_no_password_of_a_proxy_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@host:99999")
    with pytest.raises(ParameterError) as caught:
        check_network()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE", "SSL_CERT_DIR"])
def test_certificates_that_are_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(ParameterError) as caught:
        check_network("s3")
    assert caught.value.finding.where == name
    (tmp_path / "none").mkdir()
    if name != "SSL_CERT_FILE":
        check_network("s3")


def test_certificates_of_another_store_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/none")
    check_hub()
    check_network("gs")


@pytest.mark.parametrize("name", ["HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"])
@pytest.mark.parametrize("value", ["abc", "-5", "0", "1.5"])
def test_timeouts_that_are_no_seconds(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ParameterError, match="is no number of seconds"):
        check_hub()


STORES = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY", "STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_CONNECTION_STRING",
    ),
}


@pytest.mark.parametrize(("scheme", "name"), [(scheme, name) for scheme, names in STORES.items() for name in names])
def test_a_line_break_in_a_credential_names_the_variable_and_not_its_value(
    scheme: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scheme == "az":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(name, "s3cr3t\r\nX-Header: 1")
    with pytest.raises(ParameterError) as caught:
        settings(scheme)
    assert (caught.value.finding.where, "s3cr3t" in str(caught.value)) == (name, False)
    assert "holds a line break" in str(caught.value)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "address"),
    [
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:99999", "s3://bucket/model"),
        ("AWS_SECRET_ACCESS_KEY", "x\r\ny", "s3://bucket/model"),
        ("HTTPS_PROXY", "foo://x", "https://127.0.0.1/model"),
        ("HF_ENDPOINT", "http://host:99999", "hf://org/name"),
        ("HF_HUB_ETAG_TIMEOUT", "abc", "hf://org/name"),
        ("SSL_CERT_FILE", "/no/such/file", "https://127.0.0.1/model"),
    ],
)
def test_a_command_names_the_variable_and_prints_json(name: str, value: str, address: str, tmp_path: Path) -> None:
    variables = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", name: value}
    fresh = "TIMEOUT" in name  # huggingface_hub reads it when it is imported
    ran = run_process("inspect", address, "--json", env=variables, cwd=tmp_path, fresh=fresh)
    assert (ran.code, f'"where": "{name}"' in ran.out) == (1, True), ran
    assert "Traceback" not in ran.err
    assert "panicked" not in ran.err


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({"NUMBA_NUM_THREADS": "0"}, 1, "NUMBA_NUM_THREADS"),
        ({"NUMBA_OPT": "x"}, 0, "NUMBA_OPT: numba does not understand 'x', and ignores it"),
        pytest.param({"OMP_NUM_THREADS": "abc"}, 0, "", marks=pytest.mark.sweep),
        pytest.param({"TMPDIR": "/no/such/folder"}, 0, "", marks=pytest.mark.sweep),
        pytest.param({"XDG_CACHE_HOME": "/proc/none", "NUMBA_CACHE_DIR": ""}, 0, "", marks=pytest.mark.sweep),
        ({"HOME": "/proc/none", "XDG_CACHE_HOME": ""}, 0, ""),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else None,
)
def test_a_merge_of_local_models(variables: dict[str, str], code: int, words: str, tmp_path: Path) -> None:
    make_models(tmp_path)
    (tmp_path / "linear.yml").write_text(LINEAR)
    ran = run_process("merge", "linear.yml", "out", env=variables, cwd=tmp_path, fresh=True)
    assert (ran.code, words in ran.err) == (code, True), ran
    assert "Traceback" not in ran.err
