// A task of the client: its graph, computed node by node where a result asks for it.
//
// Two forms are computed as a whole, because their parts would be as large as the table times the
// rows: rows of a table by index, and products of rows with a table. Everything else is small. The
// table may be of quantised blocks.
import { computeNode, lookUp, makeStrides, makeValue, type Value, wrap } from "./arrays";
import { findMatrix, type Made, makeReader, traceBlocks } from "./blocks";
import type { Dim, Graph, Node } from "./graph";
import { type Blocks, isTableKind, type Kernels, type Table, type TableKind } from "./kernels";
import { computeLogits, type Logits, makeKnown } from "./logits";

/** A weight: a matrix in the kernels' memory, or an array: a small one, or quantised blocks. */
export type Stored = { table: Table } | { value: Value };
/** A weight, how its bytes are numbers, and which node is these numbers. */
type Read = { weight: number; kind: TableKind | "blocks"; rows: number; width: number; place: number };
type Whole = Read & ({ form: "rows"; index: number } | { form: "product"; vectors: number });
export type State = Value[];

export class Program {
  private wholes = new Map<number, Whole | null>();
  private made: (Made | null)[];
  private tables = new Map<number, Table | Blocks>();

  constructor(
    readonly graph: Graph,
    private weights: Stored[],
    private kernels: Kernels,
  ) {
    this.made = traceBlocks(graph);
  }

  /** Return which weights are read as matrices by the two forms above; only "blocks" are kept as arrays. */
  static findTables(graph: Graph): Map<number, TableKind | "blocks"> {
    const found = new Map<number, TableKind | "blocks">();
    const made = traceBlocks(graph);
    for (let place = 0; place < graph.nodes.length; place++) {
      const whole = findWhole(graph, made, place);
      if (whole) found.set(whole.weight, whole.kind);
    }
    return found;
  }

  newState(): State {
    return this.graph.states.map(({ dtype, shape }) => makeValue(dtype, shape as number[]));
  }

  /** Begin one step. `inputs` are in the order of the graph's. */
  begin(state: State, inputs: Value[]): Step {
    return new Step(this, this.weights, this.kernels, state, inputs);
  }

  /** Return what is computed as a whole at a node, or null. */
  findWhole(place: number): Whole | null {
    let whole = this.wholes.get(place);
    if (whole === undefined) this.wholes.set(place, (whole = findWhole(this.graph, this.made, place)));
    return whole;
  }

  /** Return the matrix that one of the two forms reads. */
  getTable({ weight, rows, width, place }: Read): Table | Blocks {
    const stored = this.weights[weight];
    if ("table" in stored) return stored.table;
    let table = this.tables.get(place);
    if (!table) this.tables.set(place, (table = { rows, width, read: makeReader(this.graph, this.made, place, stored.value) }));
    return table;
  }
}

/** One step of a task. Results are computed when they are asked for. */
export class Step {
  private values = new Map<number, Value>();
  private symbols = new Map<string, number>();

  private graph: Graph;

  constructor(
    private program: Program,
    private weights: Stored[],
    private kernels: Kernels,
    private state: State,
    private inputs: Value[],
  ) {
    this.graph = program.graph;
    this.graph.inputs.forEach((port, place) => {
      port.shape.forEach((dim, axis) => {
        const size = inputs[place].shape[axis];
        if (typeof dim === "string" && !this.symbols.has(dim)) this.symbols.set(dim, size);
        if (this.bind(dim) !== size) throw new Error(`the input '${port.name}' has another shape than its task takes`);
      });
    });
  }

  getOutput(output: number): Value {
    return this.compute(this.graph.outputs[output].node);
  }

  /** Return an output of one row that is a product with a table, without computing it exactly. */
  getLogits(output: number): Logits {
    let place = this.graph.outputs[output].node;
    while (["CONTIGUOUS", "RESHAPE"].includes(this.graph.nodes[place].op)) [place] = this.graph.nodes[place].srcs;
    const whole = this.program.findWhole(place);
    if (whole?.form !== "product") return makeKnown(new Float32Array(this.getOutput(output).data));
    const vectors = this.compute(whole.vectors);
    const hidden = checkFinite(readFloats(vectors), this.graph.outputs[output].name);
    return computeLogits(this.kernels, hidden, this.program.getTable(whole));
  }

  /** Return the states after the step. */
  update(): State {
    const state = this.state.slice();
    for (const { state: place, node } of this.graph.updates) state[place] = this.compute(node);
    return state;
  }

  private bind(dim: Dim): number {
    if (typeof dim === "number") return dim;
    const size = this.symbols.get(dim);
    if (size === undefined) throw new Error(`nothing says how large '${dim}' is`);
    return size;
  }

  private bindAll(arg: unknown): unknown {
    return Array.isArray(arg) ? arg.map((item) => this.bindAll(item)) : typeof arg === "string" ? this.bind(arg) : arg;
  }

  private compute(wanted: number): Value {
    const open = [wanted]; // not recursive: a graph may be thousands of nodes deep
    while (open.length) {
      const place = open[open.length - 1];
      if (this.values.has(place)) {
        open.pop();
        continue;
      }
      const node = this.graph.nodes[place];
      const whole = this.program.findWhole(place);
      const srcs = whole ? [whole.form === "rows" ? whole.index : whole.vectors] : node.srcs;
      const missing = srcs.filter((src) => !this.values.has(src));
      if (missing.length) {
        open.push(...missing);
        continue;
      }
      const operands = srcs.map((src) => this.values.get(src)!);
      this.values.set(place, whole ? this.computeWhole(node, whole, operands[0]) : this.computeOne(node, operands));
      open.pop();
    }
    return this.values.get(wanted)!;
  }

  private computeOne(node: Node, operands: Value[]): Value {
    if (node.op === "INPUT") return this.inputs[node.arg as number];
    if (node.op === "STATE") return this.state[node.arg as number];
    if (node.op === "WEIGHT") {
      const weight = this.weights[node.arg as number];
      if ("value" in weight) return weight.value;
      throw new Error(`the weights '${this.graph.weights[node.arg as number].name}' are used in a form that a browser cannot compute`);
    }
    const isText = node.op === "CONST" || node.op === "REDUCE";
    return computeNode(node, isText ? node.arg : this.bindAll(node.arg), operands);
  }

  private computeWhole(node: Node, whole: Whole, operand: Value): Value {
    let table = this.program.getTable(whole);
    if (whole.form === "rows") {
      const read = (row: number): Float32Array => this.kernels.readRow(table, row);
      const index = { ...operand, shape: operand.shape.filter((size, axis) => size !== 1 || axis === 0) };
      index.strides = makeStrides(index.shape);
      return lookUp(table.rows, table.width, node.dtype, [table.width], index, read);
    }
    if ("read" in table) table = this.kernels.expand(table, this.graph.weights[whole.weight].name);
    const vectors = readFloats(operand);
    const rows = vectors.length / table.width;
    const result = new Float32Array(rows * table.rows);
    for (let row = 0; row < rows; row++) {
      const vector = vectors.subarray(row * table.width, (row + 1) * table.width);
      result.set(this.kernels.multiply(vector, table), row * table.rows);
    }
    return wrap(node.dtype, [...operand.shape.slice(0, -2), table.rows], result);
  }
}

// ---- the two forms ------------------------------------------------------------------------------

/** Return the weight [rows, width] that a node is in another shape or type, or null. */
function findTable(graph: Graph, made: (Made | null)[], place: number): Read | null {
  const blocks = made[place] && graph.nodes[place].dtype === "float32" ? findMatrix(made[place]) : null;
  if (blocks) return { ...blocks, kind: "blocks", place };
  let dims: Dim[] | null = null; // of a RESHAPE on the way
  let node = graph.nodes[place];
  while (["RESHAPE", "CAST", "CONTIGUOUS"].includes(node.op) && node.dtype === "float32") {
    if (node.op === "RESHAPE") dims ??= node.arg as Dim[];
    node = graph.nodes[node.srcs[0]];
  }
  const half = findHalf(graph, node);
  const found = half ?? node;
  if (found.op !== "WEIGHT") return null;
  const { shape, dtype } = graph.weights[found.arg as number];
  if (shape.length !== 2 || (dims && !isWideShape(dims, shape))) return null;
  const [rows, width] = shape;
  const kind = half ? "bfloat16" : dtype;
  return isTableKind(kind) ? { weight: found.arg as number, kind, rows, width, place } : null;
}

/** Return the weight whose numbers are upper halves of float32, as bfloat16 is traced, or null. */
function findHalf(graph: Graph, node: Node): Node | null {
  if (node.op !== "BITCAST" || node.dtype !== "float32") return null;
  const shift = graph.nodes[node.srcs[0]];
  if (shift.op !== "SHL") return null;
  const [cast, by] = shift.srcs.map((src) => graph.nodes[src]);
  if (cast.op !== "CAST" || cast.dtype !== "uint32" || by.op !== "CONST" || by.arg !== "16") return null;
  const weight = graph.nodes[cast.srcs[0]];
  return weight.op === "WEIGHT" && weight.dtype === "uint16" ? weight : null;
}

/** Say whether a shape is the table's own behind axes of length 1. */
function isWideShape(dims: Dim[], shape: number[]): boolean {
  const front = dims.slice(0, -2);
  return front.every((dim) => dim === 1) && dims[dims.length - 2] === shape[0] && dims[dims.length - 1] === shape[1];
}

/** Return what a node is a shape of, with its shape. */
function skipReshape(graph: Graph, place: number): number {
  while (graph.nodes[place].op === "RESHAPE") [place] = graph.nodes[place].srcs;
  return place;
}

function findWhole(graph: Graph, made: (Made | null)[], place: number): Whole | null {
  const node = graph.nodes[place];
  if (node.op === "LOOKUP") {
    const read = findTable(graph, made, node.srcs[0]);
    return read && countAxes(graph, made, node.srcs[0]) === 2 ? { form: "rows", ...read, index: node.srcs[1] } : null;
  }
  const [operation, axes] = node.op === "REDUCE" ? (node.arg as [string, number]) : [];
  if (operation !== "ADD" || axes !== 1) return null;
  const permute = graph.nodes[node.srcs[0]];
  if (permute.op !== "PERMUTE") return null;
  const order = permute.arg as number[];
  const inner = graph.nodes[permute.srcs[0]];
  if (inner.op === "WHERE" && order.join() === "1,0,2") return findOneHot(graph, made, inner);
  const last = order.length - 1;
  if (inner.op !== "MUL" || inner.dtype !== "float32" || order.some((axis, at) => axis !== (at ? at - 1 : last))) return null;
  for (const [vectors, table] of [inner.srcs, [...inner.srcs].reverse()]) {
    const read = findTable(graph, made, table);
    const { op, arg } = graph.nodes[vectors];
    if (!read || op !== "RESHAPE" || countAxes(graph, made, table) > order.length) continue;
    const dims = arg as Dim[];
    if (dims.length === order.length && dims[last - 1] === 1 && dims[last] === read.width) {
      return { form: "product", ...read, vectors };
    }
  }
  return null;
}

/** Return how many axes a table has where it is used. */
function countAxes(graph: Graph, made: (Made | null)[], place: number): number {
  const node = graph.nodes[place];
  if (made[place]) return made[place].shape.length;
  if (node.op === "RESHAPE") return (node.arg as Dim[]).length;
  return node.op === "CAST" && node.dtype === "float32" ? countAxes(graph, made, node.srcs[0]) : 2;
}

/** Match sum over v of where(v == index, table[v], 0), which is how an embedding is traced. */
function findOneHot(graph: Graph, made: (Made | null)[], where: Node): Whole | null {
  const [condition, chosen, otherwise] = where.srcs;
  const read = findTable(graph, made, chosen);
  const zero = graph.nodes[skipReshape(graph, otherwise)];
  if (!read || zero.op !== "CONST" || !/^8?0+$/.test(String(zero.arg))) return null;
  let equal = graph.nodes[condition];
  if (equal.op === "CMPNE") {
    const isTrue = (place: number): boolean => graph.nodes[place].op === "CONST" && graph.nodes[place].arg === "1";
    const [a, b] = equal.srcs;
    if (!isTrue(a) && !isTrue(b)) return null;
    equal = graph.nodes[isTrue(b) ? a : b];
    if (equal.op !== "CMPNE") return null; // not (v != index)
  } else if (equal.op !== "CMPEQ") return null;
  for (const [side, other] of [equal.srcs, [...equal.srcs].reverse()]) {
    const iota = graph.nodes[skipReshape(graph, side)];
    if (iota.op === "IOTA" && iota.arg === read.rows) return { form: "rows", ...read, index: skipReshape(graph, other) };
  }
  return null;
}

function readFloats(value: Value): Float32Array {
  return value.data instanceof Float32Array && value.data.length === value.shape.reduce((a, b) => a * b, 1)
    ? value.data
    : Float32Array.from(computeNode({ op: "CONTIGUOUS", dtype: "float32", srcs: [], arg: null }, null, [value]).data);
}

function checkFinite(values: Float32Array, name: string): Float32Array {
  if (!values.every(Number.isFinite)) throw new Error(`the values that '${name}' is computed from are no finite numbers; the nodes or the model are broken`);
  return values;
}
