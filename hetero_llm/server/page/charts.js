// Lines over the last minutes, five at most, on a canvas. Colours come from the style sheet, so
// that a chart is right in the dark as well; the second line is dashed for who sees no colours.

const MINUTES = [1, 2, 5]; // what the axis may show: the least that has room for all readings
const SECONDS = 60 * MINUTES.at(-1);
export const GAP_SECONDS = 5; // no line over a time without readings
const ROOM = { left: 50, right: 8, top: 8, bottom: 16 };
const COLOURS = ["--first", "--second"];

// The least of these times a power of ten that is not below `value`; half of it is short as well.
export function niceMaximum(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((digit) => digit * power).find((one) => one >= value * 0.9999);
}

export class Chart {
  // names: of the lines. show: a value as text. least: the axis' top or more; fixed: just that.
  constructor(parent, { id, title, names, show, least, fixed = false, wide = false }) {
    this.title = title;
    this.names = names;
    this.show = show;
    this.least = least;
    this.fixed = fixed;
    this.readings = []; // [seconds, value of the first line, ...]; null is none

    this.figure = document.createElement("figure");
    this.figure.id = id;
    this.figure.className = wide ? "chart wide" : "chart";
    const caption = document.createElement("figcaption");
    const heading = document.createElement("span");
    heading.textContent = title;
    const list = document.createElement("ul");
    this.values = names.map((name) => {
      const item = document.createElement("li");
      item.append(name ? `${name} ` : "");
      const value = document.createElement("span");
      value.textContent = "–";
      item.append(value);
      list.append(item);
      return value;
    });
    caption.append(heading, list);
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${title}: no readings yet`);
    this.figure.append(caption, this.canvas);
    parent.append(this.figure);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  hide(hidden) {
    this.figure.hidden = hidden;
  }

  clear() {
    this.readings = [];
    this.draw();
  }

  // Takes a reading; `update` shows it, so that many can be taken at once.
  add(seconds, ...values) {
    this.readings.push([seconds, ...values]);
    while (this.readings[0][0] < seconds - SECONDS - GAP_SECONDS) this.readings.shift();
  }

  update() {
    const values = this.readings.at(-1)?.slice(1) ?? [];
    const spoken = this.names.map((name, line) => {
      const text = values[line] == null ? "–" : this.show(values[line]);
      this.values[line].textContent = text;
      return `${name} ${values[line] == null ? "none" : text}`.trim();
    });
    this.canvas.setAttribute("aria-label", `${this.title}, now: ${spoken.join(", ")}`);
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !height) return; // hidden
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const ink = this.canvas.getContext("2d");
    ink.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const top = this.top();
    const last = this.readings.at(-1)?.[0] ?? 0;
    const age = last - (this.readings[0]?.[0] ?? last);
    const minutes = MINUTES.find((one) => age <= 60 * one) ?? MINUTES.at(-1);
    this.drawAxes(ink, style, width, height, top, minutes);
    const x = (seconds) => width - ROOM.right
      - ((last - seconds) / (60 * minutes)) * (width - ROOM.left - ROOM.right);
    const y = (value) => height - ROOM.bottom
      - (Math.min(value, top) / top) * (height - ROOM.top - ROOM.bottom);
    ink.lineWidth = 1.6;
    ink.lineJoin = "round";
    ink.save();
    ink.beginPath();
    ink.rect(ROOM.left, 0, width - ROOM.left, height);
    ink.clip();
    this.names.forEach((_, line) => {
      ink.strokeStyle = style.getPropertyValue(COLOURS[line]);
      ink.setLineDash(line ? [5, 3] : []);
      this.drawLine(ink, line + 1, x, y);
    });
    ink.restore();
  }

  top() {
    if (this.fixed) return this.least;
    const values = this.readings.flatMap((reading) => reading.slice(1));
    return niceMaximum(Math.max(this.least, ...values.filter((value) => value != null)));
  }

  drawAxes(ink, style, width, height, top, minutes) {
    ink.clearRect(0, 0, width, height);
    ink.font = "11px system-ui, sans-serif";
    ink.textBaseline = "middle";
    ink.lineWidth = 1;
    for (const part of [0, 0.5, 1]) {
      const at = height - ROOM.bottom - part * (height - ROOM.top - ROOM.bottom);
      ink.strokeStyle = style.getPropertyValue("--grid");
      ink.beginPath();
      ink.moveTo(ROOM.left, Math.round(at) + 0.5);
      ink.lineTo(width - ROOM.right, Math.round(at) + 0.5);
      ink.stroke();
      ink.fillStyle = style.getPropertyValue("--soft");
      ink.textAlign = "right";
      ink.fillText(this.show(part * top), ROOM.left - 6, at);
    }
    ink.textAlign = "left";
    ink.fillText(`−${minutes} min`, ROOM.left, height - 6);
    ink.textAlign = "right";
    ink.fillText("now", width - ROOM.right, height - 6);
  }

  drawLine(ink, column, x, y) {
    let before = null;
    ink.beginPath();
    for (const reading of this.readings) {
      const [seconds, value] = [reading[0], reading[column]];
      if (value == null) {
        before = null;
        continue;
      }
      const joined = before !== null && seconds - before <= GAP_SECONDS;
      if (joined) ink.lineTo(x(seconds), y(value));
      else ink.moveTo(x(seconds), y(value));
      before = seconds;
    }
    ink.stroke();
  }
}
