"""No program loads at its start what it does not need; modules are counted, time is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.measure.starts import PROGRAMS

# Each costs a tenth of a second of CPU time or more, or brings something that does.
NEVER = {
    *("web3", "ens", "eth_account", "eth_keyfile", "py_ecc", "boto3", "sqlalchemy", "tinygrad"),
    *("tokenizers", "llguidance", "langchain_core", "openai", "grpc", "tenseal", "websockets"),
    "eth_keys",
}
MORE = {
    "splitup --help": {"aiohttp", "numpy", "pydantic", "eth_abi", "cryptography"},
    "a node's daemon": {"numpy"},
    "splitup status": {"numpy"},
    "splitup-node status": {"numpy"},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_loads_what_it_needs(program: str) -> None:
    modules = ", ".join(PROGRAMS[program].split())
    code = f"import {modules}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not (NEVER | MORE.get(program, set())) & set(done.stdout.split())


@pytest.mark.long  # in small: what programs load, above
@pytest.mark.parametrize("program", ["splitup status", "splitup receipt", "splitup-node status"])
def test_no_cipher_is_loaded_before_a_key_is_opened(program: str) -> None:
    modules = ", ".join(PROGRAMS[program].split())
    code = f"import {modules}, sys; print('Crypto.Cipher' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_compiler_loads_nothing_of_the_chain() -> None:
    """A target that no cut fits is refused seconds after the start, most of which are imports."""
    code = "import splitup_deploy.cutting.build, splitup_deploy.showing.progress, sys; "
    code += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {"eth_abi", "web3", "aiohttp", "cryptography", "asyncio"} & loaded
    front_ends = "splitup_deploy.frontends"  # each is loaded for its own sources
    others = ("gguf", "onnx", "huggingface", "tinygrad_function")
    assert not {f"{front_ends}.{other}" for other in others} & loaded
