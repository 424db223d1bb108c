// Vercel's AI SDK with its provider for OpenAI-compatible endpoints.
import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, jsonSchema, Output, RetryError, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import * as asked from "./asked.mjs";

const providerOf = (apiKey = asked.apiKey, rest = {}) =>
  createOpenAICompatible({ name: "spillway", baseURL: `${asked.url}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true, ...rest });
const spillway = providerOf();
const model = spillway(asked.model);

test("chat", async () => {
  const done = await generateText({ model, prompt: asked.question });
  assert.equal(done.text, asked.noPlay);
  assert.ok(done.reasoningText);
  assert.ok(done.usage.outputTokens > 0);
});

test("a stream and its usage", async () => {
  const stream = streamText({ model, prompt: asked.question });
  const parts = await asked.collect(stream.textStream);
  assert.ok(parts.length > 1);
  assert.equal(parts.join(""), asked.noPlay);
  assert.ok((await stream.usage).outputTokens > 0);
});

test("a round trip through a tool, streamed", async () => {
  const seen = [];
  const execute = async (given) => {
    seen.push(given);
    return asked.result;
  };
  const tools = { [asked.toolName]: tool({ description: asked.toolText, inputSchema: jsonSchema(asked.parameters), execute }) };
  const task = { model, prompt: asked.plays.tool, tools, stopWhen: stepCountIs(3) };
  const streamed = streamText(task);
  assert.equal((await asked.collect(streamed.textStream)).join(""), asked.said + asked.answer);
  assert.equal((await streamed.steps).length, 2);
  assert.equal((await generateText(task)).text, asked.answer);
  assert.deepEqual(seen, [asked.toolArguments, asked.toolArguments]);
});

test("a structured answer", async () => {
  const schema = z.object({ river: z.enum(["Elbe", "Rhine"]), level_cm: z.int() });
  const done = await generateText({ model, prompt: asked.plays.read, output: Output.object({ schema }) });
  assert.deepEqual(done.output, asked.reading);
});

test("embeddings", async () => {
  const done = await embedMany({ model: spillway.embeddingModel(asked.vectors), values: ["high", "low", "high"] });
  const [one, two, three] = done.embeddings;
  assert.deepEqual(one, three);
  assert.notDeepEqual(one, two);
});

test("errors are of its own types", async () => {
  const unknown = await generateText({ model: spillway("gpt-9"), prompt: asked.question }).catch((error) => error);
  assert.ok(APICallError.isInstance(unknown), unknown);
  assert.equal(unknown.statusCode, 404);
  assert.equal(unknown.isRetryable, false);
  assert.match(unknown.message, /gpt-9/);
});

test("what may work later is tried again", async () => {
  const answers = [];
  const leaving = new AbortController();
  const release = (response) => response.status === 429 && leaving.abort();
  const patient = providerOf(asked.tenantKeys["one at a time"], { fetch: asked.counting(answers, release) });
  const held = streamText({ model: patient(asked.model), prompt: asked.held, abortSignal: leaving.signal, onError() {} });
  const reading = held.consumeStream();
  while (answers.length === 0) await new Promise(setImmediate);
  assert.equal((await generateText({ model: patient(asked.model), prompt: asked.question })).text, asked.noPlay);
  await reading;
  assert.deepEqual([answers[0], answers[1], answers.at(-1)], [200, 429, 200]);
});

test("what has failed for good says so", async () => {
  const spent = providerOf(asked.tenantKeys.spent);
  const error = await generateText({ model: spent(asked.model), prompt: asked.question, maxRetries: 0 }).catch((error) => error);
  assert.ok(APICallError.isInstance(error) || RetryError.isInstance(error));
  assert.match(error.message, /budget|quota/);
});

const stumblingModel = (kind, name) => providerOf(asked.apiKey, { baseURL: `${asked.stumbling(kind, name)}/v1` })(asked.model);

for (const kind of ["429", "500", "lost"]) {
  test(`a first request that ends in ${kind} is tried again`, async () => {
    assert.equal((await generateText({ model: stumblingModel(kind, "node-ai"), prompt: asked.question })).text, asked.noPlay);
  });
}

test("each failure is an error of its own type", async () => {
  for (const [kind, status] of [["429", 429], ["500", 500], ["lost", undefined]]) {
    const error = await generateText({ model: stumblingModel(kind, "node-ai-error"), prompt: asked.question, maxRetries: 0 }).catch((error) => error);
    assert.ok(APICallError.isInstance(error), `${kind}: ${error}`);
    assert.deepEqual([error.statusCode, error.isRetryable], [status, true]);
  }
});

test("logprobs, by the provider's options", async () => {
  const done = await generateText({ model, prompt: asked.question, providerOptions: { spillway: { logprobs: true } }, include: { responseBody: true } });
  const [choice] = done.response.body.choices;
  assert.ok(choice.logprobs.content.map((token) => token.token).join("").endsWith(asked.noPlay));
});
