// Calls a server in every way that @grpc/grpc-js has, and prints what came of it as JSON.
//   node grpc_js_client.js HOST:PORT open_inference.proto MODEL ELEMENTS
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, proto, model, elements] = process.argv.slice(2);
const definition = loader.loadSync(proto, { keepCase: true, longs: Number, defaults: true });
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const values = Buffer.from(new Float32Array(Number(elements)).fill(1.5).buffer);
const options = { "grpc.max_receive_message_length": -1 };
const limit = () => ({ deadline: Date.now() + 30000 });

function request(id) {
  const inputs = [{ name: "INPUT0", datatype: "FP32", shape: [1, Number(elements)] }];
  return { model_name: model, id, inputs, raw_input_contents: [values] };
}

function call(client, method, message, own = limit()) {
  return new Promise((resolve) => {
    client[method](message, own, (error, response) => resolve({ code: error ? error.code : 0, response }));
  });
}

function same(response) {
  return Boolean(response) && response.raw_output_contents.length === 1 && response.raw_output_contents[0].equals(values);
}

function stream(client, count) {
  return new Promise((resolve) => {
    const got = [];
    const both = client.ModelStreamInfer(limit());
    both.on("data", (part) => got.push(part.infer_response.id + (same(part.infer_response) ? "" : "?")));
    both.on("error", (error) => resolve({ got, code: error.code }));
    both.on("end", () => resolve({ got: got.sort(), code: 0 }));
    for (let i = 0; i < count; i++) both.write(request(String(i)));
    both.end();
  });
}

async function main() {
  const told = {};
  const plain = new GRPCInferenceService(address, grpc.credentials.createInsecure(), options);
  told.live = (await call(plain, "ServerLive", {})).response.live;
  told.metadata = (await call(plain, "ModelMetadata", { name: model })).response.name;
  const many = await Promise.all(Array.from({ length: 50 }, (_, i) => call(plain, "ModelInfer", request(String(i)))));
  told.answered = many.filter((one, i) => one.response && one.response.id === String(i) && same(one.response)).length;
  told.unknown = (await call(plain, "ModelInfer", { model_name: "nobody" })).code;
  told.wrong = (await call(plain, "ModelInfer", { model_name: model })).code;
  told.late = (await call(plain, "ModelInfer", request("late"), { deadline: Date.now() - 1 })).code;
  told.stream = await stream(plain, 5);
  for (const [name, algorithm] of [["deflate", 1], ["gzip", 2]]) {
    const own = { ...options, "grpc.default_compression_algorithm": algorithm };
    const client = new GRPCInferenceService(address, grpc.credentials.createInsecure(), own);
    told[name] = same((await call(client, "ModelInfer", request(name))).response);
    client.close();
  }
  plain.close();
  console.log(JSON.stringify(told));
}

main();
