// The client of an adapter host (splitup/adapters/client.py, ADR 42), with SEAL in WebAssembly.
//
// The secret key is made here and stays here. A host gets keys for rotations and fresh ciphertexts
// of hidden states; what was decrypted goes to nobody. Whatever fails throws, and the keys are then
// given up: there is no way around encryption.
/*! node-seal 7.0 (c) Nick Angelou, Microsoft SEAL (c) Microsoft Corporation; MIT License */
import { hexToBytes } from "@noble/hashes/utils.js";
import createSeal, { type MainModule, type SEALContext } from "node-seal";
import { SplitError } from "./connection";
import { computeDigest } from "./tensor_store";

const SEAL_SHA256 = "b30d3776265a56373a2001d2cd48baa8d72ddd571e04ddfaefd4c231271170e4"; // of seal.wasm
const PRIME_BITS = [60, 40, 60];
const INPUT_SCALE = 2 ** 40;
const ANSWER_SCALE = 2 ** 58;
const ANSWER_HEAD_BYTES = 12; // the host's microseconds to read, compute and write, as u32
const RELATIVE_ERROR = 2 ** -17; // of the largest change that an adapter can make
const MAX_USES = 4_096; // of one key
const CHECKED_OF_256 = 32; // so many of 256 ciphertexts, drawn at random, go to a second host
const MAX_AGE_MS = 3_600_000;
const TIMEOUT_MS = 60_000;
const GONE = "410";

export type AdapterInfo = {
  adapter: string; // the SHA-256 of its weights
  name: string;
  width: number;
  rank: number;
  gain_bits: number;
  answer_bits: number;
  parameters: { degree: number; prime_bits: number[] };
  keywords: string[];
};
type AdapterList = { library: string; adapters: AdapterInfo[]; signer: string; signature: string };
/** An adapter and its hosts: the first one applies it, the second one is compared with it. */
export type Offer = AdapterInfo & { library: string; hosts: string[] };

/** Return what adapter hosts have for hidden states of a width; with signers, what these have signed. */
export async function listAdapters(hosts: readonly string[], signers: readonly string[], width: number): Promise<Offer[]> {
  const lists = await Promise.all(hosts.map((host) => fetchList(host, signers)));
  const offers = new Map<string, Offer>();
  lists.forEach(({ library, adapters }, place) => {
    for (const info of adapters.filter((one) => one.width === width).map(check)) {
      const known = offers.get(info.adapter);
      if (known) addHost(known, info, library, hosts[place]);
      else offers.set(info.adapter, { ...info, library, hosts: [hosts[place]] });
    }
  });
  return [...offers.values()];
}

async function fetchList(host: string, signers: readonly string[]): Promise<AdapterList> {
  const listed = JSON.parse(new TextDecoder().decode(await ask(`${host}/v1/adapters`))) as AdapterList;
  if (signers.length && !(signers.includes(listed.signer) && (await isSigned(listed)))) {
    throw new Error(`no signer whom this server names has signed what the adapter host ${host} offers; nothing was sent`);
  }
  return listed;
}

/** Tell whether a list has its signer's signature: splitup/messages/adapters.py. */
async function isSigned(listed: AdapterList): Promise<boolean> {
  const sortKeys = (_: string, value: unknown): unknown =>
    value instanceof Object && !Array.isArray(value) ? Object.fromEntries(Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1))) : value;
  const domain = "adapter-list";
  const message = `splitup/v1${String.fromCharCode(domain.length)}${domain}${JSON.stringify({ ...listed, signature: "" }, sortKeys)}`;
  if (!/^[0-9a-f]{128}$/.test(listed.signature)) return false;
  const signer = hexToBytes(listed.signer.slice(2)) as BufferSource;
  const key = await crypto.subtle.importKey("raw", signer, "Ed25519", false, ["verify"]).catch(() => {
    throw new Error("this browser cannot check Ed25519 signatures, which adapter hosts make; use a newer one");
  });
  return crypto.subtle.verify("Ed25519", key, hexToBytes(listed.signature) as BufferSource, new TextEncoder().encode(message));
}

/** Add a host to those of an adapter; what it says of it has to be the same. */
function addHost(known: Offer, info: AdapterInfo, library: string, host: string): void {
  if (known.hosts.includes(host)) return; // a host is not compared with itself
  const isEqual = (["rank", "gain_bits", "answer_bits"] as const).every((field) => known[field] === info[field]);
  if (!isEqual) throw new Error(`${known.hosts[0]} and ${host} describe adapter ${info.adapter} differently; nothing was sent`);
  if (known.library !== library) {
    throw new Error(`${known.hosts[0]} and ${host} compute with ${known.library} and ${library}: their answers cannot be compared`);
  }
  known.hosts.push(host);
}

/** Return the adapter with most keywords in a question, the first of equal ones; null for none. */
export function chooseAdapter<T extends { keywords: string[] }>(adapters: readonly T[], question: string): T | null {
  const words = splitWords(question);
  const counts = adapters.map(({ keywords }) => new Set(keywords.map(splitWords).filter((one) => one.trim() && words.includes(one))).size);
  const most = Math.max(0, ...counts);
  return most ? adapters[counts.indexOf(most)] : null;
}

/** Return the words of a text, case folded, with a space before and behind each of them. */
function splitWords(text: string): string {
  const folded = text.normalize("NFKC").toUpperCase().toLowerCase().replaceAll("ς", "σ");
  return ` ${(folded.match(/[\p{L}\p{N}_]+/gu) ?? []).join(" ")} `;
}

function check(info: AdapterInfo): AdapterInfo {
  const { adapter, name, width, rank, parameters, keywords } = info;
  const bits = [info.gain_bits, info.answer_bits];
  const isSound = /^[0-9a-f]{64}$/.test(adapter) && typeof name === "string" && [width, rank, ...bits].every(Number.isInteger) &&
    width >= 1 && width <= 8192 && rank >= 1 && rank <= 64 && bits.every((one) => Math.abs(one) <= 128) &&
    Array.isArray(keywords) && keywords.length <= 64 && keywords.every((one) => typeof one === "string");
  if (!isSound) throw new Error("the adapter host describes an adapter that cannot be");
  if (parameters?.degree !== (width <= 4096 ? 8192 : 16384) || `${parameters.prime_bits}` !== `${PRIME_BITS}`) {
    throw new Error(`the adapter host names other CKKS parameters than those that are safe for '${name}'; nothing was sent`);
  }
  return info;
}

/** One adapter at its host; hidden states are taken one after another. */
export class EncryptedAdapter {
  private keys: { own: ClientKeys; sessions: string[]; uses: number; made: number } | null = null;
  private layout: Layout;
  private sums = { states: 0, encrypt: 0, read: 0, compute: 0, write: 0, wait: 0, decrypt: 0, sent: 0, received: 0, checked: 0 };

  private constructor(readonly info: Offer, private seal: MainModule) {
    this.layout = new Layout(info);
  }

  /** Load SEAL, and give the hosts the keys. */
  static async open(info: Offer): Promise<EncryptedAdapter> {
    const opened = new EncryptedAdapter(info, await loadSeal());
    await opened.getKeys();
    return opened;
  }

  /** Return what the adapter adds to a hidden state. */
  async apply(hidden: Float32Array, signal?: AbortSignal): Promise<Float64Array> {
    const length = Math.hypot(...hidden);
    if (hidden.length !== this.info.width || !(length < 2 ** 64)) {
      throw new Error(`a hidden state has ${hidden.length} elements and length ${length}; the adapter takes ${this.info.width} finite ones`);
    }
    try {
      const slots = this.layout.pack(hidden, length || 1);
      try {
        return await this.ask(slots, length, signal);
      } catch (error) {
        if (!(error instanceof SplitError) || error.code !== GONE) throw error;
      }
      this.giveUp(); // the host has ended the session: other keys
      return await this.ask(slots, length, signal);
    } catch (error) {
      this.giveUp(); // a host must not learn how its answers are taken
      throw error;
    }
  }

  /** Return a line with means of all hidden states since the last call. */
  describe(): string {
    const { states, sent, received, checked, ...times } = this.sums;
    const [encrypt, read, compute, write, wait, decrypt] = Object.values(times).map((ms) => (ms / states).toFixed(1));
    return `adapter ${this.info.name} (${this.info.adapter.slice(0, 12)}…), under encryption: ${states} hidden states, each ` +
      `encrypt ${encrypt} ms, host ${read} + ${compute} + ${write} ms of ${wait} ms waited, decrypt ${decrypt} ms, ` +
      `${(sent / states / 1e3).toFixed(0)} kB sent, ${(received / states / 1e3).toFixed(0)} kB received` +
      (this.info.hosts.length > 1 ? `; a second host answered ${checked} of them alike` : "");
  }

  startReport(): void {
    for (const name of Object.keys(this.sums) as (keyof typeof this.sums)[]) this.sums[name] = 0;
  }

  /** Forget the keys; the hosts end their sessions. */
  giveUp(): void {
    if (!this.keys) return;
    const { own, sessions } = this.keys;
    this.keys = null;
    own.close();
    for (const session of sessions) void ask(`${session}/end`, "{}").catch(() => {}); // it ends by itself when idle
  }

  private async ask(slots: Float64Array, length: number, signal?: AbortSignal): Promise<Float64Array> {
    const keys = await this.getKeys();
    const isChecked = keys.sessions.length > 1 && (!keys.uses || crypto.getRandomValues(new Uint8Array(1))[0] < CHECKED_OF_256);
    keys.uses++;
    const times = [performance.now()];
    const sent = keys.own.encrypt(slots);
    times.push(performance.now());
    const asked = isChecked ? keys.sessions : keys.sessions.slice(0, 1);
    const [answer, other] = await Promise.all(asked.map((session) => ask(session, sent, signal)));
    times.push(performance.now());
    if (answer.length <= ANSWER_HEAD_BYTES) throw new Error(`the adapter host answered ${answer.length} bytes instead of a ciphertext`);
    const body = answer.slice(ANSWER_HEAD_BYTES);
    if (other && computeDigest(other.subarray(ANSWER_HEAD_BYTES)) !== computeDigest(body)) {
      throw new Error(`${this.info.hosts.slice(0, 2).join(" and ")} answer one ciphertext differently: one of them does not apply the adapter; no token is made of it`);
    }
    const found = this.layout.unpack(keys.own.decrypt(body), 2 ** this.info.answer_bits);
    const most = 2 ** this.info.gain_bits * (1 + RELATIVE_ERROR);
    if (!found.every((value) => Math.abs(value) <= most)) throw new Error("the adapter host's answer is larger than the adapter can make it");
    times.push(performance.now());
    const [encrypt, wait, decrypt] = [0, 1, 2].map((place) => times[place + 1] - times[place]);
    const head = new DataView(answer.buffer, answer.byteOffset);
    const [read, compute, write] = [0, 4, 8].map((place) => head.getUint32(place, true) / 1e3);
    const took = { states: 1, encrypt, read, compute, write, wait, decrypt, sent: sent.length, received: answer.length, checked: Number(isChecked) };
    for (const [name, value] of Object.entries(took)) this.sums[name as keyof typeof took] += value;
    return found.map((value) => value * length);
  }

  private async getKeys(): Promise<NonNullable<typeof this.keys>> {
    if (this.keys && (this.keys.uses >= MAX_USES || performance.now() - this.keys.made >= MAX_AGE_MS)) this.giveUp();
    if (!this.keys) {
      const own = new ClientKeys(this.seal, this.info.parameters.degree);
      try {
        const rotations = own.makeRotationKeys(this.layout.steps);
        const sessions = await Promise.all(this.info.hosts.slice(0, 2).map((host) => this.start(host, rotations)));
        this.keys = { own, sessions, uses: 0, made: performance.now() };
      } catch (error) {
        own.close();
        throw error;
      }
    }
    return this.keys;
  }

  private async start(host: string, rotations: Uint8Array<ArrayBuffer>): Promise<string> {
    const reply = await ask(`${host}/v1/adapters/${this.info.adapter}/session`, rotations);
    const { session } = JSON.parse(new TextDecoder().decode(reply));
    if (!/^[0-9a-f]{64}$/.test(session)) throw new Error(`the adapter host ${host} names no session`);
    return `${host}/v1/adapter-sessions/${session}`;
  }
}

let seal: Promise<MainModule> | null = null;

/** Fetch SEAL when an adapter is used for the first time; its digest is checked. */
async function loadSeal(): Promise<MainModule> {
  seal ??= (async () => {
    const wasmBinary = await ask("/private/seal.wasm");
    if (computeDigest(wasmBinary) !== SEAL_SHA256) throw new Error("the encryption library arrived with other contents than the page's; load the page again");
    return createSeal({ wasmBinary, locateFile: (path: string) => path });
  })();
  seal.catch(() => (seal = null));
  return seal;
}

/** GET, or POST a body. */
async function ask(url: string, body?: Uint8Array<ArrayBuffer> | string, signal?: AbortSignal): Promise<Uint8Array<ArrayBuffer>> {
  const limit = AbortSignal.any([AbortSignal.timeout(TIMEOUT_MS), ...(signal ? [signal] : [])]);
  const type = typeof body === "string" ? "application/json" : "application/octet-stream";
  const sent = body === undefined ? {} : { method: "POST", headers: { "Content-Type": type }, body };
  let reply: Response;
  try {
    reply = await fetch(url, { ...sent, credentials: "omit", signal: limit });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error(`${url} does not answer (${(error as Error).message}); there is no text with an adapter without its host`);
  }
  if (!reply.ok) throw new SplitError(String(reply.status), (await reply.json().catch(() => ({}))).error ?? `${url} answered ${reply.status}`);
  return new Uint8Array(await reply.arrayBuffer());
}

// SEAL refuses bytes of another minor version, although their form is the same in 4.1 (node-seal
// 7.0) and 4.3 (TenSEAL 0.3.18). So the version in each header (8 bytes) is replaced.
function relabel(bytes: Uint8Array<ArrayBuffer>, minor: number): Uint8Array<ArrayBuffer> {
  for (let at = bytes.indexOf(0x5e); at >= 0 && at + 16 <= bytes.length; at = bytes.indexOf(0x5e, at + 1)) {
    if (bytes[at + 1] === 0xa1 && bytes[at + 2] === 0x10 && bytes[at + 3] === 4 && !bytes[at + 6] && !bytes[at + 7]) bytes[at + 4] = minor;
  }
  return bytes;
}

class ClientKeys {
  private context: SEALContext;
  private made: { delete(): void }[] = [];
  private generator;
  private encoder;
  private encryptor;
  private decryptor;

  constructor(private seal: MainModule, degree: number) {
    const chosen = new seal.EncryptionParameters(seal.SchemeType.ckks);
    chosen.setPolyModulusDegree(degree);
    chosen.setCoeffModulus(seal.CoeffModulus.Create(degree, Int32Array.from(PRIME_BITS)));
    this.context = new seal.SEALContext(chosen, true, seal.SecLevelType.tc128);
    chosen.delete();
    if (!this.context.parametersSet()) throw new Error("SEAL refuses the parameters");
    this.generator = new seal.KeyGenerator(this.context);
    const secret = this.generator.secretKey();
    const open = this.generator.createPublicKey(); // the encryptor wants one, and it is not used
    this.encoder = new seal.CKKSEncoder(this.context);
    this.encryptor = new seal.Encryptor(this.context, open);
    this.encryptor.setSecretKey(secret);
    this.decryptor = new seal.Decryptor(this.context, secret);
    this.made.push(this.context, this.generator, secret, open, this.encoder, this.encryptor, this.decryptor);
  }

  close(): void {
    for (const one of this.made.splice(0)) one.delete();
  }

  makeRotationKeys(steps: readonly number[]): Uint8Array<ArrayBuffer> {
    const keys = this.generator.createGaloisKeysSerializableWithSteps(Int32Array.from(steps));
    const bytes = relabel(keys.saveToArray(this.seal.ComprModeType.none), 3);
    keys.delete();
    return bytes;
  }

  encrypt(slots: Float64Array): Uint8Array<ArrayBuffer> {
    const plain = new this.seal.Plaintext();
    this.encoder.encode(slots, INPUT_SCALE, plain);
    const cipher = this.encryptor.encryptSymmetricSerializable(plain);
    const bytes = relabel(cipher.saveToArray(this.seal.ComprModeType.none), 3);
    cipher.delete();
    plain.delete();
    return bytes;
  }

  decrypt(bytes: Uint8Array<ArrayBuffer>): Float64Array {
    const cipher = new this.seal.Ciphertext();
    const plain = new this.seal.Plaintext();
    try {
      cipher.loadFromArray(this.context, relabel(bytes, 1));
      const isOurs = cipher.size() === 2 && cipher.isNttForm() && !cipher.isTransparent() && cipher.coeffModulusSize() === 1;
      if (!isOurs || cipher.scale() !== ANSWER_SCALE) throw new Error("another form");
      this.decryptor.decrypt(cipher, plain);
      return this.encoder.decodeFloat64(plain);
    } catch {
      throw new Error("the adapter host's answer is no ciphertext of these keys");
    } finally {
      cipher.delete();
      plain.delete();
    }
  }
}

/** Where hidden states lie in the slots: splitup/adapters/layout.py. */
class Layout {
  private width: number;
  private slots: number;
  private period: number;
  private rows: number;
  private copies: number;
  private diagonals: number;

  constructor({ width, rank, parameters }: AdapterInfo) {
    const roundUp = (count: number): number => 2 ** Math.ceil(Math.log2(count));
    this.width = width;
    this.slots = parameters.degree / 2;
    this.period = roundUp(width);
    this.rows = roundUp(Math.ceil(rank / 2));
    this.copies = Math.min(this.slots / this.period, this.rows);
    this.diagonals = this.rows / this.copies;
  }

  get steps(): number[] {
    const babies = 2 ** Math.floor(Math.log2(this.diagonals) / 2);
    const steps = new Set(babies > 1 ? [1] : []);
    if (this.diagonals > babies) steps.add(babies);
    for (let step = this.rows; step < this.slots; step *= 2) steps.add(step);
    return [...steps].sort((a, b) => a - b);
  }

  pack(hidden: Float32Array, length: number): Float64Array {
    const slots = new Float64Array(this.slots);
    for (const [slot, element] of this.places(1)) slots[slot] = hidden[element] / length;
    return slots;
  }

  unpack(slots: Float64Array, factor: number): Float64Array {
    const answer = new Float64Array(this.width);
    for (const [slot, element] of this.places(-1)) answer[element] += slots[slot] * factor;
    return answer;
  }

  /** Direction 1: elements of the hidden state in the slots; -1: of the answer. */
  private *places(direction: 1 | -1): Generator<[number, number]> {
    for (let copy = 0; copy < this.copies; copy++) {
      for (let place = 0; place < this.period; place++) {
        const element = (place + direction * copy * this.diagonals + this.period) % this.period;
        if (element < this.width) yield [copy * this.period + place, element];
      }
    }
  }
}
