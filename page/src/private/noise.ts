// Gaussian noise on hidden states before they leave the device, as splitup.client.private.noise adds it: the
// same mechanism, accountant and sigma. What that file says holds here.
const SENSITIVITY = 2; // of unit vectors
const DELTA = 1e-6;
const HALVINGS = 200;

/** The noise of one session, which sends at most `mostRows` rows. */
export class RowNoise {
  readonly sigma: number;
  private rows = 0;

  /** `length` is that of a typical row of the model; it does not depend on the text. */
  constructor(epsilon: number, private mostRows: number, private width: number, private length: number) {
    if (!(epsilon > 0 && epsilon <= 1e6)) throw new Error(`noise needs an epsilon from above 0 to 1000000, not ${epsilon}`);
    this.sigma = computeSigma(epsilon, mostRows);
  }

  /** Return rows as they may be sent, once each. */
  add(rows: Float32Array): Float32Array {
    this.rows += rows.length / this.width;
    if (this.rows > this.mostRows) throw new Error(`the text's noise is for ${this.mostRows} rows, and ${this.rows} would say more than epsilon allows`);
    const noisy = drawNormal(rows.length);
    for (let start = 0; start < rows.length; start += this.width) {
      let squares = 0;
      for (let j = start; j < start + this.width; j++) squares += rows[j] ** 2;
      const scale = squares ? 1 / Math.sqrt(squares) : 0;
      for (let j = start; j < start + this.width; j++) noisy[j] = (rows[j] * scale + this.sigma * noisy[j]) * this.length;
    }
    return Float32Array.from(noisy);
  }

  /** The epsilon that the rows so far have cost. */
  get epsilon(): number {
    const mu = (SENSITIVITY * Math.sqrt(this.rows)) / this.sigma;
    if (computeDelta(0, mu) <= DELTA) return 0;
    return bisect((epsilon) => computeDelta(epsilon, mu) <= DELTA)[1];
  }
}

/** Return the least sigma with which this many rows are (epsilon, 1e-6) private. */
export function computeSigma(epsilon: number, rows: number): number {
  return (SENSITIVITY * Math.sqrt(rows)) / bisect((mu) => computeDelta(epsilon, mu) > DELTA)[0];
}

/** Return neighbours between which a condition on positive numbers becomes true. */
function bisect(isTrue: (x: number) => boolean): [number, number] {
  let low = 0;
  let high = 1;
  while (!isTrue(high)) high *= 2;
  for (let step = 0; step < HALVINGS; step++) {
    const middle = (low + high) / 2;
    if (isTrue(middle)) high = middle;
    else low = middle;
  }
  return [low, high];
}

function computeDelta(epsilon: number, mu: number): number {
  if (mu === 0) return 0;
  const first = epsilon / mu - mu / 2;
  const density = Math.exp(-(first ** 2) / 2) / 2; // also e^epsilon times that of the second
  const size = density * scaledErfc(Math.abs(first) / Math.SQRT2);
  return (first < 0 ? 1 - size : size) - density * scaledErfc((epsilon / mu + mu / 2) / Math.SQRT2);
}

/** Return exp(x²) erfc(x), x ≥ 0: Abramowitz and Stegun 7.1.6 and 7.1.14. */
function scaledErfc(x: number): number {
  if (x < 2) {
    let term = x;
    let sum = x;
    for (let n = 1; term > 1e-17 * sum; n++) sum += term *= (2 * x * x) / (2 * n + 1);
    return Math.exp(x * x) - (2 / Math.sqrt(Math.PI)) * sum;
  }
  let rest = x;
  for (let n = 80; n > 0; n--) rest = x + n / 2 / rest;
  return 1 / (rest * Math.sqrt(Math.PI));
}

/** Return independent standard normal numbers, from the browser's secure generator. */
function drawNormal(count: number): Float64Array {
  const normal = new Float64Array(count);
  const raw = new Uint32Array(4);
  for (let place = 0; place < count; place += 2) {
    crypto.getRandomValues(raw);
    const uniform = (at: number): number => (raw[at] * 2 ** 21 + (raw[at + 1] >>> 11) + 0.5) * 2 ** -53;
    const radius = Math.sqrt(-2 * Math.log(uniform(0)));
    const angle = 2 * Math.PI * uniform(2);
    normal[place] = radius * Math.cos(angle);
    if (place + 1 < count) normal[place + 1] = radius * Math.sin(angle);
  }
  return normal;
}
