// openai-node: chats, streams, runTools with results, parse, strict tools, responses, errors.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
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

// responses: whole, continued, streamed, with a tool and its result, parsed
const input = "The quick brown fox";
const first = await client.responses.create({ model, input, max_output_tokens: 16 });
assert.equal(first.object, "response");
const next = await client.responses.create({
  model, input: "And then?", previous_response_id: first.id, max_output_tokens: 16,
});
assert.ok(next.usage.input_tokens > first.usage.input_tokens);
assert.equal((await client.responses.retrieve(first.id)).id, first.id);
const events = client.responses.stream({ model, input, max_output_tokens: 16 });
let output = "";
events.on("response.output_text.delta", (event) => { output += event.delta; });
assert.equal((await events.finalResponse()).output_text, output);
const { name, description, parameters } = weather.function;
const asked = await client.responses.create({
  model, input, tools: [{ type: "function", name, description, parameters }], tool_choice: "required",
  parallel_tool_calls: false, max_output_tokens: 500,
});
const [call] = asked.output.filter((item) => item.type === "function_call");
assert.ok(["Paris", "Rome"].includes(JSON.parse(call.arguments).city));
await client.responses.create({
  model, previous_response_id: asked.id, max_output_tokens: 16,
  input: [{ type: "function_call_output", call_id: call.call_id, output: "Sunny" }],
});
const shaped = await client.responses.parse({
  model, input, max_output_tokens: 500, text: { format: zodTextFormat(Fish, "fish") },
});
Fish.parse(shaped.output_parsed);

// errors have the client's own types
await assert.rejects(client.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, nonsense: 1 }), OpenAI.BadRequestError);
