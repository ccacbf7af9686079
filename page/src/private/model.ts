// A private model on this device: its manifest, the client's tasks and weights, its tokenizer.
//
// All of it is checked by digests, down from the model's id: the manifest's, then those that it and
// the graphs name. Every tensor is stored once, also where two tasks have it (a tied head).
import { type Value, wrap } from "./arrays";
import type { ModelInfo } from "./connection";
import { type Graph, parseGraph, type Weight } from "./graph";
import { decode, isTableKind, type Kernels, type Table, type TableKind } from "./kernels";
import { Program, type Stored } from "./program";
import { computeDigest, type FetchRange, Refusal, type Source, type TensorStore } from "./tensor_store";
import { ModelTokenizer } from "./tokenizer";

type PortSource = { input: string } | { task: number; port: number } | { output: string };
type ClientTask = { task_id: string; label: string; weights_digest: string; weights_bytes: number; inputs: { name: string; source: PortSource }[] };
export type ClientPart = {
  inputs: { name: string }[];
  outputs: { name: string; task: number; port: number }[];
  tasks: ClientTask[];
  sends: PortSource[];
};
type Manifest = {
  inputs: { name: string }[];
  client: ClientPart | null;
  text: { tokenizer_digest: string; tokenizer_bytes: number } | null;
};
export type OnProgress = (done: number, total: number) => void;

const DTYPES: Record<string, string> = {
  F16: "float16", BF16: "bfloat16", F32: "float32", F64: "float64", BOOL: "bool",
  I8: "int8", U8: "uint8", I16: "int16", U16: "uint16", I32: "int32", U32: "uint32",
};
const MAX_FILE_BYTES = 64 * 1024 * 1024; // of a manifest, a graph or a header
const MAX_HEADER_BYTES = 16 * 1024 * 1024;

export class DeviceModel {
  /** The tasks before the nodes' and after them, in order. */
  readonly early: number[] = [];
  readonly late: number[] = [];

  constructor(
    readonly info: ModelInfo,
    readonly manifest: { inputs: { name: string }[]; client: ClientPart },
    readonly programs: Program[],
    readonly tokenizer: ModelTokenizer,
    readonly kernels: Kernels,
  ) {
    manifest.client.tasks.forEach((task, place) => {
      const isEarly = task.inputs.every(({ source }) => "input" in source || ("task" in source && this.early.includes(source.task)));
      (isEarly ? this.early : this.late).push(place);
    });
  }
}

/** What a model leaves to its users: its manifest, and the graphs of the client's tasks. */
async function readTasks(info: ModelInfo, files: Files) {
  const { inputs, client, text } = JSON.parse(await files.readText(info.model_id.slice(2), "the model's manifest")) as Manifest;
  if (!client || !text) throw new Error(`the model '${info.name}' leaves no text to its users; choose another`);
  const graphs: Graph[] = [];
  for (const task of client.tasks) graphs.push(parseGraph(await files.readText(task.task_id, `the graph of '${task.label}'`), task.label));
  return { inputs, client, text, graphs };
}

/** Return how many bytes of a model's weights and tokenizer are still to be fetched. */
export async function measureModel(info: ModelInfo, store: TensorStore, files: Files): Promise<number> {
  const { text, graphs } = await readTasks(info, files);
  const weights = new Map(graphs.flatMap((graph) => graph.weights.map((weight) => [weight.digest, countBytes(weight)])));
  let missing = (await store.recall(text.tokenizer_digest)) ? 0 : text.tokenizer_bytes;
  for (const [digest, bytes] of weights) missing += await store.countMissing(digest, bytes);
  return missing;
}

/** Fetch what is missing of a model, and load it. */
export async function loadModel(
  info: ModelInfo, store: TensorStore, kernels: Kernels, files: Files, onProgress: OnProgress, signal?: AbortSignal,
): Promise<DeviceModel> {
  const { inputs, client, text, graphs } = await readTasks(info, files);
  const tokenizer = await files.readText(text.tokenizer_digest, "the tokenizer");
  const sources = new Map<string, Source>(); // by the tensor's digest
  for (const [place, task] of client.tasks.entries()) {
    for (const source of await findTensors(task, graphs[place], files)) sources.set(source.digest, source);
  }
  await download([...sources.values()], store, onProgress, signal);
  const loader = new Loader(store, kernels, sources);
  const programs: Program[] = [];
  for (const graph of graphs) {
    const tables = Program.findTables(graph);
    const stored: Stored[] = [];
    for (const [place, weight] of graph.weights.entries()) stored.push(await loader.load(weight, tables.get(place) ?? null));
    programs.push(new Program(graph, stored, kernels));
  }
  return new DeviceModel(info, { inputs, client }, programs, new ModelTokenizer(tokenizer), kernels);
}

async function download(sources: Source[], store: TensorStore, onProgress: OnProgress, signal?: AbortSignal): Promise<void> {
  const total = sources.reduce((sum, source) => sum + source.bytes, 0);
  let before = 0;
  for (const source of sources) {
    await store.fetch(source, (bytes) => onProgress(before + bytes, total), signal);
    before += source.bytes;
  }
  onProgress(total, total);
}

/** Return where the weights of a task are in its safetensors file. */
async function findTensors(task: ClientTask, graph: Graph, files: Files): Promise<Source[]> {
  if (!graph.weights.length) return [];
  const header = JSON.parse(await files.readHeader(task.weights_digest, task.weights_bytes));
  const refuse = (problem: string): never => {
    throw new Error(`the weights of '${task.label}' cannot be read: ${problem}; the server sent another file than the model's`);
  };
  return graph.weights.map((weight) => {
    const { name, dtype, shape, digest } = weight;
    const found = header.tensors[name];
    const bytes = countBytes(weight);
    if (!found) return refuse(`'${name}' is missing`);
    if (DTYPES[found.dtype] !== dtype || String(found.shape) !== String(shape)) return refuse(`'${name}' is ${found.dtype} [${found.shape}]`);
    const [start, end] = found.data_offsets as [number, number];
    if (!(start >= 0 && end - start === bytes && header.begin + end <= task.weights_bytes)) return refuse(`'${name}' is not inside the file`);
    return { digest, bytes, file: task.weights_digest, start: header.begin + start, name: `the tensor '${name}'` };
  });
}

function countBytes({ dtype, shape }: Weight): number {
  const bits = /\d+$/.exec(dtype);
  if (!Object.values(DTYPES).includes(dtype)) throw new Error(`weights of type ${dtype} cannot be read in a browser`);
  return shape.reduce((product, size) => product * size, bits ? Number(bits[0]) / 8 : 1);
}

/** Small files, which are stored whole, and headers of weights. */
export class Files {
  constructor(
    private store: TensorStore,
    private fetchFile: (digest: string) => Promise<Uint8Array>,
    private fetchRange: FetchRange,
  ) {}

  /** Return a file's text, from this device or from the server; it has the digest. */
  async readText(digest: string, name: string): Promise<string> {
    let bytes = (await this.store.recall(digest)) as Uint8Array | undefined;
    if (!bytes) {
      bytes = await this.fetchFile(digest);
      if (bytes.length > MAX_FILE_BYTES || computeDigest(bytes) !== digest) {
        throw new Error(`${name} arrived with other contents than the model's; try again, or use another server`);
      }
      await this.store.remember(digest, bytes);
    }
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  }

  /** Return the header of a safetensors file as JSON. Nobody vouches for it: tensors are checked. */
  async readHeader(digest: string, fileBytes: number): Promise<string> {
    const key = `header ${digest}`;
    const known = (await this.store.recall(key)) as string | undefined;
    if (known) return known;
    const length = new DataView((await this.readRange(digest, 0, 8)).buffer).getBigUint64(0, true);
    if (length > MAX_HEADER_BYTES || Number(length) + 8 > fileBytes) throw new Error("the weights have no header; the server sent another file than the model's");
    const begin = 8 + Number(length);
    const tensors = JSON.parse(new TextDecoder().decode(await this.readRange(digest, 8, begin)));
    const header = JSON.stringify({ begin, tensors });
    await this.store.remember(key, header);
    return header;
  }

  private async readRange(file: string, start: number, end: number): Promise<Uint8Array<ArrayBuffer>> {
    const bytes = new Uint8Array(await (await this.fetchRange(file, start, end)).arrayBuffer());
    if (bytes.length !== end - start) throw new Refusal("the server sent another part of a file than it was asked for");
    return bytes;
  }
}

/** Loads weights into memory, each once. */
class Loader {
  private loaded = new Map<string, Stored>();

  constructor(private store: TensorStore, private kernels: Kernels, private sources: Map<string, Source>) {}

  /** `kind` says how a table's bytes are numbers; otherwise the weight is an array. */
  async load(weight: Weight, kind: TableKind | "blocks" | null): Promise<Stored> {
    const key = `${weight.digest} ${weight.dtype} ${weight.shape} ${kind}`;
    let stored = this.loaded.get(key);
    if (!stored) {
      const source = this.sources.get(weight.digest)!;
      const isTable = kind && kind !== "blocks";
      stored = isTable ? { table: await this.loadTable(weight, kind, source) } : { value: await this.loadValue(weight, source) };
      this.loaded.set(key, stored);
    }
    return stored;
  }

  private async loadTable({ name, shape }: Weight, kind: TableKind, source: Source): Promise<Table> {
    const table = this.kernels.addTable(kind, shape[0], shape[1]);
    await this.store.read(source, () => this.kernels.getBytes(table));
    this.kernels.checkTable(table, name);
    return table;
  }

  private async loadValue({ dtype, shape }: Weight, source: Source): Promise<Value> {
    const bytes = await this.store.readWhole(source);
    if (isTableKind(dtype)) return wrap(dtype, shape, decode(dtype, bytes));
    const arrays = {
      bool: Uint8Array, uint8: Uint8Array, int8: Int8Array, int16: Int16Array, uint16: Uint16Array,
      int32: Int32Array, uint32: Uint32Array, float64: Float64Array,
    };
    return wrap(dtype, shape, new arrays[dtype as keyof typeof arrays](bytes.buffer as ArrayBuffer));
  }
}
