// The errors of both clients, by class, and their retries. The cluster needs a key, serves one prompt at once and
// lets one wait.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';
import { EXPECTED, MESSAGES, MODEL, anthropic, openai, watching } from './cluster.mjs';

const ASK = { model: MODEL, messages: MESSAGES, max_tokens: 200, temperature: 0 };
const IMAGE = { ...ASK, messages: [{ role: 'user', content: [{ type: 'image' }] }] };
const FLAWS = [
  ['BadRequestError', IMAGE, {}, /(messages|input)\.0\.content\.0/],
  ['AuthenticationError', ASK, { apiKey: 'wrong' }, /key/i],
  ['NotFoundError', { ...ASK, model: 'no-such' }, {}, /no-such/],
];

for (const [name, body, options, message] of FLAWS) {
  test(`openai: ${name}`, async () => {
    const client = openai(options);
    for (const request of [
      () => client.chat.completions.create(body),
      () => client.chat.completions.create({ ...body, stream: true }),
      () => client.responses.create({ model: body.model, input: body.messages }),
    ]) {
      await assert.rejects(request, (error) => is(OpenAI[name], error, message) && error.requestID !== undefined);
    }
  });

  test(`anthropic: ${name}`, async () => {
    const client = anthropic(options);
    for (const request of [
      () => client.messages.create(body),
      () => client.messages.create({ ...body, stream: true }),
      () => client.messages.countTokens({ model: body.model, messages: body.messages }),
    ]) {
      await assert.rejects(request, (error) => is(Anthropic[name], error, message) && error.requestID !== undefined);
    }
  });
}

for (const [name, status, request] of [
  ['openai', 429, async (fetch) => {
    const answer = await openai({ fetch, maxRetries: 100 }).chat.completions.create(ASK);
    return answer.choices[0].message.content;
  }],
  ['anthropic', 529, async (fetch) => {
    const answer = await anthropic({ fetch, maxRetries: 100 }).messages.create(ASK);
    return answer.content.at(-1).text;
  }],
]) {
  test(`${name}: a request refused with ${status} is retried`, async () => {
    const holder = await openai().completions.create({
      model: MODEL, prompt: Array(60).fill('hello'), max_tokens: 400, stream: true, ignore_eos: true,
    });
    const seen = [];
    const text = await request(watching((found) => {
      seen.push(found);
      if (found === status) holder.controller.abort();
    }));

    assert.equal(text, EXPECTED.answer);
    assert.equal(seen[0], status);
    assert.equal(seen.at(-1), 200);
  });
}

function is(kind, error, message) {
  assert.ok(error instanceof kind, `${error}`);
  assert.match(error.message, message);
  return true;
}
