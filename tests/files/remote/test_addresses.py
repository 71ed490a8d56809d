"""What an address may be, and what it may not."""

from __future__ import annotations

import pytest

from weightsmith._base.errors import NotFound, ParameterError
from weightsmith._files.remote.addresses import Address, is_file_name, parse_address


@pytest.mark.parametrize(
    ("text", "address", "url"),
    [
        ("s3://models/a b/c/", Address("s3", "models", "a b/c"), "s3://models/a%20b/c/x.json"),
        ("https://example.org:8443/m", Address("https", "example.org:8443", "m"), "https://example.org:8443/m/x.json"),
        ("https://example.org", Address("https", "example.org", ""), "https://example.org/x.json"),
        ("http://127.0.0.1:80/m", Address("http", "127.0.0.1:80", "m"), "http://127.0.0.1:80/m/x.json"),
        ("gs://bucket", Address("gs", "bucket", ""), "gs://bucket/x.json"),
        ("hf://org/name", Address("hf", "", "org/name"), "hf:///org/name/x.json"),
    ],
)
def test_addresses(text: str, address: Address, url: str) -> None:
    assert parse_address(text) == address
    assert address.url("x.json") == url
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "http://example.org/m",
        "http://127.0.0.1.example.org/m",
        "https://user:pass@example.org/m",
        "https://example.org/m?token=s3cret",
        "https://example.org/m#x",
        "s3://models/../other",
        "s3://models//x",
        "s3:///models",
        "s3://a b/x",
        "https://exa mple/x",
        "https://example.org/a\\b",
        "https://example.org/a\nb",
        "hf://org",
        "hf://org/name/folder",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse_address(text)
    assert "pass" not in str(caught.value).replace("password", "")
    assert "s3cret" not in str(caught.value)


def test_other_schemes_are_named() -> None:
    with pytest.raises(NotFound, match="addresses of the scheme 'ftp' are not read") as caught:
        parse_address("ftp://example.org/x")
    assert "Use one of hf://, https://, s3://, gs://, az://" in str(caught.value)


@pytest.mark.parametrize("name", ["", "/x", "x/", "a/../b", "C:x", "a\x00b", "a\x1b[2J", ".."])
def test_names_that_are_other_places(name: str) -> None:
    assert not is_file_name(name)
