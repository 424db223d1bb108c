// A conversation through the public API, with the time to its first token and its speed.
"use strict";

(() => {
  const at = (id) => document.getElementById(id);
  const talk = at("talk");
  let messages = [];
  let running = null;

  let held = null; // the key of a team, in this page's memory only

  at("stop").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    talk.replaceChildren();
    at("hint").hidden = false;
  });
  at("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      at("playground").requestSubmit();
    }
  });
  at("playground").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send(at("message").value);
  });

  at("playground").addEventListener("input", showCode);
  at("code").addEventListener("toggle", showCode);

  // The request that the message in the box would make, in curl and in Python.
  function showCode() {
    if (!at("code").open) return;
    const { stream, stream_options, ...body } = request(at("message").value || "Hello");
    const endpoint = at("code").dataset.endpoint;
    const quoted = `'${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
    at("as-curl").textContent = [
      `curl ${endpoint}/chat/completions \\`,
      '  -H "Authorization: Bearer $SPILLWAY_API_KEY" \\',
      '  -H "Content-Type: application/json" \\',
      `  -d ${quoted}`,
    ].join("\n");
    at("as-python").textContent = [
      "import os",
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url=${JSON.stringify(endpoint)}, api_key=os.environ["SPILLWAY_API_KEY"])`,
      "answer = client.chat.completions.create(",
      ...Object.entries(body).map(([name, value]) => `    ${name}=${JSON.stringify(value)},`),
      ")",
      "print(answer.choices[0].message.content)",
    ].join("\n");
  }

  async function token() {
    const team = at("team").value;
    if (held?.team !== team) {
      const response = await fetch("/dashboard/playground/key", { method: "POST", body: new URLSearchParams({ team }) });
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error?.message || `HTTP ${response.status}`);
      held = { team, token: answer.token };
    }
    return held.token;
  }

  async function ask() {
    return fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", authorization: `Bearer ${await token()}` },
      body: JSON.stringify(request()),
      signal: running.signal,
    });
  }

  function show(role, text) {
    const item = document.createElement("li");
    item.className = role;
    const body = document.createElement("span");
    body.textContent = text;
    item.append(body);
    talk.append(item);
    item.scrollIntoView({ block: "nearest" });
    return { item, body };
  }

  function request(next) {
    const system = at("system").value.trim();
    const body = {
      model: at("model").value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, ...(next ? [{ role: "user", content: next }] : [])],
      stream: true,
      stream_options: { include_usage: true },
    };
    if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
    if (at("max_tokens").value !== "") body.max_tokens = Number(at("max_tokens").value);
    return body;
  }

  async function send(text) {
    at("hint").hidden = true;
    at("message").value = "";
    show("user", text);
    messages.push({ role: "user", content: text });
    const answer = show("assistant", "");
    running = new AbortController();
    at("send").disabled = true;
    at("stop").disabled = false;
    const seen = { text: "", first: null, last: null, tokens: null, id: null, started: performance.now() };
    try {
      await stream(answer.body, seen);
    } catch (error) {
      if (error.name !== "AbortError") show("error", error.message);
    }
    if (seen.text) messages.push({ role: "assistant", content: seen.text });
    else messages.pop();
    answer.item.append(figures(seen));
    running = null;
    at("send").disabled = false;
    at("stop").disabled = true;
  }

  async function stream(place, seen) {
    let response = await ask();
    if (response.status === 401) {
      held = null; // it was rotated in other tabs, or has expired
      response = await ask();
    }
    seen.id = response.headers.get("x-request-id");
    if (!response.ok) throw new Error((await response.json()).error?.message || `HTTP ${response.status}`);
    let rest = "";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") take(JSON.parse(line.slice(6)), place, seen);
    }
  }

  function take(chunk, place, seen) {
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices?.[0]?.delta;
    const text = (delta?.reasoning_content || delta?.reasoning || "") + (delta?.content || "");
    if (text) {
      seen.first ??= performance.now();
      seen.last = performance.now();
      seen.text += delta.content || "";
      place.textContent += text;
      place.scrollIntoView({ block: "nearest" });
    }
    if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
  }

  function figures(seen) {
    const line = document.createElement("small");
    line.className = "figures";
    const parts = [];
    if (seen.first !== null) parts.push(`TTFT ${Math.round(seen.first - seen.started)} ms`);
    if (seen.tokens !== null) parts.push(`${seen.tokens} tokens`);
    if (seen.tokens > 1 && seen.last > seen.first) parts.push(`${(((seen.tokens - 1) / (seen.last - seen.first)) * 1000).toFixed(1)} tokens/s`);
    if (seen.tokens === null) parts.push("interrupted");
    line.append(parts.join(" · "));
    if (seen.id) {
      const link = document.createElement("a");
      link.href = `/dashboard/requests/${encodeURIComponent(seen.id)}`;
      link.textContent = "Show request";
      line.append(" · ", link);
    }
    return line;
  }
})();
