// The page of the API: draws openapi.json, which stands beside it. Addresses are relative, so that
// the page works behind a proxy's prefix.

const at = (id) => document.getElementById(id);

function made(tag, text = "", name = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  return element;
}

// -- a schema in words ----------------------------------------------------------------------------

function bounds(schema) {
  const parts = [];
  if ("minimum" in schema) parts.push(`at least ${schema.minimum}`);
  if ("exclusiveMinimum" in schema) parts.push(`above ${schema.exclusiveMinimum}`);
  if ("maximum" in schema) parts.push(`at most ${schema.maximum}`);
  if ("maxLength" in schema) parts.push(`at most ${schema.maxLength} characters`);
  if ("maxItems" in schema) parts.push(`at most ${schema.maxItems} of them`);
  return parts.length ? ` (${parts.join(", ")})` : "";
}

function words(schema) {
  if (schema.anyOf) {
    return [...new Set(schema.anyOf.map(words))].filter((one) => one !== "").join(", or ");
  }
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "null") return "";
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(", ");
  if (schema.type === "array") {
    return `list of ${schema.items ? words(schema.items) : "anything"}${bounds(schema)}`;
  }
  if (schema.type === "object" && schema.properties) {
    return `{${Object.keys(schema.properties).join(", ")}}`;
  }
  const types = [schema.type ?? "anything"].flat().filter((one) => one !== "null");
  return types.join(" or ") + bounds(schema);
}

// -- operations -----------------------------------------------------------------------------------

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const names = Object.keys(schema.properties ?? {});
  names.sort((one, other) => required.has(other) - required.has(one)); // else the order stays
  const table = made("table");
  for (const name of names) {
    const row = made("tr");
    row.append(made("th", name), made("td", words(schema.properties[name])));
    row.append(made("td", required.has(name) ? "required" : "", "hint"));
    table.append(row);
  }
  return table;
}

function operation(path, method, about) {
  const section = made("section");
  section.append(made("h2", `${method.toUpperCase()} ${path}`), made("p", about.summary ?? "", "about"));
  const schema = about.requestBody?.content?.["application/json"]?.schema;
  if (schema) {
    const details = made("details");
    details.append(made("summary", "Fields of the JSON body"), fields(schema));
    section.append(details);
  }
  return section;
}

async function draw() {
  const response = await fetch(new URL("openapi.json", document.baseURI));
  if (!response.ok) throw new Error(`openapi.json: status ${response.status}`);
  const api = await response.json();
  at("version").textContent = api.info.version;
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      at("operations").append(operation(path, method, about));
    }
  }
}

draw().catch((error) => {
  at("failure").textContent = String(error);
  at("failure").hidden = false;
});
