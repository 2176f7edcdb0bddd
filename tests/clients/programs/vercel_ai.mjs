// Vercel's AI SDK with @ai-sdk/openai: text, streams, tools in steps, objects. argv[4]: "chat", or "default" (responses).

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, api] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const model = api === "chat" ? provider.chat(name) : provider(name);
const prompt = "The quick brown fox";
const common = { model, prompt, maxRetries: 0, maxOutputTokens: 300 };

const whole = await generateText({ ...common, maxOutputTokens: 16 });
assert.ok(whole.usage.outputTokens <= 16);
const streamed = streamText({ ...common, maxOutputTokens: 24, onError: ({ error }) => { throw error; } });
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, await streamed.text);

const cities = [];
const tools = {
  weather: tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => { cities.push(city); return { sky: "sunny", city }; },
  }),
};
const steps = await generateText({ ...common, tools, toolChoice: "required", stopWhen: stepCountIs(2) });
assert.equal(steps.steps.length, 2);
assert.ok(cities.length >= 2);
assert.ok(cities.every((city) => ["Paris", "Rome"].includes(city)));
cities.length = 0;
const called = streamText({ ...common, tools, toolChoice: { type: "tool", toolName: "weather" } });
await called.consumeStream();
assert.ok((await called.toolCalls).length >= 1);
assert.ok(cities.length >= 1);

const Fish = z.object({ kind: z.enum(["cod", "eel"]), salty: z.boolean() });
const formed = await generateText({ ...common, output: Output.object({ schema: Fish }) });
Fish.parse(formed.output);
