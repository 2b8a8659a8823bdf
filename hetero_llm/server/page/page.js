// The status page: polls status.json, draws it, and tells what is wrong.
//
// All addresses are relative, so that the page works behind a proxy's prefix. The API key is kept in
// this tab's session storage, the conversation in the browser's local storage.

import { Chart, GAP_SECONDS } from "./charts.js";
import { Chat, failureOf } from "./chat.js";

const POLL_MS = 1000;
const PATIENCE_MS = 5000; // for one answer of status.json
const KEY = "hetero_llm.key";
const ERRORS_KEPT = 20;

const at = (id) => document.getElementById(id);
const count = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const percent = (value) => {
  if (value > 0 && value < 0.001) return "<0.1%";
  return `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)}%`;
};
const duration = (seconds) => {
  if (seconds >= 0.9995) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  return `${(1000 * seconds).toFixed(seconds > 0 && seconds < 0.00995 ? 1 : 0)} ms`;
};
const GIB = 2 ** 30;
const gib = (used, total) => `${(used / GIB).toFixed(1)} of ${(total / GIB).toFixed(1)} GiB`;

let status = null; // the last status.json
let statusAt = 0; // when it came
let errors = []; // of this tab: [time, what], without anybody's text
let dismissed = null; // the banner's text that was read
let current = null; // the trouble that is there now
let oldest = null; // server errors before this page was opened are no news
let keyWanted = null; // resolves when a key was entered

// -- the key --------------------------------------------------------------------------------------

function storedKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null; // the browser forbids it
  }
}

let key = storedKey();

// fetch with the key; asks for one if the server wants another.
async function api(path, options = {}) {
  const used = key;
  const headers = { ...options.headers, ...(used ? { authorization: `Bearer ${used}` } : {}) };
  const response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  if (response.status === 401 && used === key) askForKey(used !== null);
  return response;
}

function askForKey(refused) {
  const dialog = at("key-dialog");
  at("key-text").textContent = refused
    ? "The key was not accepted."
    : "This server wants a key. It stays in this tab until you close it.";
  if (!dialog.open) dialog.showModal();
  at("key").select();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const entered = at("key").value.trim();
  try {
    new Headers({ authorization: `Bearer ${entered}` });
  } catch {
    at("key-text").textContent = "A key with these characters cannot be sent.";
    return;
  }
  key = entered;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // then it is kept until the page is left
  }
  at("key").value = "";
  at("key-dialog").close();
  keyWanted?.();
});
at("key-cancel").addEventListener("click", () => at("key-dialog").close());
at("key-button").addEventListener("click", () => {
  at("key-text").textContent = "It stays in this tab until you close it.";
  at("key-dialog").showModal();
});

// -- trouble --------------------------------------------------------------------------------------

function note(what) {
  errors = [...errors, { time: new Date().toISOString(), what }].slice(-ERRORS_KEPT);
}

// Shows a text, or nothing for null. What was dismissed comes back when it changes.
function trouble(text) {
  if (text === current) return;
  current = text;
  if (text !== null && text !== dismissed) {
    at("banner-text").textContent = text;
    at("report").hidden = true;
    at("banner").hidden = false;
  } else if (text === null) {
    at("banner").hidden = true;
    dismissed = null;
  }
}

at("dismiss").addEventListener("click", () => {
  dismissed = current;
  at("banner").hidden = true;
  at("prompt").focus();
});

// What helps whoever looks into it: no prompts, no answers, no keys.
function report() {
  return JSON.stringify(
    {
      report: "hetero_llm status page",
      time: new Date().toISOString(),
      browser: navigator.userAgent,
      trouble: current ?? dismissed,
      version: status?.version ?? null,
      state: status?.state ?? null,
      plan: status?.plan?.split("\n") ?? null,
      engine: status?.engine ?? null,
      uptime: status?.uptime ?? null,
      now: status?.now ?? null,
      counters: status?.counters ?? null,
      server_errors: status?.errors ?? [],
      page_errors: errors,
    },
    null,
    2,
  );
}

at("copy-report").addEventListener("click", async () => {
  const text = report();
  const button = at("copy-report");
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy report"), 2000);
  } catch {
    // Browsers give pages without TLS no clipboard: then it is there to be copied by hand.
    const field = at("report");
    field.value = text;
    field.hidden = false;
    field.focus();
    field.select();
  }
});

// -- figures --------------------------------------------------------------------------------------

const grid = at("chart-grid");
const charts = {
  throughput: new Chart(grid, {
    id: "chart-throughput", title: "Throughput, tokens/s", names: ["generated", "prompt"],
    show: (value) => count.format(value), least: 10, wide: true,
  }),
  kv: new Chart(grid, {
    id: "chart-kv", title: "KV cache in use", names: [""], show: percent, least: 1, fixed: true,
  }),
  queue: new Chart(grid, {
    id: "chart-queue", title: "Requests", names: ["running", "waiting"],
    show: (value) => count.format(value), least: 2,
  }),
  first: new Chart(grid, {
    id: "chart-first", title: "First token", names: ["p50", "p99"], show: duration, least: 0.01,
  }),
  between: new Chart(grid, {
    id: "chart-between", title: "Token gaps", names: ["p50", "p99"], show: duration,
    least: 0.01,
  }),
  prefix: new Chart(grid, {
    id: "chart-prefix", title: "Prefix cache hits", names: [""], show: percent, least: 1,
    fixed: true,
  }),
  acceptance: new Chart(grid, {
    id: "chart-acceptance", title: "Draft tokens accepted", names: [""], show: percent, least: 1,
    fixed: true,
  }),
  cpu: new Chart(grid, {
    id: "chart-cpu", title: "CPU busy with us", names: [""], show: percent, least: 1, fixed: true,
  }),
  gpu: new Chart(grid, {
    id: "chart-gpu", title: "GPU busy", names: ["mean", "most"], show: percent, least: 1,
    fixed: true,
  }),
};
charts.gpu.hide(true);

const chat = new Chat(
  {
    form: at("form"), prompt: at("prompt"), mode: at("mode"), maxTokens: at("max-tokens"),
    temperature: at("temperature"), send: at("send"), stop: at("stop"), clear: at("clear"),
    hint: at("hint"), notice: at("notice"), log: at("log"), system: at("system"),
    systemBox: at("system-box"), extras: at("extras"), tools: at("tools"),
    toolsBox: at("tools-box"), toolsProblem: at("tools-problem"), toolsNote: at("tools-note"),
    toolChoice: at("tool-choice"), schema: at("schema"), schemaBox: at("schema-box"),
    schemaProblem: at("schema-problem"), schemaNote: at("schema-note"), attach: at("attach"),
    files: at("files"), attached: at("attached"), speed: at("speed"),
    firstToken: at("first-token"), tokens: at("tokens"), drafted: at("drafted"),
  },
  api,
  (error) => note(`request: ${error.kind ?? error.name}`),
);
chat.showMode();

function draw(next) {
  const before = status;
  status = next;
  chat.setModel(next.model);
  at("state").textContent = next.state;
  at("state").className = `state ${{ ready: "ready", draining: "" }[next.state] ?? "bad"}`;
  at("model").textContent = next.model.name;
  const { device, dtype, backend } = next.engine;
  at("about").textContent = `${dtype} on ${device} (${backend}), context `
    + `${next.model.max_model_len} tokens, version ${next.version}`;
  const { requests_finished: finished, generation_tokens: generated } = next.counters;
  at("totals").textContent = `${count.format(finished)} requests, ${count.format(generated)} `
    + "tokens since the start";
  drawFigures(next);
  if (before && next.uptime <= before.uptime) {
    for (const chart of Object.values(charts)) chart.clear(); // another server: from the beginning
    return;
  }
  let last = before;
  for (const reading of [...(next.history ?? []), next]) {
    if (last) addRates(last, reading); // rates need two readings
    last = reading;
  }
  for (const chart of Object.values(charts)) chart.update();
}

function drawFigures({ counters, now, latency, machine, engine }) {
  const three = (found) => {
    if (!found) return "–";
    return ["p50", "p95", "p99"].map((name) => `${name} ${duration(found[name])}`).join(", ");
  };
  at("latency-first").textContent = three(latency.first_token);
  at("latency-between").textContent = three(latency.between_tokens);
  const { prefix_cache_hits: hits, prefix_cache_queries: queries } = counters;
  at("prefix-hits").textContent = queries
    ? `${percent(hits / queries)} of ${count.format(queries)} tokens` : "–";
  const size = count.format(engine.num_blocks * engine.block_size);
  const host = now.host_kv_usage === null ? "" : `, ${percent(now.host_kv_usage)} of host's`;
  at("kv-memory").textContent = `${percent(now.kv_usage)} of ${size} tokens${host}`;
  at("host-memory").textContent = gib(machine.memory_bytes, machine.memory_total_bytes);
  at("gpu-box").hidden = machine.gpu_memory === null;
  at("gpu-memory").textContent = (machine.gpu_memory ?? [])
    .map((one) => gib(one.used_bytes, one.total_bytes)).join(", ");
}

function addRates(before, next) {
  const now = next.uptime;
  const seconds = now - before.uptime;
  const grown = (name) => Math.max(next.counters[name] - before.counters[name], 0);
  const rate = (name) => grown(name) / seconds;
  const part = (name, whole) => (grown(whole) ? grown(name) / grown(whole) : null);
  charts.throughput.add(now, rate("generation_tokens"), rate("prompt_tokens"));
  charts.kv.add(now, next.now.kv_usage);
  charts.queue.add(now, next.now.running, next.now.waiting);
  const { first_token: first, between_tokens: between } = next.latency;
  charts.first.add(now, first?.p50 ?? null, first?.p99 ?? null);
  charts.between.add(now, between?.p50 ?? null, between?.p99 ?? null);
  charts.prefix.add(now, part("prefix_cache_hits", "prefix_cache_queries"));
  charts.acceptance.add(now, part("accepted_tokens", "draft_tokens"));
  const { cores, cpu_seconds: cpu, gpu } = next.machine;
  charts.cpu.add(now, (cpu - before.machine.cpu_seconds) / seconds / cores);
  charts.gpu.hide(gpu === null);
  if (gpu) {
    charts.gpu.add(now, gpu.reduce((sum, one) => sum + one, 0) / gpu.length, Math.max(...gpu));
  }
}

// The server's trouble in words, or null.
function troubleIn(next) {
  if (next.state === "dead") return "The engine has stopped. Nothing is answered until a restart.";
  if (next.state === "hung") return "The engine shows no life. Requests are refused meanwhile.";
  if (next.state === "draining") return "The server is shutting down; new requests are refused.";
  oldest ??= next.time;
  const news = next.errors.filter((error) => error.time >= oldest);
  if (!news.length) return null;
  const { status: code, message } = news.at(-1);
  const many = news.length > 1 ? ` (${news.length} errors since this page was opened)` : "";
  return `A request failed with status ${code}: ${message}${many}`;
}

// The address of the figures. The first time, and after a time without readings (a sleeping tab),
// with those that the server has kept meanwhile.
function wanted(seconds) {
  if (status === null) return "status.json?since=-1";
  return seconds > GAP_SECONDS ? `status.json?since=${status.uptime}` : "status.json";
}

async function poll() {
  let response;
  try {
    response = await api(wanted((performance.now() - statusAt) / 1000), { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (response.status === 401) {
      at("state").textContent = "key needed";
      await new Promise((resolve) => (keyWanted = resolve));
      return;
    }
    if (!response.ok) throw await failureOf(response);
    const next = await response.json();
    statusAt = performance.now();
    draw(next);
    trouble(troubleIn(next));
  } catch (error) {
    if (at("state").textContent !== "no answer") note(`status.json: ${error.kind ?? error.name}`);
    at("state").textContent = "no answer";
    at("state").className = "state bad";
    trouble("The server does not answer. The figures below are old.");
  }
}

async function run() {
  for (;;) {
    const begun = performance.now();
    await poll();
    const left = POLL_MS - (performance.now() - begun);
    await new Promise((resolve) => setTimeout(resolve, Math.max(left, 50)));
  }
}

const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => Object.values(charts).forEach((chart) => chart.draw()));
addEventListener("error", (event) => note(`script: ${event.filename}:${event.lineno}`));
run();
