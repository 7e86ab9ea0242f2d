// OpenAI's own client for Node against a server: `node openai_client.mjs BASE_URL MODEL CASE` does one thing and
// prints what it saw as one line of JSON. What that should be is known to the Python test that calls it.

import OpenAI from "openai";

const [baseURL, model, name] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

const asked = {
  model,
  messages: [{ role: "user", content: "What is the capital of France?" }],
  temperature: 0,
  max_tokens: 24,
};
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 20 }, unit: { enum: ["celsius", "fahrenheit"] } },
      required: ["city", "unit"],
      additionalProperties: false,
    },
  },
};

const cases = {
  async chat() {
    const chat = await client.chat.completions.create(asked);
    const [choice] = chat.choices;
    return { text: choice.message.content, finishReason: choice.finish_reason, usage: chat.usage };
  },

  async stream() {
    const stream = await client.chat.completions.create({
      ...asked,
      stream: true,
      stream_options: { include_usage: true },
    });
    const seen = { text: "", numChunks: 0, finishReason: null, usage: null };
    for await (const chunk of stream) {
      seen.numChunks += 1;
      seen.text += chunk.choices[0]?.delta.content ?? "";
      seen.finishReason = chunk.choices[0]?.finish_reason ?? seen.finishReason;
      seen.usage = chunk.usage ?? seen.usage;
    }
    return seen;
  },

  async tools() {
    const calling = {
      ...asked,
      messages: [{ role: "user", content: "How is the weather in Paris?" }],
      tools: [tool],
      tool_choice: { type: "function", function: { name: "get_weather" } },
      max_tokens: 100,
    };
    const chat = await client.chat.completions.create(calling);
    const [call] = chat.choices[0].message.tool_calls;
    const runner = client.chat.completions.stream(calling);
    let numArgumentDeltas = 0;
    runner.on("tool_calls.function.arguments.delta", () => (numArgumentDeltas += 1));
    const streamed = await runner.finalChatCompletion();
    const answer = await client.chat.completions.create({
      ...calling,
      messages: [
        ...calling.messages,
        chat.choices[0].message,
        { role: "tool", tool_call_id: call.id, content: "18 degrees and sunny" },
      ],
      tool_choice: "none",
      max_tokens: 20,
    });
    return {
      finishReasons: [chat, streamed, answer].map((one) => one.choices[0].finish_reason),
      calls: [call.function, streamed.choices[0].message.tool_calls[0].function].map((one) => [
        one.name,
        JSON.parse(one.arguments),
      ]),
      numArgumentDeltas,
      text: answer.choices[0].message.content,
    };
  },

  async abort() {
    const controller = new AbortController();
    const stream = await client.chat.completions.create(
      { ...asked, messages: [{ role: "user", content: "Count as far as you can." }], max_tokens: 1500, stream: true,
        ignore_eos: true },
      { signal: controller.signal },
    );
    let numChunks = 0;
    for await (const _ of stream) {
      numChunks += 1;
      if (numChunks === 4) controller.abort();
    }
    return { numChunks };
  },

  async error() {
    try {
      await client.chat.completions.create({ ...asked, max_tokens: -1 });
    } catch (error) {
      return { kind: error.constructor.name, status: error.status, param: error.param, requestId: error.requestID };
    }
    return null;
  },
};

console.log(JSON.stringify(await cases[name]()));
