// A client of an adapter host for browsers, with node-seal (WebAssembly; Node needs version 24).
import SEAL from "./node_modules/node-seal/dist/index_throws.js";

const PRIME_BITS = [60, 40, 60];
const INPUT_SCALE = 2 ** 40;
const ANSWER_HEAD_BYTES = 12;

// SEAL refuses bytes of another minor version, although their form is the same in 4.1 (node-seal
// 7.0) and 4.3 (TenSEAL 0.3.18). So the version in each header (8 bytes) is replaced.
function relabel(bytes, minor) {
  const head = [0x5e, 0xa1, 0x10, 4];
  for (let at = 0; at + 16 <= bytes.length; at++)
    if (head.every((byte, place) => bytes[at + place] === byte) && !bytes[at + 6] && !bytes[at + 7])
      bytes[at + 4] = minor;
  return bytes;
}

// Where hidden states lie in the slots: splitup/adapters/layout.py
class Layout {
  constructor({ width, rank, parameters }) {
    const roundUp = (count) => 2 ** Math.ceil(Math.log2(count));
    this.width = width;
    this.slots = parameters.degree / 2;
    this.period = roundUp(width);
    this.rows = roundUp(Math.ceil(rank / 2));
    this.copies = Math.min(this.slots / this.period, this.rows);
    this.diagonals = this.rows / this.copies;
    this.babies = 2 ** Math.floor(Math.log2(this.diagonals) / 2);
  }

  get steps() {
    const steps = new Set(this.babies > 1 ? [1] : []);
    if (this.diagonals > this.babies) steps.add(this.babies);
    for (let step = this.rows; step < this.slots; step *= 2) steps.add(step);
    return [...steps].sort((a, b) => a - b);
  }

  // direction 1: elements of the hidden state in the slots; -1: of the answer
  *places(direction) {
    for (let copy = 0; copy < this.copies; copy++)
      for (let place = 0; place < this.period; place++) {
        const moved = place + direction * copy * this.diagonals;
        const element = (moved + this.period) % this.period;
        if (element < this.width) yield [copy * this.period + place, element];
      }
  }

  pack(hidden, length) {
    const slots = new Float64Array(this.slots);
    for (const [slot, element] of this.places(1)) slots[slot] = hidden[element] / length;
    return slots;
  }

  unpack(slots, factor) {
    const answer = new Float64Array(this.width);
    for (const [slot, element] of this.places(-1)) answer[element] += slots[slot] * factor;
    return answer;
  }
}

class ClientKeys {
  constructor(seal, { degree, prime_bits }, layout) {
    if (degree !== (layout.width <= 4096 ? 8192 : 16384) || `${prime_bits}` !== `${PRIME_BITS}`)
      throw new Error(`unexpected parameters: ${degree}, ${prime_bits}`);
    const chosen = new seal.EncryptionParameters(seal.SchemeType.ckks);
    chosen.setPolyModulusDegree(degree);
    chosen.setCoeffModulus(seal.CoeffModulus.Create(degree, Int32Array.from(PRIME_BITS)));
    this.seal = seal;
    this.context = new seal.SEALContext(chosen, true, seal.SecLevelType.tc128);
    if (!this.context.parametersSet()) throw new Error("SEAL refuses the parameters");
    const generator = new seal.KeyGenerator(this.context);
    const secret = generator.secretKey();
    this.rotations = relabel(
      generator
        .createGaloisKeysSerializableWithSteps(Int32Array.from(layout.steps))
        .saveToArray(seal.ComprModeType.none),
      3,
    );
    this.encoder = new seal.CKKSEncoder(this.context);
    this.encryptor = new seal.Encryptor(this.context, generator.createPublicKey());
    this.encryptor.setSecretKey(secret);
    this.decryptor = new seal.Decryptor(this.context, secret);
  }

  encrypt(slots) {
    const plain = new this.seal.Plaintext();
    this.encoder.encode(slots, INPUT_SCALE, plain);
    const cipher = this.encryptor.encryptSymmetricSerializable(plain);
    const bytes = relabel(cipher.saveToArray(this.seal.ComprModeType.none), 3);
    cipher.delete();
    plain.delete();
    return bytes;
  }

  decrypt(bytes) {
    const cipher = new this.seal.Ciphertext();
    const plain = new this.seal.Plaintext();
    cipher.loadFromArray(this.context, relabel(bytes, 1));
    this.decryptor.decrypt(cipher, plain);
    const slots = this.encoder.decodeFloat64(plain);
    cipher.delete();
    plain.delete();
    return slots;
  }
}

async function post(url, body) {
  const headers = { "Content-Type": "application/octet-stream" };
  const response = await fetch(url, { method: "POST", headers, body });
  if (!response.ok) throw new Error((await response.json()).error);
  return new Uint8Array(await response.arrayBuffer());
}

// Returns what an adapter adds to hidden states, and what each took.
export async function applyAll(host, name, states) {
  const { adapters } = await (await fetch(`${host}/v1/adapters`)).json();
  const info = adapters.find((each) => each.name === name);
  const layout = new Layout(info);
  const keys = new ClientKeys(await SEAL(), info.parameters, layout);
  const started = await post(`${host}/v1/adapters/${info.adapter}/session`, keys.rotations);
  const { session } = JSON.parse(new TextDecoder().decode(started));
  const found = { answers: [], own_ms: [], sent: 0, received: 0 };
  for (const hidden of states) {
    const length = Math.hypot(...hidden);
    const times = [performance.now()];
    const sent = keys.encrypt(layout.pack(hidden, length));
    times.push(performance.now());
    const answer = await post(`${host}/v1/adapter-sessions/${session}`, sent);
    times.push(performance.now());
    const slots = keys.decrypt(answer.subarray(ANSWER_HEAD_BYTES));
    found.answers.push([...layout.unpack(slots, length * 2 ** info.answer_bits)]);
    times.push(performance.now());
    found.own_ms.push(times[1] - times[0] + times[3] - times[2]);
    found.sent = Math.max(found.sent, sent.length);
    found.received = Math.max(found.received, answer.length);
  }
  return found;
}
