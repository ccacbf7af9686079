"""A prompt with images: files become pixels, rows and tokens, as with Hugging Face's Gemma 3."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from splitup_deploy.cutting.build import build
from splitup_deploy.frontends import load_model
from splitup_deploy.frontends.source_model import Sizes

from splitup.client.images.image_prompts import (
    PromptImages,
    expand_prompt,
    find_pixels,
    load_image,
    mark_images,
)
from splitup.client.images.image_reader import ImageReader, read_pixels
from splitup.client.outcome import Array
from splitup.client.text.generation import TextModel, generate_tokens, make_decoder
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core import tuning
from splitup.core.errors import InvalidInput, InvalidModel
from splitup.core.tensors import array_to_bytes
from splitup.decode.cache_contents import CacheContents
from splitup.decode.sampler import Sampler
from splitup.decode.step import make_causal_step
from splitup.graph.manifest import Manifest
from splitup.graph.manifest_rules import check_manifest
from tests.deploy.checkpoints import GOLDEN, TOKENS
from tests.deploy.execution import CutModel, CutReference
from tests.deploy.llamas import relative_error
from tests.deploy.towers import IMAGE, NEW, PHOTO_PROMPT, make_photos, save_images, save_tower

TOWER = "0x" + "0" * 64
CHUNK = 7  # does not hold the first image where it stands


class Session:
    """Steps of a cut model in this process."""

    def __init__(self, cut: CutReference) -> None:
        self._cut, self._states, self.rows = cut, cut.new_states(), list[int]()

    @property
    def manifest(self) -> Manifest:
        return self._cut.manifest

    def submit(self, inputs: Mapping[str, Array]) -> asyncio.Future[dict[str, Array]]:
        manifest = self._cut.manifest
        data = {p.name: array_to_bytes(p.spec, inputs[p.name]) for p in manifest.inputs}
        self.rows.append(len(inputs["tokens"]))
        found = self._cut.step(self._states, data)
        answer: asyncio.Future[dict[str, Array]] = asyncio.Future()
        (port,) = manifest.outputs
        shape = (len(inputs["outputs"]), *port.shape[1:]) if port.rows else port.shape
        array = np.frombuffer(found[port.name], np.float32).reshape(shape)
        answer.set_result({port.name: array})
        return answer


def see(tower: CutModel, pixels: Array) -> Array:
    """Return the rows that a tower makes of an image."""
    found = tower.step(tower.new_states(), {"pixels": pixels.tobytes()})["embeddings"]
    return np.frombuffer(found, np.float32).reshape(tower.manifest.outputs[0].shape)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_images(tmp_path_factory.mktemp("gemma"), NEW)


@pytest.fixture(scope="module")
def tower(directory: str) -> CutModel:
    return CutModel(build(directory, 120_000, sizes=Sizes(vision=True)))


@pytest.fixture(scope="module")
def model(directory: str, tower: CutModel) -> Iterator[tuple[TextModel, CutReference]]:
    sizes = Sizes(chunk=CHUNK, images=tower.manifest.model_id)
    cut = CutReference(build(directory, 60_000, sizes=sizes))
    info = cut.manifest.text
    assert info is not None and len(cut.manifest.tasks) > 1
    data = (Path(directory) / "tokenizer.json").read_bytes()
    with closing(ModelTokenizer(data, "gemma")) as tokenizer:
        yield TextModel("gemma", cut.manifest, info, tokenizer, None, CHUNK), cut  # type: ignore[arg-type]


def test_an_image_becomes_rows_of_the_language_model(tower: CutModel) -> None:
    assert tower.manifest.kind == "function" and len(tower.manifest.tasks) >= 2
    with np.load(GOLDEN / "tower_logits.npz") as golden:
        wanted = golden["vision"]
    assert relative_error(see(tower, IMAGE), wanted) <= 1e-5


@pytest.mark.long  # in small: the rows of one image above
def test_a_prompt_with_images_is_as_hugging_face_reads_it(
    tower: CutModel, model: tuple[TextModel, CutReference]
) -> None:
    text, cut = model
    golden = np.load(GOLDEN / "image_logits.npz")
    info = text.info.images
    assert info is not None and info.tower == tower.manifest.model_id
    expanded = expand_prompt(PHOTO_PROMPT, text.tokenizer, info, 2)
    prompt = text.tokenizer.encode(expanded)
    assert prompt == golden["ids"].tolist()
    pixels = np.stack([read_pixels(file, 56, 56, name="a photo") for file in make_photos()])
    assert pixels.tobytes() == golden["pixels"].tobytes()
    rows = np.concatenate([see(tower, one) for one in pixels])
    request = text.make_request(prompt, max_tokens=8, sampler=Sampler(), images=2)
    session, logits = Session(cut), list[Array]()

    async def collect() -> list[int]:
        found = generate_tokens(
            session,
            make_decoder(None, request),
            text.tokenizer,
            images=PromptImages.place(request.images, rows),
            on_step=lambda _, given: logits.append(given),
        )
        return [token.id async for token in found]

    assert asyncio.run(collect()) == golden["tokens"].tolist()
    ends = np.cumsum(session.rows)[: len(logits)] - 1
    inside = ends < len(prompt)
    assert inside.sum() > 2 and max(session.rows) <= CHUNK
    wanted = golden["logits"][ends[inside]]
    assert relative_error(np.concatenate(logits)[: len(wanted)], wanted) <= 1e-5


def test_text_alone_is_as_without_images(model: tuple[TextModel, CutReference]) -> None:
    text, cut = model
    info = text.info.images
    assert info is not None
    prompt = list(itertools.takewhile(lambda token: token != info.token, TOKENS))[:CHUNK]
    request = text.make_request(prompt, max_tokens=1, sampler=Sampler())
    logits = list[Array]()

    async def run() -> None:
        decoder = make_decoder("lookahead", request)
        kept = generate_tokens(
            Session(cut), decoder, text.tokenizer, on_step=lambda _, given: logits.append(given)
        )
        async for _ in kept:
            pass

    asyncio.run(run())
    with np.load(GOLDEN / "tower_logits.npz") as golden:
        wanted = golden["Gemma3ForConditionalGeneration"][len(prompt) - 1]
    assert relative_error(logits[0][0], wanted) <= 1e-5


def test_prompts_whose_images_do_not_fit(model: tuple[TextModel, CutReference]) -> None:
    text, _ = model
    info, begin = text.info.images, "<start_of_image>"
    assert info is not None
    asked = partial(text.make_request, max_tokens=1, sampler=Sampler())
    image = [info.begin, *[info.token] * info.rows, info.end]
    for prompt, count in (([5, *image], 0), ([5], 1), (image * 2, 1), ([*image[:3], 5], 1)):
        with pytest.raises(InvalidInput, match="rows of images, and"):
            asked(prompt, images=count)
    with pytest.raises(InvalidInput, match="were given"):
        asked([info.begin, *[info.token] * 2 * info.rows], images=2)
    with pytest.raises(InvalidInput, match=f"2 places {begin}, and there are 1 images"):
        expand_prompt(begin * 2, text.tokenizer, info, 1)
    assert expand_prompt("w1", text.tokenizer, info, 2).count(begin) == 2
    with pytest.raises(InvalidModel, match="does not know the tokens"):
        expand_prompt("w1", text.tokenizer, info.model_copy(update={"end": 99}), 1)
    plain = replace(text, info=text.info.model_copy(update={"images": None}))
    with pytest.raises(InvalidInput, match="takes no images"):
        plain.make_request([5], max_tokens=1, sampler=Sampler(), images=1)
    for name in ("lookahead", "speculative"):
        with pytest.raises(InvalidInput, match="reads no images"):
            make_decoder(name, asked(image, images=1))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="does not fit a step of 3"):
        make_decoder(None, replace(asked(image, images=1), chunk=3))


def test_models_that_are_no_tower(tower: CutModel, model: tuple[TextModel, CutReference]) -> None:
    info, manifest = model[0].info.images, tower.manifest
    assert info is not None
    (port,) = manifest.inputs
    assert find_pixels(manifest, info) == port
    for shape in ((1, 56, 56), (3, 56), (3, 4096, 4096)):
        other = manifest.model_copy(update={"inputs": (port.model_copy(update={"shape": shape}),)})
        with pytest.raises(InvalidModel, match="is no tower"):
            find_pixels(other, info)
    for other, wanted in (
        (model[1].manifest, info),
        (manifest, info.model_copy(update={"width": 64})),
    ):
        with pytest.raises(InvalidModel, match="is no tower"):
            find_pixels(other, wanted)


def test_manifests_whose_images_do_not_fit(model: tuple[TextModel, CutReference]) -> None:
    manifest = model[1].manifest
    assert manifest.text is not None
    info = manifest.text.images
    assert info is not None
    for change in ({"token": 40}, {"rows": CHUNK + 1}, {"width": 31}):
        images = info.model_copy(update=change)
        text = manifest.text.model_copy(update={"images": images})
        with pytest.raises(InvalidModel, match="the manifest is invalid: "):
            check_manifest(manifest.model_copy(update={"text": text}))


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({"sliding_window": 3}, Sizes(images=TOWER), "window of 3 .* the 4 of an image"),
        ({}, Sizes(images="gemma-eyes"), "'gemma-eyes' is no model's id"),
        ({}, Sizes(images=TOWER, chunk=3), "an image has 4 rows, which do not fit a step of 3"),
        ({"vocab_size": 38}, Sizes(images=TOWER), "outside the vocabulary"),
    ],
)
def test_models_that_cannot_take_images(
    directory: str, tmp_path: Path, change: dict[str, int], sizes: Sizes, message: str
) -> None:
    config = json.loads((Path(directory) / "config.json").read_text())
    config["text_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match=message):
        load_model(str(tmp_path), sizes)


def test_sources_that_cannot_take_images(directory: str, tmp_path: Path) -> None:
    other = save_tower(tmp_path, "Mistral3ForConditionalGeneration", NEW)
    with pytest.raises(InvalidModel, match="has no vision tower"):
        load_model(other, Sizes(images=TOWER))
    with pytest.raises(InvalidModel, match="leave out --images"):
        load_model("tests.deploy.frontends.on_device_models:model", Sizes(images=TOWER))
    path = Path(directory) / "preprocessor_config.json"
    path.write_text(json.dumps({"image_mean": [0.5, 0.4, 0.5]}))
    try:
        with pytest.raises(InvalidModel, match=r"image_mean = \[0.5, 0.4, 0.5\]; supported: "):
            load_model(directory, Sizes(images=TOWER))
    finally:
        path.unlink()
    traced = load_model(directory, Sizes(images=TOWER)).traced
    assert [port.name for port in traced.graph.inputs][-1] == "images"
    assert traced.notes[-1].endswith("of the towers for images: register them with --vision")


def test_files_that_are_no_images(tmp_path: Path) -> None:
    png, webp = make_photos()
    large, gif, lines = BytesIO(), BytesIO(), BytesIO()
    Image.new("1", (8000, 8000)).save(large, "PNG")
    Image.new("1", (8, 8)).save(gif, "GIF")
    Image.new("L", (1, 900)).save(lines, "PNG")
    for data, message in (
        (b"", "is no JPEG, PNG, WEBP file"),
        (png[:-900], "cannot be read"),
        (webp[:60], "cannot be read"),
        (gif.getvalue(), "is no JPEG, PNG, WEBP file"),
        (large.getvalue(), "64000000 pixels"),
    ):
        with pytest.raises(InvalidInput, match=f"image 3 .*{message}"):
            read_pixels(data, 56, 56, name="image 3")
    with pytest.raises(InvalidInput, match=r"photo\.png' cannot be read: No such file"):
        load_image(tmp_path / "photo.png")
    (tmp_path / "photo.png").write_bytes(png)
    path = str(tmp_path / "photo.png")
    assert load_image(path) == (f"image '{path}'", png) and load_image(png) == ("an image", png)
    assert read_pixels(lines.getvalue(), 28, 56, name="a line").shape == (3, 28, 56)


async def test_images_are_read_in_a_process_that_a_file_may_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    png, webp = make_photos()
    large = BytesIO()
    Image.new("RGB", (2000, 2000)).save(large, "PNG")
    with closing(ImageReader()) as reader:
        found = await reader.read(png, 56, 48, name="a")
        assert found.tobytes() == read_pixels(png, 56, 48, name="a").tobytes()
        with pytest.raises(InvalidInput, match=r"^image 1 cannot be read: .* whole JPEG"):
            await reader.read(png[:-900], 56, 56, name="image 1")
        with pytest.raises(InvalidInput, match="image 2 has more than 32 MiB"):
            await reader.read(bytes(tuning.MAX_IMAGE_BYTES + 1), 56, 56, name="image 2")
        monkeypatch.setattr(tuning, "IMAGE_READ_S", 0.0)
        with pytest.raises(InvalidInput, match="image 3 ended the process that read it: no answer"):
            await reader.read(large.getvalue(), 56, 56, name="image 3")
        monkeypatch.undo()
        again = reader.read(webp, 56, 56, name="image 4")
        found, _ = await asyncio.gather(again, reader.read(large.getvalue(), 8, 8, name="5"))
        assert found.tobytes() == read_pixels(webp, 56, 56, name="b").tobytes()


def test_s30_scans_of_a_jpeg_are_counted_before_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scan takes a dozen bytes of a file, and its decoder looks at every pixel for each."""
    photo = BytesIO()
    Image.new("RGB", (64, 64)).save(photo, "JPEG", progressive=True)
    whole = photo.getvalue()
    last = whole[whole.rindex(b"\xff\xda") : -2]
    more = whole[:-2] + 90 * last + whole[-2:]
    assert read_pixels(more, 8, 8, name="a").shape == (3, 8, 8)  # few pixels are drawn soon
    monkeypatch.setattr(tuning, "MAX_IMAGE_PIXELS", 64 * 64)
    assert read_pixels(whole, 8, 8, name="b").shape == (3, 8, 8)
    with pytest.raises(InvalidInput, match=r"c draws its 4096 pixels in 100 scans; .* at most 16$"):
        read_pixels(more, 8, 8, name="c")


def test_other_images_are_other_beginnings_of_a_prompt() -> None:
    """A cache knows a prompt by its tokens, which are equal whatever an image shows."""
    prompt, places = [5, 9, 9, 6, 9, 9, 7], [range(1, 3), range(4, 6)]
    first = mark_images(prompt, places, [b"a", b"b"])
    assert first == mark_images(tuple(prompt), places, [b"a", b"b"])
    assert (first[0], first[3], first[6]) == (5, 6, 7) and first[1] == first[2] != first[4]
    second = mark_images(prompt, places, [b"a", b"c"])
    contents = CacheContents()
    images = PromptImages({}, dict(enumerate(first)))
    for start, stop in ((0, 1), (1, 3), (3, 6), (6, 7)):
        contents.feed(images.mark(make_causal_step(prompt[start:stop], start, images=places)))
    assert contents.count_common([*first, 8, 8]) == 7
    assert contents.count_common(second) == 4 and contents.count_common(prompt) == 1
