// One session of OpenAI's Node client with files, uploads and jobs. Arguments: base URL, API key, package, file of rows, id of a training file.
// Prints what it saw as JSON. The generations differ in the name of one method (`del`, later `delete`).
import fs from "node:fs";
import { createRequire } from "node:module";

const [baseURL, apiKey, name, path, training_file] = process.argv.slice(2);
const OpenAI = createRequire(`${process.cwd()}/`)(name).OpenAI;
const client = new OpenAI({ apiKey, baseURL: `${baseURL}/v1`, maxRetries: 0 });
const rows = fs.readFileSync(path);
const seen = {};

const streamed = await client.files.create({ file: fs.createReadStream(path), purpose: "fine-tune" });
const content = Buffer.from(await (await client.files.content(streamed.id)).arrayBuffer());
seen.file = { status: streamed.status, filename: streamed.filename, isEqual: content.equals(rows) };

const { toFile } = createRequire(`${process.cwd()}/`)(name);
const expires_after = { anchor: "created_at", seconds: 86400 };
const named = await client.files.create({ file: await toFile(rows, "größe 日本.jsonl"), purpose: "fine-tune", expires_after });
const unnamed = await client.files.create({ file: await toFile(new Blob([rows])), purpose: "evals" });
seen.forms = [named.filename, named.expires_at - named.created_at, unnamed.filename, unnamed.purpose];
try {
  await client.files.create({ file: rows, purpose: "fine-tune" }); // sent as a field for each byte
} catch (error) {
  seen.bytes = error.message;
}

const upload = await client.uploads.create({
  bytes: 2 * rows.length, filename: "twice.jsonl", mime_type: "application/jsonl", purpose: "fine-tune",
});
const partIds = [];
for (let i = 0; i < 2; i++) {
  const part = await client.uploads.parts.create(upload.id, { data: fs.createReadStream(path) });
  partIds.push(part.id);
}
const completed = await client.uploads.complete(upload.id, { part_ids: partIds });
const twice = Buffer.from(await (await client.files.content(completed.file.id)).arrayBuffer());
seen.upload = { status: completed.status, isEqual: twice.equals(Buffer.concat([rows, rows])) };

const method = { type: "supervised", supervised: { hyperparameters: { n_epochs: 2 } } };
const job = await client.fineTuning.jobs.create({ model: "anneal-demo", training_file, method, metadata: { a: "b" } });
seen.job = { status: job.status, epochs: job.hyperparameters.n_epochs, metadata: job.metadata };
seen.retrieved = (await client.fineTuning.jobs.retrieve(job.id)).id === job.id;
seen.events = [];
for await (const event of client.fineTuning.jobs.listEvents(job.id, { limit: 1 })) seen.events.push(event.message);
seen.cancelled = (await client.fineTuning.jobs.cancel(job.id)).status;
const grader = { type: "string_check", name: "a", input: "{{sample.output_text}}", reference: "red", operation: "eq" };
seen.reward = (await client.fineTuning.alpha.graders.run({ grader, model_sample: "red" })).reward;
seen.grader = (await client.fineTuning.alpha.graders.validate({ grader })).grader.name;
seen.models = (await client.models.list()).data.map((model) => model.id);
const remove = (client.files.delete ?? client.files.del).bind(client.files);
seen.deleted = (await remove(streamed.id)).deleted;
try {
  await client.files.retrieve(streamed.id);
} catch (error) {
  seen.after = [error.constructor.name, error.status, error.code, error.error.doc_url.split("/").pop()];
}
process.stdout.write(JSON.stringify(seen));
