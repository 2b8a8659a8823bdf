// One turn of the conversation: what was asked, the answer as it comes, and how it ended.
//
// A turn's data is a plain object, which conversation.js keeps over a reload:
//   chatting: else the text was to be continued.   text: the user's.
//   images: how many were sent with it.            answer: the model's text.
//   marks: [start, end) in the answer that were accepted from drafts.
//   end: null while the answer comes and after its own end, else {kind, text}: why it was cut off.
// `uris` holds the images themselves, and is not kept.

import { Rendered } from "./markdown.js";

const COPIED_MS = 2000;

function made(tag, name, text = "") {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  return element;
}

function button(text, pressed) {
  const element = made("button", "quiet small", text);
  element.type = "button";
  element.addEventListener("click", () => pressed(element));
  return element;
}

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

export class TurnView {
  // again: called when the user wants another answer.
  constructor(turn, again) {
    this.turn = turn;
    this.frame = null;
    this.element = made("article", turn.chatting ? "turn chat" : "turn complete");
    const said = made("span", "prompt", turn.text);
    this.answer = made(turn.chatting ? "div" : "span", "answer");
    this.rendered = new Rendered(this.answer, !turn.chatting);
    for (const [who, parts] of turn.chatting
      ? [["You", [said]], ["Model", [this.answer]]]
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

  // Another answer may be asked for the last turn, if nothing it needs is gone.
  offerAgain(offered) {
    this.again.hidden = !offered || this.imagesAreLost;
  }

  // Adds to the answer, drawn with the next frame. drafted: whether it holds accepted drafts; then
  // its mark is returned, for `ownToken`.
  write(text, drafted) {
    const { turn } = this;
    const start = turn.answer.length;
    turn.answer += text;
    const mark = drafted ? [start, turn.answer.length] : null;
    if (mark) turn.marks.push(mark);
    this.drawSoon();
    return mark;
  }

  // Takes the model's own token from the end of a mark. If the text does not end in that token (the
  // end of the answer, half a character), all of it was drafted.
  ownToken(mark, piece) {
    const [start, end] = mark;
    if (!piece || !this.turn.answer.slice(start, end).endsWith(piece)) return;
    mark[1] = end - piece.length;
    this.drawSoon();
  }

  finish(end) {
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
    this.rendered.show(this.turn.answer, this.turn.marks);
    this.onDraw?.();
  }

  async copy(element) {
    try {
      await navigator.clipboard.writeText(this.turn.answer);
      element.textContent = "Copied";
    } catch {
      // Browsers give pages without TLS no clipboard: the answer is selected to be copied by hand.
      getSelection().selectAllChildren(this.answer);
      element.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => (element.textContent = "Copy"), COPIED_MS);
  }
}
