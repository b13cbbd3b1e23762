"""A log in an S3-compatible object store: small files as objects, exclusive creation by conditional put."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from molt.environ import read
from molt.errors import LogError, SettingError
from molt.log.home import new_session


class S3Home:
    """s3://bucket/prefix of a run; the log lies under its log/."""

    def __init__(self, run_dir: str, *, session_bytes: int) -> None:
        try:
            import boto3
        except ModuleNotFoundError as error:
            raise SettingError(f"run.dir={run_dir}: an object store needs the package boto3; pip install 'molt-log[s3]'") from error
        address = urlparse(run_dir)
        if address.scheme != "s3" or not address.netloc:
            raise SettingError(f"run.dir={run_dir}: log.store=s3 needs s3://bucket/prefix")
        self._bucket = address.netloc
        self._prefix = f"{address.path.strip('/')}/log/"
        self.where = f"s3://{self._bucket}/{self._prefix.rstrip('/')}"
        endpoint = read("AWS_ENDPOINT_URL")
        self.storage_options: dict[str, str] | None = {"aws_region": read("AWS_REGION") or "us-east-1"}
        if endpoint is not None:
            self.storage_options |= {"aws_endpoint": endpoint, "allow_http": str(endpoint.startswith("http:")).lower()}
        self._session_bytes = session_bytes
        self.session = new_session(session_bytes)
        self._client: Any = boto3.client("s3", endpoint_url=endpoint, region_name=self.storage_options["aws_region"])

    def table(self, name: str) -> str:
        """Address of a table for Lance."""
        return f"{self.where}/{name}.lance"

    def local_path(self, table: str) -> Path | None:
        """None: a put is durable when it returns."""
        return None

    def file_digest(self, name: str) -> str | None:
        """sha256 of an object of the log, hex; None when there is none."""
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"]
        except self._client.exceptions.NoSuchKey:
            return None
        digest = hashlib.sha256()
        for chunk in body.iter_chunks(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()

    def renew_session(self) -> None:
        """Begin with empty caches."""
        self.session = new_session(self._session_bytes)

    def keep(self, dataset: Any) -> None:
        """Nothing to do: the objects stay."""

    def read(self, name: str) -> bytes | None:
        """Content of a small object; None when there is none."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
        except self._client.exceptions.NoSuchKey:
            return None
        return bytes(answer["Body"].read())

    def write(self, name: str, content: bytes) -> None:
        """Replace a small object."""
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=content)

    def create(self, name: str, content: bytes) -> bool:
        """Make a small object unless it exists: a put under the condition that there is none."""
        from botocore.exceptions import ClientError

        try:
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=content, IfNoneMatch="*")
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412):
                return False
            raise LogError(f"log={self.where}: {name} cannot be made; {error}") from error
        return True

    def delete(self, name: str) -> None:
        """Remove a small object if it is there."""
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def _objects(self, prefix: str) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
            found += [(item["Key"], int(item["Size"])) for item in page.get("Contents", [])]
        return found

    def names(self, prefix: str) -> list[str]:
        """Names of the small objects that begin with the prefix, sorted."""
        return sorted(key.removeprefix(self._prefix) for key, _ in self._objects(self._prefix + prefix))

    def sizes(self, table: str) -> dict[str, int]:
        """Size in bytes of each object of a table, by its path inside the table."""
        root = f"{self._prefix}{table}.lance/"
        return {key.removeprefix(root): size for key, size in self._objects(root)}
