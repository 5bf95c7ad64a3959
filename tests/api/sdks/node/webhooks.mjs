// Verifies deliveries of webhooks by OpenAI's Node client. Arguments: package, secret, JSON file of deliveries.
// Prints as JSON the type and subject of each, and then the error about a delivery that was changed.
import fs from "node:fs";
import { createRequire } from "node:module";

const [name, webhookSecret, path] = process.argv.slice(2);
const OpenAI = createRequire(`${process.cwd()}/`)(name).OpenAI;
const client = new OpenAI({ apiKey: "unused", webhookSecret });
const deliveries = JSON.parse(fs.readFileSync(path, "utf8"));
const seen = [];

for (const { body, headers } of deliveries) {
  const event = await client.webhooks.unwrap(body, headers);
  seen.push([event.type, event.data.id]);
}
try {
  await client.webhooks.unwrap(`${deliveries[0].body} `, deliveries[0].headers);
} catch (error) {
  seen.push(error.constructor.name);
}
process.stdout.write(JSON.stringify(seen));
