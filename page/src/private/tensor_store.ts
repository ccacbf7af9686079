// Files and tensors of models on this device: fetched once, resumable, known by their SHA-256.
//
// A tensor is a file of the origin's private file system, small values are in IndexedDB. A file is
// read straight into the memory where it is used: values of IndexedDB arrive as copies, which a
// garbage collector frees late. It is used only after the whole of it has had its digest.
import { sha256 } from "@noble/hashes/sha2.js";

const PART_BYTES = 1024 * 1024; // read at once
const ATTEMPTS = 5; // to get one more byte
const NAME = "splitup-private";

/** A run of bytes of one of the server's files. */
export type Source = { digest: string; bytes: number; file: string; start: number; name: string };
export type OnBytes = (bytes: number) => void;
/** GET bytes `start` to `end` of a file; as many as the server gives. */
export type FetchRange = (file: string, start: number, end: number, signal?: AbortSignal) => Promise<Response>;

/** A file that is open in this worker; TypeScript knows it in workers only. */
type OpenFile = {
  read(bytes: Uint8Array, options: { at: number }): number;
  write(bytes: Uint8Array, options: { at: number }): number;
  getSize(): number;
  truncate(size: number): void;
  flush(): void;
  close(): void;
};

export class TensorStore {
  private constructor(
    private database: IDBDatabase, private folder: FileSystemDirectoryHandle, private fetchRange: FetchRange,
  ) {}

  /** Open the device's store, in a worker: browsers give other scripts no files. */
  static async open(fetchRange: FetchRange): Promise<TensorStore> {
    const request = indexedDB.open(NAME, 2);
    request.onupgradeneeded = () => {
      for (const name of request.result.objectStoreNames) request.result.deleteObjectStore(name);
      request.result.createObjectStore("entries");
    };
    const database = await settle(request);
    try {
      const root = await navigator.storage.getDirectory();
      return new TensorStore(database, await root.getDirectoryHandle(NAME, { create: true }), fetchRange);
    } catch (error) {
      throw new Error(`this browser keeps no files for the page (${(error as Error).message}); leave private browsing, or use another browser`);
    }
  }

  /** Fetch what is missing of a source. `onBytes` is told how many bytes of it are here. */
  async fetch(source: Source, onBytes: OnBytes = () => {}, signal?: AbortSignal): Promise<void> {
    if (await this.isWhole(source)) return onBytes(source.bytes);
    await this.use(source, async (file) => {
      if (file.getSize() > source.bytes) file.truncate(0);
      const hash = sha256.create();
      const part = new Uint8Array(Math.min(PART_BYTES, file.getSize()));
      for (let place = 0; place < file.getSize(); ) {
        const count = file.read(part.subarray(0, file.getSize() - place), { at: place });
        if (!count) throw new Error(`the browser cannot read ${source.name}; load the model again`);
        hash.update(part.subarray(0, count));
        place += count;
      }
      onBytes(file.getSize());
      await this.download(file, source, (bytes) => hash.update(bytes), onBytes, signal);
      const found = toHex(hash.digest());
      if (found !== source.digest) {
        file.truncate(0);
        throw new Error(`${source.name} arrived with other contents than the model's (SHA-256 ${found.slice(0, 12)}…, not ${source.digest.slice(0, 12)}…); nothing of it is kept; try again, or use another server`);
      }
      file.flush();
    });
    await this.put(source.digest, { bytes: source.bytes });
  }

  /** Return how many bytes of a tensor are not here yet. */
  async countMissing(digest: string, bytes: number): Promise<number> {
    if (await this.isWhole({ digest, bytes })) return 0;
    const handle = await this.folder.getFileHandle(digest).catch(() => null);
    const begun = handle ? (await handle.getFile()).size : 0;
    return begun > bytes ? bytes : bytes - begun;
  }

  /** Read a source, after `fetch`, to where `getTarget` says; it is asked before every part. */
  async read(source: Source, getTarget: () => Uint8Array): Promise<void> {
    if (!(await this.isWhole(source))) throw new Error(`${source.name} is not on this device; load the model again`);
    await this.use(source, async (file) => {
      const isComplete = file.getSize() === source.bytes;
      for (let place = 0; isComplete && place < source.bytes; ) {
        const count = file.read(getTarget().subarray(place, place + PART_BYTES), { at: place });
        if (!count) break;
        place += count;
        if (place === source.bytes) return;
      }
      if (isComplete && !source.bytes) return;
      await this.remove(source.digest);
      throw new Error(`the browser lost a part of ${source.name}; load the model again`);
    });
  }

  async readWhole(source: Source): Promise<Uint8Array> {
    const whole = new Uint8Array(source.bytes);
    await this.read(source, () => whole);
    return whole;
  }

  /** Keep a small value; the caller has checked it. */
  async remember(key: string, value: unknown): Promise<void> {
    await this.put(`small ${key}`, value);
  }

  async recall(key: string): Promise<unknown> {
    return settle(this.entries("readonly").get(`small ${key}`));
  }

  /** Delete everything of every model. */
  async clear(): Promise<void> {
    await settle(this.entries("readwrite").clear());
    for await (const name of (this.folder as unknown as { keys(): AsyncIterable<string> }).keys()) await this.folder.removeEntry(name);
  }

  // ---- files -----------------------------------------------------------------------------------

  /** Give the open file of a source. Another page of this origin waits until it is closed. */
  private async use(source: Source, work: (file: OpenFile) => Promise<void>): Promise<void> {
    await navigator.locks.request(`${NAME} ${source.digest}`, async () => {
      const handle = await this.folder.getFileHandle(source.digest, { create: true });
      const file = await (handle as unknown as { createSyncAccessHandle(): Promise<OpenFile> }).createSyncAccessHandle();
      try {
        await work(file);
      } finally {
        file.close();
      }
    });
  }

  /** Append what is missing of a file; try again from where it broke off. */
  private async download(file: OpenFile, source: Source, take: (bytes: Uint8Array) => void, onBytes: OnBytes, signal?: AbortSignal): Promise<void> {
    let place = file.getSize();
    for (let attempt = 1; place < source.bytes; attempt++) {
      try {
        const reply = await this.fetchRange(source.file, source.start + place, source.start + source.bytes, signal);
        const reader = reply.body!.getReader();
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          if (place + value.length > source.bytes) {
            await reader.cancel();
            throw new Refusal(`the server sent more bytes of ${source.name} than it was asked for`);
          }
          append(file, value, place);
          take(value);
          place += value.length;
          release(value);
          onBytes(place);
          attempt = 1;
        }
        if (place < source.bytes && attempt >= ATTEMPTS) throw new Error("it ended early");
      } catch (error) {
        if (signal?.aborted || error instanceof Refusal) throw error;
        if (attempt < ATTEMPTS) continue;
        throw new Error(`${source.name} broke off after ${place} of ${source.bytes} bytes (${(error as Error).message}); load the model again to go on from there`);
      }
    }
  }

  private async isWhole(source: Pick<Source, "digest" | "bytes">): Promise<boolean> {
    const entry = (await settle(this.entries("readonly").get(source.digest))) as { bytes: number } | undefined;
    return entry?.bytes === source.bytes;
  }

  private entries(mode: IDBTransactionMode): IDBObjectStore {
    return this.database.transaction("entries", mode).objectStore("entries");
  }

  private async put(key: string, value: unknown): Promise<void> {
    try {
      await settle(this.entries("readwrite").put(value, key));
    } catch (error) {
      throw explain(error);
    }
  }

  private async remove(digest: string): Promise<void> {
    await settle(this.entries("readwrite").delete(digest));
  }
}

function append(file: OpenFile, bytes: Uint8Array, place: number): void {
  try {
    const count = file.write(bytes, { at: place });
    if (count === bytes.length) return;
    file.truncate(place);
  } catch (error) {
    throw explain(error);
  }
  throw explain(new DOMException("", "QuotaExceededError"));
}

function explain(error: unknown): unknown {
  if ((error as DOMException)?.name !== "QuotaExceededError") return error;
  return new Refusal("this browser gives the page no more space on disk; free some, or leave private browsing");
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
