"""Which store an address is in."""

from __future__ import annotations

from weightsmith._outputs.bucket.client import Bucket
from weightsmith._outputs.bucket.prefix import Prefix


def open_bucket(address: Prefix) -> Bucket:
    """The bucket of an address. Sends nothing.

    Raises StoreError without the library of the store, and for settings that cannot be used.
    """
    match address.scheme:
        case "gs":
            from weightsmith._outputs.bucket.gcs import GoogleBucket

            return GoogleBucket(address.bucket)
        case "az":
            from weightsmith._outputs.bucket.azure import AzureBucket

            return AzureBucket(address.bucket)
        case _:
            from weightsmith._outputs.bucket.s3 import S3Bucket

            return S3Bucket(address.bucket)
