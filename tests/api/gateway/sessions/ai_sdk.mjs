// A conversation with the AI SDK: two turns, and a function that is called, by both of OpenAI's APIs.
// Arguments: base URL, API key, model. Prints what it saw as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const openai = createOpenAI({ apiKey, baseURL: `${baseURL}/v1` });
const inputSchema = jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] });
const tools = { weather: tool({ inputSchema, execute: async ({ city }) => `sun in ${city}` }) };
const apis = {
  responses: { model: openai(model), providerOptions: { openai: { store: false } } },
  chat: { model: openai.chat(model) },
};
const seen = {};
for (const [name, api] of Object.entries(apis)) {
  const first = await generateText({ ...api, prompt: "Hi", maxRetries: 0 });
  const messages = [{ role: "user", content: "Hi" }, ...first.response.messages, { role: "user", content: "And?" }];
  const second = await generateText({ ...api, messages, maxRetries: 0 });
  const streamed = streamText({ ...api, prompt: "sunny?", tools, stopWhen: isStepCount(2), maxRetries: 0 });
  const steps = await streamed.steps;
  seen[name] = [first.text, second.text, steps[0].toolResults[0]?.output, await streamed.text];
}
try {
  const first = await generateText({ model: openai(model), prompt: "Hi" });
  await generateText({ model: openai(model), messages: [...first.response.messages, { role: "user", content: "And?" }], maxRetries: 0 });
} catch (error) {
  seen.stored = error.message;
}
process.stdout.write(JSON.stringify(seen));
