// SIMD kernels of the private page, compiled to WebAssembly by AssemblyScript. One thread.
//
// A table is a matrix [rows, width] as it was registered. The type parameter T says how its numbers
// are stored: u16 for float16, i16 for bfloat16, f32 for float32. The page has checked that all of
// them are finite (`countNonFinite`), so that float16 is read without cases.
//
// It is compiled twice, with and without relaxed SIMD, which not every browser has. `scan` alone
// differs: with it an instruction multiplies bytes, without it they are widened first.

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
 * Write each row as int8 times a scale, four rows side by side: sixteen numbers of the first, sixteen
 * of the second, and so on, so that `scan` reads memory in order. `stride` is the width rounded up to
 * a multiple of 16. The memory of `bytes` is zeros before, and stays so behind a row's end. `facts`
 * gets four arrays of `rows` numbers, with room for a multiple of 4: the scales, upper bounds of the
 * norms of the errors, upper bounds of the norms of the rows, all float32, and the int32 sums.
 */
function quantiseRows<T>(table: usize, rows: usize, width: usize, stride: usize, bytes: usize, facts: usize): void {
  const size = sizeof<T>();
  const room = (rows + 3) & ~3;
  for (let row: usize = 0; row < rows; row++) {
    let largest: f32 = 0;
    for (let j: usize = 0; j < width; j++) largest = max(largest, abs(read1<T>(table + j * size)));
    const scale: f32 = largest / 127;
    const inverse: f32 = scale > 0 && <f32>1 / scale < Infinity ? <f32>1 / scale : 0;
    const at = bytes + (row & ~3) * stride + (row & 3) * 16;
    let errors: f64 = 0;
    let squares: f64 = 0;
    let sum: i32 = 0;
    for (let j: usize = 0; j < width; j++) {
      const value = read1<T>(table + j * size);
      const near = nearest(value * inverse);
      const error = <f64>value - <f64>near * <f64>scale;
      errors += error * error;
      squares += <f64>value * <f64>value;
      sum += <i32>near;
      store<i8>(at + (j >> 4) * 64 + (j & 15), <i8>near);
    }
    // rounded up: float64 sums are right to 1e-12, float32 to 1e-7
    store<f32>(facts + 4 * row, scale);
    store<f32>(facts + 4 * (room + row), <f32>(Math.sqrt(errors) * 1.000001));
    store<f32>(facts + 4 * (2 * room + row), <f32>(Math.sqrt(squares) * 1.000001));
    store<i32>(facts + 4 * (3 * room + row), sum);
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
  kind: i32, table: usize, rows: usize, width: usize, stride: usize, bytes: usize, facts: usize,
): void {
  if (kind == 0) quantiseRows<u16>(table, rows, width, stride, bytes, facts);
  else if (kind == 1) quantiseRows<i16>(table, rows, width, stride, bytes, facts);
  else quantiseRows<f32>(table, rows, width, stride, bytes, facts);
}

export function multiply(kind: i32, vector: usize, table: usize, rows: usize, width: usize, out: usize): void {
  if (kind == 0) multiplyRows<u16>(vector, table, rows, width, out);
  else if (kind == 1) multiplyRows<i16>(vector, table, rows, width, out);
  else multiplyRows<f32>(vector, table, rows, width, out);
}

/** Return the sums of the numbers of each of four vectors. */
// @ts-ignore: decorator
@inline
function addAcross(a: v128, b: v128, c: v128, d: v128): v128 {
  const first = i32x4.add(v128.shuffle<i32>(a, b, 0, 4, 1, 5), v128.shuffle<i32>(a, b, 2, 6, 3, 7));
  const second = i32x4.add(v128.shuffle<i32>(c, d, 0, 4, 1, 5), v128.shuffle<i32>(c, d, 2, 6, 3, 7));
  return i32x4.add(v128.shuffle<i32>(first, second, 0, 1, 4, 5), v128.shuffle<i32>(first, second, 2, 3, 6, 7));
}

/** Return 128 times one vector plus another, rounded to float32 once. */
// @ts-ignore: decorator
@inline
function join(high: v128, low: v128): v128 {
  const times = f64x2.splat(128);
  const first = f64x2.add(f64x2.mul(f64x2.convert_low_i32x4_s(high), times), f64x2.convert_low_i32x4_s(low));
  high = v128.shuffle<i32>(high, high, 2, 3, 2, 3);
  low = v128.shuffle<i32>(low, low, 2, 3, 2, 3);
  const second = f64x2.add(f64x2.mul(f64x2.convert_low_i32x4_s(high), times), f64x2.convert_low_i32x4_s(low));
  return v128.shuffle<i32>(f32x4.demote_f64x2_zero(first), f32x4.demote_f64x2_zero(second), 0, 1, 4, 5);
}

/** Replace each 16 int16 from -8191 to 8191, plus 8192, by their higher and their lower 7 bits, as bytes. */
function splitVector(vector: usize, stride: usize): void {
  for (const end = vector + 2 * stride; vector < end; vector += 32) {
    const a = i16x8.add(v128.load(vector), i16x8.splat(8192));
    const b = i16x8.add(v128.load(vector, 16), i16x8.splat(8192));
    const seven = i16x8.splat(127);
    v128.store(vector, i8x16.narrow_i16x8_u(i16x8.shr_u(a, 7), i16x8.shr_u(b, 7)));
    v128.store(vector, i8x16.narrow_i16x8_u(v128.and(a, seven), v128.and(b, seven)), 16);
  }
}

/**
 * Write for every row its product with an int16 vector, times both scales, and how far that may be
 * from what `multiply` gives: `out` and `bounds`, float32 each. `vectorNorm` and `vectorError` are
 * upper bounds of the norms of the vector and of its rounding error. The vector is overwritten.
 *
 * With w = s·q + e and x = t·p + f: |x·w - s·t·(p·q)| ≤ |e|·|x| + |s·q|·|f| by Cauchy and Schwarz.
 * The product p·q is computed exactly, as 128·high + low; no sum leaves 32 bits, because the page
 * chooses the vector's scale so.
 */
export function scan(
  vector: usize, bytes: usize, rows: usize, stride: usize, facts: usize,
  vectorScale: f32, vectorNorm: f32, vectorError: f32, out: usize, bounds: usize,
): void {
  const room = (rows + 3) & ~3;
  const end = vector + 2 * stride;
  if (ASC_FEATURE_RELAXED_SIMD) splitVector(vector, stride);
  for (let row: usize = 0; row < rows; row += 4) { // there is room for three rows more
    let high0 = i32x4.splat(0), high1 = high0, high2 = high0, high3 = high0;
    let low0 = high0, low1 = high0, low2 = high0, low3 = high0;
    for (let at = vector; at < end; at += 32) {
      const a = v128.load(at), b = v128.load(at, 16);
      const q0 = v128.load(bytes), q1 = v128.load(bytes, 16), q2 = v128.load(bytes, 32), q3 = v128.load(bytes, 48);
      if (ASC_FEATURE_RELAXED_SIMD) { // both forms give the same numbers: `a` and `b` have 7 bits
        high0 = i32x4.relaxed_dot_i8x16_i7x16_add_s(q0, a, high0);
        low0 = i32x4.relaxed_dot_i8x16_i7x16_add_s(q0, b, low0);
        high1 = i32x4.relaxed_dot_i8x16_i7x16_add_s(q1, a, high1);
        low1 = i32x4.relaxed_dot_i8x16_i7x16_add_s(q1, b, low1);
        high2 = i32x4.relaxed_dot_i8x16_i7x16_add_s(q2, a, high2);
        low2 = i32x4.relaxed_dot_i8x16_i7x16_add_s(q2, b, low2);
        high3 = i32x4.relaxed_dot_i8x16_i7x16_add_s(q3, a, high3);
        low3 = i32x4.relaxed_dot_i8x16_i7x16_add_s(q3, b, low3);
      } else {
        low0 = i32x4.add(low0, dotWidened(q0, a, b));
        low1 = i32x4.add(low1, dotWidened(q1, a, b));
        low2 = i32x4.add(low2, dotWidened(q2, a, b));
        low3 = i32x4.add(low3, dotWidened(q3, a, b));
      }
      bytes += 64;
    }
    if (!ASC_FEATURE_RELAXED_SIMD) {
      high0 = i32x4.shr_s(low0, 7), high1 = i32x4.shr_s(low1, 7), high2 = i32x4.shr_s(low2, 7), high3 = i32x4.shr_s(low3, 7);
      const seven = i32x4.splat(127);
      low0 = v128.and(low0, seven), low1 = v128.and(low1, seven), low2 = v128.and(low2, seven), low3 = v128.and(low3, seven);
    }
    let high = addAcross(high0, high1, high2, high3);
    const at = facts + 4 * row;
    if (ASC_FEATURE_RELAXED_SIMD) high = i32x4.sub(high, i32x4.shl(v128.load(at + 12 * room), 6)); // the 8192
    const products = join(high, addAcross(low0, low1, low2, low3));
    const values = f32x4.mul(products, f32x4.mul(v128.load(at), f32x4.splat(vectorScale)));
    const error = v128.load(at + 4 * room), norm = v128.load(at + 8 * room), all = f32x4.splat(vectorNorm);
    const found = f32x4.add(f32x4.mul(error, all), f32x4.mul(f32x4.add(norm, error), f32x4.splat(vectorError)));
    const rounding = f32x4.mul(f32x4.add(f32x4.abs(values), f32x4.mul(norm, all)), f32x4.splat(1e-6));
    v128.store(out + 4 * row, values);
    const bound = f32x4.add(f32x4.mul(found, f32x4.splat(1.00001)), rounding);
    v128.store(bounds + 4 * row, f32x4.add(bound, f32x4.splat(1e-30)));
  }
}

// @ts-ignore: decorator
@inline
function dotWidened(bytes: v128, a: v128, b: v128): v128 {
  const first = i32x4.dot_i16x8_s(i16x8.extend_low_i8x16_s(bytes), a);
  return i32x4.add(first, i32x4.dot_i16x8_s(i16x8.extend_high_i8x16_s(bytes), b));
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
