// SIMD kernels of the private page, compiled to WebAssembly by AssemblyScript. One thread.
//
// A table is a matrix [rows, width] as it was registered. The type parameter T says how its numbers
// are stored: u16 for float16, i16 for bfloat16, f32 for float32. The page has checked that all of
// them are finite (`countNonFinite`), so that float16 is read without cases.

const TWO_112: f32 = 5.192296858534827628530496329220096e33;

/** Return four numbers of a table as float32. */
// @ts-ignore: decorator
@inline
function read4<T>(at: usize): v128 {
  if (isFloat<T>()) return v128.load(at);
  if (isSigned<T>()) return i32x4.shl(v128.load16x4_u(at), 16);
  const bits = v128.load16x4_u(at);
  // exponent and fraction as a float32 whose exponent is 112 too small; subnormals come out right
  const magnitude = f32x4.mul(i32x4.shl(v128.and(bits, i32x4.splat(0x7fff)), 13), f32x4.splat(TWO_112));
  return v128.or(magnitude, i32x4.shl(v128.and(bits, i32x4.splat(0x8000)), 16));
}

/** Return one number of a table as float32. */
// @ts-ignore: decorator
@inline
function read1<T>(at: usize): f32 {
  if (isFloat<T>()) return load<f32>(at);
  if (isSigned<T>()) return reinterpret<f32>(<u32>load<u16>(at) << 16);
  const bits = <u32>load<u16>(at);
  const magnitude = reinterpret<f32>((bits & 0x7fff) << 13) * TWO_112;
  return reinterpret<f32>(reinterpret<u32>(magnitude) | ((bits & 0x8000) << 16));
}

/** Return how many numbers of a table are infinite or no number. */
function countWrong<T>(table: usize, count: usize): usize {
  let wrong: usize = 0;
  for (let i: usize = 0; i < count; i++) {
    if (isFloat<T>()) wrong += usize((load<u32>(table + 4 * i) & 0x7f800000) == 0x7f800000);
    else if (isSigned<T>()) wrong += usize((load<u16>(table + 2 * i) & 0x7f80) == 0x7f80);
    else wrong += usize((load<u16>(table + 2 * i) & 0x7c00) == 0x7c00);
  }
  return wrong;
}

/**
 * Write each row as int8 times a scale, four rows side by side: eight numbers of the first, eight of
 * the second, and so on, so that `scan` reads memory in order. `stride` is the width rounded up to a
 * multiple of 8. The memory of `bytes` and `facts` is zeros before, and stays so behind a row's end.
 * `facts` gets three float32 a row: the scale, an upper bound of the norm of the error, an upper
 * bound of the norm of the row. `first` is a multiple of 4.
 */
function quantiseRows<T>(
  table: usize, first: usize, rows: usize, width: usize, stride: usize, bytes: usize, facts: usize,
): void {
  const size = sizeof<T>();
  for (let row = first; row < first + rows; row++) {
    let largest: f32 = 0;
    for (let j: usize = 0; j < width; j++) largest = max(largest, abs(read1<T>(table + j * size)));
    const scale: f32 = largest / 127;
    const inverse: f32 = scale > 0 && <f32>1 / scale < Infinity ? <f32>1 / scale : 0;
    const at = bytes + (row & ~3) * stride + (row & 3) * 8;
    let errors: f64 = 0;
    let squares: f64 = 0;
    for (let j: usize = 0; j < width; j++) {
      const value = read1<T>(table + j * size);
      const near = nearest(value * inverse);
      const error = <f64>value - <f64>near * <f64>scale;
      errors += error * error;
      squares += <f64>value * <f64>value;
      store<i8>(at + (j >> 3) * 32 + (j & 7), <i8>near);
    }
    // rounded up: float64 sums are right to 1e-12, float32 to 1e-7
    store<f32>(facts + 12 * row, scale);
    store<f32>(facts + 12 * row, <f32>(Math.sqrt(errors) * 1.000001), 4);
    store<f32>(facts + 12 * row, <f32>(Math.sqrt(squares) * 1.000001), 8);
    table += width * size;
  }
}

/** Write the products of a vector and the rows: float64 sums, rounded to float32 once. */
function multiplyRows<T>(vector: usize, table: usize, rows: usize, width: usize, out: usize): void {
  const size = sizeof<T>();
  const even = width & ~3;
  for (let row: usize = 0; row < rows; row++) {
    let low = f64x2.splat(0);
    let high = f64x2.splat(0);
    for (let j: usize = 0; j < even; j += 4) {
      const a = v128.load(vector + 4 * j);
      const b = read4<T>(table + j * size);
      low = f64x2.add(low, f64x2.mul(f64x2.promote_low_f32x4(a), f64x2.promote_low_f32x4(b)));
      const upper = f64x2.promote_low_f32x4(v128.shuffle<i32>(a, a, 2, 3, 2, 3));
      high = f64x2.add(high, f64x2.mul(upper, f64x2.promote_low_f32x4(v128.shuffle<i32>(b, b, 2, 3, 2, 3))));
    }
    const sums = f64x2.add(low, high);
    let sum = f64x2.extract_lane(sums, 0) + f64x2.extract_lane(sums, 1);
    for (let j = even; j < width; j++) sum += <f64>load<f32>(vector + 4 * j) * <f64>read1<T>(table + j * size);
    store<f32>(out + 4 * row, <f32>sum);
    table += width * size;
  }
}

// ---- what the page calls: `kind` is 0 for float16, 1 for bfloat16, 2 for float32 ----------------

export function countNonFinite(kind: i32, table: usize, count: usize): usize {
  if (kind == 0) return countWrong<u16>(table, count);
  return kind == 1 ? countWrong<i16>(table, count) : countWrong<f32>(table, count);
}

export function quantise(
  kind: i32, table: usize, first: usize, rows: usize, width: usize, stride: usize, bytes: usize, facts: usize,
): void {
  if (kind == 0) quantiseRows<u16>(table, first, rows, width, stride, bytes, facts);
  else if (kind == 1) quantiseRows<i16>(table, first, rows, width, stride, bytes, facts);
  else quantiseRows<f32>(table, first, rows, width, stride, bytes, facts);
}

export function multiply(kind: i32, vector: usize, table: usize, rows: usize, width: usize, out: usize): void {
  if (kind == 0) multiplyRows<u16>(vector, table, rows, width, out);
  else if (kind == 1) multiplyRows<i16>(vector, table, rows, width, out);
  else multiplyRows<f32>(vector, table, rows, width, out);
}

/** Return the sum of four int32, which may need more than 32 bits. */
// @ts-ignore: decorator
@inline
function addWhole(sums: v128): f64 {
  const low = <f64>i32x4.extract_lane(sums, 0) + <f64>i32x4.extract_lane(sums, 1);
  return low + (<f64>i32x4.extract_lane(sums, 2) + <f64>i32x4.extract_lane(sums, 3));
}

/**
 * Write for every row its product with an int16 vector, times both scales, and how far that may be
 * from what `multiply` gives: `out` and `bounds`, float32 each. `vectorNorm` and `vectorError` are
 * upper bounds of the norms of the vector and of its rounding error.
 *
 * With w = s·q + e and x = t·p + f: |x·w - s·t·(p·q)| ≤ |e|·|x| + |s·q|·|f| by Cauchy and Schwarz.
 */
export function scan(
  vector: usize, bytes: usize, rows: usize, stride: usize, facts: usize,
  vectorScale: f32, vectorNorm: f32, vectorError: f32, out: usize, bounds: usize,
): void {
  for (let row: usize = 0; row < rows; row += 4) { // there is room for three rows more
    let sum0 = i32x4.splat(0), sum1 = i32x4.splat(0), sum2 = i32x4.splat(0), sum3 = i32x4.splat(0);
    for (let j: usize = 0; j < stride; j += 8) {
      const eight = v128.load(vector + 2 * j);
      sum0 = i32x4.add(sum0, i32x4.dot_i16x8_s(v128.load8x8_s(bytes), eight));
      sum1 = i32x4.add(sum1, i32x4.dot_i16x8_s(v128.load8x8_s(bytes, 8), eight));
      sum2 = i32x4.add(sum2, i32x4.dot_i16x8_s(v128.load8x8_s(bytes, 16), eight));
      sum3 = i32x4.add(sum3, i32x4.dot_i16x8_s(v128.load8x8_s(bytes, 24), eight));
      bytes += 32;
    }
    // no sum leaves 32 bits: the page chooses the vector's scale so
    writeProduct(sum0, facts + 12 * row, vectorScale, vectorNorm, vectorError, out + 4 * row, bounds + 4 * row);
    writeProduct(sum1, facts + 12 * row + 12, vectorScale, vectorNorm, vectorError, out + 4 * row + 4, bounds + 4 * row + 4);
    writeProduct(sum2, facts + 12 * row + 24, vectorScale, vectorNorm, vectorError, out + 4 * row + 8, bounds + 4 * row + 8);
    writeProduct(sum3, facts + 12 * row + 36, vectorScale, vectorNorm, vectorError, out + 4 * row + 12, bounds + 4 * row + 12);
  }
}

// @ts-ignore: decorator
@inline
function writeProduct(
  sums: v128, facts: usize, vectorScale: f32, vectorNorm: f32, vectorError: f32, out: usize, bound: usize,
): void {
  const value = <f32>addWhole(sums) * (load<f32>(facts) * vectorScale);
  const norm = load<f32>(facts, 8);
  const error = load<f32>(facts, 4) * vectorNorm + (norm + load<f32>(facts, 4)) * vectorError;
  const rounding = (abs(value) + norm * vectorNorm) * <f32>1e-6;
  store<f32>(out, value);
  store<f32>(bound, error * <f32>1.00001 + rounding + <f32>1e-30);
}

// ---- noise: Philox4x64-10 (Salmon et al., SC 2011) ---------------------------------------------

// @ts-ignore: decorator
@inline
function multiplyHigh(a: u64, b: u64): u64 {
  const a0 = a & 0xffffffff, a1 = a >> 32, b0 = b & 0xffffffff, b1 = b >> 32;
  const middle = a1 * b0 + ((a0 * b0) >> 32);
  const rest = a0 * b1 + (middle & 0xffffffff);
  return a1 * b1 + (middle >> 32) + (rest >> 32);
}

// @ts-ignore: decorator
@inline
function toUniform(raw: u64): f64 {
  return (<f64>(raw >> 11) + 0.5) * 1.1102230246251565e-16;
}

/** Write `blocks` times four uniform float64 in (0, 1), keyed by (seed, position). */
export function drawUniform(seed: u64, position: u64, blocks: usize, out: usize): void {
  for (let block: usize = 0; block < blocks; block++) {
    let c0: u64 = block + 1, c1: u64 = 0, c2: u64 = 0, c3: u64 = 0;
    let k0 = seed, k1 = position;
    for (let round = 0; round < 10; round++) {
      const high0 = multiplyHigh(0xd2e7470ee14c6c93, c0), low0 = 0xd2e7470ee14c6c93 * c0;
      const high1 = multiplyHigh(0xca5a826395121157, c2), low1 = 0xca5a826395121157 * c2;
      c0 = high1 ^ c1 ^ k0;
      c1 = low1;
      c2 = high0 ^ c3 ^ k1;
      c3 = low0;
      k0 += 0x9e3779b97f4a7c15;
      k1 += 0xbb67ae8584caa73b;
    }
    store<f64>(out, toUniform(c0));
    store<f64>(out, toUniform(c1), 8);
    store<f64>(out, toUniform(c2), 16);
    store<f64>(out, toUniform(c3), 24);
    out += 32;
  }
}
