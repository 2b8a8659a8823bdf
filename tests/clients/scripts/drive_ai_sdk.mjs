// Vercel's AI SDK, with one of its providers: openai-compatible (chat completions), openai (the
// Responses API) or anthropic (the Messages API).

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import path from "node:path";
import {
  caught, checkCall, equal, leaving, ok, readSetup, refusedThenServed, runCells,
} from "./cells.mjs";

const setup = readSetup();
const modules = path.join(setup.environment, "index.js");
const load = (name) => import(pathToFileURL(createRequire(modules).resolve(name)).href);
const { generateText, isStepCount, jsonSchema, Output, streamText, tool } = await load("ai");
const { z } = await load("zod");
const wanted = setup.wanted;

const STRUCTURE = z.object({
  name: z.string().max(12),
  kind: z.enum(["list", "set"]),
  size: z.number().int().min(0).max(99),
  done: z.boolean(),
});
const WEATHER = z.object({ city: z.enum(["Köln", "Bonn"]), days: z.number().int().min(1).max(9) });

async function model({ url = setup.url, key = setup.key, name = setup.model } = {}) {
  const given = { baseURL: `${url}/v1`, apiKey: key };
  switch (setup.options.provider) {
    case "openai": {
      const { createOpenAI } = await load("@ai-sdk/openai");
      return createOpenAI(given).responses(name);
    }
    case "anthropic": {
      const { createAnthropic } = await load("@ai-sdk/anthropic");
      return createAnthropic(given)(name);
    }
  }
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const more = { name: "demo", includeUsage: true, supportsStructuredOutputs: true };
  return createOpenAICompatible({ ...given, ...more }).chatModel(name);
}

async function greedy(which = "messages", rest = {}) {
  const [system, user] = wanted[which];
  const most = which === "asking" ? wanted.guided_tokens : wanted.max_tokens;
  return {
    model: await model(),
    instructions: system.content,
    prompt: user.content,
    temperature: 0,
    maxOutputTokens: most,
    maxRetries: 0,
    ...rest,
  };
}

async function joined(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return [pieces.join(""), pieces.length];
}

async function chat() {
  const answer = await generateText(await greedy());
  equal([answer.text, answer.finishReason], [wanted.chat, "length"]);
}

async function stream() {
  const answer = streamText(await greedy());
  const [text, pieces] = await joined(answer.textStream);
  equal([text, await answer.finishReason], [wanted.chat, "length"]);
  ok(pieces > 1);
}

async function usage() {
  const counts = [wanted.chat_prompt_tokens, wanted.max_tokens];
  const whole = await generateText(await greedy());
  equal([whole.usage.inputTokens, whole.usage.outputTokens], counts);
  const streamed = streamText(await greedy());
  await joined(streamed.textStream);
  const found = await streamed.usage;
  equal([found.inputTokens, found.outputTokens], counts);
}

async function stop() {
  const answer = await generateText(await greedy("messages", { stopSequences: [wanted.stop] }));
  const text = wanted.chat.slice(0, wanted.chat.indexOf(wanted.stop));
  equal([answer.text, answer.finishReason], [text, "stop"]);
}

async function parallel() {
  const calls = Array.from({ length: 8 }, async () => (await generateText(await greedy())).text);
  equal(await Promise.all(calls), Array(8).fill(wanted.chat));
}

async function errors() {
  const hot = await caught(async () => generateText(await greedy("messages", { topP: 2 })));
  equal([hot.name, hot.statusCode], ["AI_APICallError", 400]);
  ok(hot.message.includes("top_p"), hot.message);
  const other = { model: await model({ name: "nothing" }) };
  const missing = await caught(async () => generateText(await greedy("messages", other)));
  equal([missing.name, missing.statusCode], ["AI_APICallError", 404]);
  ok(missing.message.includes("does not exist"), missing.message);
}

async function wrong_key() {
  const other = { model: await model({ key: "wrong" }) };
  const error = await caught(async () => generateText(await greedy("messages", other)));
  equal(error.statusCode, 401);
  ok(error.message.includes("API key is not accepted"), error.message);
}

async function retry() {
  const small = { model: await model({ url: setup.small_url }), maxRetries: 8 };
  const ask = async () => generateText(await greedy("messages", small));
  equal((await refusedThenServed(setup, ask)).text, wanted.chat);
}

async function abort() {
  const leave = new AbortController();
  const long = { maxOutputTokens: 1900, prompt: "def f():", abortSignal: leave.signal };
  await leaving(setup, async () => {
    const begun = streamText(await greedy("messages", { ...long, onError() {} }));
    const pieces = begun.textStream[Symbol.asyncIterator]();
    await pieces.next();
    leave.abort();
  });
}

function tools() {
  return callTools();
}

/** A call, the same in pieces, and an answer to its result. */
async function callTools() {
  const given = Object.fromEntries(
    wanted.tools.map(({ function: one }) => [
      one.name,
      tool({ description: one.description, inputSchema: jsonSchema(one.parameters) }),
    ]),
  );
  const named = { type: "tool", toolName: "get_weather" };
  const asked = await greedy("asking", { tools: given, toolChoice: named });
  const answer = await generateText(asked);
  equal(answer.finishReason, "tool-calls");
  const [call] = answer.toolCalls;
  checkCall(call.toolName, call.input);
  const streamed = streamText(asked);
  const parts = [];
  for await (const part of streamed.stream) parts.push(part);
  const text = parts.filter((part) => part.type === "tool-input-delta").map((part) => part.delta);
  equal(JSON.parse(text.join("")), call.input);
  const [again] = await streamed.toolCalls;
  equal([again.toolName, again.input], [call.toolName, call.input]);
  const { prompt, ...rest } = asked;
  const output = { type: "text", value: "18 °C" };
  const result = { type: "tool-result", toolCallId: call.toolCallId, toolName: call.toolName, output };
  const turns = [
    { role: "user", content: prompt },
    ...answer.responseMessages,
    { role: "tool", content: [result] },
  ];
  const free = { messages: turns, toolChoice: "none", maxOutputTokens: wanted.max_tokens };
  const said = await generateText({ ...rest, ...free });
  ok(said.text && !said.toolCalls.length, said.text);
}

async function json_schema() {
  const output = Output.object({ schema: jsonSchema(wanted.schema), name: "structure" });
  const answer = await generateText(await greedy("asking", { output }));
  equal(answer.output, JSON.parse(wanted.structure));
  // The provider of Anthropic's asks for it as a call.
  if (setup.options.provider !== "anthropic") equal(answer.text, wanted.structure);
  const streamed = streamText(await greedy("asking", { output }));
  const partial = [];
  for await (const one of streamed.partialOutputStream) partial.push(one);
  equal(partial.at(-1), answer.output);
  ok(partial.length > 1);
}

async function parse() {
  const output = Output.object({ schema: STRUCTURE });
  const answer = await generateText(await greedy("asking", { output }));
  STRUCTURE.parse(answer.output);
  const choice = Output.choice({ options: ["list", "set"] });
  const chosen = await generateText(await greedy("asking", { output: choice }));
  ok(["list", "set"].includes(chosen.output), chosen.output);
}

async function agent() {
  const asked = [];
  const get_weather = tool({
    description: "The weather of a city.",
    inputSchema: WEATHER,
    strict: true,
    execute: async ({ city, days }) => {
      checkCall("get_weather", { city, days });
      asked.push(city);
      return `18 °C in ${city}`;
    },
  });
  const answer = await generateText(
    await greedy("asking", {
      tools: { get_weather },
      output: Output.object({ schema: STRUCTURE }),
      stopWhen: isStepCount(3),
      // The model has to call in the first step, and may not in the second.
      prepareStep: ({ stepNumber }) => ({
        toolChoice: stepNumber ? "none" : { type: "tool", toolName: "get_weather" },
      }),
    }),
  );
  equal(answer.steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
  equal(answer.steps[0].toolResults[0].output, `18 °C in ${asked[0]}`);
  STRUCTURE.parse(answer.output);
}

async function reasoning() {
  const thinks = { providerOptions: { demo: { chat_template_kwargs: { enable_thinking: true } } } };
  const answer = await generateText(await greedy("messages", thinks));
  equal([answer.reasoningText.trim(), answer.text], [wanted.thought, ""]);
  const pieces = [];
  for await (const part of streamText(await greedy("messages", thinks)).stream) {
    if (part.type === "reasoning-delta") pieces.push(part.text);
  }
  equal(pieces.join("").trim(), wanted.thought);
}

async function responses() {
  await chat();
  await stream();
  await usage();
  const first = await generateText(await greedy());
  const after = { openai: { previousResponseId: first.response.id } };
  const again = { prompt: "and now?", providerOptions: after };
  const second = await generateText(await greedy("messages", again));
  ok(second.usage.inputTokens > first.usage.inputTokens + first.usage.outputTokens);
}

async function responses_tools() {
  await callTools();
  await json_schema();
  await parse();
  await agent();
}

const CELLS = {
  "openai-compatible": [chat, stream, usage, stop, parallel, errors, wrong_key, retry, abort,
    tools, json_schema, parse, agent, reasoning],
  openai: [responses, responses_tools],
  anthropic: [chat, stream, usage, stop, errors, wrong_key, tools, json_schema, parse, agent],
};
const version = createRequire(modules)("ai/package.json").version;
await runCells(setup, CELLS[setup.options.provider], `${version}, Node ${process.versions.node}`);
