// Sampling as splitup.decode.sampler and splitup.decode.adjusted_sampler do it: the token at a
// position is a pure function of logits, seed and position. What these two files say holds here.
//
// Most logits are known to within a bound only. A token is computed exactly where it may matter, so
// that the choice is the one among exact logits.
import type { Kernels } from "./kernels";
import { findCandidates, type Logits, makeKnown } from "./logits";

export type Sampling = {
  temperature: number; // 0 takes the largest logit
  seed: bigint;
  top_k: number; // 0 keeps every token, as do top_p 1 and min_p 0
  top_p: number;
  min_p: number;
  repetition_penalty: number; // 1 changes nothing
  frequency_penalty: number;
  presence_penalty: number;
};

export const GREEDY: Sampling = {
  temperature: 0,
  seed: 0n,
  top_k: 0,
  top_p: 1,
  min_p: 0,
  repetition_penalty: 1,
  frequency_penalty: 0,
  presence_penalty: 0,
};

const LIKELY = 1024; // largest logits, which nearly always hold all that top_p keeps
const RANGES: [keyof Sampling, number, number, boolean][] = [
  ["temperature", 0, 100, false],
  ["top_k", 0, 2 ** 31, true],
  ["top_p", Number.MIN_VALUE, 1, false],
  ["min_p", 0, 1, false],
  ["repetition_penalty", 0.1, 10, false],
  ["frequency_penalty", -2, 2, false],
  ["presence_penalty", -2, 2, false],
];

type Kept = { tokens: number[]; scaled: Float64Array }; // in the order of the vocabulary

/** Chooses the tokens of one text. */
export class Sampler {
  private counts = new Map<number, number>(); // of the tokens chosen so far
  private seen: Set<number>; // these, and the prompt's
  private noise: { position: number; values: Float64Array } | null = null;

  constructor(private kernels: Kernels, private sampling: Sampling, prompt: readonly number[] = []) {
    for (const [name, least, most, isWhole] of RANGES) {
      const value = sampling[name] as number;
      if (typeof value !== "number" || !(value >= least && value <= most) || (isWhole && !Number.isInteger(value))) {
        throw new Error(`${name} is ${value}; give a number from ${least === Number.MIN_VALUE ? "above 0" : least} to ${most}`);
      }
    }
    if (sampling.seed < 0n || sampling.seed >= 1n << 64n) throw new Error("the seed is a whole number from 0 to 2^64 - 1");
    this.seen = new Set(prompt);
  }

  /** Compute the noise of a position ahead, while its logits are awaited. */
  prepare(position: number, count: number): void {
    const { temperature, top_k, top_p, min_p } = this.sampling;
    if (temperature && !top_k && top_p === 1 && !min_p) this.getNoise(position, count);
  }

  /** Return the token that follows `position`. Raises an error for logits that hold a NaN. */
  choose(logits: Logits, position: number): number {
    for (let token = 0; token < logits.size; token++) {
      if (Number.isNaN(logits.values[token])) throw new Error(`the logits at position ${position} contain NaN; the model is broken`);
    }
    const token = this.pick(this.penalise(logits), position);
    this.counts.set(token, (this.counts.get(token) ?? 0) + 1);
    this.seen.add(token);
    return token;
  }

  private pick(logits: Logits, position: number): number {
    const { temperature, top_k, top_p, min_p } = this.sampling;
    if (temperature === 0) return findBest(findCandidates(logits, 1), (token) => logits.exact(token));
    if ((top_k > 0 && top_k < logits.size) || top_p < 1 || min_p) {
      const { tokens, scaled } = this.findKept(logits);
      const uniform = this.kernels.drawUniform(this.sampling.seed, position, logits.size);
      return findBest(tokens, (token, place) => scaled[place] + toGumbel(uniform[token]));
    }
    const noise = this.getNoise(position, logits.size);
    let least = -Infinity;
    for (let token = 0; token < logits.size; token++) {
      least = Math.max(least, (logits.values[token] - logits.bounds[token]) / temperature + noise[token]);
    }
    least -= 1e-9 * (1 + Math.abs(least)); // these sums are rounded
    const tokens = [];
    for (let token = 0; token < logits.size; token++) {
      if ((logits.values[token] + logits.bounds[token]) / temperature + noise[token] >= least) tokens.push(token);
    }
    return findBest(tokens, (token) => logits.exact(token) / temperature + noise[token]);
  }

  private getNoise(position: number, count: number): Float64Array {
    if (this.noise?.position !== position || this.noise.values.length !== count) {
      const values = this.kernels.drawUniform(this.sampling.seed, position, count);
      for (let token = 0; token < count; token++) values[token] = toGumbel(values[token]);
      this.noise = { position, values };
    }
    return this.noise.values;
  }

  /** Return the logits after penalties, which are exact where a penalty is. */
  private penalise(logits: Logits): Logits {
    const ours = this.sampling;
    const repetition = Math.fround(ours.repetition_penalty);
    const isPlain = repetition === 1 && !ours.frequency_penalty && !ours.presence_penalty;
    const changed = new Map<number, number>();
    for (const token of isPlain ? [] : this.seen) {
      let logit = logits.exact(token);
      if (repetition !== 1) logit = Math.fround(logit > 0 ? logit / repetition : logit * repetition);
      const count = this.counts.get(token);
      if (count) logit = Math.fround(logit - Math.fround(ours.frequency_penalty * count + ours.presence_penalty));
      changed.set(token, logit);
    }
    if (!changed.size) return logits;
    const values = logits.values.slice();
    const bounds = logits.bounds.slice();
    for (const [token, logit] of changed) {
      values[token] = logit;
      bounds[token] = 0;
    }
    const exactAll = (): Float32Array => {
      const all = logits.exactAll().slice();
      for (const [token, logit] of changed) all[token] = logit;
      return all;
    };
    return { size: logits.size, values, bounds, exact: (token) => changed.get(token) ?? logits.exact(token), exactAll };
  }

  /** Return the tokens that the three limits leave. */
  private findKept(logits: Logits): Kept {
    const { temperature, top_p, min_p } = this.sampling;
    let kept: number[];
    const top_k = this.sampling.top_k && Math.min(this.sampling.top_k, logits.size);
    if (top_p < 1) kept = this.findLikely(logits);
    else if (top_k && top_k < logits.size) kept = this.findLargest(logits, top_k);
    else kept = []; // all: min_p below says which of them have to be looked at
    if (min_p) {
      const best = logits.exact(findBest(findCandidates(logits, 1), (token) => logits.exact(token)));
      const least = best / temperature + Math.log(min_p);
      if (top_p === 1 && (!top_k || top_k >= logits.size)) {
        for (let token = 0; token < logits.size; token++) {
          const most = (logits.values[token] + logits.bounds[token]) / temperature;
          if (most + 1e-9 * Math.abs(most) >= least) kept.push(token);
        }
      }
      kept = kept.filter((token) => logits.exact(token) / temperature >= least);
    }
    kept.sort((a, b) => a - b);
    return { tokens: kept, scaled: Float64Array.from(kept, (token) => logits.exact(token) / temperature) };
  }

  /** Return the tokens of the `count` largest logits, largest first; of equal ones the first. */
  private findLargest(logits: Logits, count: number): number[] {
    const found = findCandidates(logits, count).map((token) => [token, logits.exact(token)]);
    found.sort(([a, x], [b, y]) => y - x || a - b);
    return found.slice(0, count).map(([token]) => token);
  }

  /** Return the tokens that top_k and top_p leave, likeliest first. */
  private findLikely(logits: Logits): number[] {
    const { temperature, top_k, top_p } = this.sampling;
    const count = Math.min(top_k || LIKELY, logits.size);
    const order = this.findLargest(logits, count);
    const first = logits.exact(order[0]) / temperature;
    const powers = Float64Array.from(order, (token) => Math.exp(logits.exact(token) / temperature - first));
    if (top_k) return order.slice(0, Math.max(1, countEnough(powers, top_p * sumPairwise(powers))));
    const [low, high] = sumAll(logits, order, powers, first, temperature);
    const enough = countEnough(powers, top_p * low);
    if (enough === countEnough(powers, top_p * high) && enough < count) return order.slice(0, Math.max(1, enough));
    return this.findLikelyOfAll(makeKnown(logits.exactAll()), first);
  }

  /** Do the same where the bounds do not decide it. */
  private findLikelyOfAll(logits: Logits, first: number): number[] {
    const { temperature, top_p } = this.sampling;
    const whole = sumPairwise(Float64Array.from(logits.values, (logit) => Math.exp(logit / temperature - first)));
    for (const count of [Math.min(LIKELY, logits.size), logits.size]) {
      const order = this.findLargest(logits, count);
      const powers = Float64Array.from(order, (token) => Math.exp(logits.values[token] / temperature - first));
      const enough = countEnough(powers, top_p * whole);
      if (enough < count || count === logits.size) return order.slice(0, Math.max(1, enough));
    }
    return [];
  }
}

/** Return between which two numbers the sum of all tokens' powers is. */
function sumAll(logits: Logits, order: number[], powers: Float64Array, first: number, temperature: number): [number, number] {
  const sum = sumPairwise(powers);
  const known = new Set(order);
  let low = 0;
  let high = 0;
  for (let token = 0; token < logits.size; token++) {
    if (known.has(token)) continue;
    const power = Math.exp(logits.values[token] / temperature - first);
    if (power < 1e-30) {
      high += 1e-30 * Math.exp(logits.bounds[token] / temperature);
      continue;
    }
    const factor = Math.exp(logits.bounds[token] / temperature);
    low += power / factor;
    high += power * factor;
  }
  return [(sum + low) * (1 - 1e-12), (sum + high) * (1 + 1e-12)]; // these sums are rounded
}

/** Return how many powers have a sum before them that is below `most`. */
function countEnough(powers: Float64Array, most: number): number {
  let sum = 0;
  let count = 0;
  for (const power of powers) {
    sum += power;
    if (sum - power < most) count++;
  }
  return count;
}

/** Add as numpy does: in eight sums, and long arrays in halves. */
function sumPairwise(values: Float64Array): number {
  const count = values.length;
  if (count < 8) return values.reduce((sum, value) => sum + value, 0);
  if (count > 128) {
    const half = Math.floor(count / 2) - (Math.floor(count / 2) % 8);
    return sumPairwise(values.subarray(0, half)) + sumPairwise(values.subarray(half));
  }
  const sums = values.slice(0, 8);
  let place = 8;
  for (; place < count - (count % 8); place += 8) for (let lane = 0; lane < 8; lane++) sums[lane] += values[place + lane];
  const [a, b, c, d, e, f, g, h] = sums;
  let sum = a + b + (c + d) + (e + f + (g + h));
  for (; place < count; place++) sum += values[place];
  return sum;
}

/** Return the token of the largest score, the first of equal ones. */
function findBest(tokens: number[], score: (token: number, place: number) => number): number {
  let best = tokens[0];
  let most = -Infinity;
  tokens.forEach((token, place) => {
    const found = score(token, place);
    if (found > most) [best, most] = [token, found];
  });
  return best;
}

function toGumbel(uniform: number): number {
  return -Math.log(-Math.log(uniform));
}
