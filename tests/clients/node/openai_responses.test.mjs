// The official openai client for Node: the Responses API, whole, streamed and stored.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import { zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod';
import { CITIES, EXPECTED, MODEL, Now, Report, Weather, openai } from './cluster.mjs';

const client = openai();
const ASK = { model: MODEL, input: 'hello, how are you today?', max_output_tokens: 200, temperature: 0, store: false };
const TOOLS = [
  zodResponsesFunction({ name: 'weather', parameters: Weather }), zodResponsesFunction({ name: 'now', parameters: Now }),
];

test('a response is the thinking and the text', async () => {
  const response = await client.responses.create(ASK);

  assert.equal(response.output_text, EXPECTED.answer);
  assert.deepEqual(response.output.map((item) => item.type), ['reasoning', 'message']);
  assert.equal(response.output[0].content[0].text, EXPECTED.thinking);
  assert.equal(response.status, 'completed');
});

test('the events of a text come in order and join to the whole response', async () => {
  const whole = await client.responses.create(ASK);
  const { events, final } = await streamed(ASK);

  assert.deepEqual(distinct(events), [
    'response.created', 'response.in_progress',
    'response.output_item.added', 'response.content_part.added', 'response.reasoning_text.delta',
    'response.reasoning_text.done', 'response.content_part.done', 'response.output_item.done',
    'response.output_item.added', 'response.content_part.added', 'response.output_text.delta',
    'response.output_text.done', 'response.content_part.done', 'response.output_item.done',
    'response.completed',
  ]);
  assert.equal(joined(events, 'response.output_text.delta'), EXPECTED.answer);
  assert.equal(joined(events, 'response.reasoning_text.delta'), EXPECTED.thinking);
  assert.deepEqual(shown(final.output), shown(whole.output));
  assert.deepEqual(final.usage, whole.usage);
});

test('the events of calls come in order and join to the whole response', async () => {
  const body = { ...ASK, tools: TOOLS };
  const whole = await client.responses.parse(body);
  const { events, final } = await streamed(body);
  const calls = final.output.filter((item) => item.type === 'function_call');

  assert.deepEqual(distinct(events).slice(-9), [
    ...Array(2).fill(['response.output_item.added', 'response.function_call_arguments.delta',
      'response.function_call_arguments.done', 'response.output_item.done']).flat(), 'response.completed',
  ]);
  assert.equal(joined(events, 'response.function_call_arguments.delta'), calls.map((call) => call.arguments).join(''));
  assert.deepEqual(calls.map((call) => call.parsed_arguments), [{ city: EXPECTED.city, days: [1, 2] }, {}]);
  assert.deepEqual(shown(final.output), shown(whole.output));
});

test('zodTextFormat makes the answer fit, whole and streamed', async () => {
  const body = { ...ASK, text: { format: zodTextFormat(Report, 'report') } };
  const whole = await client.responses.parse(body);
  const { final } = await streamed(body);

  assert.ok(CITIES.includes(whole.output_parsed.city) && typeof whole.output_parsed.cold === 'boolean');
  assert.deepEqual(final.output_parsed, whole.output_parsed);
});

test('a loop of calls goes on by previous_response_id', async () => {
  const called = await client.responses.parse({ ...ASK, store: true, tools: TOOLS });
  const calls = called.output.filter((item) => item.type === 'function_call');
  const results = calls.map((call) => ({ type: 'function_call_output', call_id: call.call_id, output: 'done' }));
  const next = { ...ASK, store: true, tools: TOOLS, input: results, previous_response_id: called.id };
  const answer = await client.responses.create(next);
  const items = [];
  for await (const item of client.responses.inputItems.list(answer.id, { order: 'asc', limit: 2 })) items.push(item.type);

  assert.equal(answer.output_text, EXPECTED.answer);
  assert.equal(answer.previous_response_id, called.id);
  assert.deepEqual(items, [
    'message', ...called.output.map((item) => item.type), 'function_call_output', 'function_call_output',
  ]);
});

test('a loop of calls goes on with the items themselves', async () => {
  const called = await client.responses.create({ ...ASK, tools: TOOLS });
  const results = called.output.filter((item) => item.type === 'function_call')
    .map((call) => ({ type: 'function_call_output', call_id: call.call_id, output: 'done' }));
  const input = [{ role: 'user', content: ASK.input }, ...called.output, ...results];
  const answer = await client.responses.create({ ...ASK, tools: TOOLS, input });

  assert.equal(answer.output_text, EXPECTED.answer);
});

test('a stored response is retrieved, and deleted', async () => {
  const created = await client.responses.create({ ...ASK, store: true });
  const retrieved = await client.responses.retrieve(created.id);
  await client.responses.delete(created.id);

  assert.deepEqual(retrieved.output, created.output);
  await assert.rejects(client.responses.retrieve(created.id), OpenAI.NotFoundError);
});

test('a response in the background is resumed in its middle, and one is cancelled', async () => {
  const body = { ...ASK, store: true, background: true };
  const stream = await client.responses.create({ ...body, stream: true });
  const seen = [];
  for await (const event of stream) {
    seen.push(event);
    if (event.type === 'response.reasoning_text.delta') break; // leaves the server
  }
  const { id } = seen[0].response;
  const after = { stream: true, starting_after: seen.at(-1).sequence_number };
  for await (const event of await client.responses.retrieve(id, after)) seen.push(event);
  const long = await client.responses.create({ ...body, max_output_tokens: 400, ignore_eos: true });
  const cancelled = await client.responses.cancel(long.id);

  assert.deepEqual(seen.map((event) => event.sequence_number), seen.map((_, at) => at));
  assert.equal(joined(seen, 'response.output_text.delta'), EXPECTED.answer);
  assert.equal(seen.at(-1).type, 'response.completed');
  assert.equal(cancelled.status, 'cancelled');
});

async function streamed(body) {
  const stream = client.responses.stream(body);
  const events = [];
  stream.on('event', (event) => events.push(event));
  const final = await stream.finalResponse();
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, at) => at));
  return { events, final };
}

// The types of events, those of adjacent deltas once.
const distinct = (events) => events.map((event) => event.type).filter((type, at, all) => type !== all[at - 1]);

const joined = (events, type) => events.filter((event) => event.type === type).map((event) => event.delta).join('');

// Items without what differs between two responses, and what the client adds.
const shown = (output) => output.map(({ id, call_id, parsed_arguments, content, ...item }) => ({
  ...item, content: content?.map(({ parsed, ...part }) => part),
}));
