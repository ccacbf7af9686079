"""Adapt the example model to write four tokens at a time, on one CPU core.

The result is a block-diffusion model of SDAR's shape (arXiv 2510.06303). It reads finished blocks
of four tokens and one block of masks, whose rows see each other, and predicts the token of every
mask at its own row. Its texts are the example model's: the starts of Debian package descriptions
(see train_packages_lm.py), each continued by the example model at a low temperature. Tokens of one
block are easier to guess together in a model's own texts than in people's (sequence-level
distillation, arXiv 1711.02281).

All weights are copied. SDAR's layers have norms of queries and keys, which the example model's
family lacks: they begin at the average size of the queries and keys that they will divide by.
Each step sees one copy of the clean text, for the blocks before, and two noised copies: all of
every block masked, as decoding begins, and one to three tokens of it (BD3-LM, arXiv 2503.09573).
Needs torch, transformers and tokenizers, which SplitUp itself does not.

    python train_block_diffusion.py packages-4m OUT

gave packages-4m-blocks, in 280 CPU seconds for 1.8 M tokens of texts and 800 for training, which
saw 0.85 M of them in 555 steps. Of a block that is all masks it guesses 73, 59, 50 and 42 % of the
tokens, by place, in held-out texts of temperature 0.25. An earlier form of this file made it, which
interrupted the first part of the training where its rate falls.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from train_packages_lm import encode, read_descriptions, train
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BLOCK, LENGTH, BATCH, MASK = 4, 128, 12, 1
TEMPERATURES = (0.5, 0.25)  # of the texts of the first and the second part of the training


def make_starts(tokenizer: PreTrainedTokenizerFast, records: list[str]) -> list[np.ndarray]:
    """Return the tokens of each description, which begin with <|endoftext|>."""
    ids = encode(tokenizer, records)
    return [part for part in np.split(ids, np.flatnonzero(ids == 0)) if len(part) > 2]


@torch.no_grad()
def write_texts(
    model: LlamaForCausalLM,
    starts: list[np.ndarray],
    temperature: float,
    rng: np.random.Generator,
    rows: int = 256,
) -> torch.Tensor:
    """Return texts, int64 [rows, LENGTH]: a start of 2 to 32 tokens, and what the model adds."""
    size = int(rng.integers(2, 33))
    found = [one[:size] for one in starts if len(one) >= size]
    chosen = rng.choice(len(found), rows, replace=len(found) < rows)
    text = torch.from_numpy(np.stack([found[i] for i in chosen]).astype(np.int64))
    cache, fed = DynamicCache(config=model.config), text
    while text.shape[1] < LENGTH:
        logits = model(input_ids=fed, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        noise = -torch.empty(logits.shape).exponential_().log()
        fed = (logits.float() / temperature + noise).argmax(1, keepdim=True)
        text = torch.cat([text, fed], 1)
    return text


def adapt(model: LlamaForCausalLM, text: torch.Tensor) -> Qwen3ForCausalLM:
    """Return the model with norms of queries and keys of about their sizes in ``text``."""
    old = model.config.to_dict()
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names += " num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_parameters"
    names += " tie_word_embeddings bos_token_id eos_token_id pad_token_id"
    config = Qwen3Config(**{name: old[name] for name in names.split()}, use_cache=False)
    adapted = Qwen3ForCausalLM(config)
    adapted.load_state_dict(model.state_dict(), strict=False)
    sizes: dict[str, torch.Tensor] = {}
    for name, part in model.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            part.register_forward_hook(
                lambda _, __, out, name=name: sizes.update({name: out.square().mean().sqrt()})
            )
    with torch.no_grad():
        model(input_ids=text)
        for name, size in sizes.items():
            adapted.get_submodule(name.replace("_proj", "_norm")).weight.fill_(size)
    return adapted


def make_mask(length: int) -> torch.Tensor:
    """Return which rows see which, bool [1, 1, 3n, 3n]: two noised copies, then the clean text.

    A noised row sees its own block of its copy and the clean blocks before; a clean row sees the
    clean blocks up to its own.
    """
    block = torch.arange(length).repeat(3) // BLOCK
    copy = torch.arange(3).repeat_interleave(length)
    of, other = block[:, None], block[None]
    own = (of == other) & (copy[:, None] == copy[None])
    before = (other < of) & (copy[None] == 2)
    return (own | before)[None, None]


class Blocks:
    """Losses of a model for masked tokens of batches of texts."""

    def __init__(self, model: Qwen3ForCausalLM, texts: torch.Tensor) -> None:
        self._model, self._texts = model, texts
        self._mask = make_mask(LENGTH)
        self._positions = torch.arange(LENGTH).repeat(3)[None]

    def compute_losses(self, clean: torch.Tensor, rng: np.random.Generator):
        """Return the loss and the correctness of every masked token, and its place in the block.

        Places are 0 to 3 in the copy that is all masks, 4 to 7 in the other.
        """
        order = rng.random((*clean.shape[:1], LENGTH // BLOCK, BLOCK)).argsort(2).argsort(2)
        count = rng.integers(1, BLOCK, order.shape[:2])[..., None]
        some = torch.from_numpy((order < count).reshape(clean.shape))
        masked = torch.cat([torch.ones_like(some), some], 1)
        noised = clean.repeat(1, 2).masked_fill(masked, MASK)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = self._model.model(
                input_ids=torch.cat([noised, clean], 1),
                attention_mask=self._mask,
                position_ids=self._positions,
            ).last_hidden_state[:, : 2 * LENGTH]
            logits = self._model.lm_head(states[masked])
        truth = clean.repeat(1, 2)[masked]
        places = torch.arange(2 * LENGTH) % BLOCK + (torch.arange(2 * LENGTH) >= LENGTH) * BLOCK
        losses = torch.nn.functional.cross_entropy(logits.float(), truth, reduction="none")
        return losses, logits.argmax(1) == truth, places.expand_as(masked)[masked]

    def sample_loss(self, rng: np.random.Generator) -> torch.Tensor:
        clean = self._texts[torch.from_numpy(rng.choice(len(self._texts), BATCH, replace=False))]
        return self.compute_losses(clean, rng)[0].mean()

    @torch.no_grad()
    def report(self, texts: torch.Tensor) -> None:
        found = [self.compute_losses(t, np.random.default_rng(1)) for t in texts.split(BATCH)]
        losses, right, places = (torch.cat(parts) for parts in zip(*found, strict=True))
        for name, values in (("nats", losses), ("right", right.float())):
            means = [values[places == place].mean().item() for place in range(2 * BLOCK)]
            print(name, *(f"{mean:.3f}" for mean in means), flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a directory of SDAR's form, float16."""
    halves = Qwen3ForCausalLM(model.config)
    halves.load_state_dict(model.state_dict())
    halves.half().save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config |= {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
    config |= {"block_size": BLOCK, "mask_token_id": MASK}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu-seconds", type=float, default=400, help="of each part")
    parser.add_argument("--texts", type=int, default=7168, help="of each part")
    options = parser.parse_args()
    torch.set_num_threads(1)  # two threads on a shared two-core machine are slower
    torch.manual_seed(0)
    base = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    writer = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    records, rng = read_descriptions(), np.random.default_rng(0)
    held_out = make_starts(tokenizer, records[:600])
    starts = make_starts(tokenizer, records[600:])
    model = None
    for temperature in TEMPERATURES:
        judged = write_texts(writer, held_out, temperature, rng, 64)
        rounds = range(options.texts // 256)
        texts = torch.cat([write_texts(writer, starts, temperature, rng) for _ in rounds])
        print(f"{texts.numel()} tokens, such as {tokenizer.decode(texts[-1])!r}", flush=True)
        if model is None:
            model = adapt(base, texts[:32])
        blocks = Blocks(model, texts)
        blocks.report(judged)
        train(model, blocks.sample_loss, options.cpu_seconds, lr_muon=0.02, lr_adam=3e-3)
        blocks.report(judged)
        save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
