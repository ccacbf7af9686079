// The page's frame: navigation, search, the API key, and the part that the address names.
import { html, type TemplateResult } from "lit";
import { getKey, isRemembered, setKey } from "./api";
import { ChatView } from "./chat";
import { Part, View } from "./element";
import "./explorer";

const SECTIONS = [
  ["chat", "Chat"],
  ["nodes", "Nodes"],
  ["models", "Models"],
  ["executions", "Executions"],
  ["committee", "Committee"],
] as const;

class App extends Part {
  static override properties = { route: { state: true }, needsKey: { state: true } };
  declare route: string[];
  declare needsKey: boolean;
  private chat = new ChatView(); // kept while other parts are shown: an answer may be running

  constructor() {
    super();
    this.route = readRoute();
    this.needsKey = false;
    addEventListener("hashchange", () => {
      this.route = readRoute();
      void this.updateComplete.then(() => this.querySelector<HTMLElement>("main")?.focus());
    });
    this.addEventListener("key-needed", () => (this.needsKey = true));
  }

  private view(): TemplateResult {
    const [section, id = ""] = this.route;
    const at = "/explorer/v1";
    switch (section) {
      case "nodes":
        return html`<nodes-view .base=${`${at}/nodes`}></nodes-view>`;
      case "models":
        return id
          ? html`<model-view .path=${`${at}/models/${encodeURIComponent(id)}`}></model-view>`
          : html`<models-view .base=${`${at}/models`}></models-view>`;
      case "executions":
        return id
          ? html`<execution-view .execution=${encodeURIComponent(id)}></execution-view>`
          : html`<executions-view .base=${`${at}/executions`}></executions-view>`;
      case "accounts":
        return html`<account-view .base=${`${at}/accounts/${encodeURIComponent(id)}`}></account-view>`;
      case "committee":
        return html`<committee-view .path=${`${at}/committee`}></committee-view>`;
      case "search":
        return html`<search-view .path=${`${at}/search?q=${encodeURIComponent(id)}`}></search-view>`;
      default:
        return html`${this.chat}`;
    }
  }

  private search(event: SubmitEvent): void {
    event.preventDefault();
    const text = (event.target as HTMLFormElement).querySelector("input")!.value.trim();
    if (text) location.hash = `#/search/${encodeURIComponent(text)}`;
  }

  private saveKey(event: SubmitEvent): void {
    event.preventDefault();
    const form = event.target as HTMLFormElement;
    const [key, remember] = form.querySelectorAll("input");
    setKey(key.value.trim(), remember.checked);
    this.needsKey = false;
    if (this.route[0] === "chat") void this.chat.load();
    else location.reload(); // every part asks again
  }

  private keyForm(): TemplateResult {
    return html`<form class="key" @submit=${this.saveKey}>
      <label>API key <input type="password" autocomplete="off" spellcheck="false" placeholder="sk-splitup-…" .value=${getKey()}></label>
      <label class="check"><input type="checkbox" ?checked=${isRemembered()}> Remember on this device</label>
      <button class="primary">Use</button>
      <p class="quiet">Without this the key is forgotten with the tab. Create one with: splitup keys new NAME</p>
    </form>`;
  }

  override render(): TemplateResult {
    const [section] = this.route;
    return html`
      <a class="skip" href="#/${this.route.join("/")}" @click=${(event: Event) => {
        event.preventDefault();
        this.querySelector<HTMLElement>("main")!.focus();
      }}>Skip to content</a>
      <header>
        <a class="brand" href="#/chat"><img src="/icon.svg" alt="" width="22" height="22">SplitUp</a>
        <nav aria-label="Sections">${SECTIONS.map(
          ([name, words]) => html`<a href="#/${name}" aria-current=${name === section ? "page" : "false"}>${words}</a>`,
        )}</nav>
        <form role="search" @submit=${this.search}>
          <input type="search" placeholder="Address, model or execution" aria-label="Search the network">
        </form>
      </header>
      <health-view path="/health"></health-view>
      ${this.needsKey ? this.keyForm() : null}
      <main tabindex="-1" class=${section === "chat" ? "full" : ""}>${this.view()}</main>`;
  }
}

function readRoute(): string[] {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean);
  try {
    return parts.length ? parts.map(decodeURIComponent) : ["chat"];
  } catch {
    return ["chat"]; // a broken address
  }
}

/** A line above every section while texts would wait, or the server is gone. */
class HealthView extends View<{ status: string }> {
  override render(): TemplateResult | null {
    const waits = "The network does not answer, or no live nodes serve a model: texts wait, and what is shown may be out of date.";
    const words = this.error || (this.data?.status === "waiting" ? waits : "");
    return words ? html`<p class="health" role="status">${words}</p>` : null;
  }
}

customElements.define("health-view", HealthView);
customElements.define("splitup-app", App);
