import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

import * as asked from "./asked.mjs";

const clientOf = (apiKey = asked.apiKey, rest = {}) => new Anthropic({ baseURL: asked.url, apiKey, maxRetries: 0, ...rest });
const client = clientOf();
const user = (content) => ({ role: "user", content });
const ask = { model: asked.model, max_tokens: 2048, messages: [user(asked.question)] };
const said = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
const tools = [{ name: asked.toolName, description: asked.toolText, input_schema: asked.parameters }];

test("a message and its tokens", async () => {
  const done = await client.messages.create(ask);
  assert.equal(said(done), asked.noPlay);
  assert.equal(done.stop_reason, "end_turn");
  const counted = await client.messages.countTokens({ model: asked.model, messages: ask.messages });
  assert.equal(counted.input_tokens, done.usage.input_tokens + (done.usage.cache_read_input_tokens ?? 0));
});

test("a stream says the same", async () => {
  const pieces = [];
  const stream = client.messages.stream(ask).on("text", (text) => pieces.push(text));
  assert.equal(await stream.finalText(), asked.noPlay);
  assert.ok(pieces.length > 1);
  assert.equal(pieces.join(""), asked.noPlay);
});

test("a round trip through a tool", async () => {
  const messages = [user(asked.plays.tool)];
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const called = await client.messages.stream({ ...ask, messages, tools, thinking }).finalMessage();
  assert.equal(called.stop_reason, "tool_use");
  const [thought, text, call] = called.content;
  assert.equal(thought.type, "thinking");
  assert.equal(text.text.trim(), asked.said);
  assert.deepEqual([call.name, call.input], [asked.toolName, asked.toolArguments]);
  const result = { type: "tool_result", tool_use_id: call.id, content: asked.result };
  messages.push({ role: "assistant", content: called.content }, user([result]));
  const done = await client.messages.create({ ...ask, messages, tools, thinking });
  assert.equal(done.content.at(-1).text, asked.answer);
});

test("a structured answer", async () => {
  const Reading = z.object({ river: z.enum(["Elbe", "Rhine"]), level_cm: z.int() });
  const output_config = { format: zodOutputFormat(Reading) };
  const parsed = await client.messages.parse({ ...ask, messages: [user(asked.plays.read)], output_config });
  assert.deepEqual(parsed.parsed_output, asked.reading);
});

test("errors are of its own types", async () => {
  const bad = await client.messages.create({ ...ask, stop_sequences: [""] }).catch((error) => error);
  assert.ok(bad instanceof Anthropic.BadRequestError);
  assert.match(bad.message, /stop_sequences/);
  const unknown = await client.messages.create({ ...ask, model: "claude-9" }).catch((error) => error);
  assert.ok(unknown instanceof Anthropic.NotFoundError);
  const stranger = await clientOf("sk-wrong").messages.create(ask).catch((error) => error);
  assert.ok(stranger instanceof Anthropic.AuthenticationError);
  assert.ok(stranger.requestID);
});

test("what may work later is tried again", async () => {
  const answers = [];
  let held;
  const release = (response) => response.status === 429 && held.controller.abort();
  const patient = clientOf(asked.tenantKeys["one at a time"], { maxRetries: 2, fetch: asked.counting(answers, release) });
  held = await patient.messages.create({ ...ask, messages: [user(asked.held)], stream: true });
  assert.equal(said(await patient.messages.create(ask)), asked.noPlay);
  assert.deepEqual([answers[0], answers[1], answers.at(-1)], [200, 429, 200]);
});

test("what will not work later is not", async () => {
  const answers = [];
  const spent = clientOf(asked.tenantKeys.spent, { maxRetries: 2, fetch: asked.counting(answers) });
  const error = await spent.messages.create(ask).catch((error) => error);
  assert.ok(error instanceof Anthropic.APIError);
  assert.equal(answers.length, 1);
});

const stumblingClient = (kind, name, maxRetries, answers = []) =>
  new Anthropic({ baseURL: `${asked.stumbling(kind, name)}`, apiKey: asked.apiKey, maxRetries, fetch: asked.counting(answers) });

for (const kind of ["429", "500", "lost"]) {
  test(`a first request that ends in ${kind} is tried again`, async () => {
    const client = stumblingClient(kind, "node-anthropic", 2);
    const done = await client.messages.create(ask);
    assert.equal(said(done), asked.noPlay);
  });
}

test("each failure is an error of its own type", async () => {
  const types = { 429: Anthropic.RateLimitError, 500: Anthropic.InternalServerError, lost: Anthropic.APIConnectionError, final: Anthropic.RateLimitError };
  for (const [kind, type] of Object.entries(types)) {
    const answers = [];
    const client = stumblingClient(kind, "node-anthropic-error", kind === "final" ? 2 : 0, answers);
    const error = await client.messages.create(ask).catch((error) => error);
    assert.ok(error instanceof type, `${kind}: ${error}`);
    assert.ok(answers.length <= 1, `${kind} was tried again`);
  }
});
