// The cluster that scripts talk to, the known answers of its model, and tools for them.
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';
import { z } from 'zod';

const URL = process.env.PDSERVE_URL;
const KEY = process.env.PDSERVE_KEY ?? 'none';
export const MODEL = 'tiny';
// { answer, thinking, plan, before, city }: what the model writes with and without tools
export const EXPECTED = JSON.parse(process.env.PDSERVE_EXPECTED);
export const CITIES = ['Paris', 'Rome'];
export const MESSAGES = [{ role: 'user', content: 'hello, how are you today?' }];
export const Report = z.object({ city: z.enum(CITIES), cold: z.boolean() });
export const Weather = z.object({ city: z.string(), days: z.array(z.number()) });
export const Now = z.object({});

export const openai = (options) =>
  new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0, timeout: 300_000, ...options });
export const anthropic = (options) =>
  new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0, timeout: 300_000, ...options });

// A fetch that passes the status of each HTTP response to `seen`.
export const watching = (seen) => async (...request) => {
  const response = await fetch(...request);
  seen(response.status);
  return response;
};
