import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import * as asked from "./asked.mjs";

const client = new OpenAI({ baseURL: `${asked.url}/v1`, apiKey: asked.apiKey, maxRetries: 0 });
const ask = { model: asked.model, store: false };
const tools = [{ type: "function", name: asked.toolName, description: asked.toolText, parameters: asked.parameters, strict: true }];

test("an answer and its stream", async () => {
  const whole = await client.responses.create({ ...ask, input: asked.question });
  assert.equal(whole.output_text, asked.noPlay);
  const pieces = [];
  const stream = client.responses.stream({ ...ask, input: asked.question });
  stream.on("response.output_text.delta", ({ delta }) => pieces.push(delta));
  const last = await stream.finalResponse();
  assert.ok(pieces.length > 1);
  assert.equal(pieces.join(""), asked.noPlay);
  assert.deepEqual(last.usage, whole.usage);
});

test("a round trip through a tool", async () => {
  const input = [{ role: "user", content: asked.plays.tool }];
  const called = await client.responses.create({ ...ask, input, tools });
  assert.equal(called.output_text, asked.said);
  const call = called.output.find((item) => item.type === "function_call");
  assert.deepEqual([call.name, JSON.parse(call.arguments)], [asked.toolName, asked.toolArguments]);
  input.push(...called.output, { type: "function_call_output", call_id: call.call_id, output: asked.result });
  assert.equal((await client.responses.create({ ...ask, input, tools })).output_text, asked.answer);
});

test("an answer in the background, read again from an event, and gone on from", async () => {
  const background = await client.responses.create({ model: asked.model, input: asked.question, background: true });
  assert.equal(background.status, "queued");
  const events = [];
  for await (const event of await client.responses.retrieve(background.id, { stream: true })) events.push(event);
  assert.equal(events.at(-1).type, "response.completed");
  const rest = [];
  for await (const event of await client.responses.retrieve(background.id, { stream: true, starting_after: 3 })) rest.push(event);
  assert.deepEqual(rest, events.slice(4));
  while ((await client.responses.retrieve(background.id)).status !== "completed") await new Promise((done) => setTimeout(done, 50));
  const more = await client.responses.create({ model: asked.model, input: "More.", previous_response_id: background.id });
  assert.equal(more.output_text, asked.noPlay);
  await client.responses.delete(background.id);
  await assert.rejects(client.responses.retrieve(background.id), OpenAI.NotFoundError);
});

test("a structured answer", async () => {
  const Reading = z.object({ river: z.enum(["Elbe", "Rhine"]), level_cm: z.int() });
  const text = { format: zodTextFormat(Reading, "reading") };
  const parsed = await client.responses.parse({ ...ask, input: asked.plays.read, text });
  assert.deepEqual(parsed.output_parsed, asked.reading);
});

test("errors are of its own types", async () => {
  const unknown = await client.responses.create({ ...ask, model: "gpt-9", input: "?" }).catch((error) => error);
  assert.ok(unknown instanceof OpenAI.NotFoundError);
  assert.equal(unknown.code, "model_not_found");
});

const stumblingClient = (kind, name, maxRetries, answers = []) =>
  new OpenAI({ baseURL: `${asked.stumbling(kind, name)}/v1`, apiKey: asked.apiKey, maxRetries, fetch: asked.counting(answers) });

for (const kind of ["429", "500", "lost"]) {
  test(`a first request that ends in ${kind} is tried again`, async () => {
    const client = stumblingClient(kind, "node-openai-responses", 2);
    const done = await client.responses.create({ ...ask, input: asked.question });
    assert.equal(done.output_text, asked.noPlay);
  });
}

test("each failure is an error of its own type", async () => {
  const types = { 429: OpenAI.RateLimitError, 500: OpenAI.InternalServerError, lost: OpenAI.APIConnectionError, final: OpenAI.RateLimitError };
  for (const [kind, type] of Object.entries(types)) {
    const answers = [];
    const client = stumblingClient(kind, "node-openai-responses-error", kind === "final" ? 2 : 0, answers);
    const error = await client.responses.create({ ...ask, input: asked.question }).catch((error) => error);
    assert.ok(error instanceof type, `${kind}: ${error}`);
    assert.ok(answers.length <= 1, `${kind} was tried again`);
  }
});
