// The private page: a chat whose text, tokens and choices stay on the device. The worker computes.
import { html, type TemplateResult } from "lit";
import { getKey, setKey } from "../api";
import { Part } from "../element";
import { bytes, count, ms, price, usdc } from "../format";
import type { Offer } from "./adapter";
import type { ModelInfo } from "./connection";
import type { Costs } from "./generation";
import type { Sampling } from "./sampler";
import type { BY_WORDS, Order, Prompt, Report } from "./worker";

type Message = { role: "user" | "assistant"; text: string; tokens: number; firstMs: number; ms: number; costs: Costs | null; finish: string; error: string };
type Settings = { form: "chat" | "text"; maxTokens: string; seed: string; epsilon: string; adapter: string; numbers: Record<NumberName, number> };
type NumberName = Exclude<keyof Sampling, "seed" | "frequency_penalty" | "presence_penalty">;
type Phase = "choosing" | "loading" | "ready" | "running";

const NUMBERS: [NumberName, string, number, number, number][] = [
  ["temperature", "Temperature", 0, 5, 0.1],
  ["top_k", "Top k (0: all)", 0, 1000, 1],
  ["top_p", "Top p", 0.01, 1, 0.01],
  ["min_p", "Min p", 0, 1, 0.01],
  ["repetition_penalty", "Repetition penalty", 0.5, 2, 0.05],
];
const MOST_TOKENS = 512; // when the user names no number
const PROMISE =
  "Text and token ids stay on your device. Nodes that receive activations can usually reconstruct them if they know the model.";

// Trusted Types: the two scripts that this page may start are named here
const scripts = (globalThis as any).trustedTypes?.createPolicy("splitup-scripts", {
  createScriptURL: (url: string) => {
    if (url === "/private/device.js" || url === "/offline.js") return url;
    throw new TypeError(`${url} is no script of this page`);
  },
}) ?? { createScriptURL: (url: string) => url };

class PrivateChat extends Part {
  static override properties = Object.fromEntries(
    ["models", "chosen", "phase", "progress", "messages", "settings", "error", "needsKey", "isOffline", "adapters", "adapterProblem", "canInstall", "missing"].map((name) => [name, { state: true }]),
  );
  declare models: ModelInfo[] | null;
  declare chosen: string;
  declare phase: Phase;
  declare progress: { done: number; total: number };
  declare messages: Message[];
  declare settings: Settings;
  declare error: string;
  declare needsKey: boolean;
  declare isOffline: boolean;
  declare adapters: Offer[];
  declare adapterProblem: string;
  declare canInstall: boolean;
  declare missing: number | null; // bytes that loading the chosen model would fetch, once they are known
  private worker = new Worker(scripts.createScriptURL("/private/device.js"), { type: "module" });
  private began = 0;

  constructor() {
    super();
    this.models = null;
    this.chosen = "";
    this.phase = "choosing";
    this.progress = { done: 0, total: 0 };
    this.messages = [];
    const numbers = { temperature: 0.7, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1 };
    this.settings = { form: "chat", maxTokens: "", seed: "", epsilon: "", adapter: "", numbers };
    this.adapters = [];
    this.adapterProblem = "";
    this.error = "";
    this.needsKey = false;
    this.isOffline = false;
    this.canInstall = true;
    this.missing = null;
    void this.keepPage();
    this.worker.onmessage = ({ data }: MessageEvent<Report>) => this.take(data);
    this.worker.onerror = (event) => (this.error = `the page's worker failed: ${event.message}`);
    this.list();
  }

  /** Keep the page's files for times without a network; browsers do only where they trust the certificate. */
  private async keepPage(): Promise<void> {
    try {
      await navigator.serviceWorker.register(scripts.createScriptURL("/offline.js"), { scope: "/private" });
    } catch {
      this.canInstall = false;
    }
  }

  private tell(order: Order): void {
    this.worker.postMessage(order);
  }

  private list(): void {
    this.tell({ order: "list", key: getKey() });
  }

  /** Choose a model. What is on the device is opened at once; of others the size is shown. */
  private choose(name: string): void {
    this.chosen = name;
    this.phase = "choosing";
    this.missing = null;
    if (name) this.tell({ order: "look", model: name });
  }

  private take(data: Report): void {
    const answer = this.messages.at(-1);
    switch (data.report) {
      case "models":
        this.models = data.models;
        this.isOffline = data.isOffline;
        this.needsKey = false;
        if (!this.chosen) this.choose((data.models.find(({ name }) => name === data.last) ?? data.models[0])?.name ?? "");
        break;
      case "size":
        if (data.model !== this.chosen || this.phase !== "choosing") break;
        this.missing = data.missing;
        if (!data.missing) this.load();
        break;
      case "progress":
        this.progress = data;
        break;
      case "ready":
        this.phase = "ready";
        this.adapters = data.adapters;
        this.adapterProblem = data.problem;
        if (!matchMedia("(min-width: 60rem)").matches) this.querySelector("details")!.open = false;
        void this.updateComplete.then(() => this.querySelector<HTMLElement>("#prompt")?.focus());
        break;
      case "piece":
        answer!.text += data.text;
        answer!.tokens += Number(data.token >= 0);
        answer!.ms = performance.now() - this.began;
        if (answer!.tokens <= 1) answer!.firstMs = answer!.ms;
        this.follow();
        break;
      case "costs":
        answer!.costs = data.costs;
        break;
      case "end":
        answer!.finish = data.finish;
        this.phase = "ready";
        this.follow();
        break;
      case "cleared":
        this.choose(this.chosen);
        break;
      case "error":
        if (data.code === "invalid_api_key") this.needsKey = true;
        if (this.phase === "running") this.giveBack(answer!, data.message);
        else this.error = data.message;
        this.phase = this.phase === "running" ? "ready" : "choosing";
        this.missing = null; // a part of it may have arrived
        this.follow();
    }
  }

  /** Put a question that failed back where it was typed; later questions do not follow it. */
  private giveBack(answer: Message, error: string): void {
    const question = this.messages.at(-2)!;
    answer.error = question.error = error;
    const field = this.querySelector<HTMLTextAreaElement>("#prompt")!;
    field.value ||= question.text;
  }

  private get model(): ModelInfo | undefined {
    return this.models?.find((model) => model.name === this.chosen);
  }

  /** Whether the model converses: a template that never says who speaks only joins messages. */
  private get takesTurns(): boolean {
    return this.model?.chat?.template.includes("role") ?? false;
  }

  private get textForm(): Settings["form"] {
    return this.takesTurns ? this.settings.form : "text";
  }

  private load(): void {
    this.error = "";
    this.phase = "loading";
    this.progress = { done: 0, total: 0 };
    this.tell({ order: "load", model: this.chosen });
  }

  private send(event: Event): void {
    event.preventDefault();
    const field = this.querySelector<HTMLTextAreaElement>("#prompt")!;
    const text = field.value;
    if (!text.trim() || this.phase !== "ready") return;
    field.value = "";
    const empty = { tokens: 0, firstMs: 0, ms: 0, costs: null, finish: "", error: "" };
    const said = [...this.messages.filter((message) => !message.error), { ...empty, role: "user" as const, text }];
    const prompt: Prompt =
      this.textForm === "text" ? { text } : { messages: said.map(({ role, text: content }) => ({ role, content })) };
    this.messages = [...this.messages, said.at(-1)!, { ...empty, role: "assistant", text: "" }];
    this.phase = "running";
    this.began = performance.now();
    const { seed, maxTokens, epsilon, adapter, numbers } = this.settings;
    const chosen = seed === "" ? crypto.getRandomValues(new BigUint64Array(1))[0] : BigInt(seed);
    this.tell({ order: "generate", prompt, maxTokens: Number(maxTokens) || MOST_TOKENS, sampling: { ...numbers, seed: chosen }, epsilon: Number(epsilon), adapter });
    this.follow();
  }

  /** Draw the text so far; stay at its end unless the reader scrolled up. */
  private follow(): void {
    const list = this.querySelector(".messages")!;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    this.messages = [...this.messages];
    if (atEnd) void this.updateComplete.then(() => (list.scrollTop = list.scrollHeight));
  }

  private saveKey(event: SubmitEvent): void {
    event.preventDefault();
    setKey((event.target as HTMLFormElement).querySelector("input")!.value.trim(), false);
    this.error = "";
    this.list();
  }

  // ---- what is shown ---------------------------------------------------------------------------

  private loader(): TemplateResult {
    const { done, total } = this.progress;
    const isBusy = this.phase === "loading" || this.phase === "running";
    return html`
      <label class="wide">Model
        <select ?disabled=${isBusy} @change=${(event: Event) => this.choose((event.target as HTMLSelectElement).value)}>
          ${this.models?.map(({ name }) => html`<option value=${name} ?selected=${name === this.chosen}>${name}</option>`)}
        </select></label>
      ${this.phase === "loading"
        ? html`<div class="wide" role="status">
            <progress max=${total || 1} .value=${done} aria-label="Weights on this device"></progress>
            <p class="quiet">${total ? `${bytes(done)} of ${bytes(total)} on this device` : "Reading what the model needs …"}</p></div>`
        : html`<button class="primary wide" ?disabled=${!this.chosen || isBusy || this.phase === "ready"} @click=${this.load}>
            ${this.phase !== "choosing" ? "On this device" : `Load onto this device${this.missing === null ? "" : ` (${bytes(this.missing)})`}`}</button>`}
      ${this.canInstall
        ? null
        : html`<p class="quiet wide" id="uninstallable">From this address the page can neither be installed nor opened without a
            network: see “A page to install” in docs/guides/private-inference.md.</p>`}`;
  }

  private set(values: Partial<Settings>): void {
    this.settings = { ...this.settings, ...values };
  }

  private form(): TemplateResult {
    const { settings, model, textForm: form } = this;
    const field = (name: "maxTokens" | "seed" | "epsilon", words: string, placeholder: string): TemplateResult => html`<label>${words}
      <input inputmode="numeric" pattern="[0-9]{0,19}" placeholder=${placeholder} .value=${settings[name]}
        @change=${({ target }: Event) => {
          const input = target as HTMLInputElement;
          if (input.reportValidity()) this.set({ [name]: input.value });
        }}></label>`;
    return html`${this.loader()}
      <label class="wide">Form
        <select @change=${(event: Event) => this.set({ form: (event.target as HTMLSelectElement).value as Settings["form"] })}>
          <option value="chat" ?disabled=${!this.takesTurns} ?selected=${form === "chat"}>Conversation</option>
          <option value="text" ?selected=${form === "text"}>Continue a text</option>
        </select></label>
      ${field("maxTokens", "Most tokens", String(MOST_TOKENS))}${field("seed", "Seed", "random")}
      ${field("epsilon", "Noise: epsilon", "none")}
      ${this.adapterChoice()}
      ${NUMBERS.map(([name, words, least, most, step]) => html`<label>${words}
        <input type="number" min=${least} max=${most} step=${step} .value=${String(settings.numbers[name])}
          @change=${({ target }: Event) => {
            const input = target as HTMLInputElement;
            if (input.reportValidity()) this.set({ numbers: { ...settings.numbers, [name]: Number(input.value) } });
          }}></label>`)}
      <p class="quiet wide">${model ? html`${price(model.price_nano_usdc_per_step)} per million steps of up to ${model.chunk} tokens;
        embedding${model.private_blocks ? `, ${model.private_blocks} ${model.private_blocks === 1 ? "block" : "blocks"} at each end` : ""} and head run here.` : null}
        <button class="plain" ?disabled=${this.phase === "loading" || this.phase === "running"}
          @click=${() => this.tell({ order: "clear" })}>Delete all models from this device</button></p>`;
  }

  private adapterChoice(): TemplateResult | null {
    const { adapter: chosen } = this.settings;
    if (!this.adapters.length && !this.adapterProblem && !chosen) return null;
    const byWords: typeof BY_WORDS = "words";
    const choices = [["", "None"], [byWords, "The one that fits the question's words"], ...this.adapters.map(({ adapter, name }) => [adapter, name])];
    return html`${this.adapterProblem ? html`<p class="error wide" role="alert">${this.adapterProblem}</p>` : null}<label class="wide">Adapter, applied under encryption
      <select .value=${chosen} @change=${(event: Event) => this.set({ adapter: (event.target as HTMLSelectElement).value })}>
        ${choices.map(([value, words]) => html`<option value=${value} ?selected=${value === chosen}>${words}</option>`)}
      </select></label>`;
  }

  private answer(message: Message): TemplateResult {
    const isRunning = this.phase === "running" && message === this.messages.at(-1);
    const facts = [
      isRunning && !message.tokens ? "waiting for the first token; nodes may still be loading the model" : `${count(message.tokens)} tokens`,
      message.costs ? usdc(message.costs.microUsdc) : "",
      message.costs?.epsilon == null ? "" : `noise: ε ${message.costs.epsilon.toPrecision(3)}, δ 1e-6`,
      message.costs?.adapter ?? "",
      message.tokens ? `first token after ${ms(message.firstMs)}` : "",
      message.tokens > 1 ? `then ${ms((message.ms - message.firstMs) / (message.tokens - 1))} a token` : "",
      { length: "cut at the limit", stopped: "stopped" }[message.finish] ?? "",
    ];
    return html`<article class="message assistant">
      <div class="text" aria-busy=${isRunning}>${message.text.trimStart()}${isRunning ? html`<span class="cursor"></span>` : null}</div>
      ${message.error ? html`<p class="error" role="alert">${message.error}</p>` : null}
      <p class="facts quiet">${facts.filter(Boolean).join(" · ")}</p>
    </article>`;
  }

  private keyForm(): TemplateResult {
    return html`<form class="key" @submit=${this.saveKey}>
      <label>API key <input type="password" autocomplete="off" spellcheck="false" placeholder="sk-splitup-…"></label>
      <button class="primary">Use</button></form>`;
  }

  override render(): TemplateResult {
    const isReady = this.phase === "ready" || this.phase === "running";
    const isText = this.textForm === "text";
    return html`
      <header><a class="brand" href="/"><img src="/icon.svg" alt="" width="22" height="22">SplitUp</a><span class="quiet">Private chat</span>
        ${this.isOffline ? html`<span class="badge bad">offline</span>` : null}</header>
      ${this.needsKey ? this.keyForm() : null}
      <main class="full"><div class="chat">
        <details class="settings" open><summary>Model and settings</summary><div class="form">${this.form()}</div></details>
        <section class="talk">
          <p class="promise" role="note"><strong>What stays here.</strong> ${PROMISE} ${this.model?.measured.join(" ")}</p>
          <div class="messages" role="log" aria-label="Conversation" tabindex="0">
            ${this.error ? html`<p class="error" role="alert">${this.error}</p>` : null}
            ${this.models && !this.models.length ? html`<p class="quiet">This server offers no private model.</p>` : null}
            ${this.messages.map((message) =>
              message.role === "user" ? html`<article class="message user"><div class="text">${message.text}</div></article>` : this.answer(message),
            )}
          </div>
          <form @submit=${this.send}>
            <textarea id="prompt" rows="2" aria-label=${isText ? "Beginning of a text" : "Message"} ?disabled=${!isReady} autocapitalize="sentences"
              placeholder=${!isReady ? "Load a model first" : isText ? "Write how a text begins" : "Write a message"}
              @keydown=${(event: KeyboardEvent) => {
                if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.send(event);
              }}></textarea>
            ${this.phase === "running"
              ? html`<button type="button" class="stop" @click=${() => this.tell({ order: "stop" })}>Stop</button>`
              : html`<button type="submit" class="primary" ?disabled=${!isReady}>${isText ? "Continue" : "Send"}</button>`}
          </form>
          <p class="facts quiet">
            <span>Cost so far: <output id="cost">${usdc(this.messages.reduce((sum, { costs }) => sum + (costs?.microUsdc ?? 0), 0))}</output></span>
            <button class="plain" ?disabled=${!this.messages.length || this.phase === "running"} @click=${() => (this.messages = [])}>${isText ? "Clear" : "New conversation"}</button>
          </p>
        </section>
      </div></main>`;
  }
}

customElements.define("private-chat", PrivateChat);
