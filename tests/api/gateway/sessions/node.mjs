// One session of OpenAI's Node client with models that answer. Arguments: base URL, API key, package, model.
// Prints what it saw as JSON.
const [baseURL, apiKey, name, model] = process.argv.slice(2);
const { default: OpenAI } = await import(name);
const client = new OpenAI({ apiKey, baseURL: `${baseURL}/v1`, maxRetries: 0 });
const messages = [{ role: "user", content: "Größe? 日本 🙂" }];
const seen = {};
const refusal = async (call) => {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.status, error.code];
  }
};

const { data, response } = await client.chat.completions.create({ model, messages }).withResponse();
seen.answer = [data.choices[0].message.content, data.model, Boolean(response.headers.get("x-request-id"))];

const stream = await client.chat.completions.create({ model, messages, stream: true, stream_options: { include_usage: true } });
let text = "", usage = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
seen.stream = [text, usage.total_tokens === usage.prompt_tokens + usage.completion_tokens];

const helper = client.chat.completions.stream ? client.chat.completions : client.beta.chat.completions;
seen.helper = await helper.stream({ model, messages }).finalContent();

const left = await client.chat.completions.create({ model, messages, stream: true });
for await (const chunk of left) if (chunk) break; // leaves the connection in the middle
seen.response = (await client.responses.create({ model, input: "Hi" })).output_text;
const events = [];
for await (const event of await client.responses.create({ model, input: "Hi", stream: true })) events.push(event.type);
seen.events = [events[0], events.at(-1), events.filter((type) => type === "response.output_text.delta").length > 0];
seen.completion = (await client.completions.create({ model, prompt: "Hi" })).choices[0].text;
seen.model = (await client.models.retrieve(model)).id;
seen.unknown = await refusal(() => client.chat.completions.create({ model: "no-such", messages }));
seen.invalid = await refusal(() => client.chat.completions.create({ model, messages, temperature: 9 }));
seen.signedOut = await refusal(() => new OpenAI({ apiKey: "wrong", baseURL: `${baseURL}/v1`, maxRetries: 0 }).models.list());
seen.notOffered = await refusal(() => client.vectorStores?.list() ?? client.beta.vectorStores.list());
process.stdout.write(JSON.stringify(seen));
