// What cells.py is for Python's clients, for Node's.

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";

const PATIENCE = 60_000;
const LOOK = 10;

export const equal = assert.deepStrictEqual;
export const ok = assert.ok;

/** Runs each cell and writes which of them failed, and how, by their functions' names. */
export async function runCells(setup, cells, version) {
  const results = {};
  for (const cell of cells) {
    try {
      await cell(setup);
      results[cell.name] = null;
    } catch (error) {
      results[cell.name] = String(error?.stack ?? error);
    }
  }
  writeFileSync(process.argv[3], JSON.stringify({ version, cells: results }));
}

export function readSetup() {
  return JSON.parse(readFileSync(process.argv[2], "utf8"));
}

/** Asserts that a call of one of `wanted.tools` has arguments that its schema allows. */
export function checkCall(name, given) {
  if (name === "now") return equal(given, {});
  equal([name, Object.keys(given).sort()], ["get_weather", ["city", "days"]]);
  ok(["Köln", "Bonn"].includes(given.city), given.city);
  ok(Number.isInteger(given.days) && given.days >= 1 && given.days <= 9, given.days);
}

/** The error that a call ends with. */
export async function caught(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error("no error");
}

// the server's own view

async function metric(url, name, labels = "") {
  const text = await (await fetch(`${url}/metrics`)).text();
  let total = 0;
  for (const line of text.split("\n")) {
    const found = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (found && found[1] === name && (found[2] ?? "").includes(labels)) total += Number(found[3]);
  }
  return total;
}

async function until(condition, what) {
  const end = Date.now() + PATIENCE;
  while (!(await condition())) {
    ok(Date.now() < end, `never: ${what}`);
    await new Promise((done) => setTimeout(done, LOOK));
  }
}

/** Asserts that the stream which `leave` begins and leaves was aborted, and nothing is left. */
export async function leaving(setup, leave) {
  const name = "hetero_llm:aborted_requests_total";
  const gone = 'cause="client_gone"';
  const before = await metric(setup.url, name, gone);
  await leave();
  const aborted = async () => (await metric(setup.url, name, gone)) === before + 1;
  await until(aborted, "the request was aborted");
  equal(await (await fetch(`${setup.url}/load`)).json(), { server_load: 0 });
  for (const gauge of ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]) {
    await until(async () => (await metric(setup.url, `vllm:${gauge}`)) === 0, `${gauge} is 0`);
  }
}

/** What `ask` returns if the small server refuses it first, because it is full, and then not. */
export async function refusedThenServed(setup, ask) {
  const url = setup.small_url;
  const [name, reason] = ["vllm:admission_rejections_total", 'reason="overloaded"'];
  const before = await metric(url, name, reason);
  const leave = new AbortController();
  const full = await fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${setup.key}`, "content-type": "application/json" },
    body: JSON.stringify({ prompt: [1], max_tokens: 2000, ignore_eos: true, stream: true }),
    signal: leave.signal,
  });
  equal(full.status, 200);
  await full.body.getReader().read();
  const answer = ask();
  answer.catch(() => {}); // it is awaited below
  try {
    await until(async () => (await metric(url, name, reason)) > before, "the server refused");
  } finally {
    leave.abort();
  }
  return await answer;
}
