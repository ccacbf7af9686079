// Weights in quantised blocks: the part of a graph that makes numbers of them, computed for some rows.
//
// A weight [rows, blocks, bytes] becomes float32 [rows, width] by operations that the graph holds, of
// any format. All rows at once would be as large as the model was before it was quantised, for each
// operation; a row depends on its own bytes only, so any run of rows can be computed by itself.
import { computeNode, flatten, isElementwise, type Value } from "./arrays";
import type { Graph } from "./graph";

/** What a node is made of, if that is one weight and constants: its shape, and which axis has the rows (-1: none). */
export type Made = { shape: number[]; axis: number; weight: number };

/** Return for every node of a graph what it is made of, or null. */
export function traceBlocks(graph: Graph): (Made | null)[] {
  const found: (Made | null)[] = [];
  for (const { op, dtype, srcs, arg } of graph.nodes) {
    const parts = srcs.map((src) => found[src]);
    if (parts.includes(null)) found.push(null);
    else if (op === "WEIGHT") {
      const { shape } = graph.weights[arg as number];
      found.push(dtype === "uint8" && shape.length === 3 ? { shape, axis: 0, weight: arg as number } : null);
    } else found.push(op === "CONST" ? { shape: [], axis: -1, weight: -1 } : make(op, arg, parts as Made[]));
  }
  return found;
}

function make(op: string, arg: unknown, parts: Made[]): Made | null {
  if (!parts.length) return null;
  const [{ shape, axis, weight }] = parts;
  const rows = shape[axis];
  const numbers = arg as number[];
  const pairs = arg as [number, number][];
  if (op === "CAST" || op === "BITCAST" || op === "CONTIGUOUS" || isElementwise(op)) return join(parts, 0);
  switch (op) {
    case "STACK":
      return parts.every((part) => String(part.shape) === String(shape)) ? join(parts, 1, parts.length) : null;
    case "RESHAPE": {
      if (numbers.some((size) => typeof size !== "number")) return null;
      if (axis < 0) return { shape: numbers, axis, weight };
      const place = numbers.findIndex((size) => size !== 1 || size === rows);
      return isFront(shape, axis) && numbers[place] === rows ? { shape: numbers, axis: place, weight } : null;
    }
    case "PERMUTE":
      return { shape: numbers.map((from) => shape[from]), axis: numbers.indexOf(axis), weight };
    case "EXPAND":
      return { shape: [...numbers, ...shape], axis: axis < 0 ? axis : axis + numbers.length, weight };
    case "SHRINK":
    case "PAD": {
      const isWhole = axis < 0 || (pairs[axis][0] === 0 && pairs[axis][1] === rows);
      return isWhole ? { shape: pairs.map(([, size]) => size), axis, weight } : null;
    }
    default:
      return null;
  }
}

/** Say whether all axes before this one have length 1. */
function isFront(shape: number[], axis: number): boolean {
  return shape.slice(0, axis).every((size) => size === 1);
}

/** Return what operands make that are broadcast, or with `count` stacked; null where their rows do not meet. */
function join(parts: Made[], front: number, count = 1): Made | null {
  const rank = Math.max(...parts.map(({ shape }) => shape.length));
  const shape = new Array<number>(rank).fill(1);
  let [axis, weight] = [-1, -1];
  for (const part of parts) {
    const shift = rank - part.shape.length;
    part.shape.forEach((size, at) => (shape[shift + at] = Math.max(shape[shift + at], size)));
    if (part.weight < 0) continue;
    if (weight >= 0 && (weight !== part.weight || axis !== shift + part.axis)) return null;
    [axis, weight] = [shift + part.axis, part.weight];
  }
  if (axis < 0) return front ? { shape: [count, ...shape], axis, weight } : { shape, axis, weight };
  if (parts.some((part) => part.weight < 0 && (part.shape[axis - rank + part.shape.length] ?? 1) !== 1)) return null;
  return front ? { shape: [count, ...shape], axis: axis + 1, weight } : { shape, axis, weight };
}

/** Return the weight [rows, width] that a node is as float32, but for axes of length 1 before, or null. */
export function findMatrix({ shape, axis, weight }: Made): { weight: number; rows: number; width: number } | null {
  const isMatrix = weight >= 0 && axis === shape.length - 2 && isFront(shape, axis);
  return isMatrix ? { weight, rows: shape[axis], width: shape[axis + 1] } : null;
}

/** Return a function that computes rows of a node, [count, width], from the weight's value. */
export function makeReader(graph: Graph, made: (Made | null)[], root: number, value: Value): (first: number, count: number) => Float32Array {
  const needed = new Set([root]); // a set gives what was added while it is read
  for (const place of needed) for (const src of graph.nodes[place].srcs) needed.add(src);
  const order = [...needed].sort((a, b) => a - b);
  return (first, count) => {
    const values = new Map<number, Value>();
    for (const place of order) {
      const node = graph.nodes[place];
      const operands = node.srcs.map((src) => values.get(src)!);
      const part = { ...value, shape: [count, ...value.shape.slice(1)], offset: value.offset + first * value.strides[0] };
      values.set(place, node.op === "WEIGHT" ? part : computeNode(node, narrow(node.op, node.arg, made[place]!.axis, count), operands));
    }
    return Float32Array.from(flatten(values.get(root)!));
  };
}

/** Return a node's argument for so many rows. */
function narrow(op: string, arg: unknown, axis: number, count: number): unknown {
  if (axis < 0) return arg;
  if (op === "RESHAPE") return (arg as number[]).map((size, at) => (at === axis ? count : size));
  if (op === "SHRINK" || op === "PAD") return (arg as [number, number][]).map((pair, at) => (at === axis ? [0, count] : pair));
  return arg;
}
