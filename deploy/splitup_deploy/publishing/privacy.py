"""What was measured of a private split (``splitup-deploy privacy``), put into a manifest."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from splitup.core.codec import compute_digest, encode_canonical
from splitup.core.errors import InvalidInput
from splitup.graph.manifest import Digest, PrivacyMeasure
from splitup_deploy.cutting.build import CompiledModel, change_manifest
from splitup_deploy.publishing.measured_files import load_measured


class PrivacyFile(BaseModel):
    """What ``splitup-deploy privacy --output`` writes: measures by the user's tasks."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    splits: dict[Digest, PrivacyMeasure]


def make_key(compiled: CompiledModel) -> str:
    """Return the SHA-256 of the ids and weights of a user's tasks, in hex."""
    client = compiled.manifest.client
    tasks = () if client is None else client.tasks
    return compute_digest(encode_canonical([[t.task_id, t.weights_digest] for t in tasks]))


def attach_privacy(compiled: CompiledModel, path: Path) -> CompiledModel:
    """Put what a file says of this split into the manifest. Raises InvalidInput."""
    client = compiled.manifest.client
    if client is None:
        raise InvalidInput("--privacy is for models that are registered with --private")
    command = "splitup-deploy privacy --output"
    splits = load_measured(path, PrivacyFile, "privacy file", command).splits
    found = splits.get(make_key(compiled))
    if found is None:
        raise InvalidInput(
            f"'{path}' is about other tasks: measure again, with the same --private, --context and "
            "--chunk as 'register'"
        )
    part = client.model_copy(update={"privacy": found})
    return change_manifest(compiled, {"client": part})
