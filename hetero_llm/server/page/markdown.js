// Markdown as models write it: headings, lists, fenced code and paragraphs, and in them bold,
// italic and code spans. All else, HTML and links among it, stays the text that it is.
//
// A model's text reaches the page as text nodes alone, so it cannot become markup or a script. Each
// text node knows where it stands in the source: the parts that came from drafts are shaded.

const FENCE = /^\s*(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+\S/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(?=\S)/;
const MOST_DEPTH = 8; // of lists and of spans in each other: elements deeper down are flattened

// -- blocks: [start, end) in the source ------------------------------------------------------------

function linesOf(source) {
  const lines = [];
  for (let start = 0; start < source.length;) {
    const found = source.indexOf("\n", start);
    const end = found === -1 ? source.length : found;
    lines.push({ start, end, text: source.slice(start, end) });
    start = end + 1;
  }
  return lines;
}

// What is shown as it is: a block for each line, with its end, so that only the last ones change.
function plainBlocks(source) {
  return linesOf(source).map(({ start, end }) => (
    { kind: "line", start, end: Math.min(end + 1, source.length) }
  ));
}

function startsBlock(text) {
  return FENCE.test(text) || HEADING.test(text) || ITEM.test(text);
}

// The number of the first line behind a list that begins at line `at`, and its items.
function listAt(lines, at) {
  const items = [];
  let next = at;
  for (; next < lines.length; next++) {
    const { start, end, text } = lines[next];
    const found = ITEM.exec(text);
    if (found) {
      const number = parseInt(found[2], 10);
      items.push({
        indent: found[1].replaceAll("\t", "    ").length,
        number: Number.isNaN(number) ? null : number,
        start: start + found[0].length,
        end,
      });
      continue;
    }
    if (!text.trim()) {
      const behind = lines[next + 1]?.text ?? "";
      if (ITEM.test(behind) || (/^\s/.test(behind) && behind.trim())) continue;
      break;
    }
    if (!/^\s/.test(text) || FENCE.test(text)) break;
    items.at(-1).end = end;
  }
  return [next, items];
}

function blocksOf(source) {
  const lines = linesOf(source);
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const { start, end, text } = lines[at];
    if (!text.trim()) {
      at++;
      continue;
    }
    const fence = FENCE.exec(text);
    const heading = HEADING.exec(text);
    if (fence) {
      const closes = (line) => line.startsWith(fence[1]) && !line.replaceAll(fence[1][0], "");
      const found = lines.findIndex((line, index) => index > at && closes(line.text.trim()));
      const close = found === -1 ? lines.length : found;
      const inside = lines.slice(at + 1, close);
      blocks.push({
        kind: "code", start: inside[0]?.start ?? end, end: inside.at(-1)?.end ?? end,
      });
      at = close + 1;
    } else if (heading) {
      const level = heading[1].length;
      const marks = /\s+#+\s*$/.exec(text)?.[0].length ?? 0;
      blocks.push({ kind: "heading", level, start: start + heading[0].length - 1, end: end - marks });
      at++;
    } else if (ITEM.test(text)) {
      const [next, items] = listAt(lines, at);
      blocks.push({ kind: "list", start, end: items.at(-1).end, items });
      at = next;
    } else {
      let next = at + 1;
      while (next < lines.length && lines[next].text.trim() && !startsBlock(lines[next].text)) next++;
      blocks.push({ kind: "paragraph", start, end: lines[next - 1].end });
      at = next;
    }
  }
  return blocks;
}

// -- spans ----------------------------------------------------------------------------------------

function runAt(source, at, end) {
  let next = at;
  while (next < end && source[next] === source[at]) next++;
  return next - at;
}

// Where a run of exactly `length` backticks begins in [at, end), or -1.
function closingTicks(source, length, at, end) {
  const ticks = "`".repeat(length);
  let found = source.indexOf(ticks, at);
  while (found !== -1 && found + length <= end) {
    const run = runAt(source, found, end);
    if (run === length) return found;
    found = source.indexOf(ticks, found + run);
  }
  return -1;
}

// Puts the spans of one text into elements. A delimiter that was once found to have no end is not
// looked for again: a text of nothing but stars takes no longer than another.
class Spans {
  constructor(source, text) {
    this.source = source;
    this.text = text; // (parent, start, end): appends that part of the source
  }

  append(parent, start, end, depth = 0) {
    const { source } = this;
    const open = new Set();
    let shown = start;
    for (let at = start; at < end;) {
      const length = "`*".includes(source[at]) ? runAt(source, at, end) : 1;
      const span = depth < MOST_DEPTH ? this.spanAt(at, length, end, open) : null;
      if (!span) {
        at += length;
        continue;
      }
      this.text(parent, shown, at);
      const element = document.createElement(span.tag);
      if (span.tag === "code") this.text(element, span.start, span.end);
      else this.append(element, span.start, span.end, depth + 1);
      parent.append(element);
      at = shown = span.end + span.size;
    }
    this.text(parent, shown, end);
  }

  // The span whose delimiter of `length` characters stands at `at`, or null.
  spanAt(at, length, end, open) {
    const { source } = this;
    const kind = source[at];
    if (!"`*".includes(kind) || (kind === "*" && length > 3) || open.has(kind + length)) return null;
    const start = at + length;
    if (kind === "`") {
      const found = closingTicks(source, length, start, end);
      if (found > start) return { tag: "code", start, end: found, size: length };
    } else if (start < end && !/\s/.test(source[start])) {
      // *** is bold around italic: the bold part takes two stars on each side.
      const size = Math.min(length, 2);
      const first = at + size;
      const stars = "*".repeat(size);
      let found = source.indexOf(stars, start);
      while (found !== -1 && found + size <= end) {
        const run = runAt(source, found, end);
        if (!/\s/.test(source[found - 1]) && (size === 2 || run !== 2)) {
          return {
            tag: size === 2 ? "strong" : "em", start: first, end: found + run - size, size,
          };
        }
        found = source.indexOf(stars, found + run);
      }
    } else {
      return null; // a star before a space opens nothing, others may
    }
    open.add(kind + length);
    return null;
  }
}

// -- elements -------------------------------------------------------------------------------------

export class Rendered {
  // container: gets one child for each block. plain: the text is shown as it is.
  constructor(container, plain) {
    this.container = container;
    this.blocksOf = plain ? plainBlocks : blocksOf;
    this.keys = [];
  }

  // Shows a text; `marks` are ascending [start, end) in it that are shaded. Blocks that are as they
  // were keep their elements.
  show(source, marks) {
    const blocks = this.blocksOf(source);
    const shades = marks.filter(([start, end]) => end > start);
    let mark = 0;
    const keys = blocks.map(({ kind, level, start, end }) => {
      const inside = [];
      while (mark < shades.length && shades[mark][1] <= start) mark++;
      for (let at = mark; at < shades.length && shades[at][0] < end; at++) inside.push(shades[at]);
      return `${kind} ${level} ${start} ${end} ${inside.join(" ")}`;
    });
    let same = 0;
    while (same < keys.length && keys[same] === this.keys[same]) same++;
    while (this.container.childNodes.length > same) this.container.lastChild.remove();
    const spans = new Spans(source, (parent, start, end) => {
      appendShaded(parent, source, start, end, shades);
    });
    for (const block of blocks.slice(same)) this.container.append(elementOf(block, spans));
    this.keys = keys;
  }
}

function elementOf(block, spans) {
  const { kind, start, end } = block;
  if (kind === "code") {
    const pre = document.createElement("pre");
    const code = document.createElement("code");
    spans.text(code, start, end);
    pre.tabIndex = 0; // it may be wider than it is seen
    pre.append(code);
    return pre;
  }
  if (kind === "list") return listOf(block.items, spans);
  if (kind === "line") {
    const line = document.createElement("span");
    spans.text(line, start, end);
    return line;
  }
  // The page's own headings are h1 to h3.
  const element = document.createElement(kind === "heading" ? `h${Math.min(block.level + 3, 6)}` : "p");
  spans.append(element, start, end);
  return element;
}

function listOf(items, spans) {
  const holder = document.createElement("div");
  const open = []; // the lists around the next item: their indent, element and kind
  for (const { indent, number, start, end } of items) {
    while (open.length > 1 && indent <= open.at(-2).indent) open.pop();
    const ordered = number !== null;
    const inner = open.length && indent >= open.at(-1).indent + 2 && open.length < MOST_DEPTH;
    if (!open.length || inner || open.at(-1).ordered !== ordered) {
      if (!inner) open.pop();
      const element = document.createElement(ordered ? "ol" : "ul");
      if (ordered) element.start = number;
      (open.at(-1)?.element.lastChild ?? holder).append(element);
      open.push({ indent, ordered, element });
    }
    const item = document.createElement("li");
    spans.append(item, start, end);
    open.at(-1).element.append(item);
  }
  return holder;
}

// Appends source[start, end), the parts inside of marks as <mark>.
function appendShaded(parent, source, start, end, marks) {
  let low = 0;
  for (let high = marks.length; low < high;) {
    const middle = (low + high) >> 1;
    if (marks[middle][1] <= start) low = middle + 1;
    else high = middle;
  }
  let at = start;
  for (; low < marks.length && marks[low][0] < end; low++) {
    const first = Math.max(marks[low][0], start);
    const last = Math.min(marks[low][1], end);
    if (first > at) parent.append(source.slice(at, first));
    const mark = document.createElement("mark");
    mark.className = "draft";
    mark.textContent = source.slice(first, last);
    parent.append(mark);
    at = last;
  }
  if (at < end) parent.append(source.slice(at, end));
}
