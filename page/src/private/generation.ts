// One text: its tokens are chosen here, the nodes compute the layers between the client's tasks.
import type { EncryptedAdapter } from "./adapter";
import { makeValue, type Value, wrap } from "./arrays";
import { type Connection, type Forwarded, SplitError } from "./connection";
import type { Logits } from "./logits";
import type { DeviceModel } from "./model";
import { RowNoise } from "./noise";
import type { State, Step } from "./program";
import { Sampler, type Sampling } from "./sampler";

const ATTEMPTS = 3; // to feed a session whose rows the server lost
const LOST = ["session_evicted", "session_unknown", "execution_failed", "unavailable"];

export type Piece = { token: number; text: string };
export type Costs = { steps: number; microUsdc: number; executions: string[]; epsilon: number | null; adapter: string };

/** A text under way. Rows that were sent are kept, to feed them again when the server forgot them. */
class Session {
  private states: State[];
  private steps = new Map<number, Step>(); // of the tasks, in the current step
  private fed: Float32Array[] = [];
  private rows = 0;
  private id: string | null = null;
  private noise: RowNoise | null = null;
  readonly costs: Costs = { steps: 0, microUsdc: 0, executions: [], epsilon: null, adapter: "" };

  constructor(private model: DeviceModel, private connection: Connection, private adapter: EncryptedAdapter | null, private signal: AbortSignal) {
    this.states = model.programs.map((program) => program.newState());
  }

  /** Add noise to all that is sent, at most so many rows, before the first tokens are fed. */
  protect(epsilon: number, mostRows: number): void {
    const { hidden_dim, chunk, vocab } = this.model.info;
    // a typical length, of tokens that no text chooses
    const spread = Array.from({ length: chunk }, (_, place) => Math.floor((place * (vocab - 1)) / Math.max(1, chunk - 1)));
    const inputs = makeInputs(spread, 0, chunk);
    for (const task of this.model.early) this.begin(task, inputs, null);
    const rows = this.readSent();
    this.states = this.model.programs.map((program) => program.newState());
    this.steps.clear();
    const lengths = Array.from({ length: chunk }, (_, row) => Math.hypot(...rows.subarray(row * hidden_dim, (row + 1) * hidden_dim)));
    const [low, high] = [(chunk - 1) >> 1, chunk >> 1].map((place) => lengths.sort((a, b) => a - b)[place]);
    this.noise = new RowNoise(epsilon, mostRows, hidden_dim, (low + high) / 2);
  }

  get position(): number {
    return this.rows - 1; // of the last row
  }

  /** Feed tokens; return the logits of the last one. */
  async feed(tokens: readonly number[], whileWaiting: () => void): Promise<Logits> {
    const { info, late, programs } = this.model;
    const chunks: { inputs: Map<string, Value>; sent: Float32Array }[] = [];
    for (let place = 0; place < tokens.length; place += info.chunk) {
      const part = tokens.slice(place, place + info.chunk);
      const inputs = makeInputs(part, this.rows, info.chunk);
      this.rows += part.length;
      this.steps.clear();
      for (const task of this.model.early) this.begin(task, inputs, null);
      const sent = this.readSent();
      chunks.push({ inputs, sent: this.noise?.add(sent) ?? sent });
    }
    this.costs.epsilon = this.noise?.epsilon ?? null;
    const answer = this.forward(chunks.map(({ sent }) => sent));
    whileWaiting();
    let given = await answer;
    if (this.adapter) {
      const last = given.subarray(-info.hidden_dim);
      const added = await this.adapter.apply(last, this.signal);
      added.forEach((value, place) => (last[place] += value));
      this.costs.adapter = this.adapter.describe();
    }
    const hasState = late.some((task) => programs[task].graph.states.length);
    for (const [place, { inputs, sent }] of chunks.entries()) {
      const rows = given.subarray(0, sent.length);
      given = given.subarray(sent.length);
      const isLast = place === chunks.length - 1;
      this.steps.clear();
      if (isLast || hasState) for (const task of late) this.begin(task, inputs, wrap("float32", [sent.length / info.hidden_dim, info.hidden_dim], rows));
    }
    const [{ task, port }] = this.model.manifest.client.outputs;
    return this.steps.get(task)!.getLogits(port);
  }

  async close(): Promise<void> {
    if (this.id !== null) await this.connection.end(this.id);
  }

  private begin(task: number, inputs: Map<string, Value>, network: Value | null): void {
    const given = this.model.manifest.client.tasks[task].inputs.map(({ source }) => {
      if ("input" in source) return inputs.get(source.input)!;
      return "task" in source ? this.steps.get(source.task)!.getOutput(source.port) : network!;
    });
    const step = this.model.programs[task].begin(this.states[task], given);
    this.states[task] = step.update();
    this.steps.set(task, step);
  }

  /** Return the hidden states that go to the nodes. */
  private readSent(): Float32Array {
    const { inputs, client } = this.model.manifest;
    const source = client.sends[inputs.findIndex(({ name }) => name === this.model.info.input)];
    if (!source || !("task" in source)) throw new Error(`the model '${this.model.info.name}' sends other values than hidden states`);
    const value = this.steps.get(source.task)!.getOutput(source.port);
    return (value.data as Float32Array).slice(value.offset, value.offset + value.shape[0] * value.shape[1]);
  }

  private async forward(parts: Float32Array[]): Promise<Float32Array> {
    const rows = join(parts);
    this.fed.push(rows);
    for (let attempt = 1; ; attempt++) {
      const isAgain = attempt > 1 || this.id === null;
      const feed = isAgain ? join(this.fed) : rows;
      try {
        return (await this.send(feed, this.rows - feed.length / this.model.info.hidden_dim)).slice(-rows.length);
      } catch (error) {
        if (!(error instanceof SplitError) || !LOST.includes(error.code) || attempt === ATTEMPTS || this.signal.aborted) throw error;
        this.id = null;
      }
    }
  }

  private async send(rows: Float32Array, position: number): Promise<Float32Array> {
    const { info } = this.model;
    const results: Float32Array[] = [];
    const most = info.max_rows * info.hidden_dim;
    for (let place = 0; place < rows.length; place += most) {
      const part = rows.slice(place, place + most);
      const [answer, result] = await this.connection.forward(info, part, position + place / info.hidden_dim, this.id, this.signal);
      this.count(answer);
      this.id = answer.session_id;
      results.push(result);
    }
    return join(results);
  }

  private count(answer: Forwarded & { steps?: number }): void {
    this.costs.steps += answer.steps ?? 0;
    this.costs.microUsdc += answer.cost_micro_usdc;
    if (!this.costs.executions.includes(answer.execution_id)) this.costs.executions.push(answer.execution_id);
  }
}

/** Yield the tokens that continue a prompt, each with the text that is certain by then. */
export async function* generate(
  model: DeviceModel,
  connection: Connection,
  prompt: readonly number[],
  maxTokens: number,
  sampling: Sampling,
  epsilon: number, // 0: no noise
  adapter: EncryptedAdapter | null, // applied to the final hidden states
  signal: AbortSignal,
  onCosts: (costs: Costs) => void = () => {},
): AsyncGenerator<Piece> {
  const { info } = model;
  if (adapter && info.private_blocks) throw new Error(`an adapter changes the final hidden state, and the model '${info.name}' leaves blocks after it to this device; use one registered with --private 0`);
  const room = info.context - prompt.length + 1; // the last token is chosen and not fed back
  if (!prompt.length) throw new Error("the prompt has no token; write something");
  if (room < 1) throw new Error(`the prompt has ${prompt.length} tokens and the model only ${info.context} positions; shorten it`);
  const unknown = prompt.find((token) => token >= info.vocab);
  if (unknown !== undefined) throw new Error(`token ${unknown} of the prompt is outside the vocabulary of ${info.vocab}`);
  const sampler = new Sampler(model.kernels, sampling, prompt);
  const stream = model.tokenizer.openStream(prompt);
  const session = new Session(model, connection, adapter, signal);
  adapter?.startReport();
  try {
    if (epsilon) session.protect(epsilon, prompt.length + Math.min(maxTokens, room) - 1);
    let next: readonly number[] = prompt;
    for (let count = 0; count < Math.min(maxTokens, room); count++) {
      const fed = next;
      const logits = await session.feed(fed, () => sampler.prepare(session.position, info.vocab));
      onCosts(session.costs);
      const token = sampler.choose(logits, session.position);
      if (info.eos_ids.includes(token)) break;
      yield { token, text: stream.extend(token) };
      next = [token];
    }
    const rest = stream.extend(null);
    if (rest) yield { token: -1, text: rest };
  } finally {
    await session.close();
  }
}

/** Return a step of consecutive tokens as the model takes it; see splitup.decode.step. */
function makeInputs(tokens: readonly number[], start: number, chunk: number): Map<string, Value> {
  const width = 2 + 2 * chunk;
  const layout = makeValue("int32", [tokens.length, width]);
  tokens.forEach((_, row) => {
    layout.data[row * width] = start + row;
    for (let seen = 0; seen <= row; seen++) layout.data[row * width + 2 + seen] = seen + 1;
  });
  layout.data[1] = start;
  return new Map([
    ["tokens", wrap("int32", [tokens.length], Int32Array.from(tokens))],
    ["layout", layout],
    ["outputs", wrap("int32", [1], Int32Array.of(tokens.length - 1))],
  ]);
}

function join(parts: Float32Array[]): Float32Array {
  const joined = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) {
    joined.set(part, place);
    place += part.length;
  }
  return joined;
}
