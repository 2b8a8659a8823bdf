// A box for JSON in a `details` element. What is wrong with its text is shown below the box, and
// whether it holds something in the summary, which is seen while the box is closed.

const TYPING_MS = 500; // a text that is still being typed is not called wrong

// A number that JavaScript cannot hold is sent as it was written, by browsers that can do it:
// 9223372036854775807, a usual maximum, would be another number.
function exact(key, value, context) {
  const source = typeof value === "number" && key !== "" ? context?.source : undefined;
  return source === undefined || String(value) === source || !JSON.rawJSON
    ? value : JSON.rawJSON(source);
}

export class JsonField {
  // elements: {box, field, problem, note}: the details, the textarea, and the places below it and
  // in the summary. kind: "list" or "object". describe(value): the note of a value. changed: called
  // with each valid value, null for an empty box.
  constructor(elements, kind, describe, changed = () => {}) {
    this.elements = elements;
    this.kind = kind;
    this.describe = describe;
    this.changed = changed;
    this.timer = null;
    elements.field.addEventListener("input", () => {
      this.elements.field.removeAttribute("aria-invalid");
      this.elements.problem.textContent = "";
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.check(), TYPING_MS);
    });
    elements.field.addEventListener("change", () => this.check());
  }

  // {value, wrong}: the value, null for an empty box, and what is wrong, else null.
  read() {
    const text = this.elements.field.value;
    if (!text.trim()) return { value: null, wrong: null };
    try {
      const value = JSON.parse(text, exact);
      const object = value !== null && typeof value === "object" && !Array.isArray(value);
      if (this.kind === "list" ? Array.isArray(value) : object) return { value, wrong: null };
      const needed = this.kind === "list" ? "a list, [...]" : "an object, {...}";
      return { value: null, wrong: `Not a JSON ${this.kind}: ${needed} is needed.` };
    } catch (error) {
      return { value: null, wrong: `Invalid JSON: ${error.message}` };
    }
  }

  get value() {
    return this.read().value;
  }

  // Shows what is wrong; returns whether the text is empty or as it has to be.
  check() {
    clearTimeout(this.timer);
    const { value, wrong } = this.read();
    this.show(wrong);
    const note = wrong ? "invalid" : value && this.describe(value);
    this.elements.note.textContent = note ? ` (${note})` : "";
    if (wrong === null) this.changed(value);
    return wrong === null;
  }

  // A complaint, ours or the server's, until the text changes. null: there is none.
  show(wrong) {
    const { field, problem } = this.elements;
    problem.textContent = wrong ?? "";
    if (wrong === null) field.removeAttribute("aria-invalid");
    else field.setAttribute("aria-invalid", "true");
  }

  focus() {
    this.elements.box.open = true;
    this.elements.field.focus();
  }
}
