// The chat box: one request at a time, streamed, with its speed and its drafted tokens. The
// conversation outlives a reload (conversation.js).
//
// One event holds what one step of the engine gave a sequence. A step that verified a draft gives
// the draft tokens it accepted, then one token of the model's own: all but the last of several
// tokens came from a draft. Where that last token begins in the text is known from its own text,
// which /detokenize tells once for each token id.

import { isWhole } from "./calls.js";
import { forgetConversation, keepConversation, keptConversation } from "./conversation.js";
import { JsonField } from "./json_field.js";
import { thumbnail, TurnView } from "./turn.js";

const NEAR_END = 40; // pixels: a log that was read to the end stays at the end
const KEPT_FIELDS = [
  "system", "mode", "maxTokens", "temperature", "tools", "toolChoice", "schema",
];
const CHOICES = ["auto", "required", "none"];
const NAMED = "="; // before a function's name as a choice: a function may be called "auto"

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

// What went wrong with a request; `text` and `param`, the field it is about, may hold the user's
// words, `kind` never does.
export class RequestFailure extends Error {
  constructor(status, code, text, param = null) {
    super(param === null || text.includes(param) ? text : `${param}: ${text}`);
    this.kind = code ? `${status} ${code}` : `${status}`;
    this.param = param;
  }
}

export async function failureOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not ours: a proxy's page
  }
  const text = error.message ?? response.statusText;
  return new RequestFailure(response.status, error.code, text, error.param ?? null);
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

// What a prompt is to the model: the user's message, or the results of tools.
function askedOf({ text, uris, results }) {
  if (results === null) return [{ role: "user", content: contentOf(text, uris) }];
  return results.map(({ id, text: content }) => ({ role: "tool", tool_call_id: id, content }));
}

// What an answer is to the model; null if nothing of it can be sent back.
function saidOf({ answer, reasoning, calls }) {
  const whole = calls.filter(isWhole);
  if (!answer && !whole.length) return null;
  const message = { role: "assistant", content: answer || null };
  if (reasoning) message.reasoning = reasoning;
  if (whole.length) {
    message.tool_calls = whole.map(({ id, name, arguments: text }) => (
      { id, type: "function", function: { name, arguments: text } }
    ));
  }
  return message;
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
  if (reason === "stop" || reason === "tool_calls") return null;
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
    this.tools = new JsonField(
      {
        box: elements.toolsBox, field: elements.tools, problem: elements.toolsProblem,
        note: elements.toolsNote,
      },
      "list",
      (tools) => tools.length || null,
      (tools) => this.showChoices(tools ?? []),
    );
    this.schema = new JsonField(
      {
        box: elements.schemaBox, field: elements.schema, problem: elements.schemaProblem,
        note: elements.schemaNote,
      },
      "object",
      () => "set",
    );
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
    const { hint, prompt, extras, attach } = this.elements;
    extras.hidden = !this.chatting;
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

  // -- tools and schema -------------------------------------------------------------------------

  // The choices that these tools leave; the one that is chosen stays if it is among them.
  showChoices(tools) {
    const { toolChoice } = this.elements;
    const names = tools.map((tool) => tool?.function?.name).filter((one) => typeof one === "string");
    const choices = [...CHOICES, ...names.map((name) => NAMED + name)];
    const options = [...toolChoice.options].map((option) => option.value);
    if (JSON.stringify(choices) === JSON.stringify(options)) return;
    const chosen = toolChoice.value;
    toolChoice.replaceChildren(...choices.map((value) => (
      new Option(value.startsWith(NAMED) ? value.slice(NAMED.length) : value, value)
    )));
    toolChoice.value = choices.includes(chosen) ? chosen : CHOICES[0];
  }

  // Whether the boxes for tools and schema can be sent; if not, the user gets to the wrong one.
  areBoxesValid() {
    for (const [name, box] of [["tools", this.tools], ["JSON schema", this.schema]]) {
      if (box.check()) continue;
      box.focus();
      this.tell(`Not sent: the text in the box for ${name} is not valid.`);
      return false;
    }
    return true;
  }

  // Shows what the server says of a field beside the box that the field comes from.
  showRefusal({ param, message }) {
    if (/^tool(s|_choice)\b/.test(param ?? "")) this.tools.show(message);
    if (/^(response_format|json)\b/.test(param ?? "")) this.schema.show(message);
  }

  // What the boxes add to a request.
  get extraFields() {
    const fields = {};
    const [tools, schema] = [this.tools.value, this.schema.value];
    if (tools?.length) {
      fields.tools = tools;
      const choice = this.elements.toolChoice.value;
      fields.tool_choice = choice.startsWith(NAMED)
        ? { type: "function", function: { name: choice.slice(NAMED.length) } }
        : choice;
    }
    if (schema !== null) {
      const json_schema = { name: "answer", schema, strict: true };
      fields.response_format = { type: "json_schema", json_schema };
    }
    return fields;
  }

  tell(text) {
    this.elements.notice.textContent = text;
  }

  // -- the conversation ---------------------------------------------------------------------------

  restore() {
    const { turns, settings } = keptConversation();
    for (const name of KEPT_FIELDS) {
      if (typeof settings[name] === "string") this.elements[name].value = settings[name];
      if (name === "tools") this.tools.check(); // it makes the choices
    }
    if (this.elements.toolChoice.value === "") this.elements.toolChoice.value = CHOICES[0];
    this.schema.check();
    this.elements.systemBox.open = this.elements.system.value !== "";
    for (const turn of turns) this.addTurn({ ...turn, uris: [] }, false);
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
    const { system, tools, schema } = this.elements;
    if (system.value || tools.value || schema.value) this.keep(); // the settings stay
  }

  addTurn(turn, coming) {
    const { log } = this.elements;
    const view = new TurnView(
      turn, coming, () => this.again(), (results) => this.sendResults(results),
    );
    this.views.push(view);
    log.append(view.element);
    this.offer();
    log.scrollTop = this.height = log.scrollHeight;
    return view;
  }

  // What can be done with the last turn: another answer, results for its calls.
  offer() {
    for (const view of this.views) {
      view.offer(view === this.views.at(-1) && this.stopping === null);
    }
  }

  // Asks for another answer to the last prompt; it replaces the one that is there.
  again() {
    const view = this.views.at(-1);
    if (!view || !this.canAsk(view.turn.chatting)) return;
    this.views.pop();
    view.element.remove();
    const { chatting, text, uris, results } = view.turn;
    this.ask({ chatting, text, uris, results });
  }

  // -- requests ---------------------------------------------------------------------------------

  // The conversation so far as the model gets it: turns without an answer are left out, and
  // results of calls that are not there any more.
  messages() {
    const { system } = this.elements;
    const messages = system.value.trim() ? [{ role: "system", content: system.value }] : [];
    const called = new Set();
    for (const { turn } of this.views) {
      const said = turn.chatting ? saidOf(turn) : null;
      if (said === null || turn.results?.some(({ id }) => !called.has(id))) continue;
      messages.push(...askedOf(turn), said);
      for (const { id } of said.tool_calls ?? []) called.add(id);
    }
    return messages;
  }

  request(prompt) {
    const { maxTokens, temperature } = this.elements;
    const body = {
      model: this.model.name,
      stream: true,
      return_token_ids: true,
      max_tokens: maxTokens.valueAsNumber,
      temperature: temperature.valueAsNumber,
    };
    if (!prompt.chatting) return ["v1/completions", { ...body, prompt: prompt.text }];
    const messages = [...this.messages(), ...askedOf(prompt)];
    return ["v1/chat/completions", { ...body, messages, ...this.extraFields }];
  }

  canAsk(chatting) {
    if (this.stopping || !this.model) return false;
    return !chatting || this.areBoxesValid();
  }

  send() {
    const { prompt } = this.elements;
    const text = prompt.value;
    if ((!text && !this.images.length) || !this.canAsk(this.chatting)) return;
    const uris = this.images;
    if (this.chatting) prompt.value = "";
    this.setImages([]);
    this.tell("");
    this.ask({ chatting: this.chatting, text, uris, results: null });
  }

  // Sends the results of tool calls, which the model's next message answers.
  sendResults(results) {
    if (!this.canAsk(true)) return;
    this.tell("");
    this.ask({ chatting: true, text: "", uris: [], results });
    this.elements.log.focus({ preventScroll: true }); // the box that had it is gone
  }

  // prompt: {chatting, text, uris, results}, as of a turn.
  async ask(prompt) {
    const { send, stop, log } = this.elements;
    const [path, body] = this.request(prompt);
    const stopping = (this.stopping = new AbortController());
    const view = this.addTurn({
      ...prompt, images: prompt.uris.length, answer: "", marks: [], reasoning: "",
      reasoningMarks: [], calls: [], end: null,
    }, true);
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
        const { answer, reasoning, calls } = view.turn;
        const before = answer || reasoning || calls.length ? "Cut off: " : "";
        end = { kind: "failed", text: `${before}${error.message}` };
        this.showRefusal(error);
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
    this.offer();
    this.follow(); // boxes for results have made the log longer
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
      const ids = choice.token_ids ?? [];
      if (ids.length) meter.add(ids.length);
      this.write(view, choice, ids);
    }
    throw new RequestFailure(200, "cut_off", "the stream ended before the answer did");
  }

  // Writes a chunk's parts; the model's own token is at the end of the last one.
  write(view, { text, delta }, ids) {
    const { reasoning, content, tool_calls: calls } = delta ?? { content: text };
    let last = null;
    for (const [part, added] of [["reasoning", reasoning], ["answer", content]]) {
      if (!added) continue;
      const mark = view.write(part, added, ids.length > 1);
      last = mark && [part, mark];
    }
    if (calls) view.call(calls);
    else if (last) this.takeOwnToken(view, ...last, ids.at(-1));
  }

  // Keeps a log that was read to its end there, with each frame that is drawn.
  follow() {
    const { log } = this.elements;
    if (this.height - log.scrollTop - log.clientHeight < NEAR_END) log.scrollTop = log.scrollHeight;
    this.height = log.scrollHeight;
  }

  // Leaves the model's own token at the end of a burst without shade.
  takeOwnToken(view, part, mark, id) {
    if (this.pieces.has(id)) {
      view.ownToken(part, mark, this.pieces.get(id));
      return;
    }
    this.asked = this.asked.then(async () => view.ownToken(part, mark, await this.pieceOf(id)));
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
