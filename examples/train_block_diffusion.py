"""Train a model that writes four tokens at a time, and its judge, on one CPU core.

Text: records of Debian packages, which `apt-get update` puts into /var/lib/apt/lists: the first
line of the description, then section, priority, architecture, maintainer and tags, of maintainers
with at least 100 packages. Most tokens of a record follow from few of them. Every 20th source
package is held out, with all of its packages.

First the example's draft model goes on with these records, one token after the other. That is the
judge. Then its weights are adapted to blocks of four tokens, in SDAR's shape (arXiv 2510.06303):
the model reads finished blocks of four tokens and one block of masks, whose rows see each other,
and predicts the token of every mask at its own row. SDAR's layers have norms of queries and keys,
which the judge's family lacks: they begin at the average size of the queries and keys that they
will divide by. Each step sees one copy of the clean text, for the blocks before, and one noised
copy, in which half of the blocks are all masks, as decoding begins, and the others have one to
three (BD3-LM, arXiv 2503.09573). It learns from records and, in the second half, from records that
the judge wrote: tokens of one block are easier to guess together in a model's own texts
(sequence-level distillation, arXiv 1711.02281).

Needs torch, transformers and tokenizers, which SplitUp itself does not.

    python train_block_diffusion.py packages-draft-0.7m packages-4m records-0.7m records-0.7m-blocks

takes the weights of the first and the tokenizer of the second. The judge is trained unless it is
there. It gave both models in 34 CPU minutes: the judge saw 6.8 M tokens (0.82 nats/token of
held-out records), the block model 15 M. Of a block that is all masks it guesses 82, 73, 72 and
69 % of the tokens, by place, in records that the judge wrote at temperature 1 from held-out starts.
"""

import argparse
import collections
import glob
import json
import random
import re
import subprocess
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from train_packages_lm import encode, train
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BLOCK, LENGTH, BATCH, MASK = 4, 128, 24, 1
FIELDS = ("Section", "Priority", "Architecture", "Multi-Arch", "Maintainer", "Tag")


def read_records() -> tuple[list[str], list[str]]:
    """Return the records for training and those held out."""
    text = "".join(
        subprocess.run(
            ["/usr/lib/apt/apt-helper", "cat-file", path],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for path in sorted(glob.glob("/var/lib/apt/lists/*_dists_bookworm_*Packages*"))
    )
    found = [
        dict(re.findall(r"^([\w-]+): (.*(?:\n .*)*)", stanza, re.M))
        for stanza in text.strip().split("\n\n")
    ]
    counts = collections.Counter(fields["Maintainer"] for fields in found)
    unique: tuple[dict[str, None], ...] = ({}, {})
    for fields in found:
        if counts[fields["Maintainer"]] < 100:
            continue
        lines = [f"{name}: {' '.join(fields[name].split())}" for name in FIELDS if name in fields]
        source = fields.get("Source", fields["Package"]).split(" ")[0]
        record = "\n".join([fields["Description"], *lines]) + "\n"
        unique[zlib.crc32(source.encode()) % 20 == 0][record] = None
    training, held_out = (list(records) for records in unique)
    random.Random(0).shuffle(training)
    random.Random(0).shuffle(held_out)
    return training, held_out


class Rows:
    """Rows of LENGTH tokens that begin with a record, and go on with those behind it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, records: list[str]) -> None:
        self._ids = encode(tokenizer, records)
        starts = np.flatnonzero(self._ids == 0)
        self._starts = starts[starts < len(self._ids) - LENGTH]

    def sample(self, rng: np.random.Generator, count: int = BATCH) -> torch.Tensor:
        starts = rng.choice(self._starts, count)
        return torch.from_numpy(
            np.stack([self._ids[s : s + LENGTH] for s in starts]).astype(np.int64)
        )


def compute_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def write_texts(
    model: LlamaForCausalLM, starts: torch.Tensor, rng: np.random.Generator
) -> torch.Tensor:
    """Return texts, int64 [rows, LENGTH]: 4 to 24 tokens of each start, and what the model adds."""
    text = fed = starts[:, : int(rng.integers(4, 25))]
    cache = DynamicCache(config=model.config)
    while text.shape[1] < LENGTH:
        logits = model(input_ids=fed, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        noise = -torch.empty(logits.shape).exponential_().log()
        fed = (logits.float() + noise).argmax(1, keepdim=True)
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
    hooks = [
        part.register_forward_hook(
            lambda _, __, out, name=name: sizes.update({name: out.square().mean().sqrt()})
        )
        for name, part in model.named_modules()
        if name.endswith(("q_proj", "k_proj"))
    ]
    with torch.no_grad():
        model(input_ids=text)
        for name, size in sizes.items():
            adapted.get_submodule(name.replace("_proj", "_norm")).weight.fill_(size)
    for hook in hooks:
        hook.remove()
    return adapted


def make_mask(length: int) -> torch.Tensor:
    """Return which rows see which, bool [1, 1, 2n, 2n]: a noised copy, then the clean text.

    A noised row sees its own block of its copy and the clean blocks before; a clean row sees the
    clean blocks up to its own.
    """
    block = torch.arange(length).repeat(2) // BLOCK
    copy = torch.arange(2).repeat_interleave(length)
    of, other = block[:, None], block[None]
    own = (of == other) & (copy[:, None] == copy[None])
    before = (other < of) & (copy[None] == 1)
    return (own | before)[None, None]


class Blocks:
    """Losses of a model for masked tokens of rows."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model = model
        self._mask = make_mask(LENGTH)
        self._positions = torch.arange(LENGTH).repeat(2)[None]

    def compute_losses(self, clean: torch.Tensor, rng: np.random.Generator):
        """Return the loss and the correctness of every masked token, and its place in the block.

        Places are 0 to 3 in blocks that are all masks, 4 to 7 in others.
        """
        order = rng.random((len(clean), LENGTH // BLOCK, BLOCK)).argsort(2).argsort(2)
        count = rng.integers(1, BLOCK, order.shape[:2])
        is_whole = rng.random(count.shape) < 0.5
        count[is_whole] = BLOCK
        masked = torch.from_numpy((order < count[..., None]).reshape(clean.shape))
        noised = clean.masked_fill(masked, MASK)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = self._model.model(
                input_ids=torch.cat([noised, clean], 1),
                attention_mask=self._mask,
                position_ids=self._positions,
            ).last_hidden_state[:, :LENGTH]
            logits = self._model.lm_head(states[masked])
        truth = clean[masked]
        places = np.arange(BLOCK) + BLOCK * ~is_whole[..., None]
        losses = torch.nn.functional.cross_entropy(logits.float(), truth, reduction="none")
        return losses, logits.argmax(1) == truth, torch.from_numpy(places).view_as(clean)[masked]

    @torch.no_grad()
    def report(self, rows: torch.Tensor) -> None:
        found = [self.compute_losses(t, np.random.default_rng(1)) for t in rows.split(BATCH)]
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


def train_judge(options: argparse.Namespace, tokenizer, rows: Rows, held_out: Rows):
    """Return the example's draft model, trained on with records, float32; save it as float16."""
    if options.judge.exists():
        return LlamaForCausalLM.from_pretrained(options.judge, dtype=torch.float32).eval()
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    train(
        model,
        lambda rng: compute_loss(model, rows.sample(rng)),
        options.judge_seconds,
        lr_muon=0.02,
        lr_adam=4e-3,
    )
    with torch.no_grad():
        judged = held_out.sample(np.random.default_rng(1), 192)
        loss = sum(compute_loss(model, part).item() for part in judged.split(BATCH)) / 8
    print(f"judge: {loss:.3f} nats/token of held-out records", flush=True)
    model.half().save_pretrained(options.judge)
    tokenizer.save_pretrained(options.judge)
    return model.float().eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "tokenizer", "judge", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--judge-seconds", type=float, default=400, help="CPU time")
    parser.add_argument("--seconds", type=float, default=800, help="CPU time of each half")
    parser.add_argument("--texts", type=int, default=6144, help="written by the judge")
    options = parser.parse_args()
    torch.set_num_threads(1)  # two threads on a shared two-core machine are slower
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    records, held = read_records()
    rows, held_out = Rows(tokenizer, records), Rows(tokenizer, held)
    print(f"{len(records)} records, {len(held)} held out", flush=True)
    judge = train_judge(options, tokenizer, rows, held_out)

    rng = np.random.default_rng(0)
    model = adapt(judge, rows.sample(rng, 32))
    blocks, begun = Blocks(model), time.process_time()
    judged = write_texts(judge, held_out.sample(rng, 192), rng)
    texts = torch.cat(
        [write_texts(judge, rows.sample(rng, 512), rng) for _ in range(options.texts // 512)]
    )
    print(f"{texts.numel()} tokens written in {time.process_time() - begun:.0f} CPU seconds")
    print(repr(tokenizer.decode(texts[-1])), flush=True)

    def sample(of: torch.Tensor | Rows, rng: np.random.Generator) -> torch.Tensor:
        clean = of.sample(rng) if isinstance(of, Rows) else of[rng.integers(0, len(of), BATCH)]
        return blocks.compute_losses(clean, rng)[0].mean()

    for of in (rows, texts):
        train(model, lambda rng, of=of: sample(of, rng), options.seconds, 0.02, 4e-3)
        blocks.report(judged)
        save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
