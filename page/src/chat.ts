// The chat: a conversation with one model, or texts that it continues; what they cost, and who
// computed each answer.
import { html, type TemplateResult } from "lit";
import { ApiError, get, getKey, stop, stream, type Usage } from "./api";
import { arrivalChart } from "./charts";
import { Part } from "./element";
import "./execution";
import { count, ms, price, usdc } from "./format";
import { MOST_IMAGES, readImage } from "./images";

type Model = {
  id: string;
  kind: string;
  context_length: number;
  price_nano_usdc_per_step: number;
  takes_images: boolean;
  takes_turns: boolean; // else it joins messages to one text, and was not trained to answer
};
type Message = {
  role: "user" | "assistant";
  given: string; // that an answer continues, "" for a turn of a conversation
  thought: string; // of the model, before it answered
  text: string;
  images: string[]; // data URLs
  usage: Usage | null;
  arrivals: number[]; // milliseconds after the request, one a token
  finish: string | null;
  error: string;
};
type Settings = {
  model: string;
  mode: "chat" | "text";
  system: string;
  temperature: number;
  top_p: number;
  max_tokens: string; // "": as many as the server allows, or TEXT_TOKENS
  seed: string;
};

const START: Settings = { model: "", mode: "chat", system: "", temperature: 0.7, top_p: 1, max_tokens: "", seed: "" };
const TEXT_TOKENS = 64; // of a continuation: the API's own 16 are half a sentence

function makeMessage(role: Message["role"], given: string, text: string, images: string[]): Message {
  return { role, given, thought: "", text, images, usage: null, arrivals: [], finish: null, error: "" };
}

function takesTurns(model: Model): boolean {
  return model.takes_turns || model.takes_images;
}

export class ChatView extends Part {
  static override properties = {
    models: { state: true },
    messages: { state: true },
    settings: { state: true },
    images: { state: true },
    imageError: { state: true },
    error: { state: true },
    running: { state: true },
  };
  declare models: Model[] | null;
  declare messages: Message[];
  declare settings: Settings;
  declare images: string[]; // of the message that is being written
  declare imageError: string;
  declare error: string;
  declare running: AbortController | null;
  private stream = ""; // that the answer comes in

  constructor() {
    super();
    this.models = null;
    this.messages = [];
    this.settings = { ...START };
    this.images = [];
    this.imageError = "";
    this.error = "";
    this.running = null;
  }

  override connectedCallback(): void {
    super.connectedCallback();
    void this.load();
  }

  /** Ask which models are served; the key may have changed. */
  async load(): Promise<void> {
    try {
      const list = await get<{ data: Model[] }>("/v1/models");
      this.models = list.data.filter(({ kind }) => kind === "text-generation");
      this.error = "";
      if (!this.model) this.set("model", (this.models.find(takesTurns) ?? this.models[0])?.id ?? "");
    } catch (error) {
      const needsKey = error instanceof ApiError && error.status === 401;
      this.error = needsKey && !getKey() ? "" : String((error as Error).message);
      if (needsKey) this.dispatchEvent(new CustomEvent("key-needed", { bubbles: true }));
    }
  }

  private get model(): Model | undefined {
    return this.models?.find((model) => model.id === this.settings.model);
  }

  private get mode(): Settings["mode"] {
    return this.model && !takesTurns(this.model) ? "text" : this.settings.mode;
  }

  private get price(): number {
    return this.model?.price_nano_usdc_per_step ?? 0;
  }

  private get takesImages(): boolean {
    return this.mode === "chat" && (this.model?.takes_images ?? false);
  }

  private get cost(): number {
    return this.messages.reduce((sum, message) => sum + this.costOf(message), 0);
  }

  /** Return what an answer cost; while it runs, what its tokens so far cost at least. */
  private costOf(message: Message): number {
    return message.usage?.splitup.cost_micro_usdc ?? Math.ceil((message.arrivals.length * this.price) / 1000);
  }

  private makeBody(): [string, object] {
    const { model, system, temperature, top_p, max_tokens, seed } = this.settings;
    const { given } = this.messages.at(-1)!;
    const chosen = Object.entries({ max_tokens: max_tokens || (given && TEXT_TOKENS), seed }).filter(([, value]) => value !== "");
    const options = {
      model,
      temperature,
      top_p,
      ...Object.fromEntries(chosen.map(([name, value]) => [name, Number(value)])),
    };
    if (given) return ["/v1/completions", { ...options, prompt: given }];
    const said = this.messages.slice(0, -1).filter((message) => !message.error && !message.given);
    const messages: object[] = said.map(({ role, text, images }) => ({
      role,
      content: images.length
        ? [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }]
        : text,
    }));
    if (system) messages.unshift({ role: "system", content: system });
    return ["/v1/chat/completions", { ...options, messages }];
  }

  private send(event: Event): void {
    event.preventDefault();
    const field = this.querySelector<HTMLTextAreaElement>("#prompt")!;
    const text = field.value;
    const images = this.takesImages ? this.images : [];
    if (!(text.trim() || images.length) || this.running) return;
    field.value = "";
    this.images = [];
    this.imageError = "";
    const answer = makeMessage("assistant", "", "", []);
    if (this.mode === "chat") void this.ask(answer, makeMessage("user", "", text, images));
    else void this.ask({ ...answer, given: text });
  }

  /** Let the model write an answer, after these messages. */
  private async ask(answer: Message, ...before: Message[]): Promise<void> {
    this.messages = [...this.messages, ...before, answer];
    const running = (this.running = new AbortController());
    const began = performance.now();
    try {
      const [path, body] = this.makeBody();
      for await (const delta of stream(path, body, running.signal, (id) => (this.stream = id))) {
        if (delta.text || delta.thought) answer.arrivals.push(performance.now() - began);
        answer.thought += delta.thought;
        answer.text += delta.text;
        answer.finish = delta.finish ?? answer.finish;
        answer.usage = delta.usage ?? answer.usage;
        this.follow();
      }
    } catch (error) {
      if (running.signal.aborted) answer.finish = "stopped";
      else answer.error = (error as Error).message;
      if (error instanceof ApiError && error.status === 401) {
        this.dispatchEvent(new CustomEvent("key-needed", { bubbles: true }));
      }
    } finally {
      this.running = null;
      this.stream = "";
      this.follow();
      this.querySelector<HTMLElement>("#prompt")?.focus();
    }
  }

  /** End the answer that is written: the server says what it cost; one that has not begun is left. */
  private stop(): void {
    if (this.stream) void stop(this.stream).catch(() => this.running?.abort());
    else this.running?.abort();
  }

  /** Add files to the message that is being written: chosen, pasted or dropped ones. */
  private async addImages(files: Iterable<File>): Promise<void> {
    this.imageError = "";
    for (const file of files) {
      try {
        const url = await readImage(file);
        const said = this.messages.reduce((sum, message) => sum + message.images.length, 0);
        if (said + this.images.length >= MOST_IMAGES) {
          throw new Error(`A conversation has at most ${MOST_IMAGES} images`);
        }
        this.images = [...this.images, url];
      } catch (error) {
        this.imageError = (error as Error).message;
      }
    }
  }

  /** Take what was pasted or dropped, if it has files and the model takes images. */
  private takeFiles(event: Event, data: DataTransfer | null): void {
    if (!this.takesImages || !data?.files.length) return;
    event.preventDefault();
    void this.addImages([...data.files]);
  }

  /** Draw the text so far; stay at its end unless the reader scrolled up. */
  private follow(): void {
    const list = this.querySelector(".messages")!;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    this.messages = [...this.messages];
    if (atEnd) void this.updateComplete.then(() => (list.scrollTop = list.scrollHeight));
  }

  private set<K extends keyof Settings>(name: K, value: Settings[K]): void {
    this.settings = { ...this.settings, [name]: value };
  }

  private optionalField(name: "max_tokens" | "seed", words: string, placeholder: string): TemplateResult {
    return html`<label>${words}
      <input type="number" min="0" placeholder=${placeholder} .value=${this.settings[name]}
        @change=${(event: Event) => this.set(name, (event.target as HTMLInputElement).value)}></label>`;
  }

  private numberField(name: "temperature" | "top_p", words: string, most: number, step: number): TemplateResult {
    return html`<label>${words}
      <input type="number" min="0" max=${most} step=${step} .value=${String(this.settings[name])}
        @change=${(event: Event) => this.set(name, Number((event.target as HTMLInputElement).value))}></label>`;
  }

  private form(): TemplateResult {
    const { settings, model, mode } = this;
    return html`
      <label class="wide">Model
        <select @change=${(event: Event) => this.set("model", (event.target as HTMLSelectElement).value)}>
          ${this.models?.map((model) => html`<option ?selected=${model.id === settings.model} value=${model.id}>${model.id}</option>`)}
        </select></label>
      <label class="wide">Form
        <select @change=${(event: Event) => this.set("mode", (event.target as HTMLSelectElement).value as Settings["mode"])}>
          <option value="chat" ?disabled=${model && !takesTurns(model)} ?selected=${mode === "chat"}>Conversation</option>
          <option value="text" ?selected=${mode === "text"}>Continue a text</option>
        </select></label>
      ${
        mode === "chat"
          ? html`<label class="wide">System prompt
              <textarea rows="3" .value=${settings.system}
                @change=${(event: Event) => this.set("system", (event.target as HTMLTextAreaElement).value)}></textarea></label>`
          : null
      }
      ${this.optionalField("max_tokens", "Most tokens", mode === "text" ? String(TEXT_TOKENS) : "what fits")}
      ${this.optionalField("seed", "Seed", "random")}
      ${this.numberField("temperature", "Temperature", 2, 0.1)}
      ${this.numberField("top_p", "Top p", 1, 0.05)}
      ${this.model ? html`<p class="quiet wide">${price(this.price)} per million steps</p>` : null}`;
  }

  private answer(message: Message): TemplateResult {
    const { usage, arrivals } = message;
    const isRunning = this.running !== null && message === this.messages.at(-1);
    const seconds = arrivals.length > 1 ? (arrivals.at(-1)! - arrivals[0]) / 1000 : 0;
    const speed = seconds > 0 ? `${((arrivals.length - 1) / seconds).toFixed(1)} tokens/s` : "";
    return html`<article class="message assistant">
      ${
        message.thought
          ? html`<details ?open=${isRunning && !message.text}><summary>What the model thought</summary>
              <div class="text given">${message.thought}</div></details>`
          : null
      }
      <div class="text" aria-busy=${isRunning}>${
        message.given ? html`<span class="given">${message.given}</span>${message.text}` : message.text.trimStart()
      }${isRunning ? html`<span class="cursor"></span>` : null}</div>
      ${message.error ? html`<p class="error" role="alert">${message.error}</p>` : null}
      <p class="facts quiet">
        ${[
          usage ? `${count(usage.completion_tokens)} tokens` : `${arrivals.length} tokens`,
          `${usage ? "" : "≈ "}${usdc(this.costOf(message))}`,
          arrivals.length ? `first after ${ms(arrivals[0])}` : "",
          speed,
          { length: "cut at the limit", stopped: "stopped" }[message.finish ?? ""] ?? "",
        ]
          .filter(Boolean)
          .join(" · ")}
        ${
          message.given && !isRunning && ["length", "stopped"].includes(message.finish ?? "")
            ? html`· <button class="plain" ?disabled=${this.running !== null}
                @click=${() => void this.ask(makeMessage("assistant", message.given + message.text, "", []))}>Go on</button>`
            : null
        }
      </p>
      ${
        message.usage && !isRunning
          ? html`<details @toggle=${() => this.requestUpdate()}>
              <summary>Who computed this?</summary>
              ${this.proof(message)}
            </details>`
          : null
      }
    </article>`;
  }

  /** Show the execution of an answer; its parts are asked for when it is opened. */
  private proof(message: Message): TemplateResult {
    const usage = message.usage?.splitup;
    return html`${arrivalChart(message.arrivals)}${(usage?.executions ?? []).map(
      (id, place) => html`<lazy-proof .execution=${id} .firstStep=${place ? 0 : (usage?.first_step ?? 0)}></lazy-proof>`,
    )}`;
  }

  /** The images of the message that is being written, and the button that adds more. */
  private attachments(): TemplateResult | null {
    if (!this.takesImages) return null;
    return html`
      ${this.imageError ? html`<p class="error" role="alert">${this.imageError}</p>` : null}
      ${
        this.images.length
          ? html`<ul class="images" aria-label="Images of this message">
              ${this.images.map(
                (url, place) => html`<li><img src=${url} alt=${`Image ${place + 1}`}>
                  <button type="button" aria-label=${`Remove image ${place + 1}`}
                    @click=${() => (this.images = this.images.filter((_, other) => other !== place))}>×</button></li>`,
              )}
            </ul>`
          : null
      }`;
  }

  private imageButton(): TemplateResult | null {
    if (!this.takesImages) return null;
    return html`<label class="button" title="Add images">
      <input type="file" accept="image/*" multiple aria-label="Add images"
        @change=${(event: Event) => {
          const field = event.target as HTMLInputElement;
          const files = [...field.files!];
          field.value = ""; // so that the same file can be chosen again
          void this.addImages(files);
        }}><span aria-hidden="true">+ Image</span></label>`;
  }

  override render(): TemplateResult {
    const served = this.models && !this.models.length;
    const isText = this.mode === "text";
    return html`
      <div class="chat">
        <details class="settings" ?open=${matchMedia("(min-width: 60rem)").matches}>
          <summary>Settings</summary><div class="form">${this.form()}</div>
        </details>
        <section class="talk">
          <div class="messages" role="log" aria-label="Conversation" tabindex="0">
            ${this.error ? html`<p class="error" role="alert">${this.error}</p>` : null}
            ${served ? html`<p class="quiet">This key may use no model.</p>` : null}
            ${this.messages.length ? null : html`<div class="welcome">
              <h1>${isText ? "Begin a text" : "Ask the network"}</h1>
              ${isText ? html`<p>This model continues what you write${this.model && !takesTurns(this.model) ? "; it answers no questions" : ""}.</p>` : null}
              <p class="quiet">Each answer is computed by several nodes, paid from this server's account, and verified.</p></div>`}
            ${this.messages.map((message) =>
              message.role === "user"
                ? html`<article class="message user"><div class="text">${message.images.map(
                    (url, place) => html`<img src=${url} alt=${`Image ${place + 1}`}>`,
                  )}${message.text}</div></article>`
                : this.answer(message),
            )}
          </div>
          ${this.attachments()}
          <form @submit=${this.send} @dragover=${(event: DragEvent) => this.takesImages && event.preventDefault()}
            @drop=${(event: DragEvent) => this.takeFiles(event, event.dataTransfer)}>
            ${this.imageButton()}
            <textarea id="prompt" rows="2" placeholder=${isText ? "Write how a text begins" : "Write a message"}
              aria-label=${isText ? "Beginning of a text" : "Message"}
              @paste=${(event: ClipboardEvent) => this.takeFiles(event, event.clipboardData)}
              @keydown=${(event: KeyboardEvent) => {
                if (event.key === "Enter" && !event.shiftKey && !event.isComposing) void this.send(event);
              }}></textarea>
            ${
              this.running
                ? html`<button type="button" class="stop" @click=${() => this.stop()}>Stop</button>`
                : html`<button type="submit" class="primary" ?disabled=${!this.settings.model}>${isText ? "Continue" : "Send"}</button>`
            }
          </form>
          <p class="facts quiet">
            <span>Cost so far: <output id="cost">${usdc(this.cost)}</output></span>
            <button class="plain" ?disabled=${!this.messages.length || this.running !== null}
              @click=${() => (this.messages = [])}>${isText ? "Clear" : "New conversation"}</button>
          </p>
        </section>
      </div>`;
  }
}

/** An execution that is asked for once its details are open. */
class LazyProof extends Part {
  static override properties = { execution: {}, firstStep: { type: Number }, isOpen: { state: true } };
  declare execution: string;
  declare firstStep: number;
  declare isOpen: boolean;

  override connectedCallback(): void {
    super.connectedCallback();
    const details = this.closest("details")!;
    details.addEventListener("toggle", () => (this.isOpen = details.open));
    this.isOpen = details.open;
  }

  override render(): TemplateResult | null {
    if (!this.isOpen) return null;
    return html`<execution-view brief .execution=${this.execution} .firstStep=${this.firstStep}></execution-view>`;
  }
}

customElements.define("lazy-proof", LazyProof);
customElements.define("chat-view", ChatView);
