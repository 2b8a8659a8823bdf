// The tool calls of one answer: their arguments as they come, and boxes for the tools' results.

import { made } from "./elements.js";

const MOST_INDENTS = 32; // deeper values are not indented further

// JSON with a line for each member. Numbers and texts stay as they were written: read and written
// anew, 12345678901234567890 would be another number.
export function pretty(json) {
  let depth = 0;
  const line = () => `\n${"  ".repeat(Math.min(depth, MOST_INDENTS))}`;
  return json.replace(/"(?:[^"\\]|\\.)*"|[{[]\s*[}\]]|[{}[\],:]|\s+/g, (part) => {
    if (part[0] === '"') return part;
    if (/^[{[]/.test(part) && part.length > 1) return part[0] + part.at(-1);
    if (/[{[]/.test(part)) {
      depth++;
      return part + line();
    }
    if (/[}\]]/.test(part)) {
      depth--;
      return line() + part;
    }
    if (part === ",") return part + line();
    return part === ":" ? ": " : "";
  });
}

// Whether the arguments are the JSON object that the server wants back with the tool's result.
export function isWhole(call) {
  try {
    const value = JSON.parse(call.arguments);
    return value !== null && typeof value === "object" && !Array.isArray(value);
  } catch {
    return false;
  }
}

export class CallsView {
  // send: called with [{id, name, text}], the results of all whole calls.
  constructor(send) {
    this.element = made("form", "calls");
    this.boxes = [];
    this.calls = [];
    this.fields = []; // [call, textarea] while results are wanted
    this.button = made("button", "main", "Send results");
    this.button.type = "submit";
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.fields.length) return;
      send(this.fields.map(([{ id, name }, field]) => ({ id, name, text: field.value })));
    });
  }

  // coming: whether the last call may get more arguments.
  show(calls, coming) {
    this.calls = calls;
    calls.forEach((call, index) => {
      const box = (this.boxes[index] ??= this.added(call));
      if (box.ended) return;
      box.ended = !coming || index < calls.length - 1;
      const whole = box.ended && isWhole(call);
      box.code.textContent = whole ? pretty(call.arguments) : call.arguments;
      box.problem.hidden = whole || !box.ended;
    });
  }

  added({ name }) {
    const element = made("div", "call");
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", `Call of ${name}`);
    const title = made("h4", "", "Calls ");
    title.append(made("code", "", name));
    const code = made("code", "");
    const pre = made("pre", "");
    pre.tabIndex = 0; // it may be wider than it is seen
    pre.append(code);
    const problem = made("p", "problem", "The arguments are no complete JSON object: the model "
      + "does not see this call again.");
    element.append(title, pre, problem);
    this.element.append(element);
    return { element, code, problem, ended: false };
  }

  // Boxes for the results of the whole calls, or none.
  offerResults(offered) {
    if (offered === this.fields.length > 0) return;
    for (const [, field] of this.fields) field.parentElement.remove();
    this.fields = [];
    this.button.remove();
    if (!offered) return;
    this.calls.forEach((call, index) => {
      if (!isWhole(call)) return;
      const label = made("label", "result", `Result of ${call.name}`);
      const field = made("textarea", "");
      field.rows = 2;
      field.autocomplete = "off";
      field.placeholder = "What the tool answers; Ctrl+Enter sends";
      field.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
        event.preventDefault();
        this.element.requestSubmit();
      });
      label.append(field);
      this.boxes[index].element.append(label);
      this.fields.push([call, field]);
    });
    this.button.textContent = this.fields.length === 1 ? "Send result" : "Send results";
    if (this.fields.length) this.element.append(this.button);
  }
}
