import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import * as asked from "./asked.mjs";

const clientOf = (apiKey = asked.apiKey, rest = {}) => new OpenAI({ baseURL: `${asked.url}/v1`, apiKey, maxRetries: 0, ...rest });
const client = clientOf();
const user = (content) => ({ role: "user", content });
const ask = { model: asked.model, messages: [user(asked.question)] };
const tools = [{ type: "function", function: { name: asked.toolName, description: asked.toolText, parameters: asked.parameters, strict: true } }];

test("chat with logprobs", async () => {
  const done = await client.chat.completions.create({ ...ask, logprobs: true, top_logprobs: 2, n: 2 });
  assert.deepEqual(done.choices.map((choice) => choice.message.content), [asked.noPlay, asked.noPlay]);
  for (const { logprobs } of done.choices) {
    assert.ok(logprobs.content.map((token) => token.token).join("").endsWith(asked.noPlay));
    assert.ok(logprobs.content.every((token) => token.top_logprobs.length === 2));
  }
});

test("a stream and its usage", async () => {
  const chunks = await asked.collect(await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } }));
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), asked.noPlay);
  assert.deepEqual(chunks.at(-1).usage, (await client.chat.completions.create(ask)).usage);
});

test("a round trip through a tool, by the client's own runner", async () => {
  const seen = [];
  const read = (given) => {
    seen.push(given);
    return asked.result;
  };
  const own = { type: "function", function: { ...tools[0].function, function: read, parse: JSON.parse } };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({ model: asked.model, messages: [user(asked.plays.tool)], tools: [own], stream });
    assert.equal(await runner.finalContent(), asked.answer);
    const called = runner.messages.find((message) => message.tool_calls);
    assert.equal(called.content, asked.said);
  }
  assert.deepEqual(seen, [asked.toolArguments, asked.toolArguments]);
});

test("a structured answer", async () => {
  const Reading = z.object({ river: z.enum(["Elbe", "Rhine"]), level_cm: z.int() });
  const parsed = await client.chat.completions.parse({
    model: asked.model,
    messages: [user(asked.plays.read)],
    response_format: zodResponseFormat(Reading, "reading"),
  });
  assert.deepEqual(parsed.choices[0].message.parsed, asked.reading);
});

test("embeddings", async () => {
  const input = ["high", "low", "high"];
  const whole = await client.embeddings.create({ model: asked.vectors, input, encoding_format: "float" });
  const packed = await client.embeddings.create({ model: asked.vectors, input }); // base64, which the client unpacks
  const [one, two, three] = whole.data.map((one) => one.embedding);
  assert.deepEqual(one, three);
  assert.notDeepEqual(one, two);
  packed.data[1].embedding.forEach((value, place) => assert.ok(Math.abs(value - two[place]) < 1e-6));
});

test("errors are of its own types", async () => {
  const bad = await client.chat.completions.create({ ...ask, temperature: 3 }).catch((error) => error);
  assert.ok(bad instanceof OpenAI.BadRequestError);
  assert.equal(bad.param, "temperature");
  const unknown = await client.chat.completions.create({ ...ask, model: "gpt-9" }).catch((error) => error);
  assert.ok(unknown instanceof OpenAI.NotFoundError);
  assert.equal(unknown.code, "model_not_found");
  const stranger = await clientOf("sk-wrong").chat.completions.create(ask).catch((error) => error);
  assert.ok(stranger instanceof OpenAI.AuthenticationError);
  assert.ok(stranger.requestID);
});

test("what may work later is tried again", async () => {
  const answers = [];
  let held;
  const release = (response) => response.status === 429 && held.controller.abort();
  const patient = clientOf(asked.tenantKeys["one at a time"], { maxRetries: 2, fetch: asked.counting(answers, release) });
  held = await patient.chat.completions.create({ model: asked.model, messages: [user(asked.held)], stream: true });
  const done = await patient.chat.completions.create(ask);
  assert.equal(done.choices[0].message.content, asked.noPlay);
  assert.deepEqual([answers[0], answers[1], answers.at(-1)], [200, 429, 200]);
});

test("what will not work later is not", async () => {
  const answers = [];
  const spent = clientOf(asked.tenantKeys.spent, { maxRetries: 2, fetch: asked.counting(answers) });
  const error = await spent.chat.completions.create(ask).catch((error) => error);
  assert.ok(error instanceof OpenAI.RateLimitError);
  assert.equal(error.code, "insufficient_quota");
  assert.deepEqual(answers, [429]);
});

const stumblingClient = (kind, name, maxRetries, answers = []) =>
  new OpenAI({ baseURL: `${asked.stumbling(kind, name)}/v1`, apiKey: asked.apiKey, maxRetries, fetch: asked.counting(answers) });

for (const kind of ["429", "500", "lost"]) {
  test(`a first request that ends in ${kind} is tried again`, async () => {
    const client = stumblingClient(kind, "node-openai", 2);
    const done = await client.chat.completions.create(ask);
    assert.equal(done.choices[0].message.content, asked.noPlay);
  });
}

test("each failure is an error of its own type", async () => {
  const types = { 429: OpenAI.RateLimitError, 500: OpenAI.InternalServerError, lost: OpenAI.APIConnectionError, final: OpenAI.RateLimitError };
  for (const [kind, type] of Object.entries(types)) {
    const answers = [];
    const client = stumblingClient(kind, "node-openai-error", kind === "final" ? 2 : 0, answers);
    const error = await client.chat.completions.create(ask).catch((error) => error);
    assert.ok(error instanceof type, `${kind}: ${error}`);
    assert.ok(answers.length <= 1, `${kind} was tried again`);
  }
});
