"""Distil a draft model for speculative decoding from any model that writes text, on a CPU.

    python distil_draft.py TEACHER OUT --minutes 20
    splitup-deploy register OUT --name NAME-draft --context 1024 --chunk 16
    splitup generate NAME --decoder speculative --draft NAME-draft

TEACHER is what ``splitup-deploy register`` takes: a directory, or a GGUF file. A draft model is
asked what its target writes, not what people write, so the teacher writes the texts, a third each
greedily, at T = 0.8 and at T = 1. A chat model asks itself a question and answers it (arXiv
2406.08464); every other text, and all of a model without a chat template, continues the start of a
paragraph of ``--text``, by default this project's pages. Half of the minutes are for writing.

The draft is a small Llama with the teacher's tokenizer. Its table of tokens, embedding and head at
once, is the teacher's head in fewer dimensions and is not trained: of all tables of this width, it
gives the logits nearest to the teacher's. The blocks are trained on the teacher's probabilities of
the next token, of which the likeliest are kept; against them stand these tokens of a whole batch,
and others at random, each for many. An OUT that is there is trained on, with new texts, and Ctrl-C
ends the training early. Needs what SplitUp needs, and splitup-deploy.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its own threads wait for each other where others work

import numpy as np
from safetensors.numpy import load_file, save_file
from splitup_deploy.cutting.build import prepare
from splitup_deploy.frontends.decoder.float_weights import Dequantised
from splitup_deploy.frontends.source_model import Sizes, SourceText

from splitup.backend.runtime import TaskProgram
from splitup.client.text.tokenizer import ModelTokenizer
from splitup.core.errors import SplitUpError
from splitup.core.tensors import array_to_bytes
from splitup.decode.step import make_arrays, make_causal_step
from splitup.graph.rules import check_graph

ROWS, LENGTH, QUESTION, KEPT = 32, 256, 48, 32  # texts at once; tokens of a text, of a question
MESSAGE = "MESSAGE"  # which no template has
LOOP = 16  # tokens that come again where a text repeats itself
HEAD = 32  # size of an attention head of the draft
SMALL = 0.05  # of numbers of its table, which should not drown what the blocks add to rows
TEMPERATURES = (0.0, 0.8, 1.0)
BATCH, RANDOM = 4, 2048  # texts of a thread's step; tokens that stand for all that nobody kept
THREADS = len(os.sched_getaffinity(0))
JUDGED = 32  # of so many texts one is kept back, to judge the draft
RANKS = (1, 2, 4, 8)
TABLE = "model.embed_tokens.weight"
PAGES = Path(__file__).parents[1] / "docs"
Array = np.ndarray
Writing = Generator[int, Array, None]  # tokens that are fed; logits behind them come back


@dataclass
class Text:
    """A text of the teacher. ``top``, ``share``: behind each token, [n, KEPT]; ``counts``: [n]."""

    tokens: list[int]
    top: Array
    share: Array
    counts: Array  # 1.0 where it is learnt what follows, 0.0 where that was given
    temperature: float


# ---- the teacher -------------------------------------------------------------------------------


class Teacher:
    """A model, uncut and in this process, that computes steps of several texts at once."""

    def __init__(self, path: str) -> None:
        source = prepare(path, Sizes(context=LENGTH, chunk=ROWS))
        if source.text is None:
            raise SystemExit(f"error: {path} has no tokenizer: a draft is for models of text")
        weights = source.traced.weights
        self.program = TaskProgram.from_graph(
            check_graph(source.traced.graph),
            lambda name: memoryview(b"".join(weights[name].read())),
            threads=THREADS,
        )
        self.text = source.text
        head = weights.get("lm_head.weight", weights.get(TABLE))
        if head is None:
            raise SystemExit(f"error: {path} has no table of tokens of the usual name")
        parts = (head if head.encoding in ("", "bfloat16") else Dequantised(head)).read()
        data = b"".join(parts)
        if head.encoding == "bfloat16":
            table = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            kind = np.float32 if head.encoding else np.dtype(head.spec.dtype)
            table = np.frombuffer(data, kind).astype(np.float32)
        self.table = table.reshape(self.text.vocab, -1)
        file = self.text.tokenizer
        self.tokenizer_json = file if isinstance(file, bytes) else file.read_bytes()
        self.tokenizer = ModelTokenizer(self.tokenizer_json, path)
        self.width = min(ROWS, self.program.width)

    def list_frames(self) -> tuple[list[int], list[int]] | None:
        """Return the tokens before and behind a user's message, None where no chat has them."""
        if (chat := self.text.chat) is None:
            return None
        messages = [{"role": "user", "content": MESSAGE}]
        parts = self.tokenizer.render_chat(chat, messages, context=LENGTH).split(MESSAGE)
        frames = [self.tokenizer.encode(part, add_special_tokens=False) for part in parts]
        return (frames[0], frames[1]) if len(frames) == 2 and all(frames) else None

    def make_step(self, token: int, position: int) -> list[bytes | memoryview]:
        """Return the inputs of a step of one token."""
        arrays = make_arrays(make_causal_step([token], position), ROWS)
        return [array_to_bytes(spec, arrays[spec.name]) for spec in self.program.inputs]

    def write(self, author: Author, seconds: float) -> None:
        """Write texts for some time."""
        program = self.program
        states = [program.new_state() for _ in range(self.width)]
        texts = [author.begin() for _ in states]
        fed = [(next(text), 0) for text in texts]  # a token, at a position
        begun = said = time.monotonic()
        while (now := time.monotonic()) - begun < seconds:
            steps = [(state, self.make_step(*row)) for state, row in zip(states, fed, strict=True)]
            for place, [data] in enumerate(program.run_together(steps)):
                try:
                    token = texts[place].send(np.frombuffer(data, np.float32)[: self.text.vocab])
                    fed[place] = token, fed[place][1] + 1
                except StopIteration:
                    texts[place] = author.begin()
                    fed[place] = next(texts[place]), 0
            if now - said > 15:
                said = now
                count = sum(len(text.tokens) for text in author.texts)
                print(f"{len(author.texts)} texts, {count} tokens, {now - begun:.0f} s", flush=True)


class Author:
    """Starts texts, and says how they go on."""

    def __init__(self, teacher: Teacher, paragraphs: Sequence[str], seed: int) -> None:
        self.frames = teacher.list_frames()
        self.ends = set(teacher.text.eos_ids)
        self.paragraphs = [teacher.tokenizer.encode(text) for text in paragraphs]
        self.rng = np.random.default_rng(seed)
        self.texts: list[Text] = []
        self.inverse = np.linalg.inv(teacher.table.T @ teacher.table) @ teacher.table.T
        self.covariance = np.zeros((teacher.table.shape[1],) * 2)

    def begin(self) -> Writing:
        """Begin the next text."""
        count = len(self.texts)
        text = Text(
            [],
            *(np.zeros((LENGTH, KEPT), kind) for kind in (np.int32, np.float32)),
            np.zeros(LENGTH, np.float32),
            TEMPERATURES[count // 2 % len(TEMPERATURES)],
        )
        self.texts.append(text)
        return self.write(text, is_chat=count % 2 == 0 and self.frames is not None)

    def write(self, text: Text, *, is_chat: bool) -> Writing:
        """Write one text: yields the tokens that are fed, takes the logits behind them."""
        if is_chat:
            before, behind = self.frames
            logits = yield from self.feed(text, before)
            yield from self.continue_(text, logits, 1.0, len(before) + QUESTION)
            logits = yield from self.feed(text, behind)
        else:
            paragraph = self.paragraphs[self.rng.integers(len(self.paragraphs))]
            logits = yield from self.feed(text, paragraph[: self.rng.integers(2, 17)])
        yield from self.continue_(text, logits, text.temperature, LENGTH)

    def feed(self, text: Text, tokens: Sequence[int]) -> Generator[int, Array, Array]:
        """Feed given tokens; returns the logits behind the last."""
        for token in tokens:
            text.tokens.append(token)
            logits = yield token
        return logits

    def continue_(
        self, text: Text, logits: Array, temperature: float, most: int
    ) -> Generator[int, Array, None]:
        """Choose and feed tokens until one ends the text, or there are so many."""
        while True:
            place = len(text.tokens) - 1
            top = np.argpartition(logits, -KEPT)[-KEPT:]
            scores = logits[top] - logits[top].max()
            share = np.exp(scores)
            text.top[place], text.share[place], text.counts[place] = top, share / share.sum(), 1.0
            if temperature:
                share = np.exp(scores / temperature)
            token = int(
                top[self.rng.choice(KEPT, p=share / share.sum()) if temperature else share.argmax()]
            )
            if self.rng.integers(8) == 0:
                hidden = self.inverse @ logits
                self.covariance += np.outer(hidden, hidden)
            if token in self.ends or len(text.tokens) == most or is_loop(text.tokens):
                return
            text.tokens.append(token)
            logits = yield token


def is_loop(tokens: Sequence[int]) -> bool:
    """Say whether a text has come to what it said before: n-grams draft what follows."""
    last, count = tokens[-LOOP:], len(tokens)
    return any(tokens[at : at + LOOP] == last for at in range(count - 2 * LOOP + 1))


def reduce_table(table: Array, covariance: Array, hidden: int) -> Array:
    """Return the head [vocab, hidden] whose logits can be nearest to the teacher's.

    These are ``table`` times rows of this ``covariance``. A constant of all logits does not count.
    """
    table = table - table.mean(0)
    lengths, basis = np.linalg.eigh(table.T @ table)
    root = np.sqrt(np.maximum(lengths, 0))
    _, axes = np.linalg.eigh(root[:, None] * (basis.T @ covariance @ basis) * root)
    kept = axes[:, -hidden:]
    reduced = table @ (basis / np.maximum(root, 1e-6 * root.max())) @ kept
    return (SMALL * reduced / reduced.std()).astype(np.float32)


def read_paragraphs(paths: Sequence[Path]) -> list[str]:
    """Return the paragraphs of files that begin with a letter, as those of prose do."""
    parts = (part for path in paths for part in path.read_text().split("\n\n"))
    return [part for part in parts if len(part) > 100 and part[0].isalpha()]


# ---- the draft ---------------------------------------------------------------------------------

Backward = Callable[[Array], Array]


class Draft:
    """A Llama in float32 with gradients by hand; weights and gradients by Hugging Face's names."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Array]) -> None:
        self.config, self.weights = config, weights
        self.gradients: dict[str, Array] = {}
        self.table = weights[TABLE]
        size, theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
        angles = np.arange(LENGTH)[:, None] * theta ** (-np.arange(0, size, 2) / size)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def compute(self, tokens: Array) -> tuple[Array, Backward]:
        """Return the rows before the head of tokens [texts, n], and what takes their gradient."""
        x, backs = self.table[tokens], list[Backward]()
        for layer in range(self.config["num_hidden_layers"]):
            for part in (self.attend, self.mlp):
                x, back = part(x, f"model.layers.{layer}")
                backs.append(back)
        x, back = self.norm(x, "model.norm.weight")

        def go_back(d: Array) -> Array:
            d = back(d)
            for each in reversed(backs):
                d = each(d)
            return d

        return x, go_back

    def norm(self, x: Array, name: str) -> tuple[Array, Backward]:
        weight = self.weights[name]
        factor = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        unit = x * factor

        def back(d: Array) -> Array:
            self.gradients[name] = (d * unit).sum((0, 1))
            d = d * weight
            return factor * (d - unit * (d * unit).mean(-1, keepdims=True))

        return unit * weight, back

    def project(self, x: Array, name: str) -> tuple[Array, Backward]:
        weight = self.weights[name]

        def back(d: Array) -> Array:
            self.gradients[name] = d.reshape(-1, d.shape[-1]).T @ x.reshape(-1, x.shape[-1])
            return d @ weight

        return x @ weight.T, back

    def rotate(self, x: Array, sign: float = 1.0) -> Array:
        """Return heads [texts, heads, n, size] rotated by their positions, or back."""
        one, two = np.split(x, 2, -1)
        cos, sin = self.cos[: x.shape[2]], sign * self.sin[: x.shape[2]]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    def attend(self, x: Array, layer: str) -> tuple[Array, Backward]:
        c, (texts, n, _) = self.config, x.shape
        heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        h, back_norm = self.norm(x, f"{layer}.input_layernorm.weight")
        made = [self.project(h, f"{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        q, k, v = (y.reshape(texts, n, -1, size).swapaxes(1, 2) for y, _ in made)
        q = self.rotate(q).reshape(texts, groups, heads // groups, n, size)
        k, v = self.rotate(k)[:, :, None], v[:, :, None]
        scores = q @ k.swapaxes(-1, -2) * size**-0.5
        scores += np.triu(np.full((n, n), -1e9, np.float32), 1)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        mixed = (share @ v).reshape(texts, heads, n, size).swapaxes(1, 2).reshape(texts, n, -1)
        y, back_out = self.project(mixed, f"{layer}.self_attn.o_proj.weight")

        def back(d: Array) -> Array:
            d_mixed = back_out(d).reshape(texts, n, heads, size).swapaxes(1, 2)
            d_mixed = d_mixed.reshape(texts, groups, heads // groups, n, size)
            d_v = (share.swapaxes(-1, -2) @ d_mixed).sum(2)
            d_share = d_mixed @ v.swapaxes(-1, -2)
            d_scores = share * (d_share - (d_share * share).sum(-1, keepdims=True)) * size**-0.5
            d_q = self.rotate((d_scores @ k).reshape(texts, heads, n, size), -1.0)
            d_k = self.rotate((d_scores.swapaxes(-1, -2) @ q).sum(2), -1.0)
            d_h = sum(
                each(part.swapaxes(1, 2).reshape(texts, n, -1))
                for (_, each), part in zip(made, (d_q, d_k, d_v), strict=True)
            )
            return d + back_norm(d_h)

        return x + y, back

    def mlp(self, x: Array, layer: str) -> tuple[Array, Backward]:
        h, back_norm = self.norm(x, f"{layer}.post_attention_layernorm.weight")
        gate, back_gate = self.project(h, f"{layer}.mlp.gate_proj.weight")
        up, back_up = self.project(h, f"{layer}.mlp.up_proj.weight")
        open_ = 1 / (1 + np.exp(-gate))
        y, back_down = self.project(gate * open_ * up, f"{layer}.mlp.down_proj.weight")

        def back(d: Array) -> Array:
            d_active = back_down(d)
            d_gate = d_active * up * open_ * (1 + gate * (1 - open_))
            return d + back_norm(back_gate(d_gate) + back_up(d_active * gate * open_))

        return x + y, back

    def save(self, folder: Path, tokenizer: bytes) -> None:
        """Write a directory as ``splitup-deploy register`` takes it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))
        (folder / "tokenizer.json").write_bytes(tokenizer)
        arrays = {name: each.astype(np.float16) for name, each in self.weights.items()}
        save_file(arrays, folder / "model.safetensors")


def make_config(text: SourceText, layers: int, hidden: int) -> dict[str, Any]:
    """Return the draft's config.json."""
    heads = hidden // HEAD
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": text.vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": list(text.eos_ids),
    }


def make_weights(
    config: dict[str, Any], table: Array, rng: np.random.Generator
) -> dict[str, Array]:
    """Return weights at random, but for the table."""
    hidden, inner, count = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def draw(*shape: int) -> Array:
        return (rng.normal(size=shape) * shape[1] ** -0.5).astype(np.float32)

    weights = {
        TABLE: table,
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in (f"model.layers.{number}" for number in range(count)):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{norm}.weight"] = np.ones(hidden, np.float32)
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = draw(size, hidden)
        weights[f"{layer}.self_attn.o_proj.weight"] = draw(hidden, q) * 0.3
        for name in ("gate", "up"):
            weights[f"{layer}.mlp.{name}_proj.weight"] = draw(inner, hidden)
        weights[f"{layer}.mlp.down_proj.weight"] = draw(hidden, inner) * 0.3
    return weights


# ---- training ----------------------------------------------------------------------------------


def stack(texts: Sequence[Text]) -> tuple[Array, ...]:
    """Return tokens [texts, n], top and share [texts, n, KEPT] and counts [texts, n]."""
    n = max(len(text.tokens) for text in texts)

    tokens = np.array([text.tokens + [0] * (n - len(text.tokens)) for text in texts])
    others = (
        np.stack([getattr(text, name)[:n] for text in texts]) for name in ("top", "share", "counts")
    )
    return tokens, *others


def learn(draft: Draft, texts: Sequence[Text], rng: np.random.Generator) -> float:
    """Compute the gradients of a batch; return the cross entropy with the teacher, in nats."""
    tokens, top, share, counts = stack(texts)
    rows, go_back = draft.compute(tokens)
    learnt = counts > 0
    h, top, share = rows[learnt], top[learnt], share[learnt]
    vocab = len(draft.table)
    known = np.unique(top)
    others = np.setdiff1d(rng.integers(0, vocab, RANDOM), known)
    table = draft.table[np.concatenate([known, others])]
    logits = h @ table.T
    logits[:, len(known) :] += np.log((vocab - len(known)) / max(len(others), 1))
    places = np.searchsorted(known, top)
    logits -= logits.max(1, keepdims=True)
    gradient = np.exp(logits)
    total = gradient.sum(1, keepdims=True)
    found = np.take_along_axis(logits, places, 1) - np.log(total)
    gradient /= total
    np.put_along_axis(gradient, places, np.take_along_axis(gradient, places, 1) - share, 1)
    d = np.zeros_like(rows)
    d[learnt] = gradient @ table / len(h)
    go_back(d)
    return float(-(found * share).sum(1).mean())


def orthogonalise(x: Array) -> Array:
    """Return roughly the nearest orthogonal matrix (Newton-Schulz iteration of Muon)."""
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def train(
    draft: Draft,
    texts: Sequence[Text],
    seconds: float,
    lr_muon: float = 0.02,
    lr_adam: float = 0.01,
) -> None:
    """Train the blocks and norms: matrices by Muon, norms by Adam; each thread has a batch."""
    drafts = [Draft(draft.config, draft.weights) for _ in range(THREADS)]  # of the same weights
    generators = np.random.default_rng(1).spawn(THREADS)
    first = {name: np.zeros_like(each) for name, each in draft.weights.items() if name != TABLE}
    second = {name: np.zeros_like(each) for name, each in first.items() if each.ndim == 1}
    step, losses, begun = 0, list[float](), time.monotonic()
    said = begun

    def learn_batch(one: Draft, rng: np.random.Generator) -> float:
        return learn(one, [texts[i] for i in rng.integers(0, len(texts), BATCH)], rng)

    def update(name: str) -> None:
        gradient = sum(one.gradients[name] for one in drafts) / THREADS
        weight, moment = draft.weights[name], first[name]
        if name in second:
            moment += 0.1 * (gradient - moment)
            second[name] += 0.05 * (gradient**2 - second[name])
            part = np.sqrt(second[name] / (1 - 0.95**step)) + 1e-10
            weight -= lr_adam * scale * moment / (1 - 0.9**step) / part
        else:
            moment *= 0.95
            moment += gradient
            change = orthogonalise(gradient + 0.95 * moment)
            weight *= 1 - 0.05 * lr_muon * scale
            weight -= lr_muon * scale * max(1, weight.shape[0] / weight.shape[1]) ** 0.5 * change

    with ThreadPoolExecutor(THREADS) as pool:
        while (done := (time.monotonic() - begun) / seconds) < 1:
            step += 1
            scale = min(1, step / 20) * min(1, (1 - done) / 0.7 + 0.01)
            losses += pool.map(learn_batch, drafts, generators)
            list(pool.map(update, first))
            if (now := time.monotonic()) - said > 15:
                print(f"{done:.0%}: step {step}, {np.mean(losses):.3f} nats", flush=True)
                said = now
                losses.clear()


def report(draft: Draft, texts: Sequence[Text]) -> None:
    """Print how often the teacher's likeliest token is among the draft's first, by temperature."""
    for temperature in TEMPERATURES:
        ranks, both = [], []
        for text in (each for each in texts if each.temperature == temperature):
            tokens, top, share, counts = stack([text])
            rows, _ = draft.compute(tokens)
            learnt = counts[0] > 0
            logits = rows[0][learnt] @ draft.table.T
            top, share = top[0][learnt], share[0][learnt]
            best = np.take_along_axis(top, share.argmax(1)[:, None], 1)
            ranks.append((logits > np.take_along_axis(logits, best, 1)).sum(1))
            p = np.exp(logits - logits.max(1, keepdims=True))
            p = np.take_along_axis(p / p.sum(1, keepdims=True), top, 1)
            both.append(np.minimum(p, share).sum(1))
        if ranks:
            rank = np.concatenate(ranks)
            shares = " / ".join(f"{(rank < most).mean():.1%}" for most in RANKS)
            overlap = f"the models overlap by {np.concatenate(both).mean():.1%}"
            print(f"T = {temperature}: first {RANKS}: {shares}; {overlap}", flush=True)


# ---- all of it ---------------------------------------------------------------------------------


def open_draft(folder: Path, teacher: Teacher, author: Author, layers: int, hidden: int) -> Draft:
    """Return the draft in a folder, or a new one."""
    if (folder / "config.json").exists():
        config = json.loads((folder / "config.json").read_text())
        weights = {
            name: each.astype(np.float32)
            for name, each in load_file(folder / "model.safetensors").items()
        }
        return Draft(config, weights)
    config = make_config(teacher.text, layers, hidden)
    table = reduce_table(teacher.table, author.covariance, hidden)
    return Draft(config, make_weights(config, table, np.random.default_rng(0)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20, help="of all, on a clock (20)")
    parser.add_argument("--layers", type=int, default=2, help="blocks of a new draft (2)")
    parser.add_argument("--hidden", type=int, default=192, help="its width, of 32 (192)")
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(PAGES.rglob("*.md")))
    options = parser.parse_args()
    begun = time.monotonic()
    teacher = Teacher(options.teacher)
    author = Author(teacher, read_paragraphs(options.text), seed=time.time_ns())
    teacher.write(author, 30 * options.minutes - (time.monotonic() - begun))
    texts = [text for text in author.texts if text.counts.any()]
    print(f"{len(texts)} texts, such as {teacher.tokenizer.decode(texts[0].tokens)!r}", flush=True)
    draft = open_draft(options.out, teacher, author, options.layers, options.hidden)
    judged, learnt = texts[::JUDGED], [each for n, each in enumerate(texts) if n % JUDGED]
    report(draft, judged)
    try:
        train(draft, learnt, 60 * options.minutes - (time.monotonic() - begun))
    except KeyboardInterrupt:
        print("stopped; saving the draft as it is", flush=True)
    report(draft, judged)
    draft.save(options.out, teacher.tokenizer_json)
    teacher.tokenizer.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped before the training, so there is nothing to save") from None
    except SplitUpError as error:
        raise SystemExit(f"error: {error}") from None
