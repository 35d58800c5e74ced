// A program for Node.js with what is built in. Needs nothing of lightspan.
import { readFileSync } from "node:fs";

const { number } = JSON.parse(readFileSync(process.env.LIGHTSPAN_TASK_FILE, "utf8"));
const gateway = process.env.LIGHTSPAN_GATEWAY_URL;

async function ask(endpoint, model, text) {
  const response = await fetch(`${endpoint}/chat/completions`, {
    method: "POST",
    headers: {
      authorization: `Bearer ${process.env.OPENAI_API_KEY}`,
      "content-type": "application/json",
    },
    body: JSON.stringify({ model, messages: [{ role: "user", content: text }] }),
  });
  if (!response.ok) throw new Error(await response.text());
  return (await response.json()).choices[0].message.content;
}

console.error(await ask(`${gateway}/agents/planner/v1`, "any", `plan ${number}`));
console.error(await ask(`${gateway}/agents/team/writer/v1`, "any", `write ${number}`));
console.error(await ask(process.env.OPENAI_BASE_URL, "editor", `edit ${number}`));
console.log(await ask(process.env.OPENAI_BASE_URL, process.env.LIGHTSPAN_MODEL, `${number}`));
