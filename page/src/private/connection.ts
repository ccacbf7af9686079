// The server of split inference: its models, their files, and `forward`. What is sent from this
// device to the server is sent here: API key, digests of files, names of models, hidden states.
import { Refusal } from "./tensor_store";

const BASE = "/api/v1/split";
const PROTOCOL = "splitup.split.v1";
const KEY_PROTOCOL = "splitup.key.";
const FORWARD_MS = 120_000; // the server may have to wait for an execution
const CONNECT_MS = 10_000;

export type ModelInfo = {
  name: string;
  model_id: string;
  private_blocks: number;
  hidden_dim: number;
  context: number;
  chunk: number;
  max_rows: number;
  price_nano_usdc_per_step: number;
  vocab: number;
  eos_ids: number[];
  is_recurrent: boolean;
  chat: { template: string; bos_token: string; eos_token: string } | null;
  input: string;
  output: string;
  measured: string[];
};
export type Listing = { models: ModelInfo[]; adapter_hosts: string[]; adapter_signers: string[] };
export type Forwarded = { session_id: string; cached_seq_len: number; cost_micro_usdc: number; execution_id: string };

export class SplitError extends Error {
  constructor(readonly code: string, message: string) {
    super(message);
  }
}

export class Connection {
  private socket: WebSocket | null = null;
  private usesHttp = false;

  constructor(private key: string) {}

  async listModels(): Promise<Listing> {
    return (await this.request(`${BASE}/models`)).json();
  }

  /** GET a range of a file; see `FetchRange`. */
  fetchRange = async (file: string, start: number, end: number, signal?: AbortSignal): Promise<Response> => {
    const reply = await this.request(`${BASE}/files/${file}`, { headers: { Range: `bytes=${start}-${end - 1}` }, signal });
    if (reply.status === 206 && reply.headers.get("Content-Range")?.startsWith(`bytes ${start}-`)) return reply;
    if (reply.status === 200 && start === 0 && Number(reply.headers.get("Content-Length")) === end) return reply;
    await reply.body?.cancel();
    throw new Refusal(`the server does not send parts of files (status ${reply.status})`);
  };

  /** GET a small file. */
  async fetchFile(file: string): Promise<Uint8Array> {
    return new Uint8Array(await (await this.request(`${BASE}/files/${file}`)).arrayBuffer());
  }

  /** Send rows of hidden states; return what the nodes made of them. */
  async forward(model: ModelInfo, rows: Float32Array, position: number, session: string | null, signal?: AbortSignal): Promise<[Forwarded, Float32Array]> {
    const header = {
      type: "forward",
      model: model.name,
      seq_len: rows.length / model.hidden_dim,
      hidden_dim: model.hidden_dim,
      ...(session === null ? {} : { session_id: session }),
      incremental: position > 0,
      position,
    };
    const [answer, tensor] = decodeMessage(await this.ask(encodeMessage(header, rows), signal));
    const count = rows.length;
    if (tensor.length !== 4 * count || answer.cached_seq_len !== position + header.seq_len) {
      throw new SplitError("bad_message", "the server answered other rows than it was sent");
    }
    return [answer as Forwarded, new Float32Array(tensor.slice().buffer)];
  }

  /** Forget a session at the server; it would forget it by itself later. */
  async end(session: string): Promise<void> {
    await this.ask(encodeMessage({ type: "end", session_id: session }, new Float32Array())).catch(() => {});
  }

  close(): void {
    this.socket?.close();
    this.socket = null;
  }

  private async request(path: string, init: RequestInit = {}): Promise<Response> {
    const headers = { ...(init.headers as Record<string, string>), ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) };
    let reply: Response;
    try {
      reply = await fetch(path, { ...init, headers, cache: "no-store" });
    } catch (error) {
      if (init.signal?.aborted) throw error;
      throw new SplitError("unavailable", "the server does not answer: does it run, and is this device online?");
    }
    if (reply.ok) return reply;
    const found = await reply.json().catch(() => ({}));
    throw new SplitError(found.code ?? String(reply.status), found.message ?? found.error?.message ?? `the server answered ${reply.status}`);
  }

  private async ask(message: Uint8Array<ArrayBuffer>, signal?: AbortSignal): Promise<Uint8Array> {
    try {
      const socket = this.usesHttp ? null : await this.connect();
      const limit = AbortSignal.any([AbortSignal.timeout(FORWARD_MS), ...(signal ? [signal] : [])]);
      return await (socket ? tell(socket, message, limit) : this.post(message, limit));
    } catch (error) {
      this.close(); // an answer that comes later must not be taken for the next one
      if ((error as Error).name === "TimeoutError") throw new SplitError("unavailable", "the server did not answer in time");
      throw error;
    }
  }

  /** Return an open WebSocket, or null where none passes. */
  private async connect(): Promise<WebSocket | null> {
    if (this.socket?.readyState === WebSocket.OPEN) return this.socket;
    const url = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${BASE}/stream`;
    const socket = new WebSocket(url, this.key ? [PROTOCOL, KEY_PROTOCOL + this.key] : [PROTOCOL]);
    socket.binaryType = "arraybuffer";
    const isOpen = await new Promise<boolean>((resolve) => {
      const timer = setTimeout(() => resolve(false), CONNECT_MS);
      socket.onopen = () => (clearTimeout(timer), resolve(true));
      socket.onerror = socket.onclose = () => (clearTimeout(timer), resolve(false));
    });
    this.usesHttp = !isOpen;
    if (!isOpen) socket.close();
    return (this.socket = isOpen ? socket : null);
  }

  private async post(message: Uint8Array<ArrayBuffer>, signal: AbortSignal): Promise<Uint8Array> {
    const headers = { "Content-Type": "application/octet-stream" };
    const reply = await this.request(`${BASE}/forward`, { method: "POST", body: message, headers, signal });
    return new Uint8Array(await reply.arrayBuffer());
  }
}

function tell(socket: WebSocket, message: Uint8Array<ArrayBuffer>, signal: AbortSignal): Promise<Uint8Array> {
  return new Promise((resolve, reject) => {
    const abort = (): void => reject(signal.reason);
    const finish = (act: () => void): void => {
      socket.onmessage = socket.onclose = null;
      signal.removeEventListener("abort", abort);
      act();
    };
    signal.addEventListener("abort", abort);
    socket.onmessage = ({ data }) => finish(() => (data instanceof ArrayBuffer ? resolve(new Uint8Array(data)) : reject(new SplitError("bad_message", "the server answered in another form"))));
    socket.onclose = () => finish(() => reject(new SplitError("unavailable", "the server closed the connection; try again")));
    if (signal.aborted) abort();
    else socket.send(message);
  });
}

function encodeMessage(header: object, rows: Float32Array): Uint8Array<ArrayBuffer> {
  const text = new TextEncoder().encode(JSON.stringify(header));
  const message = new Uint8Array(4 + text.length + 4 * rows.length);
  new DataView(message.buffer).setUint32(0, text.length, true);
  message.set(text, 4);
  message.set(new Uint8Array(rows.buffer, rows.byteOffset, rows.byteLength), 4 + text.length);
  return message;
}

function decodeMessage(message: Uint8Array): [Record<string, any>, Uint8Array] {
  const length = message.length < 4 ? 0 : new DataView(message.buffer, message.byteOffset).getUint32(0, true);
  if (message.length < 4 + length) throw new SplitError("bad_message", "the server's answer is cut off");
  const header = JSON.parse(new TextDecoder().decode(message.subarray(4, 4 + length)));
  if (header.type === "error") throw new SplitError(header.code, header.message);
  return [header, message.subarray(4 + length)];
}
