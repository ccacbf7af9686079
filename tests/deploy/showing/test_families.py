"""``splitup-deploy families`` says what each family was tested with, and that is true."""

from __future__ import annotations

from splitup_deploy.showing.families import (
    PUBLISHED,
    RENAMED,
    list_families,
    render_families,
)

from tests.deploy import (
    blocks,
    checkpoints,
    encoders,
    hybrids,
    mixtures,
    moes,
    towers,
    variations,
)


def list_random() -> set[str]:
    """Return the architectures of all random checkpoints that tests compare."""
    cases = (checkpoints.CASES, mixtures.CASES, hybrids.CASES, variations.CASES, encoders.CASES)
    found = {case.architecture for table in cases for case in table.values()}
    tables = (*moes.CASES.values(), *blocks.CASES.values())
    return found | set(towers.CASES) | {table["architectures"][0] for table in tables}


def test_random_weights_are_among_the_tests_of_all_that_are_said_to_have_them() -> None:
    names = {row["architecture"] for row in list_families()}
    assert names - RENAMED.keys() == names & list_random()
    assert set(RENAMED.values()) <= list_random() and RENAMED.keys() <= names
    assert PUBLISHED.keys() <= names and not PUBLISHED.keys() & RENAMED.keys()


def test_the_table_says_what_each_family_was_tested_with() -> None:
    lines = {line.split()[0]: line for line in str(render_families(list_families())).split("\n")}
    assert "tested with" in lines["architecture"]
    assert lines["LlamaForCausalLM"].endswith("  SmolLM2-135M-Instruct; GGUF: llama")
    assert lines["Olmo2ForCausalLM"].endswith("  random weights; GGUF: olmo2")
    assert lines["XLMRobertaModel"].endswith("weights of RobertaModel; embeddings; GGUF: bert")
    assert lines["MPNetModel"].endswith("; embeddings")
