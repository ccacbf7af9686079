"""The families of models for text that can be compiled, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.text import Text

from splitup_deploy.frontends.families import block_diffusion, vision_towers
from splitup_deploy.frontends.families.architectures import ARCHITECTURES
from splitup_deploy.frontends.families.encoders import ENCODERS
from splitup_deploy.frontends.families.text_towers import TOWERS
from splitup_deploy.frontends.gguf import encoder_file
from splitup_deploy.frontends.gguf.config import list_gguf_names

# Published models that ran, by architecture: the demo's, and the one of docs/compiler.md.
PUBLISHED: Final = {
    "LlamaForCausalLM": "SmolLM2-135M-Instruct",
    "BertModel": "all-MiniLM-L6-v2",
}
# Others have random weights among the tests; these have the weights of such a one, renamed.
RENAMED: Final = {
    "Fast_dLLM_QwenForCausalLM": "Qwen2ForCausalLM",
    "BertForMaskedLM": "BertModel",
    "RobertaForMaskedLM": "RobertaModel",
    "RobertaForSequenceClassification": "XLMRobertaForSequenceClassification",
    "XLMRobertaModel": "RobertaModel",
    "XLMRobertaForMaskedLM": "RobertaModel",
    "DistilBertModel": "DistilBertForMaskedLM",
    "MPNetModel": "MPNetForMaskedLM",
    "MPNetForSequenceClassification": "MPNetForMaskedLM",
    "ModernBertForMaskedLM": "ModernBertModel",
}


def list_families() -> list[dict[str, Any]]:
    """Return every architecture of a directory: its use, GGUF names, and if text is a part.

    ``tested_with`` is the published model that ran, or else "random weights", compared with the
    library's own model, or else the architecture whose random weights were.

    ``images``: its tower for images can be compiled, too. ``decoder`` is the only one that the
    family's models are used with, if there is such a one.
    """
    names = list_gguf_names()
    names |= {name: (file,) for file, found in encoder_file.CONVERTED.items() for name in found}
    tower_of = {name: tower.architecture for name, tower in TOWERS.items()}
    uses = dict.fromkeys((*ARCHITECTURES, *TOWERS), "text-generation")
    uses |= {name: use for name, (_, use) in ENCODERS.items()}
    return [
        {
            "architecture": name,
            "use": use,
            "gguf": list(names.get(name, ())),
            "text_tower": tower_of.get(name),
            "images": name == vision_towers.ARCHITECTURE,
            "tested_with": PUBLISHED.get(name) or RENAMED.get(name) or "random weights",
            "decoder": "diffusion" if name in block_diffusion.ARCHITECTURES else None,
        }
        for name, use in uses.items()
    ]


def render_families(rows: Sequence[dict[str, Any]]) -> Text:
    """Return the lines of ``splitup-deploy families``."""
    width = max(len(row["architecture"]) for row in rows)
    text = Text(f"{'architecture':{width}}  tested with\n", "dim")
    tested = {name: f"the weights of {other}" for name, other in RENAMED.items()}
    for row in rows:
        tower, gguf = row["text_tower"], ", ".join(row["gguf"])
        also = f"text only, as {tower}" if tower else f"GGUF: {gguf}" if gguf else ""
        if row["images"]:
            also = f"text as {tower}; images with --vision and --images"
        if row["decoder"]:
            also = "writes blocks of tokens (--decoder diffusion)"
        if row["use"] != "text-generation":
            used = "embeddings" if row["use"] == "text-embedding" else "reranking, with one label"
            also = f"{used}; GGUF: {gguf}" if gguf else used
        name = row["architecture"]
        shown = "; ".join(part for part in (tested.get(name, row["tested_with"]), also) if part)
        text.append(name, "bold")
        text.append(f"{'':{width - len(name)}}  {shown}\n")
    text.rstrip()
    return text
