"""Places to keep a log: each storage profile that has to pass the same tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from molt.log.home import forget_memory
from molt.log.store import Store, load_store

PROFILES = ("durable", "process", "memory", "shared", "s3")


def quick(name: str, **commit: float) -> Store:
    """A profile with a short window, so that tests do not wait."""
    store = load_store(name)
    return store.model_copy(update={"commit": store.commit.model_copy(update={"window_ms": 1.0} | commit)})


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """A bucket on a moto server of its own."""
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="molt-test")
        yield "s3://molt-test"
        client.close()
    server.stop()


@pytest.fixture(params=PROFILES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Store]]:
    """Address of a run that does not exist yet, and the profile to keep its log under."""
    name: str = request.param
    address = f"{request.getfixturevalue('bucket')}/{uuid4().hex}" if name == "s3" else str(tmp_path / "run")
    yield address, quick(name)
    forget_memory(address)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that does not exist yet, on the local disk."""
    return tmp_path / "run"


@pytest.fixture
def fast() -> Callable[..., Store]:
    """Profiles with a short window."""
    return quick
