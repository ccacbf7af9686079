from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load, save_file
from splitup_deploy.cutting.build import build, parse_size
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.frontends.weight_sources import watch_hashing

from splitup.core.errors import InvalidInput, InvalidModel
from splitup.graph.manifest_rules import load_manifest
from splitup.graph.rules import load_graph
from tests.deploy.llamas import EXAMPLE, load_example, save_llama

TARGET = parse_size("1.3MB")
CHUNK = Sizes(chunk=8)

SCRIPT = """
import sys
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.source_model import Sizes
from splitup_deploy.frontends.weight_sources import watch_hashing
compiled = build(sys.argv[1], int(sys.argv[2]), sizes=Sizes(chunk=8))
print(compiled.model_id, *(blob.digest for blob in compiled.blobs))
"""


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(
            {"PYTHONHASHSEED": "1", "DEV": "CPU:X86", "NUM_CPU_THREADS": "7"},
            marks=pytest.mark.long,
        ),
        {"PYTHONHASHSEED": "2", "DEV": "CUDA", "DEFAULT_FLOAT": "float16", "LC_ALL": "C"},
    ],
)
def test_the_same_bytes_in_every_process(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(EXAMPLE), str(TARGET)],
        cwd=tmp_path,
        env={**os.environ, "PATH": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = build(str(EXAMPLE), TARGET, sizes=CHUNK)
    assert done.stdout.split() == [compiled.model_id, *(blob.digest for blob in compiled.blobs)]


def test_the_same_ids_wherever_the_same_tensors_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file or several, in another order of tensors or shards, from another directory."""
    weights = save_llama(tmp_path / "one")
    given = [build(str(tmp_path / "one"), 30_000)]
    names = sorted(weights)
    for count, order in ((1, reversed(names)), (3, names), (5, sorted(names, key=len))):
        directory = tmp_path / f"{count} shards"
        save_llama(directory)
        (directory / "model.safetensors").unlink()
        table = {name: f"{number % count}.safetensors" for number, name in enumerate(order)}
        for file in set(table.values()):
            save_file({n: weights[n] for n in table if table[n] == file}, directory / file)
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": table}))
        monkeypatch.chdir(directory)
        given.append(build(".", 30_000))
    monkeypatch.chdir(tmp_path)
    given.append(build("one", 30_000))
    assert len(given[0].manifest.tasks) > 2
    ids = [(compiled.model_id, *(blob.digest for blob in compiled.blobs)) for compiled in given]
    assert ids == ids[:1] * len(ids)


def test_objects_are_what_the_manifest_says() -> None:
    compiled = build(str(EXAMPLE), TARGET, sizes=CHUNK)
    stored = {}
    for blob in (*compiled.blobs, compiled.manifest_blob):
        data = b"".join(blob.open())
        assert data == b"".join(blob.open())  # it can be opened again, for a second try
        assert (len(data), hashlib.sha256(data).hexdigest()) == (blob.length, blob.digest)
        stored[blob.key] = data
    manifest = load_manifest(stored.pop(f"models/{compiled.model_id}/manifest.json"))
    assert manifest == compiled.manifest
    text = manifest.text
    assert text is not None and (text.vocab, text.context, text.eos_ids) == (2048, 256, (0,))
    tokenizer = stored.pop(f"blobs/{text.tokenizer_digest}")
    assert tokenizer == (EXAMPLE / "tokenizer.json").read_bytes()
    names = set()
    for task in manifest.tasks:
        graph = load_graph(stored.pop(f"tasks/{task.task_id}.json"))
        weights = stored[f"weights/{task.weights_digest}.safetensors"]
        assert len(weights) == task.weights_bytes
        assert {weight.name for weight in graph.weights} == set(load(weights))
        names |= {weight.name for weight in graph.weights}
    digests = [task.weights_digest for task in manifest.tasks]
    assert set(stored) == {f"weights/{digest}.safetensors" for digest in digests}
    assert digests[0] == digests[-1] and len(set(digests)) == len(digests) - 1  # a tied head
    _, original = load_example()
    joined = [name.replace(".gate_up_proj", ".gate_proj") for name in names]
    joined = [name.replace(".qkv_proj", ".q_proj") for name in joined]
    assert {n for n in original if "_proj" not in n} <= names
    assert {name for name in joined if not name.endswith(".rope")} <= set(original)


def test_layers_of_one_task_share_their_rope_table() -> None:
    """It is as long as the context, and would be a third of a small model's weights otherwise."""
    for target, tables in ((10**9, 1), (TARGET, 5)):  # five layers, in one task or in five
        compiled = build(str(EXAMPLE), target)
        stored = {blob.key: b"".join(blob.open()) for blob in compiled.blobs}
        graphs = [load_graph(stored[f"tasks/{t.task_id}.json"]) for t in compiled.manifest.tasks]
        found = [sum(w.name.endswith(".rope") for w in graph.weights) for graph in graphs]
        assert (sum(found), max(found)) == (tables, 1)
        for task in compiled.manifest.tasks:
            weights = stored.get(f"weights/{task.weights_digest}.safetensors", b"")
            assert len(weights) == task.weights_bytes


def test_a_target_that_no_task_can_meet_is_refused_with_one_that_is_enough() -> None:
    with pytest.raises(InvalidModel, match=r"needs 1\.06MB of .*target is 500kB") as caught:
        build(str(EXAMPLE), 500_000)
    (text,) = re.findall(r"raise --target-vram to at least (\S+)", str(caught.value))
    least = parse_size(text)
    assert max(task.vram_bytes for task in build(str(EXAMPLE), least).manifest.tasks) <= least
    with pytest.raises(InvalidModel, match="a task needs"):
        build(str(EXAMPLE), int(0.9 * least))


def test_a_target_far_too_small_is_refused_before_anything_is_divided() -> None:
    """In so many pieces this model would have more kernels than are compiled."""
    with pytest.raises(InvalidModel, match=r"raise --target-vram to at least \S+"):
        build(str(EXAMPLE), parse_size("10KB"), sizes=Sizes(chunk=8))


def test_a_target_that_no_task_can_meet_is_refused_before_weights_are_read() -> None:
    class Unread:
        def start(self, what: str, total_bytes: int) -> None:
            raise AssertionError(f"{total_bytes} bytes of {what} are read")

    with watch_hashing(Unread()), pytest.raises(InvalidModel, match="at least"):
        build(str(EXAMPLE), parse_size("10KB"))


def test_too_few_tasks_are_refused_with_a_target_that_needs_no_more() -> None:
    with pytest.raises(InvalidModel, match=r"gives at least 30 tasks; 5 are allowed: ") as caught:
        build(str(EXAMPLE), parse_size("1.3MB"), max_tasks=5)
    (text,) = re.findall(r"at least (\S+) \(a larger --max-tasks also helps\)", str(caught.value))
    assert len(build(str(EXAMPLE), parse_size(text), max_tasks=5).manifest.tasks) <= 5


def test_one_task_when_the_target_is_large() -> None:
    compiled = build(str(EXAMPLE), parse_size("12GB"))
    assert len(compiled.manifest.tasks) == 1
    assert compiled.manifest.edges() == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GB", 12 * 10**9),
        ("12 gb", 12 * 10**9),
        ("12GiB", 12 * 2**30),
        ("1.5MB", 1_500_000),
        ("900000", 900_000),
        ("64k", 64_000),
        ("2Ki", 2048),
        ("1TB", 10**12),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1e9", "12XB", "99999999TB", "1..5MB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(InvalidInput, match="12GB"):
        parse_size(text)


def test_hashing_is_shown_as_bytes_of_all_bytes() -> None:
    class Seen:
        def __init__(self) -> None:
            self.totals: dict[str, int] = {}
            self.done: dict[str, int] = {}

        def start(self, what: str, total_bytes: int) -> None:
            self.totals[what], self.done[what] = total_bytes, 0

        def advance(self, hashed_bytes: int) -> None:
            self.done[list(self.totals)[-1]] += hashed_bytes

    seen = Seen()
    with watch_hashing(seen):
        compiled = build(str(EXAMPLE), parse_size("1.3MB"))  # the head is divided
    assert seen.done == seen.totals and set(seen.totals) == {"weights", "tasks"}
    assert seen.done["tasks"] == sum(task.weights_bytes for task in compiled.manifest.tasks)
