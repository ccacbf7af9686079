// Arrays with strides, as numpy has them, and the operations of a graph on them.
import type { Node } from "./graph";
import { decode, type TableKind } from "./kernels";

type Data = Float32Array | Float64Array | Int32Array | Uint32Array | Int16Array | Uint16Array | Int8Array | Uint8Array;
export type Value = { dtype: string; shape: number[]; strides: number[]; offset: number; data: Data };

const MAX_ELEMENTS = 2 ** 26; // 256 MB as float32
const TO_INTEGER = 1.5 * 2 ** 52; // what is added to it has no bits behind the point; ties go to even
const ARRAYS: Record<string, new (count: number) => Data> = {
  bool: Uint8Array,
  float16: Float32Array, // rounded after every operation, as bfloat16
  bfloat16: Float32Array,
  float32: Float32Array,
  float64: Float64Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
};
const INTEGER_RANGES: Record<string, [number, number]> = {
  int8: [-128, 127],
  uint8: [0, 255],
  int16: [-32768, 32767],
  uint16: [0, 65535],
  int32: [-(2 ** 31), 2 ** 31 - 1],
  uint32: [0, 2 ** 32 - 1],
};

function multiplyAll(numbers: readonly number[]): number {
  return numbers.reduce((product, number) => product * number, 1);
}

export function makeStrides(shape: readonly number[]): number[] {
  const strides = new Array<number>(shape.length);
  let step = 1;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    strides[axis] = step;
    step *= shape[axis];
  }
  return strides;
}

/** Return an array of zeros. */
export function makeValue(dtype: string, shape: number[]): Value {
  const count = multiplyAll(shape);
  if (!(dtype in ARRAYS)) throw new Error(`numbers of type ${dtype} cannot be computed in a browser`);
  if (!(count <= MAX_ELEMENTS) || shape.some((size) => !Number.isInteger(size) || size < 0)) {
    throw new Error(`a value of shape [${shape}] is too large for a browser`);
  }
  return { dtype, shape, strides: makeStrides(shape), offset: 0, data: new ARRAYS[dtype](count) };
}

/** Return numbers as an array of this shape. Raises an error when they are too few or too many. */
export function wrap(dtype: string, shape: number[], data: Data): Value {
  if (multiplyAll(shape) !== data.length) throw new Error(`${data.length} numbers are no value of shape [${shape}]`);
  return { dtype, shape, strides: makeStrides(shape), offset: 0, data };
}

function isOrdered(value: Value): boolean {
  const strides = makeStrides(value.shape);
  return value.shape.every((size, axis) => size === 1 || value.strides[axis] === strides[axis]);
}

/** Return the numbers in C order; they may be the value's own. */
export function flatten(value: Value): Data {
  const count = multiplyAll(value.shape);
  if (isOrdered(value)) return value.data.subarray(value.offset, value.offset + count) as Data;
  const result = makeValue(value.dtype, value.shape);
  walk(value.shape, [value.strides], [value.offset], (place, [at], [step], length) => {
    for (let i = 0; i < length; i++) result.data[place + i] = value.data[at + i * step];
  });
  return result.data;
}

/** Call `visit` for every last axis: where the result and each operand begin, and the operands' steps. */
function walk(
  shape: number[],
  strides: number[][],
  offsets: number[],
  visit: (place: number, at: number[], steps: number[], length: number) => void,
): void {
  const axes = shape.length - 1;
  const length = axes < 0 ? 1 : shape[axes];
  const steps = strides.map((each) => each[axes] ?? 0);
  const index = new Array<number>(Math.max(axes, 0)).fill(0);
  const at = offsets.slice();
  const total = multiplyAll(shape);
  for (let place = 0; place < total; place += length) {
    visit(place, at, steps, length);
    for (let axis = axes - 1; axis >= 0; axis--) {
      index[axis]++;
      for (let i = 0; i < at.length; i++) at[i] += strides[i][axis];
      if (index[axis] < shape[axis]) break;
      for (let i = 0; i < at.length; i++) at[i] -= strides[i][axis] * shape[axis];
      index[axis] = 0;
    }
  }
}

/** Return a number as it is stored in this type, but for what a typed array does itself. */
function makeRounder(dtype: string): ((value: number) => number) | null {
  if (dtype === "bool") return (value) => (value !== 0 ? 1 : 0);
  if (dtype !== "float16" && dtype !== "bfloat16") return null;
  const float = new Float32Array(1);
  const bits = new Uint32Array(float.buffer);
  if (dtype === "float16") {
    return (value) => { // as Math.f16round, which many browsers lack
      float[0] = value;
      const exponent = Math.max(((bits[0] >>> 23) & 0xff) - 127, -14);
      const step = 2 ** (exponent - 10);
      const rounded = (value / step + TO_INTEGER - TO_INTEGER) * step;
      return rounded === 0 ? value * 0 : Math.abs(rounded) < 65536 ? rounded : rounded * Infinity;
    };
  }
  return (value) => {
    float[0] = value;
    if (Number.isFinite(float[0])) bits[0] = (bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) & 0xffff0000;
    return float[0];
  };
}

function finish(value: Value): Value {
  const round = makeRounder(value.dtype);
  if (round) for (let i = 0; i < value.data.length; i++) value.data[i] = round(value.data[i]);
  return value;
}

/** Apply a function to operands that are broadcast as in numpy. */
function applyAll(dtype: string, operands: Value[], compute: (a: number, b: number, c: number) => number, loop?: FloatLoop): Value {
  const rank = Math.max(...operands.map((operand) => operand.shape.length));
  const shape = new Array<number>(rank).fill(1);
  for (const operand of operands) {
    operand.shape.forEach((size, axis) => {
      const place = rank - operand.shape.length + axis;
      if (size !== 1 && shape[place] !== 1 && shape[place] !== size) throw new Error("shapes do not fit each other");
      if (size !== 1) shape[place] = size;
    });
  }
  const strides = operands.map((operand) => {
    const front = new Array<number>(rank - operand.shape.length).fill(0);
    return [...front, ...operand.strides.map((step, axis) => (operand.shape[axis] === 1 ? 0 : step))];
  });
  const result = makeValue(dtype, shape);
  const [first, second = first, third = second] = operands;
  const places = [0, Math.min(1, operands.length - 1), operands.length - 1];
  const { data } = result;
  const [x, y, z] = [first.data, second.data, third.data];
  const used = places.map((place) => strides[place]);
  const floats = [data, x, y].every((each) => each instanceof Float32Array) ? loop : undefined;
  walk(shape, used, places.map((place) => operands[place].offset), (place, [a, b, c], [p, q, r], length) => {
    if (floats) floats(data as Float32Array, place, x as Float32Array, a, p, y as Float32Array, b, q, length);
    else for (let i = 0; i < length; i++) data[place + i] = compute(x[a + i * p], y[b + i * q], z[c + i * r]);
  });
  return compute === FUNCTIONS.WHERE ? result : finish(result); // chosen numbers have been rounded
}

// Loops over float32 alone for the operations of which a step has millions: engines make vectors of
// them, and calls of what they cannot see through elsewhere.
type FloatLoop = (data: Float32Array, place: number, x: Float32Array, a: number, p: number, y: Float32Array, b: number, q: number, length: number) => void;
const FLOAT_LOOPS: Record<string, FloatLoop> = {
  ADD(data, place, x, a, p, y, b, q, length) {
    for (let i = 0; i < length; i++) data[place + i] = x[a + i * p] + y[b + i * q];
  },
  MUL(data, place, x, a, p, y, b, q, length) {
    for (let i = 0; i < length; i++) data[place + i] = x[a + i * p] * y[b + i * q];
  },
};

const FUNCTIONS: Record<string, (a: number, b: number, c: number) => number> = {
  EXP2: (a) => 2 ** a,
  LOG2: (a) => Math.log2(a),
  SIN: (a) => Math.sin(a),
  POW: (a, b) => a ** b,
  SQRT: (a) => Math.sqrt(a),
  RECIPROCAL: (a) => 1 / a,
  TRUNC: (a) => Math.trunc(a),
  NEG: (a) => -a,
  ADD: (a, b) => a + b,
  SUB: (a, b) => a - b,
  MUL: (a, b) => a * b,
  FDIV: (a, b) => a / b,
  MAX: (a, b) => Math.max(a, b),
  AND: (a, b) => a & b,
  OR: (a, b) => a | b,
  XOR: (a, b) => a ^ b,
  CDIV: (a, b) => Math.trunc(a / b),
  CMOD: (a, b) => a % b,
  FLOORDIV: (a, b) => Math.floor(a / b),
  FLOORMOD: (a, b) => a - b * Math.floor(a / b),
  SHL: (a, b) => a << b,
  SHR: (a, b) => (a < 0 ? a >> b : a >>> b),
  CMPLT: (a, b) => (a < b ? 1 : 0),
  CMPNE: (a, b) => (a !== b ? 1 : 0),
  CMPEQ: (a, b) => (a === b ? 1 : 0),
  WHERE: (a, b, c) => (a ? b : c),
};

/** Say whether an operation computes every number of its result from one of each operand. */
export function isElementwise(op: string): boolean {
  return op in FUNCTIONS;
}

/** Return the sum, product or largest over the first axes. Sums are in float64, rounded once. */
function reduce(dtype: string, source: Value, operation: string, axes: number): Value {
  const shape = source.shape.slice(axes);
  const size = multiplyAll(shape);
  if (operation === "ADD" && axes === 1 && source.strides[0] === 1 && source.data instanceof Float32Array) {
    return addAlong(dtype, source, source.data);
  }
  const values = flatten(source);
  const compute = operation === "MUL" ? FUNCTIONS.MUL : operation === "MAX" ? FUNCTIONS.MAX : FUNCTIONS.ADD;
  const sums = new Float64Array(size).fill(operation === "MUL" ? 1 : operation === "MAX" ? -Infinity : 0);
  if (operation === "ADD" && values instanceof Float32Array) addFloats(sums, values);
  else for (let place = 0; place < values.length; place += size) {
    for (let i = 0; i < size; i++) sums[i] = compute(sums[i], values[place + i], 0);
  }
  const result = makeValue(dtype, shape);
  result.data.set(sums);
  return finish(result);
}

/** Return the sums over a first axis whose numbers are neighbours, as those of a product of matrices are. */
function addAlong(dtype: string, source: Value, data: Float32Array): Value {
  const [count, ...shape] = source.shape;
  const result = makeValue(dtype, shape);
  walk(shape, [source.strides.slice(1)], [source.offset], (place, [at], [step], length) => {
    for (let i = 0; i < length; i++) {
      let sum = 0;
      for (let from = at + i * step, end = from + count; from < end; from++) sum += data[from];
      result.data[place + i] = sum;
    }
  });
  return finish(result);
}

function addFloats(sums: Float64Array, values: Float32Array): void {
  const size = sums.length;
  for (let place = 0; place < values.length; place += size) {
    for (let i = 0; i < size; i++) sums[i] += values[place + i];
  }
}

/** Return rows of a table by index, and zeros for an index outside. */
export function lookUp(rows: number, width: number, dtype: string, shape: number[], index: Value, read: (row: number) => ArrayLike<number>): Value {
  const result = makeValue(dtype, [...index.shape, ...shape]);
  flatten(index).forEach((row, place) => {
    if (row >= 0 && row < rows) result.data.set(read(row), place * width);
  });
  return result;
}

function cast(dtype: string, source: Value): Value {
  const range = INTEGER_RANGES[dtype];
  if (!range || !source.dtype.includes("float")) {
    const result = makeValue(dtype, source.shape);
    result.data.set(flatten(source));
    return finish(result);
  }
  return applyAll(dtype, [source], (a) => (Number.isNaN(a) ? 0 : Math.max(range[0], Math.min(range[1], Math.trunc(a)))));
}

function bitcast(dtype: string, source: Value): Value {
  const values = flatten(source).slice();
  const target = ARRAYS[dtype];
  if (/^(bfloat|float)16$/.test(dtype) && values.BYTES_PER_ELEMENT === 2) { // scales of quantised blocks
    return wrap(dtype, source.shape, decode(dtype as TableKind, new Uint8Array(values.buffer)));
  }
  const isHalf = /float16$/.test(dtype) || /float16$/.test(source.dtype);
  if (isHalf || target === undefined || new target(0).BYTES_PER_ELEMENT !== values.BYTES_PER_ELEMENT) {
    throw new Error(`${source.dtype} cannot be read as ${dtype} in a browser`);
  }
  return wrap(dtype, source.shape, new (target as unknown as new (buffer: ArrayBufferLike) => Data)(values.buffer));
}

/** Return a value whose operands are given; `arg` has numbers in the place of symbols. */
export function computeNode(node: Node, arg: unknown, operands: Value[]): Value {
  const { op, dtype } = node;
  const [first, second] = operands;
  const compute = FUNCTIONS[op];
  if (compute) {
    const isWide = /^u?int32$/.test(dtype) && op === "MUL"; // a product may have more than 53 bits
    return applyAll(dtype, operands, isWide ? Math.imul : compute, FLOAT_LOOPS[op]);
  }
  const numbers = arg as number[];
  const pairs = arg as [number, number][];
  switch (op) {
    case "IOTA":
      return wrap("int32", [arg as number], Int32Array.from({ length: arg as number }, (_, i) => i));
    case "CONST": {
      const value = makeValue(dtype, []);
      value.data[0] = dtype.includes("float") ? decodeFloat(arg as string) : Number(arg);
      return finish(value);
    }
    case "RESHAPE":
      return wrap(dtype, numbers, flatten(first));
    case "EXPAND":
      return { ...first, shape: [...numbers, ...first.shape], strides: [...numbers.map(() => 0), ...first.strides] };
    case "PERMUTE":
      return { ...first, shape: numbers.map((axis) => first.shape[axis]), strides: numbers.map((axis) => first.strides[axis]) };
    case "SHRINK": {
      pairs.forEach(([offset, size], axis) => {
        if (offset < 0 || offset + size > first.shape[axis]) throw new Error("SHRINK leaves its operand");
      });
      const offset = pairs.reduce((sum, [start], axis) => sum + start * first.strides[axis], first.offset);
      return { ...first, shape: pairs.map(([, size]) => size), offset };
    }
    case "PAD": {
      const result = makeValue(dtype, pairs.map(([, size]) => size));
      const inner = { ...result, shape: first.shape, offset: pairs.reduce((sum, [start], axis) => sum + start * result.strides[axis], 0) };
      copy(first, inner);
      return result;
    }
    case "FLIP": {
      const offset = numbers.reduce((sum, flip, axis) => sum + (flip ? (first.shape[axis] - 1) * first.strides[axis] : 0), first.offset);
      return { ...first, strides: first.strides.map((step, axis) => (numbers[axis] ? -step : step)), offset };
    }
    case "STACK": {
      const parts = operands.map(flatten);
      const result = makeValue(dtype, [operands.length, ...first.shape]);
      parts.forEach((part, place) => result.data.set(part, place * part.length));
      return result;
    }
    case "CONTIGUOUS":
      return wrap(dtype, first.shape, flatten(first));
    case "CAST":
      return cast(dtype, first);
    case "BITCAST":
      return bitcast(dtype, first);
    case "REDUCE":
      return reduce(dtype, first, (arg as [string, number])[0], (arg as [string, number])[1]);
    case "LOOKUP": {
      const shape = first.shape.slice(1);
      const width = multiplyAll(shape);
      const rows = flatten(first);
      return lookUp(first.shape[0], width, dtype, shape, second, (row) => rows.subarray(row * width, (row + 1) * width));
    }
    default:
      throw new Error(`the operation ${op} cannot be computed in a browser`);
  }
}

function copy(source: Value, target: Value): void {
  const { data } = target;
  walk(source.shape, [source.strides, target.strides], [source.offset, target.offset], (_, [a, b], [p, q], length) => {
    for (let i = 0; i < length; i++) data[b + i * q] = source.data[a + i * p];
  });
}

function decodeFloat(text: string): number {
  const bytes = new DataView(new ArrayBuffer(8));
  bytes.setBigUint64(0, BigInt(`0x${text}`));
  return bytes.getFloat64(0);
}
