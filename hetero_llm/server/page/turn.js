// One turn of the conversation: what was asked, the answer as it comes, and how it ended.
//
// A turn's data is a plain object, which conversation.js keeps over a reload:
//   chatting: else the text was to be continued.   text: the user's.
//   results: of tools, [{id, name, text}], in place of the user's text; else null.
//   images: how many were sent with it.            answer: the model's text.
//   marks: [start, end) in the answer that were accepted from drafts.
//   reasoning, reasoningMarks: the same of the model's reasoning.
//   calls: of tools, [{id, name, arguments}], the arguments as the model's text.
//   end: null while the answer comes and after its own end, else {kind, text}: why it was cut off.
// `uris` holds the images themselves, and is not kept.

import { CallsView } from "./calls.js";
import { button, made } from "./elements.js";
import { Rendered } from "./markdown.js";

const COPIED_MS = 2000;
const MARKS = { answer: "marks", reasoning: "reasoningMarks" };

// A picture of an image without an address: the page's policy allows no images from elsewhere.
export async function thumbnail(uri, height) {
  const canvas = made("canvas", "thumbnail");
  canvas.setAttribute("role", "img");
  try {
    const [head, data] = uri.split(",");
    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    const type = head.slice(5).split(";")[0];
    const picture = await createImageBitmap(new Blob([bytes], { type }));
    canvas.height = height;
    canvas.width = Math.max(1, Math.round((height * picture.width) / picture.height));
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.setAttribute("aria-label", `image of ${picture.width} x ${picture.height} pixels`);
    picture.close();
  } catch {
    canvas.setAttribute("aria-label", "an image that this browser cannot show");
  }
  return canvas;
}

// Reasoning, folded once something else follows it, unless the user has folded or unfolded it.
class ReasoningView {
  constructor() {
    this.element = made("details", "reasoning");
    this.summary = made("summary", "");
    this.touched = false;
    this.summary.addEventListener("click", () => (this.touched = true));
    const body = made("div", "thought");
    this.rendered = new Rendered(body, true);
    this.element.append(this.summary, body);
  }

  // coming: whether it may go on. followed: whether an answer or a call has begun.
  show(text, marks, coming, followed) {
    const title = coming && !followed ? "Thinking…" : "Reasoning";
    if (this.summary.textContent !== title) this.summary.textContent = title;
    if (!this.touched) this.element.open = !followed;
    this.rendered.show(text, marks);
  }
}

export class TurnView {
  // coming: whether the answer is still to come. again: called when the user wants another answer.
  // results: called with the results of tools that the user gives.
  constructor(turn, coming, again, results) {
    this.turn = turn;
    this.coming = coming;
    this.frame = null;
    this.reasoning = null;
    this.calls = null;
    this.sendResults = results;
    this.element = made("article", turn.chatting ? "turn chat" : "turn complete");
    const said = made("span", "prompt", turn.text);
    this.answer = made(turn.chatting ? "div" : "span", "answer");
    this.rendered = new Rendered(this.answer, !turn.chatting);
    const asked = turn.results === null
      ? [["You", [said]]]
      : turn.results.map(({ name, text }) => [`Result of ${name}`, [made("span", "prompt", text)]]);
    for (const [who, parts] of turn.chatting
      ? [...asked, ["Model", [this.answer]]]
      : [["Completion", [said, this.answer]]]) {
      const body = made("div", "text");
      body.append(...parts);
      this.element.append(made("h3", "", who), body);
    }
    if (turn.images) this.showImages(said);
    this.ending = made("p", "ending");
    this.ending.hidden = true;
    this.again = button("Regenerate", again);
    const actions = made("div", "tools");
    actions.append(button("Copy", (element) => this.copy(element)), this.again);
    this.element.append(this.ending, actions);
    this.draw();
    this.showEnd();
  }

  get imagesAreLost() {
    return this.turn.images > this.turn.uris.length;
  }

  async showImages(said) {
    const row = made("div", "attached");
    said.after(row);
    if (this.imagesAreLost) {
      const many = this.turn.images === 1 ? "1 image" : `${this.turn.images} images`;
      row.append(made("p", "hint", `${many}, not kept over the reload: the model sees it no more`));
      return;
    }
    for (const uri of this.turn.uris) row.append(await thumbnail(uri, 64));
  }

  // Another answer may be asked for the last turn, if nothing it needs is gone, and results for
  // its calls.
  offer(offered) {
    this.again.hidden = !offered || this.imagesAreLost;
    this.calls?.offerResults(offered);
  }

  // Adds to a part, "answer" or "reasoning", drawn with the next frame. drafted: whether the text
  // holds accepted drafts; then its mark is returned, for `ownToken`.
  write(part, text, drafted) {
    const { turn } = this;
    const start = turn[part].length;
    turn[part] += text;
    const mark = drafted ? [start, turn[part].length] : null;
    if (mark) turn[MARKS[part]].push(mark);
    this.drawSoon();
    return mark;
  }

  // Adds a stream's deltas of tool calls.
  call(deltas) {
    const { calls } = this.turn;
    for (const { index, id, function: called } of deltas) {
      calls[index] ??= { id, name: called.name, arguments: "" };
      calls[index].arguments += called.arguments ?? "";
    }
    this.drawSoon();
  }

  // Takes the model's own token from the end of a mark. If the text does not end in that token (the
  // end of the answer, half a character), all of it was drafted.
  ownToken(part, mark, piece) {
    const [start, end] = mark;
    if (!piece || !this.turn[part].slice(start, end).endsWith(piece)) return;
    mark[1] = end - piece.length;
    this.drawSoon();
  }

  finish(end) {
    this.coming = false;
    this.turn.end = end;
    this.draw();
    this.showEnd();
  }

  showEnd() {
    const { end } = this.turn;
    this.ending.hidden = end === null;
    if (end === null) return;
    this.ending.className = end.kind === "failed" ? "ending failed" : "ending cut";
    this.ending.textContent = end.text;
    this.element.classList.add("cut-off");
  }

  drawSoon() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    const { answer, marks, reasoning, reasoningMarks, calls } = this.turn;
    if (reasoning) {
      if (this.reasoning === null) {
        this.reasoning = new ReasoningView();
        this.answer.before(this.reasoning.element);
      }
      const followed = answer !== "" || calls.length > 0;
      this.reasoning.show(reasoning, reasoningMarks, this.coming, followed);
    }
    this.rendered.show(answer, marks);
    if (calls.length) {
      if (this.calls === null) {
        this.calls = new CallsView(this.sendResults);
        this.answer.after(this.calls.element);
      }
      this.calls.show(calls, this.coming);
    }
    this.onDraw?.();
  }

  async copy(element) {
    const { answer, calls } = this.turn;
    const text = answer || calls.map((call) => `${call.name} ${call.arguments}`).join("\n");
    try {
      await navigator.clipboard.writeText(text);
      element.textContent = "Copied";
    } catch {
      // Browsers give pages without TLS no clipboard: the answer is selected to be copied by hand.
      getSelection().selectAllChildren(answer ? this.answer : this.calls?.element ?? this.answer);
      element.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => (element.textContent = "Copy"), COPIED_MS);
  }
}
