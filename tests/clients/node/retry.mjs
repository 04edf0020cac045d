// One chat with the official openai client; writes each HTTP status as it comes, and the answer.
import { MESSAGES, MODEL, openai, watching } from './cluster.mjs';

const client = openai({ fetch: watching((status) => console.log(status)), maxRetries: 1000 });
const answer = await client.chat.completions.create({ model: MODEL, messages: MESSAGES, max_tokens: 200, temperature: 0 });
console.log(answer.choices[0].message.content);
