import type { EventSourceMessage } from "eventsource-parser";
import { expect, it } from "vitest";

import { readMessages } from "./stream";

function body(chunks: Uint8Array[]): ReadableStream<Uint8Array> {
  return new ReadableStream({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(chunk);
      controller.close();
    },
  });
}

const TEXT = ': hello\n\nid: 7\nevent: step\ndata: {"text":"2.5×"}\n\nid: 8\nevent: node\ndata: {}\n\n';

// Any split, also within the two bytes of "×".
it.each([1, 2, 3, 7, 1000])("reads the same events in chunks of %i bytes", async (size) => {
  const bytes = new TextEncoder().encode(TEXT);
  const chunks: Uint8Array[] = [];
  for (let start = 0; start < bytes.length; start += size) chunks.push(bytes.slice(start, start + size));
  const messages: EventSourceMessage[] = [];
  let heard = 0;
  await readMessages(
    body(chunks),
    (message) => messages.push(message),
    () => heard++,
  );
  expect(messages).toEqual([
    { id: "7", event: "step", data: '{"text":"2.5×"}' },
    { id: "8", event: "node", data: "{}" },
  ]);
  expect(heard).toBe(chunks.length);
});

it("gives no event that was cut off by the end", async () => {
  const messages: EventSourceMessage[] = [];
  await readMessages(body([new TextEncoder().encode("id: 1\nevent: job\ndata: {")]), (message) =>
    messages.push(message),
  );
  expect(messages).toEqual([]);
});
