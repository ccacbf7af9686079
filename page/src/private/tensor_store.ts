// Files and tensors of models on this device: fetched once, in pieces of 8 MB, resumable, in IndexedDB.
//
// What is stored is known by its SHA-256 and used only after the whole of it has had that digest.
import { sha256 } from "@noble/hashes/sha2.js";

export const PIECE_BYTES = 8 * 1024 * 1024;
const ATTEMPTS = 5; // to get one more piece
const NAME = "splitup-private";

/** A run of bytes of one of the server's files. */
export type Source = { digest: string; bytes: number; file: string; start: number; name: string };
export type OnBytes = (bytes: number) => void;
/** GET bytes `start` to `end` of a file; as many as the server gives. */
export type FetchRange = (file: string, start: number, end: number, signal?: AbortSignal) => Promise<Response>;

type Entry = { bytes: number; isWhole: boolean };

export class TensorStore {
  private constructor(private database: IDBDatabase, private fetchRange: FetchRange) {}

  static async open(fetchRange: FetchRange): Promise<TensorStore> {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("entries");
      request.result.createObjectStore("pieces");
    };
    return new TensorStore(await settle(request), fetchRange);
  }

  /** Return how many bytes of these are missing. */
  async countMissing(sources: readonly Source[]): Promise<number> {
    let missing = 0;
    for (const source of sources) {
      const entry = await this.getEntry(source.digest);
      if (!entry?.isWhole) missing += source.bytes - PIECE_BYTES * (await this.countPieces(source));
    }
    return Math.max(0, missing);
  }

  /** Fetch what is missing of a source. `onBytes` is told how many bytes of it are here. */
  async fetch(source: Source, onBytes: OnBytes = () => {}, signal?: AbortSignal): Promise<void> {
    if ((await this.getEntry(source.digest))?.isWhole) return onBytes(source.bytes);
    const hash = sha256.create();
    const stored = await this.countPieces(source);
    for (let piece = 0; piece < stored; piece++) await this.usePiece(source, piece, (data) => hash.update(data));
    const buffer = new Uint8Array(Math.min(PIECE_BYTES, source.bytes)); // of all pieces, one after another
    onBytes(Math.min(source.bytes, stored * PIECE_BYTES));
    for (let piece = stored; piece * PIECE_BYTES < source.bytes; piece++) {
      const length = Math.min(PIECE_BYTES, source.bytes - piece * PIECE_BYTES);
      const data = length < buffer.length ? buffer.slice(0, length) : buffer; // all of its memory is stored
      await this.download(data, source, piece, onBytes, signal);
      hash.update(data);
      await this.put("pieces", [source.digest, piece], data);
    }
    const found = toHex(hash.digest());
    if (found !== source.digest) {
      await this.forget(source.digest);
      throw new Error(`${source.name} arrived with other contents than the model's (SHA-256 ${found.slice(0, 12)}…, not ${source.digest.slice(0, 12)}…); nothing of it is kept; try again, or use another server`);
    }
    await this.put("entries", source.digest, { bytes: source.bytes, isWhole: true } satisfies Entry);
  }

  /** Give the bytes of a source piece by piece, after `fetch`. They are gone when `take` returns. */
  async read(source: Source, take: (bytes: Uint8Array, start: number) => void): Promise<void> {
    const entry = await this.getEntry(source.digest);
    if (!entry?.isWhole || entry.bytes !== source.bytes) throw new Error(`${source.name} is not on this device; load the model again`);
    for (let piece = 0; piece * PIECE_BYTES < source.bytes; piece++) {
      await this.usePiece(source, piece, (data) => take(data, piece * PIECE_BYTES));
    }
  }

  async readWhole(source: Source): Promise<Uint8Array> {
    const whole = new Uint8Array(source.bytes);
    await this.read(source, (bytes, start) => whole.set(bytes, start));
    return whole;
  }

  /** Keep a small value; the caller has checked it. */
  async remember(key: string, value: unknown): Promise<void> {
    await this.put("entries", `small ${key}`, value);
  }

  async recall(key: string): Promise<unknown> {
    return settle(this.database.transaction("entries").objectStore("entries").get(`small ${key}`));
  }

  /** Delete everything of every model. */
  async clear(): Promise<void> {
    const transaction = this.database.transaction(["entries", "pieces"], "readwrite");
    transaction.objectStore("entries").clear();
    transaction.objectStore("pieces").clear();
    await finish(transaction);
  }

  // ---- pieces ----------------------------------------------------------------------------------

  /** Fill `data` with one piece; try again from where it broke off. */
  private async download(data: Uint8Array, source: Source, piece: number, onBytes: OnBytes, signal?: AbortSignal): Promise<void> {
    const first = piece * PIECE_BYTES;
    let place = 0;
    for (let attempt = 1; place < data.length; attempt++) {
      try {
        const start = source.start + first + place;
        const reply = await this.fetchRange(source.file, start, source.start + first + data.length, signal);
        const reader = reply.body!.getReader();
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          if (place + value.length > data.length) {
            await reader.cancel();
            throw new Refusal(`the server sent more bytes of ${source.name} than it was asked for`);
          }
          data.set(value, place);
          place += value.length;
          release(value);
          onBytes(first + place);
          attempt = 1;
        }
        if (place < data.length && attempt >= ATTEMPTS) throw new Error("it ended early");
      } catch (error) {
        if (signal?.aborted || error instanceof Refusal || attempt >= ATTEMPTS) {
          if (signal?.aborted || error instanceof Refusal) throw error;
          throw new Error(`${source.name} broke off after ${first + place} of ${source.bytes} bytes (${(error as Error).message}); load the model again to go on from there`);
        }
      }
    }
  }

  /** Return how many pieces are here from the first on; a wrong length counts as missing. */
  private async countPieces(source: Source): Promise<number> {
    const store = this.database.transaction("pieces").objectStore("pieces");
    const range = IDBKeyRange.bound([source.digest, 0], [source.digest, Infinity]);
    const keys = (await settle(store.getAllKeys(range))) as [string, number][];
    let count = 0;
    while (count < keys.length && keys[count][1] === count) count++;
    return count;
  }

  /** Give a piece; it is gone when `take` returns. */
  private async usePiece(source: Source, piece: number, take: (data: Uint8Array) => void): Promise<void> {
    const store = this.database.transaction("pieces").objectStore("pieces");
    const data = (await settle(store.get([source.digest, piece]))) as Uint8Array | undefined;
    const wanted = Math.min(PIECE_BYTES, source.bytes - piece * PIECE_BYTES);
    if (data?.length !== wanted) {
      await this.forget(source.digest);
      throw new Error(`the browser lost a part of ${source.name}; load the model again`);
    }
    take(data);
    release(data);
  }

  private async getEntry(digest: string): Promise<Entry | undefined> {
    return settle(this.database.transaction("entries").objectStore("entries").get(digest));
  }

  private async put(store: string, key: IDBValidKey, value: unknown): Promise<void> {
    const transaction = this.database.transaction(store, "readwrite");
    transaction.objectStore(store).put(value, key);
    try {
      await finish(transaction);
    } catch (error) {
      if ((error as DOMException)?.name !== "QuotaExceededError") throw error;
      throw new Refusal("this browser gives the page no more space on disk; free some, or leave private browsing");
    }
  }

  private async forget(digest: string): Promise<void> {
    const transaction = this.database.transaction(["entries", "pieces"], "readwrite");
    transaction.objectStore("entries").delete(digest);
    transaction.objectStore("pieces").delete(IDBKeyRange.bound([digest, 0], [digest, Infinity]));
    await finish(transaction);
  }
}

/** Give the memory of bytes back at once, where browsers can: a garbage collector waits for many. */
function release(bytes: Uint8Array): void {
  (bytes.buffer as ArrayBuffer & { transfer?: (bytes: number) => ArrayBuffer }).transfer?.(0);
}

/** An error that trying again does not mend. */
export class Refusal extends Error {}

export function computeDigest(bytes: Uint8Array): string {
  return toHex(sha256(bytes));
}

function toHex(bytes: Uint8Array): string {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function settle<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function finish(transaction: IDBTransaction): Promise<void> {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}
