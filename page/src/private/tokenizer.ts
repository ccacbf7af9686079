// The model's tokenizer on the device, and a text that grows token by token.
// The latter is as in splitup/client/text/tokenizer.py: every token's text is certain when it is shown.
import { Tokenizer } from "@huggingface/tokenizers";

const PROMPT_TOKENS = 64; // of a prompt's end: more than the text of what follows depends on
const UNFINISHED = "\ufffd"; // what libraries decode a part of a character to

export class ModelTokenizer {
  private library: Tokenizer;

  /** Take the text of a tokenizer.json. */
  constructor(json: string) {
    this.library = new Tokenizer(JSON.parse(json), { clean_up_tokenization_spaces: false });
  }

  /** Return the tokens of a text. Halves of characters become "?", as in Python. */
  encode(text: string, addSpecialTokens = true): number[] {
    return this.library.encode(text.replace(/\p{Cs}/gu, "?"), { add_special_tokens: addSpecialTokens }).ids;
  }

  decode(tokens: readonly number[]): string {
    return tokens.length ? this.library.decode([...tokens], { skip_special_tokens: true, clean_up_tokenization_spaces: false }) : "";
  }

  openStream(prompt: readonly number[]): TextStream {
    return new TextStream(this, prompt);
  }

  /** Return what tokens from `place` on add to the text of those before. */
  continueText(tokens: readonly number[], place: number): string {
    const text = this.decode(tokens);
    let known = this.decode(tokens.slice(0, place));
    if (!text.startsWith(known)) known = known.replace(/\ufffd+$/, ""); // which the tokens may have finished
    return text.startsWith(known) ? text.slice(known.length) : this.decode(tokens.slice(place));
  }
}

export class TextStream {
  private tokens: number[];
  private settled: number; // how many of them have been given

  constructor(private tokenizer: ModelTokenizer, prompt: readonly number[]) {
    this.tokens = prompt.slice(-PROMPT_TOKENS);
    this.settled = this.tokens.length;
  }

  /** Take a token, or the end of the text; return the text that is certain now. */
  extend(token: number | null): string {
    if (token !== null) this.tokens.push(token);
    if (this.tokens.length === this.settled) return "";
    const text = this.tokenizer.continueText(this.tokens, this.settled);
    if (text.endsWith(UNFINISHED) && token !== null) return "";
    const starts = this.tokenizer.decode(this.tokens.slice(this.settled));
    if (text && !starts.startsWith(UNFINISHED)) this.tokens.splice(0, Math.max(0, this.settled - PROMPT_TOKENS));
    this.settled = this.tokens.length;
    return text;
  }
}
