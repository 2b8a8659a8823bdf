// The chat box: one request at a time, streamed, with its speed and its drafted tokens.
//
// One event holds what one step of the engine gave a sequence. A step that verified a draft gives
// the draft tokens it accepted, then one token of the model's own: all but the last of several
// tokens came from a draft. Where that last token begins in the text is known from its own text,
// which /detokenize tells once for each token id.

const NEAR_END = 40; // pixels: a log that was read to the end stays at the end

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

export class Chat {
  // elements: of the page, by name. api: fetch with the key. failed: told what went wrong.
  constructor(elements, api, failed) {
    this.elements = elements;
    this.api = api;
    this.failed = failed;
    this.model = null;
    this.turns = []; // what the model is told of the conversation
    this.pieces = new Map(); // token id: its text
    this.asked = Promise.resolve(); // one question about a token at a time
    this.stopping = null;
    const { form, prompt, mode, stop, clear } = elements;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    prompt.addEventListener("keydown", (event) => this.onKey(event));
    mode.addEventListener("change", () => this.showMode());
    stop.addEventListener("click", () => this.stopping?.abort());
    clear.addEventListener("click", () => this.clear());
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

  showMode() {
    const { hint, prompt } = this.elements;
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

  clear() {
    this.stopping?.abort();
    this.turns = [];
    this.elements.log.replaceChildren();
  }

  request(text) {
    const { maxTokens, temperature } = this.elements;
    const body = {
      model: this.model.name,
      stream: true,
      return_token_ids: true,
      max_tokens: maxTokens.valueAsNumber,
      temperature: temperature.valueAsNumber,
    };
    if (!this.chatting) return ["v1/completions", { ...body, prompt: text }];
    const messages = [...this.turns, { role: "user", content: text }];
    return ["v1/chat/completions", { ...body, messages }];
  }

  async send() {
    const { prompt, send, stop, log } = this.elements;
    const text = prompt.value;
    if (!text || this.stopping || !this.model) return;
    const chatting = this.chatting;
    const [path, body] = this.request(text);
    const view = this.addTurn(text, chatting);
    const stopping = (this.stopping = new AbortController());
    send.disabled = true;
    stop.disabled = false;
    log.setAttribute("aria-busy", "true"); // read aloud when it is whole, not token by token
    if (chatting) prompt.value = "";
    try {
      await this.stream(path, body, view, stopping.signal);
    } catch (error) {
      if (!stopping.signal.aborted) this.fail(view, error);
    } finally {
      this.stopping = null;
      send.disabled = false;
      stop.disabled = true;
      log.removeAttribute("aria-busy");
    }
    if (chatting && view.answer && log.contains(view.turn)) {
      this.turns.push({ role: "user", content: text }, { role: "assistant", content: view.answer });
    }
  }

  async stream(path, body, view, signal) {
    const meter = new Meter(this.elements);
    const response = await this.api(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw await failureOf(response);
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new RequestFailure(200, chunk.error.code, chunk.error.message);
      const choice = chunk.choices[0];
      if (!choice) continue;
      const text = choice.text ?? choice.delta?.content ?? "";
      const ids = choice.token_ids ?? [];
      if (ids.length) meter.add(ids.length);
      this.write(view, text, ids);
    }
    throw new RequestFailure(200, "cut_off", "the stream ended before the answer did");
  }

  fail(view, error) {
    const note = document.createElement("p");
    note.className = "failed";
    note.textContent = error.message;
    view.turn.append(note);
    this.failed(error);
  }

  // -- the log ----------------------------------------------------------------------------------

  addTurn(text, chatting) {
    const turn = document.createElement("article");
    turn.className = chatting ? "turn chat" : "turn complete";
    const said = document.createElement("span");
    said.className = "prompt";
    said.textContent = text;
    const answer = document.createElement("span");
    answer.className = "answer";
    for (const [who, parts] of chatting
      ? [["You", [said]], ["Model", [answer]]]
      : [["Completion", [said, answer]]]) {
      const heading = document.createElement("h3");
      heading.textContent = who;
      const body = document.createElement("div");
      body.className = "text";
      body.append(...parts);
      turn.append(heading, body);
    }
    this.elements.log.append(turn);
    turn.scrollIntoView({ block: "end" });
    return { turn, target: answer, answer: "" };
  }

  write(view, text, ids) {
    if (!text) return;
    const { log } = this.elements;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    view.answer += text;
    if (ids.length > 1) {
      const mark = document.createElement("mark");
      mark.className = "draft";
      mark.textContent = text;
      view.target.append(mark);
      this.takeOwnToken(mark, ids.at(-1));
    } else if (view.target.lastChild?.nodeType === Node.TEXT_NODE) {
      view.target.lastChild.appendData(text);
    } else {
      view.target.append(text);
    }
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  // Leaves the model's own token at the end of a burst without shade. If the end of the text is not
  // that token (the end of the answer, half a character), all that is seen was drafted.
  takeOwnToken(mark, id) {
    const split = (piece) => {
      const text = mark.textContent;
      if (!piece || !text.endsWith(piece)) return;
      mark.after(text.slice(text.length - piece.length));
      mark.textContent = text.slice(0, text.length - piece.length);
      if (!mark.textContent) mark.remove();
    };
    if (this.pieces.has(id)) {
      split(this.pieces.get(id));
      return;
    }
    this.asked = this.asked.then(async () => split(await this.pieceOf(id)));
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
