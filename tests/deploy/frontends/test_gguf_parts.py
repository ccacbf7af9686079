"""GGUF models in several files are those of one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends.gguf.header import read_gguf, read_gguf_parts

from splitup.core.errors import InvalidModel
from tests.deploy.ggufs import save_gguf, write_gguf

LARGE = 10**9


def save_parts(
    whole: Path, count: int, *, first: int = 0, change: dict[int, dict[str, Any]] | None = None
) -> list[Path]:
    """Write a model again as parts, of which the first has ``first`` tensors; return their paths.

    ``change`` is laid over the metadata of a part, by its number from 0.
    """
    file, data = read_gguf(whole), whole.read_bytes()
    rows = {
        name: (one.format.name, one.shape, data[one.start : one.end])
        for name, one in file.tensors.items()
    }
    names = list(rows)
    shares = [names[:first], *(names[first + part :: count - 1] for part in range(count - 1))]
    paths = [whole.with_name(f"big-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    for number, (path, share) in enumerate(zip(paths, shares, strict=True)):
        metadata = {**(file.metadata if number == 0 else {}), "split.count": count}
        metadata |= {"split.no": number, "split.tensors.count": len(rows)}
        metadata |= (change or {}).get(number, {})
        metadata = {key: value for key, value in metadata.items() if value is not None}
        write_gguf(path, metadata, {name: rows[name] for name in share})
    return paths


def test_s89_a_part_leads_to_no_other_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_gguf(folder / "m.gguf", forms={"": "F16"})
    first, second, _ = save_parts(folder / "m.gguf", 3)
    second.rename(tmp_path / "own.gguf")
    second.symlink_to("../own.gguf")
    with pytest.raises(InvalidModel, match="hidden or outside"):
        read_gguf_parts(first)


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("is_padded", [True, False])
def test_parts_are_the_model_of_one_file(first: int, is_padded: bool, tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf", forms={"": "F16"})
    paths = save_parts(tmp_path / "m.gguf", 3, first=first)
    if first == 0 and not is_padded:  # as the gguf package writes it: nothing follows to align
        paths[0].write_bytes(paths[0].read_bytes().rstrip(b"\0") + bytes(3))
        assert not read_gguf(paths[0]).tensors
    one, several = (build(str(path), LARGE) for path in (tmp_path / "m.gguf", paths[0]))
    assert several.manifest_bytes == one.manifest_bytes
    wanted, given = ([b"".join(blob.open()) for blob in m.blobs] for m in (one, several))
    assert given == wanted


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({0: {"split.no": 1}}, "00001-of-00003.gguf' has split.no = 1; as part 1 .* have 0"),
        ({1: {"split.no": 2}}, "00002-of-00003.gguf' has split.no = 2; as part 2 .* have 1"),
        ({1: {"split.no": None}}, "has split.no = None"),
        ({2: {"split.count": 4}}, "00003-of-00003.gguf' has split.count = 4"),
        ({2: {"llama.block_count": 9}}, "has llama.block_count = 9"),
        ({2: {"tokenizer.ggml.pre": "llama3"}}, "has tokenizer.ggml.pre = 'llama3'"),
        ({0: {"split.count": 4}}, "one of 4 parts"),
        ({number: {"split.tensors.count": 7} for number in range(3)}, "tensors, not 7"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    change: dict[int, dict[str, Any]], problem: str, tmp_path: Path
) -> None:
    save_gguf(tmp_path / "m.gguf")
    paths = save_parts(tmp_path / "m.gguf", 3, change=change)
    with pytest.raises(InvalidModel, match=problem):
        read_gguf_parts(paths[0])


def test_parts_that_are_missing_double_or_not_the_first_are_named(tmp_path: Path) -> None:
    save_gguf(tmp_path / "m.gguf")
    paths = save_parts(tmp_path / "m.gguf", 3, first=2)
    with pytest.raises(InvalidModel, match=r"a later part .* give the first, '.*00001-of-00003"):
        read_gguf_parts(paths[1])
    other = tmp_path / "model.gguf"
    other.write_bytes(paths[0].read_bytes())
    with pytest.raises(InvalidModel, match="must be called as"):
        read_gguf_parts(other)
    tensors = {"output.weight": ("F32", (1, 4), bytes(16))}
    write_gguf(paths[2], {"split.no": 2, "split.count": 3}, tensors)
    write_gguf(paths[1], {"split.no": 1, "split.count": 3}, tensors)
    with pytest.raises(InvalidModel, match=r"00003-of-00003.gguf' has the tensor 'output.weight'"):
        read_gguf_parts(paths[0])
    paths[2].unlink()
    with pytest.raises(InvalidModel, match=r"cannot read GGUF file '.*00003-of-00003"):
        read_gguf_parts(paths[0])
