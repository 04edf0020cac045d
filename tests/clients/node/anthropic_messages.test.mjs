// The official Anthropic client for TypeScript: messages, streams, tools, thinking, counts.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import Anthropic from '@anthropic-ai/sdk';
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod';
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod';
import { z } from 'zod';
import { CITIES, EXPECTED, MESSAGES, MODEL, Now, Report, Weather, anthropic } from './cluster.mjs';

const client = anthropic();
const ASK = { model: MODEL, messages: MESSAGES, max_tokens: 200, temperature: 0 };
const PLAIN = { ...ASK, thinking: { type: 'disabled' } };
const TOOLS = Object.entries({ weather: Weather, now: Now }).map(([name, schema]) => ({
  name, description: name, input_schema: z.toJSONSchema(schema),
}));
const BUDGET = 10;

test('a message has the thinking and the text', async () => {
  const message = await client.messages.create(ASK);

  assert.deepEqual(message.content.map((block) => block.type), ['thinking', 'text']);
  assert.equal(message.content[0].thinking, EXPECTED.thinking);
  assert.equal(message.content[1].text, EXPECTED.answer);
  assert.equal(message.stop_reason, 'end_turn');
});

for (const [name, body] of Object.entries({
  text: PLAIN,
  thinking: { ...ASK, thinking: { type: 'enabled', budget_tokens: BUDGET } },
  stop: { ...PLAIN, stop_sequences: ['most'] },
  calls: { ...ASK, tools: TOOLS },
  forced: { ...PLAIN, tools: TOOLS, tool_choice: { type: 'tool', name: 'now' } },
})) {
  test(`a streamed message is the whole one: ${name}`, async () => {
    const whole = await client.messages.create(body);
    const stream = client.messages.stream(body);
    const reported = { text: '', thinking: '' };
    const inputs = [];
    stream.on('text', (delta) => { reported.text += delta; });
    stream.on('thinking', (delta) => { reported.thinking += delta; });
    stream.on('contentBlock', (block) => block.type === 'tool_use' && inputs.push(block.input));
    const final = await stream.finalMessage();

    assert.deepEqual(final.content.map(shown), whole.content.map(shown));
    assert.equal(final.stop_reason, whole.stop_reason);
    assert.equal(final.stop_sequence, whole.stop_sequence);
    assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
    for (const type of ['text', 'thinking']) {
      assert.equal(reported[type], whole.content.map((block) => (block.type === type ? block[type] : '')).join(''));
    }
    const calls = whole.content.filter((block) => block.type === 'tool_use');
    assert.deepEqual(inputs, calls.map((block) => block.input));
    assert.equal(calls.length, { calls: 2, forced: 1 }[name] ?? 0);
    const counted = await client.messages.countTokens(countable(body));
    assert.equal(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
  });
}

for (const stream of [false, true]) {
  test(`toolRunner calls both tools and goes on to the answer, stream: ${stream}`, async () => {
    const called = [];
    const run = (input) => (called.push(input), 'done');
    const tools = Object.entries({ weather: Weather, now: Now }).map(([name, inputSchema]) => (
      betaZodTool({ name, description: name, inputSchema, run })
    ));
    const message = await client.beta.messages.toolRunner({ ...ASK, stream, tools });

    assert.deepEqual(called, [{ city: EXPECTED.city, days: [1, 2] }, {}]);
    assert.equal(message.content.at(-1).text, EXPECTED.answer);
  });
}

test('an output format makes the answer fit', async () => {
  const message = await client.messages.parse({ ...ASK, output_config: { format: zodOutputFormat(Report) } });

  assert.ok(CITIES.includes(message.parsed_output.city));
});

test('an aborted stream ends, and the next message is served', async () => {
  const stream = client.messages.stream(PLAIN);
  stream.once('text', () => stream.abort());
  await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);

  const message = await client.messages.create(PLAIN);

  assert.equal(message.content[0].text, EXPECTED.answer);
});

// A block without what differs between two answers.
const shown = ({ id, signature, parsed_output, ...block }) => block;

const countable = ({ max_tokens, temperature, stop_sequences, ...body }) => body;
