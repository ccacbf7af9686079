// The worker of the private page: tokenizer, tasks, sampling and connection run here, so that the
// page stays responsive. Messages to and from it are `Order` and `Report`.
import { Template } from "@huggingface/jinja";
import { chooseAdapter, EncryptedAdapter, listAdapters, type Offer } from "./adapter";
import { Connection, type Listing, type ModelInfo, SplitError } from "./connection";
import { type Costs, generate } from "./generation";
import { Kernels } from "./kernels";
import { type DeviceModel, Files, loadModel, measureModel } from "./model";
import { GREEDY, type Sampling } from "./sampler";
import { TensorStore } from "./tensor_store";

export type ChatMessage = { role: string; content: string };
export type Prompt = { text: string } | { messages: ChatMessage[] };
export type Order =
  | { order: "list"; key: string }
  | { order: "look"; model: string }
  | { order: "load"; model: string }
  | { order: "generate"; prompt: Prompt; maxTokens: number; sampling: Partial<Sampling>; epsilon: number; adapter: string }
  | { order: "stop" }
  | { order: "clear" };
export type Report =
  | { report: "models"; models: ModelInfo[]; last: string; isOffline: boolean }
  | { report: "size"; model: string; missing: number } // bytes that loading it would fetch
  | { report: "progress"; done: number; total: number }
  | { report: "ready"; model: string; adapters: Offer[]; problem: string }
  | { report: "piece"; token: number; text: string }
  | { report: "costs"; costs: Costs }
  | { report: "end"; finish: "stop" | "length" | "stopped" }
  | { report: "cleared" }
  | { report: "error"; code: string; message: string };

export const BY_WORDS = "words"; // instead of an adapter's digest: the question's words choose one
const MODELS = "models"; // as the server listed them last
const LAST = "last"; // the name of the model that was loaded last

class Device {
  private connection = new Connection("");
  private listing: Listing = { models: [], adapter_hosts: [], adapter_signers: [] }; // of the server
  private offers: Offer[] = []; // of the adapter hosts, for the model
  private adapter: EncryptedAdapter | null = null;
  private model: DeviceModel | null = null;
  private running: AbortController | null = null;
  private kernels = Kernels.load(readKernels);
  private store = TensorStore.open((...range) => this.connection.fetchRange(...range));

  async follow(order: Order): Promise<void> {
    if (order.order === "stop") return this.running?.abort();
    try {
      if (order.order === "list") await this.list(order.key);
      else if (order.order === "look") await this.look(order.model);
      else if (order.order === "load") await this.load(order.model);
      else if (order.order === "clear") await this.clear();
      else await this.generate(order);
    } catch (error) {
      report({ report: "error", code: error instanceof SplitError ? error.code : "", message: (error as Error).message });
    }
  }

  private async list(key: string): Promise<void> {
    this.connection.close();
    this.connection = new Connection(key);
    const store = await this.store;
    const last = String((await store.recall(LAST)) ?? "");
    try {
      this.listing = await this.connection.listModels();
      await store.remember(MODELS, this.listing);
      report({ report: "models", models: this.listing.models, last, isOffline: false });
    } catch (error) {
      const known = (await store.recall(MODELS)) as Listing | undefined;
      if (!known?.models || !(error instanceof SplitError) || error.code !== "unavailable") throw error;
      this.listing = known;
      report({ report: "models", models: known.models, last, isOffline: true });
    }
  }

  /** Report how much of a model is missing here. Where that cannot be known, loading it says why. */
  private async look(name: string): Promise<void> {
    const missing = await measureModel(this.find(name), await this.store, await this.openFiles()).catch(() => null);
    if (missing !== null) report({ report: "size", model: name, missing });
  }

  private find(name: string): ModelInfo {
    const info = this.listing.models.find((model) => model.name === name);
    if (!info) throw new Error(`the server offers no private model '${name}'`);
    return info;
  }

  private async openFiles(): Promise<Files> {
    return new Files(await this.store, (digest) => this.connection.fetchFile(digest), this.connection.fetchRange);
  }

  private async load(name: string): Promise<void> {
    const store = await this.store;
    const info = this.find(name);
    await navigator.storage?.persist?.(); // a browser may otherwise delete weights when disk is short
    this.model = null;
    this.kernels = Kernels.load(readKernels); // an old model's memory is freed
    let shown = 0;
    const onProgress = (done: number, total: number): void => {
      if (done < total && performance.now() - shown < 100) return;
      shown = performance.now();
      report({ report: "progress", done, total });
    };
    this.model = await loadModel(info, store, await this.kernels, await this.openFiles(), onProgress);
    await store.remember(LAST, name);
    this.offers = [];
    const problem = await this.findAdapters(info).then(() => "", (error: Error) => error.message);
    report({ report: "ready", model: name, adapters: this.offers, problem });
  }

  private async findAdapters({ private_blocks, hidden_dim }: ModelInfo): Promise<void> {
    const { adapter_hosts, adapter_signers } = this.listing;
    this.offers = private_blocks ? [] : await listAdapters(adapter_hosts, adapter_signers, hidden_dim);
  }

  /** Return the chosen adapter, whose host has its keys; null for none. */
  private async openAdapter(chosen: string, prompt: Prompt): Promise<EncryptedAdapter | null> {
    if (!chosen) return null;
    if (!this.offers.length) await this.findAdapters(this.model!.info);
    const question = "text" in prompt ? prompt.text : prompt.messages.at(-1)!.content;
    const offer = chosen === BY_WORDS && this.offers.length ? chooseAdapter(this.offers, question) : this.offers.find(({ adapter }) => adapter === chosen);
    if (offer === undefined) throw new Error("no host offers the chosen adapter for this model; choose another one");
    if (offer && this.adapter?.info === offer) return this.adapter;
    this.adapter?.giveUp();
    return (this.adapter = offer && (await EncryptedAdapter.open(offer)));
  }

  private async clear(): Promise<void> {
    this.model = null;
    const store = await this.store;
    await store.clear();
    await store.remember(MODELS, this.listing);
    report({ report: "cleared" });
  }

  private async generate({ prompt, maxTokens, sampling, epsilon, adapter: chosen }: Order & { order: "generate" }): Promise<void> {
    const { model } = this;
    if (!model) throw new Error("no model is loaded; load one first");
    const { signal } = (this.running = new AbortController());
    const tokens = encodePrompt(model, prompt);
    const adapter = await this.openAdapter(chosen, prompt);
    const most = Math.min(maxTokens, model.info.context - tokens.length + 1);
    let count = 0;
    try {
      const unused = chosen && "no adapter has a word of the question";
      const onCosts = (costs: Costs): void => report({ report: "costs", costs: { ...costs, adapter: costs.adapter || unused } });
      for await (const piece of generate(model, this.connection, tokens, maxTokens, { ...GREEDY, ...sampling }, epsilon, adapter, signal, onCosts)) {
        count += Number(piece.token >= 0);
        report({ report: "piece", ...piece });
      }
    } catch (error) {
      if (!signal.aborted) throw error;
    }
    report({ report: "end", finish: signal.aborted ? "stopped" : count >= most ? "length" : "stop" });
  }
}

async function readKernels(name: string): Promise<ArrayBuffer> {
  return (await fetch(`/private/${name}`)).arrayBuffer();
}

/** Return the tokens of a text, or of what the model's chat template makes of messages. */
function encodePrompt({ info, tokenizer }: DeviceModel, prompt: Prompt): number[] {
  if ("text" in prompt) return tokenizer.encode(prompt.text);
  if (!info.chat) throw new Error(`the model '${info.name}' has no chat template; let it continue a text`);
  const { template, bos_token, eos_token } = info.chat;
  const given = { messages: prompt.messages, bos_token, eos_token, add_generation_prompt: true, tools: null, documents: null };
  return tokenizer.encode(new Template(template).render(given), false);
}

function report(message: Report): void {
  postMessage(message);
}

const device = new Device();
onmessage = ({ data }: MessageEvent<Order>) => void device.follow(data);
