// The logits of one token: known to within a bound, and exactly where somebody asks.
import type { Blocks, Kernels, Table } from "./kernels";

export type Logits = {
  readonly size: number;
  /** Near the exact logits: each within `bounds`. */
  readonly values: Float32Array;
  readonly bounds: Float32Array;
  /** Return a logit itself: a sum in float64 over the registered weights, rounded to float32. */
  exact(token: number): number;
  /** Return all of them. It takes many times as long as `values` did. */
  exactAll(): Float32Array;
};

/** Return logits that are known. */
export function makeKnown(values: Float32Array): Logits {
  return {
    size: values.length,
    values,
    bounds: new Float32Array(values.length),
    exact: (token) => values[token],
    exactAll: () => values,
  };
}

/** Return the logits that a hidden state and a table give; only few of them are ever computed exactly. */
export function computeLogits(kernels: Kernels, hidden: Float32Array, table: Table | Blocks): Logits {
  const { values, bounds } = kernels.scan(hidden, table);
  const known = new Map<number, number>();
  return {
    size: table.rows,
    values,
    bounds,
    exact(token) {
      let logit = known.get(token);
      if (logit === undefined) known.set(token, (logit = kernels.multiply(hidden, table, token, 1)[0]));
      return logit;
    },
    exactAll: () => kernels.multiply(hidden, table),
  };
}

/** Return the tokens among which the `count` largest logits are, with the margin of the bounds. */
export function findCandidates(logits: Logits, count: number): number[] {
  const { values, bounds, size } = logits;
  const least = findLeast(values, bounds, Math.min(count, size));
  const found = [];
  for (let token = 0; token < size; token++) if (values[token] + bounds[token] >= least) found.push(token);
  return found;
}

/** Return the `count`-th largest of all `values - bounds`. */
function findLeast(values: Float32Array, bounds: Float32Array, count: number): number {
  // a heap of the largest so far, the smallest of them at its root
  const heap = new Float64Array(count).fill(-Infinity);
  for (let token = 0; token < values.length; token++) {
    const low = values[token] - bounds[token];
    if (low <= heap[0]) continue;
    let place = 0;
    for (;;) {
      let child = 2 * place + 1;
      if (child >= count) break;
      if (child + 1 < count && heap[child + 1] < heap[child]) child++;
      if (heap[child] >= low) break;
      heap[place] = heap[child];
      place = child;
    }
    heap[place] = low;
  }
  return heap[0];
}
