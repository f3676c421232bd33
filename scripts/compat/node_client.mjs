// What users of OpenAI's Node client do. Run in the folder that has node_modules: node node_client.mjs URL
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { OpenAI } = require("openai");

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "demo";
const messages = [{ role: "user", content: "What is the capital of France?" }];
const answer = "The capital of France is Paris.";
const greedy = { model, messages, temperature: 0, max_tokens: 120 };
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", description: "Weather of a city", parameters } }];

const checks = {
  async models() {
    const { data } = await client.models.list();
    assert.deepEqual(data.map((entry) => entry.id), [model]);
  },
  async chat() {
    const { choices, usage } = await client.chat.completions.create(greedy);
    assert.equal(choices[0].message.content, answer);
    assert.equal(choices[0].finish_reason, "stop");
    assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
  },
  async stream() {
    const stream = await client.chat.completions.create({ ...greedy, stream: true, stream_options: { include_usage: true } });
    let text = "";
    const ends = [];
    let usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      if (chunk.choices[0]?.finish_reason) ends.push(chunk.choices[0].finish_reason);
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, answer);
    assert.deepEqual(ends, ["stop"]);
    assert.ok(usage.completion_tokens > 0);
  },
  async "stream helper"() {
    const stream = client.chat.completions.stream(greedy);
    assert.equal(await stream.finalContent(), answer);
  },
  async completion() {
    const { choices } = await client.completions.create({ model, prompt: "1, 2, 3, 4, 5,", temperature: 0, max_tokens: 6, n: 2 });
    assert.deepEqual(choices.map((choice) => choice.text), [" 6, 7,", " 6, 7,"]);
  },
  async tools() {
    const asked = { ...greedy, tools, tool_choice: "required", parallel_tool_calls: false };
    const { message, finish_reason } = (await client.chat.completions.create(asked)).choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.ok(["Paris", "Rome"].includes(JSON.parse(message.tool_calls[0].function.arguments).city));
    const whole = (await client.chat.completions.stream(asked).finalMessage()).tool_calls;
    assert.deepEqual(whole.map((call) => call.function.arguments), message.tool_calls.map((call) => call.function.arguments));
  },
  async "structured output"() {
    const schema = { type: "object", properties: { n: { type: "integer" } }, required: ["n"], additionalProperties: false };
    const response_format = { type: "json_schema", json_schema: { name: "number", strict: true, schema } };
    const { choices } = await client.chat.completions.parse({ ...greedy, response_format });
    assert.ok(Number.isInteger(choices[0].message.parsed.n));
  },
  async logprobs() {
    const { choices } = await client.chat.completions.create({ ...greedy, logprobs: true, top_logprobs: 2 });
    const { content } = choices[0].logprobs;
    assert.ok(Buffer.concat(content.map((entry) => Buffer.from(entry.bytes))).toString().startsWith(answer));
    assert.ok(content.every((entry) => entry.logprob <= 0 && entry.top_logprobs.length === 2));
  },
  async "errors as classes"() {
    await assert.rejects(client.chat.completions.create({ ...greedy, model: "gpt-5" }), (error) => {
      return error instanceof OpenAI.NotFoundError && error.code === "model_not_found" && error.param === "model";
    });
    await assert.rejects(client.chat.completions.create({ ...greedy, temperature: -1 }), (error) => {
      return error instanceof OpenAI.BadRequestError && error.param === "temperature" && Boolean(error.requestID);
    });
    await assert.rejects(client.embeddings.create({ model, input: "x" }), OpenAI.NotFoundError);
  },
  async "stopping a stream"() {
    const stream = await client.completions.create({ model, prompt: "1, 2,", max_tokens: 1000, stream: true });
    for await (const _ of stream) stream.controller.abort();
    assert.equal((await client.chat.completions.create(greedy)).choices[0].message.content, answer);
  },
};

let failed = false;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${name}`);
  } catch (error) {
    failed = true;
    console.log(`FAIL ${name}: ${String(error).split("\n").join(" ")}`);
  }
}
process.exitCode = failed ? 1 : 0;
