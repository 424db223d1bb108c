// What all clients ask for, and what they must get: told by tests/clients/test_node.py.
export const { url, stumblingBase, apiKey, tenantKeys, model, vectors, plays, question, noPlay, said, answer, toolName, toolText, toolArguments, parameters, result, reading, held } =
  JSON.parse(process.env.SPILLWAY);

// A base URL below which the first request stumbles (tests/clients/stumbling.py): "429", "500", "lost" or "final".
export const stumbling = (kind, name) => `${stumblingBase}/${kind}-${name}`;

export const collect = async (stream) => {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
};

// A fetch that notes the answers to a client, those before a retry included, and tells of each.
export const counting = (answers, onAnswer = () => {}) => async (...request) => {
  const response = await fetch(...request);
  answers.push(response.status);
  onAnswer(response);
  return response;
};
