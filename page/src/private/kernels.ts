// The kernels in WebAssembly and the memory that they read: tables, vectors, results.
// Their sources, with what each computes, are in page/assembly.

export type TableKind = "float16" | "bfloat16" | "float32";
const KINDS: TableKind[] = ["float16", "bfloat16", "float32"]; // by the kernels' number
const PAGE_BYTES = 65_536;
const MAX_BYTES = 65_536 * PAGE_BYTES;
const PART_NUMBERS = 2 ** 18; // of blocks that are computed at once: arrays of 1 MB, which caches hold

type Exports = {
  countNonFinite(kind: number, table: number, count: number): number;
  quantise(kind: number, table: number, rows: number, width: number, stride: number, bytes: number, facts: number): void;
  multiply(kind: number, vector: number, table: number, rows: number, width: number, out: number): void;
  scan(vector: number, bytes: number, rows: number, stride: number, facts: number, scale: number, norm: number, error: number, out: number, bounds: number): void;
  drawUniform(seed: bigint, position: bigint, blocks: number, out: number): void;
};

/** A matrix of a model as it was registered, in the kernels' memory. */
export type Table = { kind: TableKind; rows: number; width: number; at: number };
/** A matrix of quantised blocks: `read` computes some of its rows, float32 [count, width]. */
export type Blocks = { rows: number; width: number; read: (first: number, count: number) => Float32Array };
type Quantised = { bytes: number; facts: number; stride: number };

/** What a scan says of every row: its product is within `bounds` of `values`. */
export type Scan = { values: Float32Array; bounds: Float32Array };

export function isTableKind(dtype: string): dtype is TableKind {
  return (KINDS as string[]).includes(dtype);
}

export class Kernels {
  private used = PAGE_BYTES;
  private quantised = new Map<Table | Blocks, Quantised>();
  private expanded = new Map<Blocks, Table>();
  private scratch = { at: 0, bytes: 0 };
  private part = { at: 0, bytes: 0 };

  private constructor(private memory: WebAssembly.Memory, private exports: Exports) {}

  /** Load one of the two builds. `read` returns the bytes of a file by its name. */
  static async load(read: (name: string) => Promise<BufferSource> | BufferSource): Promise<Kernels> {
    const memory = new WebAssembly.Memory({ initial: 1, maximum: MAX_BYTES / PAGE_BYTES });
    let bytes = await read("kernels-relaxed.wasm");
    if (!WebAssembly.validate(bytes)) bytes = await read("kernels.wasm"); // this browser has no relaxed SIMD
    const { instance } = await WebAssembly.instantiate(bytes, { env: { memory } });
    return new Kernels(memory, instance.exports as unknown as Exports);
  }

  /** Return the place of new memory, all zeros. Raises an error when the device has none. */
  private reserve(bytes: number): number {
    const at = Math.ceil(this.used / 16) * 16;
    const missing = at + bytes - this.memory.buffer.byteLength;
    try {
      if (at + bytes > MAX_BYTES) throw new RangeError();
      if (missing > 0) this.memory.grow(Math.ceil(missing / PAGE_BYTES));
    } catch {
      throw new Error(`the model needs ${Math.ceil(bytes / 1e6)} MB more memory than this browser gives; use a smaller model`);
    }
    this.used = at + bytes;
    return at;
  }

  /** Return memory for the operands and the result of one call. */
  private useScratch(bytes: number): number {
    if (this.scratch.bytes < bytes) this.scratch = { at: this.reserve(bytes), bytes };
    return this.scratch.at;
  }

  /** Make room for a table; its bytes are written to `getBytes`, then `checkTable` is called. */
  addTable(kind: TableKind, rows: number, width: number): Table {
    return { kind, rows, width, at: this.reserve(rows * width * itemBytes(kind)) };
  }

  /** Return a table's bytes. Memory moves when it grows: ask again after every `await`. */
  getBytes(table: Table): Uint8Array {
    return new Uint8Array(this.memory.buffer, table.at, table.rows * table.width * itemBytes(table.kind));
  }

  /** Raise an error for a table that holds an infinite number or none. */
  checkTable(table: Table, name: string): void {
    const wrong = this.exports.countNonFinite(KINDS.indexOf(table.kind), table.at, table.rows * table.width);
    if (wrong) throw new Error(`the weights '${name}' hold ${wrong} infinite or undefined numbers; the model is broken`);
  }

  /** Return a matrix of blocks as float32, made once: for products in every step. */
  expand(blocks: Blocks, name: string): Table {
    let table = this.expanded.get(blocks);
    if (table) return table;
    table = this.addTable("float32", blocks.rows, blocks.width);
    for (const [first, data] of readParts(blocks, 0, blocks.rows)) {
      new Float32Array(this.memory.buffer, table.at, table.rows * table.width).set(data, first * table.width);
    }
    this.checkTable(table, name);
    this.expanded.set(blocks, table);
    return table;
  }

  /** Return one row as float32. */
  readRow(table: Table | Blocks, row: number): Float32Array {
    if ("read" in table) return table.read(row, 1);
    const size = itemBytes(table.kind);
    const start = table.at + row * table.width * size;
    return decode(table.kind, new Uint8Array(this.memory.buffer, start, table.width * size));
  }

  /** Return the products of a vector with rows of a table; float64 sums, rounded once. */
  multiply(vector: Float32Array, table: Table | Blocks, first = 0, rows = table.rows): Float32Array {
    if ("read" in table) return this.multiplyBlocks(vector, table, first, rows);
    const at = this.useScratch(4 * (table.width + rows) + 16);
    const out = at + Math.ceil((4 * table.width) / 16) * 16;
    new Float32Array(this.memory.buffer, at, table.width).set(vector);
    const start = table.at + first * table.width * itemBytes(table.kind);
    this.exports.multiply(KINDS.indexOf(table.kind), at, start, rows, table.width, out);
    return new Float32Array(this.memory.buffer, out, rows).slice();
  }

  private multiplyBlocks(vector: Float32Array, blocks: Blocks, first: number, rows: number): Float32Array {
    const result = new Float32Array(rows);
    for (const [row, data] of readParts(blocks, first, rows)) {
      const table = this.place(data, blocks.width);
      result.set(this.multiply(vector, table), row - first);
    }
    return result;
  }

  /** Put rows of blocks where the kernels read them, until the next such call. */
  private place(data: Float32Array, width: number): Table {
    const bytes = 4 * Math.max(data.length, PART_NUMBERS);
    if (this.part.bytes < bytes) this.part = { at: this.reserve(bytes), bytes };
    new Float32Array(this.memory.buffer, this.part.at, data.length).set(data);
    return { kind: "float32", rows: data.length / width, width, at: this.part.at };
  }

  /** Make the int8 form of a table, which takes one byte a number, before the first `scan`. */
  quantise(table: Table | Blocks): Quantised {
    const known = this.quantised.get(table);
    if (known) return known;
    const stride = Math.ceil(table.width / 16) * 16;
    const room = Math.ceil(table.rows / 4) * 4; // four rows are computed at once
    const bytes = this.reserve(room * stride);
    const facts = this.reserve(room * 16);
    if ("read" in table) this.quantiseBlocks(table, { bytes, facts, stride }, room);
    else this.exports.quantise(KINDS.indexOf(table.kind), table.at, table.rows, table.width, stride, bytes, facts);
    const found = { bytes, facts, stride };
    this.quantised.set(table, found);
    return found;
  }

  private quantiseBlocks(blocks: Blocks, { bytes, facts, stride }: Quantised, room: number): void {
    let own = 0; // facts of a part, which the kernel writes as four arrays of its own length
    for (const [first, data] of readParts(blocks, 0, blocks.rows)) {
      const { kind, at, rows, width } = this.place(data, blocks.width);
      this.checkTable({ kind, at, rows, width }, "of quantised blocks");
      const part = Math.ceil(rows / 4) * 4;
      own ||= this.reserve(16 * part); // the first part is the longest
      this.exports.quantise(KINDS.indexOf(kind), at, rows, width, stride, bytes + first * stride, own);
      for (let fact = 0; fact < 4; fact++) {
        const target = facts + 4 * (fact * room + first);
        new Uint8Array(this.memory.buffer).copyWithin(target, own + 4 * fact * part, own + 4 * (fact * part + rows));
      }
    }
  }

  /** Return every row's product with a vector to within a bound that is proved, not guessed. */
  scan(vector: Float32Array, table: Table | Blocks): Scan {
    const { bytes, facts, stride } = this.quantise(table);
    const room = Math.ceil(table.rows / 4) * 4;
    const at = this.useScratch(2 * stride + 8 * room + 48);
    const out = at + Math.ceil((2 * stride) / 16) * 16;
    const rounded = new Int16Array(this.memory.buffer, at, stride).fill(0);
    // the kernel takes 14 bits; where it has no relaxed SIMD, a lane adds stride / 4 products of at most 127 · most
    const most = Math.min(8_191, Math.floor((2 ** 31 - 1) / (127 * Math.ceil(stride / 4))));
    const scale = Math.fround(vector.reduce((found, x) => Math.max(found, Math.abs(x)), 0) / most);
    const inverse = scale > 0 && Number.isFinite(1 / scale) ? 1 / scale : 0;
    let squares = 0;
    let errors = 0;
    for (let j = 0; j < table.width; j++) {
      rounded[j] = Math.max(-most, Math.min(most, Math.round(vector[j] * inverse)));
      squares += vector[j] ** 2;
      errors += (vector[j] - rounded[j] * scale) ** 2;
    }
    const norm = Math.sqrt(squares) * 1.000001;
    this.exports.scan(at, bytes, table.rows, stride, facts, scale, norm, Math.sqrt(errors) * 1.000001, out, out + 4 * room);
    const read = (place: number): Float32Array => new Float32Array(this.memory.buffer, place, table.rows).slice();
    return { values: read(out), bounds: read(out + 4 * room) };
  }

  /** Return `count` uniform numbers in (0, 1), keyed by seed and position; see splitup.decode.sampler. */
  drawUniform(seed: bigint, position: number, count: number): Float64Array {
    const blocks = Math.ceil(count / 4);
    const at = this.useScratch(32 * blocks);
    this.exports.drawUniform(BigInt.asIntN(64, seed), BigInt(position), blocks, at);
    return new Float64Array(this.memory.buffer, at, count).slice();
  }
}

/** Yield rows of blocks in parts, with the first row of each; a part has a multiple of four, but for the last. */
function* readParts(blocks: Blocks, first: number, rows: number): Generator<[number, Float32Array]> {
  const most = Math.max(4, Math.floor(PART_NUMBERS / blocks.width / 4) * 4);
  for (let row = first; row < first + rows; row += most) yield [row, blocks.read(row, Math.min(most, first + rows - row))];
}

export function itemBytes(kind: TableKind): number {
  return kind === "float32" ? 4 : 2;
}

/** Return stored numbers as float32. */
export function decode(kind: TableKind, bytes: Uint8Array): Float32Array {
  if (kind === "float32") return new Float32Array(bytes.slice().buffer);
  const halves = new Uint16Array(bytes.slice().buffer);
  if (kind === "bfloat16") return new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer);
  return Float32Array.from(halves, (half) => {
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 31;
    const fraction = half & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
  });
}
