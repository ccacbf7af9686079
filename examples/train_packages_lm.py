"""Train the example model on Debian package descriptions, on one CPU core.

Text: the English package descriptions of a Debian release, which
`apt-get -o Acquire::Languages=en update` puts into /var/lib/apt/lists. Optimiser: Muon for the
matrices, AdamW for the rest, bf16 autocast. Needs torch, transformers and tokenizers, which SplitUp
itself does not.

    python train_packages_lm.py OUT --hidden 256 --layers 5 --heads 8 --kv-heads 4 --ffn 640 \\
        --cpu-seconds 1900

gave packages-4m: 3.97 M parameters, 9.2 M tokens seen, validation 2.71 nats/token, BPE of 2048
tokens of 3.3 characters. With

    --hidden 128 --layers 2 --heads 4 --kv-heads 2 --ffn 384 --cpu-seconds 700 --tokenizer FIRST_OUT

and a rate of 4e-3 for AdamW it gave the draft model beside it, packages-draft-0.7m: 0.66 M
parameters, 14.4 M tokens seen, 3.22 nats/token, before an earlier distil_draft.py (at 49b3e601)
went on with it. A prompt is the start of a description's first line, after <|endoftext|>.
``--tokenizer`` takes the tokenizer of a model trained before, for a smaller model beside it,
``--family`` another architecture, such as gemma3_text.
"""

import argparse
import glob
import random
import re
import subprocess
import time
from collections.abc import Callable

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CONTEXT, VOCAB, BATCH = 256, 2048, 8


def read_descriptions() -> list[str]:
    text = "".join(
        subprocess.run(
            ["/usr/lib/apt/apt-helper", "cat-file", path],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for path in sorted(glob.glob("/var/lib/apt/lists/*Translation-en*"))
    )
    unique: dict[str, None] = {}
    for block in text.split("\n\n"):
        found = re.search(r"^Description-en: (.*(?:\n .*)*)", block, re.M)
        if not found:
            continue
        first, *rest = found.group(1).split("\n")
        body = re.sub(
            r" ?\n ?",
            "\n",
            " ".join("\n" if line.strip() == "." else line.strip() for line in rest),
        )
        unique[f"{first}\n{body[:900]}\n"] = None
    records = list(unique)
    random.Random(0).shuffle(records)
    return records


def train_tokenizer(records: list[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    bpe.train_from_iterator(
        records,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=["<|endoftext|>", "<|mask|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A",
        pair="<|endoftext|> $A <|endoftext|> $B",
        special_tokens=[("<|endoftext|>", 0)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        mask_token="<|mask|>",
    )


def encode(tokenizer: PreTrainedTokenizerFast, records: list[str]) -> np.ndarray:
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(records):
        ids += encoding.ids
    return np.array(ids, dtype=np.uint16)


def sample_batch(ids: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    starts = rng.integers(0, len(ids) - CONTEXT - 1, BATCH)
    return torch.from_numpy(np.stack([ids[s : s + CONTEXT + 1] for s in starts]).astype(np.int64))


def compute_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(
        logits.float().reshape(-1, VOCAB), batch[:, 1:].reshape(-1)
    )


def orthogonalise(gradient: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of Muon: the nearest (semi-)orthogonal matrix, roughly."""
    tall = gradient.shape[0] > gradient.shape[1]
    x = (gradient.T if tall else gradient) / (gradient.norm() + 1e-7)
    x = x.bfloat16()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.T if tall else x).float()


def train(
    model: torch.nn.Module,
    sample_loss: Callable[[np.random.Generator], torch.Tensor],
    cpu_seconds: float,
    lr_muon: float,
    lr_adam: float,
) -> None:
    matrices = [
        p
        for name, p in model.named_parameters()
        if p.dim() == 2 and "embed" not in name and "lm_head" not in name
    ]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    momenta = [torch.zeros_like(p) for p in matrices]
    adam = torch.optim.AdamW(others, lr=lr_adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rng, start, step = np.random.default_rng(0), time.process_time(), 0
    while (done := (time.process_time() - start) / cpu_seconds) < 1:
        scale = min(1, (step + 1) / 20) * min(1, (1 - done) / 0.5 + 0.02)
        for group in adam.param_groups:
            group["lr"] = lr_adam * scale
        loss = sample_loss(rng)
        model.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
        with torch.no_grad():
            for p, m in zip(matrices, momenta, strict=False):
                m.mul_(0.95).add_(p.grad)
                update = orthogonalise(p.grad + 0.95 * m)
                p.mul_(1 - lr_muon * scale * 0.05)
                p.add_(update, alpha=-lr_muon * scale * max(1, p.shape[0] / p.shape[1]) ** 0.5)
        step += 1
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {done:.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    for name in ("hidden", "layers", "heads", "kv-heads", "ffn", "cpu-seconds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--family", default="llama", help="a model_type of transformers")
    parser.add_argument(
        "--tokenizer", help="directory with a tokenizer to reuse (a draft shares its target's)"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)  # two threads on a shared two-core machine are slower
    torch.manual_seed(0)
    records = read_descriptions()
    held_out, training = records[:600], records[600:]
    tokenizer = (
        PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
        if args.tokenizer
        else train_tokenizer(training)
    )
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            args.family,
            vocab_size=VOCAB,
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            head_dim=args.hidden // args.heads,
            intermediate_size=args.ffn,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=2,
        )
    )
    ids = encode(tokenizer, training)
    train(
        model,
        lambda rng: compute_loss(model, sample_batch(ids, rng)),
        args.cpu_seconds,
        lr_muon=0.02,
        lr_adam=3e-3,
    )
    model.eval()
    with torch.no_grad():
        ids, rng = encode(tokenizer, held_out), np.random.default_rng(1)
        print(
            "validation",
            sum(compute_loss(model, sample_batch(ids, rng)).item() for _ in range(8)) / 8,
            "nats/token",
        )
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
