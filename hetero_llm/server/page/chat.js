// The chat box: one request at a time, streamed, with its speed and its drafted tokens. The
// conversation outlives a reload (conversation.js).
//
// One event holds what one step of the engine gave a sequence. A step that verified a draft gives
// the draft tokens it accepted, then one token of the model's own: all but the last of several
// tokens came from a draft. Where that last token begins in the text is known from its own text,
// which /detokenize tells once for each token id.

import { forgetConversation, keepConversation, keptConversation } from "./conversation.js";
import { thumbnail, TurnView } from "./turn.js";

const NEAR_END = 40; // pixels: a log that was read to the end stays at the end
const KEPT_FIELDS = ["system", "mode", "maxTokens", "temperature"];

// The data of each server-sent event of a response.
export async function* eventsOf(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ")) yield frame.slice(6);
    }
  }
}

// What went wrong with a request; `text` may hold the user's words, `kind` never does.
export class RequestFailure extends Error {
  constructor(status, code, text) {
    super(text);
    this.kind = code ? `${status} ${code}` : `${status}`;
  }
}

export async function failureOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not ours: a proxy's page
  }
  return new RequestFailure(response.status, error.code, error.message ?? response.statusText);
}

class Meter {
  constructor(elements) {
    this.elements = elements;
    this.begun = performance.now();
    this.first = null;
    this.last = null;
    this.firstTokens = 0; // they took the prompt's time, not that of decoding
    this.tokens = 0;
    this.drafted = 0;
    this.show();
  }

  add(tokens) {
    this.last = performance.now();
    if (this.first === null) {
      this.first = this.last;
      this.firstTokens = tokens;
    }
    this.tokens += tokens;
    this.drafted += tokens - 1;
    this.show();
  }

  get speed() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
  }

  show() {
    const { speed, firstToken, tokens, drafted } = this.elements;
    const rate = this.speed;
    speed.textContent = rate === null ? "–" : `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`;
    const wait = this.first - this.begun;
    firstToken.textContent = this.first === null ? "–" : `${wait.toFixed(0)} ms`;
    tokens.textContent = this.tokens || "–";
    const part = this.tokens ? Math.round((100 * this.drafted) / this.tokens) : 0;
    drafted.textContent = this.tokens ? `${this.drafted} (${part}%)` : "–";
  }
}

function contentOf(text, uris) {
  if (!uris.length) return text;
  const images = uris.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...images, { type: "text", text }] : images;
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// What a finish reason says of an answer: null if it is whole.
function endOf(reason, tokens, most) {
  if (reason === "stop") return null;
  if (reason === "length") {
    const full = tokens < most ? "the context is full" : `“Most tokens” is ${most}`;
    return { kind: "length", text: `Cut off after ${tokens} tokens: ${full}.` };
  }
  if (reason === "abort") return { kind: "abort", text: "Cut off: the server has aborted it." };
  return { kind: "failed", text: `Cut off: the server gives the reason ${reason ?? "none"}.` };
}

export class Chat {
  // elements: of the page, by name. api: fetch with the key. failed: told what went wrong.
  constructor(elements, api, failed) {
    this.elements = elements;
    this.api = api;
    this.failed = failed;
    this.model = null;
    this.views = []; // of all turns, in order
    this.height = 0; // of the log's content when it was last drawn
    this.images = []; // data URIs that go with the next prompt
    this.pieces = new Map(); // token id: its text
    this.asked = Promise.resolve(); // one question about a token at a time
    this.stopping = null;
    const { form, prompt, mode, stop, clear, attach, files } = elements;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    prompt.addEventListener("keydown", (event) => this.onKey(event));
    prompt.addEventListener("paste", (event) => this.onPaste(event));
    mode.addEventListener("change", () => this.showMode());
    stop.addEventListener("click", () => this.stopping?.abort());
    clear.addEventListener("click", () => this.clear());
    attach.addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      this.attach([...files.files]);
      files.value = "";
    });
    for (const name of KEPT_FIELDS) elements[name].addEventListener("change", () => this.keep());
    addEventListener("pagehide", () => this.onLeave());
    this.restore();
  }

  // What status.json says of the model; the box opens with the first answer.
  setModel(model) {
    const changed = JSON.stringify(model) !== JSON.stringify(this.model);
    this.model = model;
    if (!changed) return;
    const { mode, send, prompt } = this.elements;
    mode.options[0].disabled = !model.chat;
    if (!model.chat) mode.value = "complete";
    prompt.disabled = !model.text;
    send.disabled = !model.text || this.stopping !== null;
    this.showMode();
  }

  get chatting() {
    return this.elements.mode.value === "chat";
  }

  get takesImages() {
    return this.chatting && (this.model?.images ?? 0) > 0;
  }

  showMode() {
    const { hint, prompt, systemBox, attach } = this.elements;
    systemBox.hidden = !this.chatting;
    attach.hidden = !this.takesImages;
    if (!this.takesImages) this.setImages([]);
    if (this.model && !this.model.text) {
      hint.textContent = "The server runs without a tokenizer: it takes token ids only.";
      return;
    }
    const missing = this.model && !this.model.chat ? " This model has no chat template." : "";
    hint.textContent = this.chatting
      ? "Enter sends, Shift+Enter begins a line, Escape stops."
      : `Ctrl+Enter sends, Escape stops.${missing}`;
    prompt.placeholder = this.chatting ? "Say something" : "Text that the model continues";
  }

  onKey(event) {
    if (event.isComposing) return;
    const sends = event.key === "Enter"
      && (event.ctrlKey || event.metaKey || (this.chatting && !event.shiftKey));
    if (sends) {
      event.preventDefault();
      this.elements.form.requestSubmit();
    } else if (event.key === "Escape") {
      this.stopping?.abort();
    }
  }

  // -- images -----------------------------------------------------------------------------------

  onPaste(event) {
    const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
    if (!files.length || !this.takesImages) return;
    event.preventDefault();
    this.attach(files);
  }

  // Reads images that go with the next prompt. Those that the server would refuse are not taken.
  async attach(files) {
    const { images: most, image_bytes: bytes } = this.model;
    this.tell("");
    for (const file of files) {
      if (this.images.length >= most) {
        this.tell(`${file.name} is not attached: the model takes at most ${most} images.`);
      } else if (file.size > bytes) {
        this.tell(`${file.name} is not attached: it has more than ${bytes} bytes.`);
      } else {
        const uri = await dataUri(file).catch(() => null);
        if (uri) this.setImages([...this.images, uri]);
        else this.tell(`${file.name} is not attached: it cannot be read.`);
      }
    }
  }

  setImages(images) {
    const { attached, prompt } = this.elements;
    this.images = images;
    attached.hidden = images.length === 0;
    attached.replaceChildren(...images.map((uri, index) => {
      const item = document.createElement("li");
      const remove = document.createElement("button");
      remove.type = "button";
      remove.className = "quiet small";
      remove.textContent = "Remove";
      remove.setAttribute("aria-label", `Remove image ${index + 1}`);
      remove.addEventListener("click", () => {
        this.setImages(this.images.filter((_, other) => other !== index));
        prompt.focus();
      });
      thumbnail(uri, 40).then((picture) => item.prepend(picture));
      item.append(remove);
      return item;
    }));
  }

  tell(text) {
    this.elements.notice.textContent = text;
  }

  // -- the conversation ---------------------------------------------------------------------------

  restore() {
    const { turns, settings } = keptConversation();
    for (const name of KEPT_FIELDS) {
      if (typeof settings[name] === "string") this.elements[name].value = settings[name];
    }
    this.elements.systemBox.open = this.elements.system.value !== "";
    for (const turn of turns) this.addTurn({ ...turn, uris: [] });
  }

  keep() {
    const turns = this.views.map((view) => view.turn);
    const fields = KEPT_FIELDS.map((name) => [name, this.elements[name].value]);
    const kept = keepConversation(turns, Object.fromEntries(fields));
    if (kept === turns.length) return;
    const left = kept ? `only the last ${kept} turns` : "no turns";
    this.tell(`The browser has no more room: ${left} will be there after a reload.`);
  }

  // An answer that is still coming when the page is left is cut off there.
  onLeave() {
    if (this.stopping === null) return;
    this.views.at(-1)?.finish({ kind: "left", text: "Cut off: the page was left." });
    this.keep();
  }

  clear() {
    this.stopping?.abort();
    this.views = [];
    this.elements.log.replaceChildren();
    this.tell("");
    forgetConversation();
    if (this.elements.system.value) this.keep(); // the settings stay
  }

  addTurn(turn) {
    const { log } = this.elements;
    const view = new TurnView(turn, () => this.again());
    this.views.push(view);
    log.append(view.element);
    this.offerAgain();
    log.scrollTop = this.height = log.scrollHeight;
    return view;
  }

  offerAgain() {
    for (const view of this.views) {
      view.offerAgain(view === this.views.at(-1) && this.stopping === null);
    }
  }

  // Asks for another answer to the last prompt; it replaces the one that is there.
  again() {
    const view = this.views.at(-1);
    if (!view || this.stopping || !this.model) return;
    this.views.pop();
    view.element.remove();
    const { chatting, text, uris } = view.turn;
    this.ask(chatting, text, uris);
  }

  // -- requests ---------------------------------------------------------------------------------

  // The conversation so far as the model gets it: turns without an answer are left out.
  messages() {
    const { system } = this.elements;
    const messages = system.value.trim() ? [{ role: "system", content: system.value }] : [];
    for (const { turn } of this.views) {
      if (!turn.chatting || !turn.answer) continue;
      messages.push({ role: "user", content: contentOf(turn.text, turn.uris) });
      messages.push({ role: "assistant", content: turn.answer });
    }
    return messages;
  }

  request(chatting, text, uris) {
    const { maxTokens, temperature } = this.elements;
    const body = {
      model: this.model.name,
      stream: true,
      return_token_ids: true,
      max_tokens: maxTokens.valueAsNumber,
      temperature: temperature.valueAsNumber,
    };
    if (!chatting) return ["v1/completions", { ...body, prompt: text }];
    const messages = [...this.messages(), { role: "user", content: contentOf(text, uris) }];
    return ["v1/chat/completions", { ...body, messages }];
  }

  send() {
    const { prompt } = this.elements;
    const text = prompt.value;
    if ((!text && !this.images.length) || this.stopping || !this.model) return;
    const uris = this.images;
    if (this.chatting) prompt.value = "";
    this.setImages([]);
    this.tell("");
    this.ask(this.chatting, text, uris);
  }

  async ask(chatting, text, uris) {
    const { send, stop, log } = this.elements;
    const [path, body] = this.request(chatting, text, uris);
    const stopping = (this.stopping = new AbortController());
    const view = this.addTurn({
      chatting, text, images: uris.length, uris, answer: "", marks: [], end: null,
    });
    view.onDraw = () => this.follow();
    send.disabled = true;
    stop.disabled = false;
    log.setAttribute("aria-busy", "true"); // read aloud when it is whole, not token by token
    let end = null;
    try {
      end = await this.stream(path, body, view, stopping.signal);
    } catch (error) {
      if (stopping.signal.aborted) {
        end = { kind: "stopped", text: "Cut off: you have stopped it." };
      } else {
        const before = view.turn.answer ? "Cut off: " : "";
        end = { kind: "failed", text: `${before}${error.message}` };
        this.failed(error);
      }
    } finally {
      this.stopping = null;
      send.disabled = false;
      stop.disabled = true;
      log.removeAttribute("aria-busy");
    }
    if (view.turn.end !== null) return; // the page is being left
    view.finish(end);
    view.onDraw = null;
    this.offerAgain();
    if (!this.views.includes(view)) return; // cleared meanwhile
    this.keep();
    this.asked.then(() => this.views.includes(view) && this.keep()); // with exact marks
  }

  // Writes the answer as it comes; returns why it was cut off, or null.
  async stream(path, body, view, signal) {
    const meter = new Meter(this.elements);
    const response = await this.api(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw await failureOf(response);
    let reason = null;
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") return endOf(reason, meter.tokens, body.max_tokens);
      const chunk = JSON.parse(data);
      if (chunk.error) throw new RequestFailure(200, chunk.error.code, chunk.error.message);
      const choice = chunk.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const text = choice.text ?? choice.delta?.content ?? "";
      const ids = choice.token_ids ?? [];
      if (ids.length) meter.add(ids.length);
      if (!text) continue;
      const mark = view.write(text, ids.length > 1);
      if (mark) this.takeOwnToken(view, mark, ids.at(-1));
    }
    throw new RequestFailure(200, "cut_off", "the stream ended before the answer did");
  }

  // Keeps a log that was read to its end there, with each frame that is drawn.
  follow() {
    const { log } = this.elements;
    if (this.height - log.scrollTop - log.clientHeight < NEAR_END) log.scrollTop = log.scrollHeight;
    this.height = log.scrollHeight;
  }

  // Leaves the model's own token at the end of a burst without shade.
  takeOwnToken(view, mark, id) {
    if (this.pieces.has(id)) {
      view.ownToken(mark, this.pieces.get(id));
      return;
    }
    this.asked = this.asked.then(async () => view.ownToken(mark, await this.pieceOf(id)));
  }

  async pieceOf(id) {
    if (!this.pieces.has(id)) {
      let piece = "";
      try {
        const response = await this.api("detokenize", {
          method: "POST",
          headers: { "content-type": "application/json" },
          body: JSON.stringify({ model: this.model.name, tokens: [id] }),
        });
        if (response.ok) piece = (await response.json()).prompt;
      } catch {
        return ""; // only the shade is less exact; a later burst asks again
      }
      this.pieces.set(id, piece);
    }
    return this.pieces.get(id);
  }
}
