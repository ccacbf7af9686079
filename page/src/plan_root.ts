// Computes the root of an execution's plan, as the chain stores it: splitup/messages/plans.py in Python.
import { sha256 } from "@noble/hashes/sha2.js";
import { keccak_256 } from "@noble/hashes/sha3.js";
import { bytesToHex, concatBytes, hexToBytes, utf8ToBytes } from "@noble/hashes/utils.js";

/** All that a root is computed from. */
export type Opening = {
  request_hash: string;
  execution_id: string;
  model_id: string;
  snapshot_root: string;
  seed: string;
  nodes: { node: string; signing_key: string; endpoint: string; exposure: number }[];
  places: number[];
  tasks: {
    candidates: string[];
    verifiable: boolean;
    terms: {
      task_id: string;
      flops: number;
      weights_bytes: number;
      input_bytes: number;
      ready_ms: number;
      crosses_classes: boolean;
    } | null;
  }[];
};

const PLAN = keccak_256(utf8ToBytes("splitup/plan/v2"));
const TASK = keccak_256(utf8ToBytes("splitup/plan-task/v3"));
const EMPTY = new Uint8Array(32);

/** Return the root of a plan, "0x" and 64 hexadecimal digits. */
export function computePlanRoot(plan: Opening): string {
  const header = [plan.request_hash, plan.execution_id, plan.model_id, plan.snapshot_root, plan.seed].map(word);
  const root = hash(PLAN, ...header, hashDirectory(plan), number(plan.tasks.length), merkleRoot(plan.tasks.map(hashTask)));
  return `0x${bytesToHex(root)}`;
}

/** Return which node runs each task: the candidate that its place names. */
export function listExecutors(plan: Opening): string[] {
  return plan.tasks.map((task, index) => task.candidates[plan.places[index] ?? 0]);
}

function hashTask(task: Opening["tasks"][number], index: number): Uint8Array {
  const terms = task.terms;
  const figures = terms
    ? [
        word(terms.task_id),
        ...[terms.flops, terms.weights_bytes, terms.input_bytes, terms.ready_ms].map(number),
        number(Number(terms.crosses_classes)),
      ]
    : Array<Uint8Array>(6).fill(EMPTY);
  return hash(TASK, number(index), ...figures, number(Number(task.verifiable)), hash(...task.candidates.map(word)));
}

function hashDirectory(plan: Opening): Uint8Array {
  const nodes = plan.nodes.map((entry) =>
    hash(word(entry.node), word(entry.signing_key), sha256(utf8ToBytes(entry.endpoint)), number(entry.exposure)),
  );
  return hash(...nodes, ...plan.places.map(number));
}

function merkleRoot(leaves: Uint8Array[]): Uint8Array {
  if (!leaves.length) return EMPTY;
  let level = leaves;
  while (level.length > 1) {
    const above: Uint8Array[] = [];
    for (let i = 0; i < level.length; i += 2) above.push(hash(level[i], level[i + 1] ?? EMPTY));
    level = above;
  }
  return level[0];
}

function hash(...words: Uint8Array[]): Uint8Array {
  return sha256(concatBytes(...words));
}

/** Return a hexadecimal string as a word of 32 bytes; an address is filled up on the left. */
function word(hex: string): Uint8Array {
  return hexToBytes(hex.replace(/^0x/, "").padStart(64, "0"));
}

function number(value: number): Uint8Array {
  return word(value.toString(16));
}
