// What all parts of the page have in common: no shadow root, so that one style sheet serves all.
import { LitElement } from "lit";
import { ApiError, get, getKey } from "./api";

export class Part extends LitElement {
  protected override createRenderRoot(): HTMLElement {
    return this;
  }
}

/** A part that shows one JSON object of the server, and asks for it again every few seconds. */
export class View<T> extends Part {
  static override properties = { path: {}, data: { state: true }, error: { state: true } };
  declare path: string;
  declare data: T | null;
  declare error: string;
  protected period = 5000; // milliseconds; 0: asked once
  private timer = 0;
  private asOf = ""; // the time of the data
  private asking: AbortController | null = null;

  constructor() {
    super();
    this.path = "";
    this.data = null;
    this.error = "";
  }

  override connectedCallback(): void {
    super.connectedCallback();
    document.addEventListener("visibilitychange", this.onVisible);
  }

  override disconnectedCallback(): void {
    super.disconnectedCallback();
    document.removeEventListener("visibilitychange", this.onVisible);
    this.stop();
  }

  override willUpdate(changed: Map<string, unknown>): void {
    if (!changed.has("path")) return;
    this.data = null;
    this.error = "";
    void this.ask();
  }

  private stop(): void {
    clearTimeout(this.timer);
    this.asking?.abort();
  }

  private onVisible = (): void => {
    if (!document.hidden && this.period) void this.ask();
  };

  protected async ask(): Promise<void> {
    this.stop();
    if (!this.path) return;
    const asking = (this.asking = new AbortController());
    try {
      const data = await get<T>(this.path, asking.signal);
      if (asking.signal.aborted) return;
      this.data = data;
      this.asOf = new Date().toLocaleTimeString();
      this.error = "";
    } catch (error) {
      if (asking.signal.aborted) return;
      const needsKey = error instanceof ApiError && error.status === 401;
      this.error = error instanceof ApiError ? error.message : String(error);
      if (this.data) this.error += `; what is shown is of ${this.asOf}`;
      else if (needsKey && !getKey()) this.error = "";
      if (needsKey) this.dispatchEvent(new CustomEvent("key-needed", { bubbles: true }));
    }
    if (this.period && !document.hidden) this.timer = window.setTimeout(() => void this.ask(), this.period);
  }
}
