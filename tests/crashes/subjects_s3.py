"""Subjects over the embedded queue, staged in a bucket of moto's server, one per case.

Each operation of s3fs's client is a point.  A put is atomic, so there is no half of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow_broadway import Broadway
from airflow_broadway.testing.crashes.interceptor import Boundary
from airflow_broadway.testing.crashes.subject import Embedded
from tests.crashes.aws_calls import Aws
from tests.crashes.subjects import MakeSubject
from tests.crashes.subjects_sqs import Moto, moto


@contextmanager
def open_subjects() -> Iterator[MakeSubject]:
    """Yields a function that creates subjects staged in a bucket."""
    with moto() as server:
        yield lambda pipeline, folder: _OnS3(pipeline, folder, server)


class _OnS3(Embedded):
    """A pipeline over the embedded queue, staged in a bucket."""

    def __init__(self, pipeline: type[Broadway], folder: Path, server: Moto) -> None:
        super().__init__(pipeline, folder)
        self._server = server
        self._bucket = f"crashes-{hashlib.md5(str(folder).encode()).hexdigest()[:12]}"
        server.client("s3").create_bucket(Bucket=self._bucket)

    @property
    def staging(self) -> str:
        return f"s3://{self._bucket}/staging"

    def boundaries(self) -> list[Boundary]:
        return [Aws(self._bucket), *super().boundaries()]

    def staged(self) -> list[str]:
        return [key.removeprefix("staging/") for key in self._keys()]

    def leftovers(self) -> list[str]:
        response = self._server.client("s3").list_multipart_uploads(Bucket=self._bucket)
        return [
            *super().leftovers(),
            *(f"an upload of {upload['Key']}" for upload in response.get("Uploads", ())),
        ]

    def _keys(self) -> Iterator[str]:
        pages: Any = self._server.client("s3").get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket):
            yield from (item["Key"] for item in page.get("Contents", ()))

    def close(self) -> None:
        client = self._server.client("s3")
        for key in list(self._keys()):
            client.delete_object(Bucket=self._bucket, Key=key)
        client.delete_bucket(Bucket=self._bucket)
