// openai-node: chats, streams, runTools with results, parse, strict tools, errors.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "The quick brown fox" }];
const Fish = z.object({ kind: z.enum(["cod", "eel"]), salty: z.boolean() });

// answers, whole and streamed
const whole = await client.chat.completions.create({ model, messages, max_completion_tokens: 12 });
assert.ok(whole.usage.completion_tokens <= 12);
const stream = client.chat.completions.stream({
  model, messages, max_tokens: 20, stream_options: { include_usage: true },
});
let text = "";
stream.on("content", (piece) => { text += piece; });
const final = await stream.finalChatCompletion();
assert.equal(text, final.choices[0].message.content);
assert.ok(final.usage.completion_tokens > 0);
assert.ok((await client.completions.create({ model, prompt: "Once", max_tokens: 4 })).choices[0]);

// the client's loop over tools: called, answered, called again with the result in the history
const cities = [];
const weather = {
  type: "function",
  function: {
    name: "weather",
    description: "The weather in a city",
    function: ({ city }) => { cities.push(city); return `Sunny in ${city}`; },
    parse: JSON.parse,
    parameters: { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] },
  },
};
const required = { model, messages, tools: [weather], tool_choice: "required", max_tokens: 300 };
const runner = client.chat.completions.runTools(required, { maxChatCompletions: 2 });
await runner.done();
assert.ok(cities.length >= 2);
assert.ok(cities.every((city) => ["Paris", "Rome"].includes(city)));
assert.equal(runner.messages.filter((message) => message.role === "tool").length, cities.length);
const named = { type: "function", function: { name: "weather" } };
cities.length = 0;
const streamed = client.chat.completions.runTools({ ...required, tool_choice: named, stream: true });
await streamed.done();
assert.equal(cities.length, 1);

// parse
const parsed = await client.chat.completions.parse({
  model, messages, max_tokens: 300, response_format: zodResponseFormat(Fish, "fish"),
});
Fish.parse(parsed.choices[0].message.parsed);
const strict = await client.chat.completions.parse({
  model, messages, max_tokens: 300, tools: [zodFunction({ name: "catch_fish", parameters: Fish })],
  tool_choice: "required", parallel_tool_calls: false,
});
Fish.parse(strict.choices[0].message.tool_calls[0].function.parsed_arguments);

// errors have the client's own types
await assert.rejects(client.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, nonsense: 1 }), OpenAI.BadRequestError);
