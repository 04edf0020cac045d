// The official openai client for Node: chats, tools, structured output, embeddings.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod';
import OpenAI from 'openai';
import { CITIES, EXPECTED, MESSAGES, MODEL, Now, Report, Weather, openai } from './cluster.mjs';

const client = openai();
const ASK = { model: MODEL, messages: MESSAGES, max_tokens: 200, temperature: 0 };
const PLAIN = { ...ASK, chat_template_kwargs: { enable_thinking: false } };

test('a chat is answered with the thinking beside the content', async () => {
  const { data } = await client.models.list();
  const answer = await client.chat.completions.create(ASK);

  assert.ok(data.some((model) => model.id === MODEL));
  assert.equal(answer.choices[0].message.content, EXPECTED.answer);
  assert.equal(answer.choices[0].message.reasoning, EXPECTED.thinking);
  assert.equal(answer.choices[0].finish_reason, 'stop');
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test('a streamed chat joins to the whole one', async () => {
  const options = { stream: true, stream_options: { include_usage: true } };
  const whole = await client.chat.completions.create(ASK);
  let content = '', thinking = '', usage;
  for await (const chunk of await client.chat.completions.create({ ...ASK, ...options })) {
    content += chunk.choices[0]?.delta.content ?? '';
    thinking += chunk.choices[0]?.delta.reasoning ?? '';
    usage = chunk.usage ?? usage;
  }
  const helped = await client.chat.completions.stream({ ...ASK, stream_options: options.stream_options });

  assert.deepEqual([content, thinking], [EXPECTED.answer, EXPECTED.thinking]);
  assert.deepEqual(usage, whole.usage);
  assert.equal(await helped.finalContent(), EXPECTED.answer);
  assert.equal((await helped.totalUsage()).total_tokens, whole.usage.total_tokens);
});

for (const stream of [false, true]) {
  test(`runTools calls both functions and goes on to the answer, stream: ${stream}`, async () => {
    const called = [];
    const runner = client.chat.completions.runTools({ ...ASK, stream, tools: [
      zodFunction({ name: 'weather', parameters: Weather, function: (input) => (called.push(input), { sun: true }) }),
      zodFunction({ name: 'now', parameters: Now, function: (input) => (called.push(input), 'noon') }),
    ] });
    const reported = [];
    runner.on('functionToolCall', (call) => reported.push(call.name));
    const content = await runner.finalContent();

    assert.deepEqual(called, [{ city: EXPECTED.city, days: [1, 2] }, {}]);
    assert.deepEqual(reported, ['weather', 'now']);
    assert.equal(content, EXPECTED.answer);
    const roles = runner.messages.map((message) => message.role);
    assert.deepEqual(roles, ['user', 'assistant', 'tool', 'tool', 'assistant']);
    assert.deepEqual(runner.messages.slice(2, 4).map((message) => message.content), ['{"sun":true}', 'noon']);
    assert.equal(new Set(runner.messages[1].tool_calls.map((call) => call.id)).size, 2);
  });

  test(`runTools with a named function calls only that, stream: ${stream}`, async () => {
    const tool = zodFunction({ name: 'report', parameters: Report, function: (input) => input.city });
    const runner = client.chat.completions.runTools({
      ...PLAIN, stream, tools: [tool], tool_choice: { type: 'function', function: { name: 'report' } },
    });

    assert.ok(CITIES.includes(await runner.finalFunctionToolCallResult()));
  });
}

test('zodResponseFormat makes the answer fit, whole and streamed', async () => {
  const body = { ...ASK, response_format: zodResponseFormat(Report, 'report') };
  const whole = await client.chat.completions.parse(body);
  const streamed = await client.chat.completions.stream(body).finalChatCompletion();

  const { parsed } = whole.choices[0].message;
  assert.ok(CITIES.includes(parsed.city) && typeof parsed.cold === 'boolean');
  assert.deepEqual(streamed.choices[0].message.parsed, parsed);
});

test('zodFunction makes the arguments of a required call fit', async () => {
  const tools = [zodFunction({ name: 'report', parameters: Report })];
  const body = { ...PLAIN, tools, tool_choice: 'required', parallel_tool_calls: false };
  const whole = await client.chat.completions.parse(body);
  const streamed = await client.chat.completions.stream(body).finalChatCompletion();

  const [call] = whole.choices[0].message.tool_calls;
  assert.equal(whole.choices[0].finish_reason, 'tool_calls');
  assert.ok(CITIES.includes(call.function.parsed_arguments.city));
  assert.deepEqual(streamed.choices[0].message.tool_calls[0].function.parsed_arguments, call.function.parsed_arguments);
});

test('a cut structured answer is the client\'s own error', async () => {
  const body = { ...PLAIN, max_tokens: 2, response_format: zodResponseFormat(Report, 'report') };

  await assert.rejects(client.chat.completions.parse(body), OpenAI.LengthFinishReasonError);
});

test('embeddings are the same in base64, which the client requests, and as numbers', async () => {
  const body = { model: MODEL, input: ['hello', 'the quick brown fox'] };
  const [packed, plain] = await Promise.all(
    [{}, { encoding_format: 'float' }].map((format) => client.embeddings.create({ ...body, ...format })),
  );

  assert.equal(packed.data.length, 2);
  assert.ok(packed.data[0].embedding.length > 8);
  for (const [at, { embedding }] of packed.data.entries()) {
    embedding.forEach((value, index) => assert.ok(Math.abs(value - plain.data[at].embedding[index]) < 1e-6));
  }
});

test('an aborted stream ends, and the next request is served', async () => {
  const stream = await client.chat.completions.create({ ...PLAIN, stream: true, ignore_eos: true, max_tokens: 400 });
  let chunks = 0;
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta.content && ++chunks === 3) stream.controller.abort();
  }
  const answer = await client.chat.completions.create(PLAIN);

  assert.ok(chunks >= 3 && chunks < 100, `${chunks} chunks`); // those on their way at the abort may still be read
  assert.equal(answer.choices[0].message.content, EXPECTED.answer);
});
