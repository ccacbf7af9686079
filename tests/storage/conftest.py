from __future__ import annotations

from collections.abc import Iterator

import pytest
from splitup_oracle.gateway.presigning import Presigner

from splitup.devnet.s3_server import ObjectServer, start_object_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One real S3 server for all tests of this folder; every test uses its own keys."""
    running = start_object_server(tmp_path_factory.mktemp("s3"))
    yield running
    running.stop()


@pytest.fixture
def presigner(server: ObjectServer) -> Presigner:
    return Presigner.open(server.endpoint_url, server.bucket, server.credentials_path)
