"""Wrong inputs: each is refused in one line that names a remedy, with an exit code, without a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from tests.export.test_export import MAP
from tests.small_models import floats, write_model

DATABASE = Path(__file__).parents[1] / "kernel_db/database_of_0_1_0/gpuprof-db"
#: What is written before: name → content.
_FILES = {
    "empty.onnx": "",
    "text.onnx": "not a model",
    "empty.csv": "",
    "header.csv": "model,rate_rps,slo_ms\n",
    "columns.csv": "model,rate\nnet,1\n",
    "word.csv": "model,rate_rps,slo_ms\nnet.onnx,fast,20\n",
    "negative.csv": "model,rate_rps,slo_ms\nnet.onnx,-5,20\n",
    "zero.csv": "model,rate_rps,slo_ms\nnet.onnx,5,0\n",
    "nan.csv": "model,rate_rps,slo_ms\nnet.onnx,nan,20\n",
    "twice.csv": "model,rate_rps,slo_ms\nnet.onnx,5,20\nnet.onnx,6,20\n",
    "percentile.csv": "model,rate_rps,slo_ms,percentile\nnet.onnx,5,20,101\n",
    "extra.csv": "model,rate_rps,slo_ms,colour\nnet.onnx,5,20,red\n",
    "unknown.csv": "model,rate_rps,slo_ms\nnowhere,5,20\n",
    "slo.csv": "model,rate_rps,slo_ms\nnet.onnx,5,20\n",
    "absurd.csv": "model,rate_rps,slo_ms\nnet.onnx,1e15,20\n",
    "map.json": MAP.to_json(),
    "list.json": "[]",
    "half.json": MAP.to_json()[:200],
    "newer.json": json.dumps({"schema": "gpuprof.deployment/9"}),
    "other.json": json.dumps({"schema": "x/1"}),
    "rates.json": json.dumps(json.loads(MAP.to_json()) | {"models": {"b": {"rate_rps": -1, "slo_ms": 5}}}),
    "fleet.toml": "this is = = no TOML",
    "fleet2.toml": "[[devices]]\nname = 'nonsense'\n",
    "trace.csv": "time_s,model\nlater,b\n",
    "trace2.csv": "when,what\n1,b\n",
    "token": "",
    "folder/file": "",
    "null.csv": "model,rate_rps,slo_ms\nne\0t.onnx,5,20\n",
    "utf16.csv": "model,rate_rps,slo_ms\nnet.onnx,5,20\n".encode("utf-16").decode("latin-1"),
    "listed.yaml": "models: [net.onnx]\nsteps: [profile]\n",
    "future.json": '{"schema": "gpuprof.simulation/9"}',
    "digits.csv": f"model,rate_rps,slo_ms,dims\nnet.onnx,5,20,seq={'9' * 5000}\n",
    "short.csv": "model,rate_rps,slo_ms\nnet.onnx,5\n",
    "price.toml": "[[gpus]]\ndevice = 'a100-80'\nprice = 3\n",
    "binary.toml": "\0",
    "devices.toml": "[[devices]]\nname = 'x'\n",
    "processes.json": MAP.to_json().replace('"processes": 1', '"processes": 10000000', 1),
    "batch.json": MAP.to_json().replace('"batch": 4', '"batch": 1000000000000', 1),
    "deep.json": "[" * 100_000,
    "list.yaml": "- a\n- b\n",
    "data.npz": "PK nonsense",
    "no_samples.json": '{"data": []}',
    "other_input.json": '{"data": [{"z": [1, 2, 3, 4]}]}',
    "three.json": '{"data": [{"x": [1, 2, 3]}]}',
    "nodes.json": json.dumps(json.loads(MAP.to_json()) | {"nodes": []}),
    "semicolon.csv": "model;rate_rps;slo_ms\nnet.onnx;5;20\n",
    "quote.csv": 'model,rate_rps,slo_ms\n"net.onnx,5,20\n',
    "comma.csv": 'model,rate_rps,slo_ms\nnet.onnx,"1,5",20\n',
    "tiny.csv": "model,rate_rps,slo_ms\nnet.onnx,5,1e-300\n",
    "column_twice.csv": "model,rate_rps,slo_ms,slo_ms\nnet.onnx,5,20,30\n",
    "nameless.csv": "model,rate_rps,slo_ms\n,5,20\n",
    "pipe_as_model.csv": "model,rate_rps,slo_ms\npipe,5,20\n",
    "blank.csv": "  \n\n",
    "many.csv": "model,rate_rps,slo_ms\n" + "".join(f"m{i},5,20\n" for i in range(20_000)),
    "count.toml": "[[gpus]]\ndevice = 'a100-80'\ncount = -1\n",
    "no_gpus.toml": "gpus = []\n",
    "catalogue.toml": "[a100-80]\nsms = 1\n",
    "before.csv": "time_s,model\n-1,b\n",
    "unsorted.csv": "time_s,model\n2,b\n1,b\n",
    "cut.sqlite": "SQLite format 3\0" + "x" * 100,
    "events.json": '{"traceEvents": [{"ph": "X"}]}',
    "itself.yaml": "steps:\n  - run: {plan: itself.yaml}\n",
    "tag.yaml": "steps: !!python/object/apply:os.system ['true']\n",
    "aliases.yaml": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "tab.yaml": "steps:\n\t- doctor\n",
    "large.json": '{"data": [{"x": [1, 2, 3, 1e999]}]}',
    "base64.json": '{"data": [{"x": {"b64": "%%%"}}]}',
    "negative.json": '{"data": [{"x": {"content": [1, 2, 3, 4], "shape": [-4]}}]}',
    "text_shape.json": '{"data": [{"x": {"content": [1, 2, 3, 4], "shape": "4"}}]}',
    "texts.json": '{"data": [{"x": ["a", "b", "c", "d"]}]}',
    "nothing.json": '{"data": [{"x": null}]}',
    "ragged.json": '{"data": [{"x": [[1, 2], [3]]}]}',
    "denormal.csv": "model,rate_rps,slo_ms\nnet.onnx,1e-320,20\n",
    "foreign/sales.parquet": "PAR1",
    "simulated.json": '{"schema": "gpuprof.simulation/1"}',
    "short_keys.yaml": "models: {a: {file: net.onnx, rate: 10, slo: 50}}\nsteps: [doctor]\n",
    "word_of_model.yaml": "models: {a: net.onnx}\nsteps: [doctor]\n",
    "circle/file": "",
    "igniter.jsonl": '{"model": 1}\n',
    "infinite.csv": "model,rate_rps,slo_ms\nnet.onnx,inf,20\n",
    "underscore.csv": "model,rate_rps,slo_ms\nnet.onnx,1_0,20\n",
    "nan_price.toml": "[[gpus]]\ndevice = 'a100-80'\nprice_per_hour = nan\n",
    "number.toml": "[[gpus]]\ndevice = 5\n",
    "quoted.csv": 'time_s,model\n1,"b\n',
    "documents.yaml": "steps: [doctor]\n---\nsteps: [doctor]\n",
    "cut.parquet": "PAR1xxxxPAR1",
    **{
        f"load_{name}.json": json.dumps(
            [{"rate_rps": 1.0, "goodput_rps": 1.0, "p99_ms": 1.0, "model": model, "stages": stages}]
        )
        for name, model, stages in (
            ("model", ["a"], {}),
            ("size", "a", {"infer_ms": 1, "batches": {"one": 3}}),
            ("count", "a", {"infer_ms": 1, "batches": {"4": -3}}),
        )
    },
    "setting.json": '[{"setting": 1, "quantity": "latency", "predictor": "lasso", "median_pct": 3}]',
    "keys.jsonl": "{}\n",
    "rows.csv": "Mig instance,Batch size,Workload Number,Throughput,Latency\n",
    "net.pt": "PK\3\4 archive/data.pkl",
    "net.h5": "\x89HDF\r\n",
    "net.tflite": "\x1c\0\0\0TFL3",
    "net.safetensors": "\x08\0\0\0\0\0\0\0{}",
    "pointer.onnx": "version https://git-lfs.github.com/spec/v1\n",
    "url.csv": "model,rate_rps,slo_ms\nhttps://example.com/net.onnx,5,20\n",
}

#: Words of a command line → part of what is said.
_WRONG: list[tuple[str, str]] = [
    ("profile", "model"),
    ("profile none.onnx", "none.onnx"),
    ("profile empty.onnx --device cpu", "empty"),
    ("profile text.onnx --device cpu", "text.onnx"),
    ("profile folder --device cpu", "folder"),
    ("profile net.onnx --batch 0", "batch"),
    ("profile net.onnx --batch 1,two", "two"),
    ("profile net.onnx --batch ,", "batch"),
    ("profile net.onnx --processes 0", "processes"),
    ("profile net.onnx --share 0 --device cpu", "share"),
    ("profile net.onnx --share 101 --device cpu", "share"),
    ("profile net.onnx --share 3g.40gb --device cpu", "3g.40gb"),
    ("profile net.onnx --collector perf", "perf"),
    ("profile net.onnx --time-limit -1", "time-limit"),
    ("profile net.onnx --beside other:x --device cpu", "other"),
    ("profile net.onnx --device tpu", "tpu"),
    ("profile --from-report none.sqlite --batch 1", "none.sqlite"),
    ("estimate net.onnx --batch x --device a100-80", "x"),
    ("estimate net.onnx --batch 99999999999 --device a100-80", "batch"),
    ("estimate net.onnx --device a100-8", "a100-80"),
    ("estimate net.onnx --device a100-80 --share 9g.1gb", "9g.1gb"),
    ("estimate net.onnx --device a100-80 --processes 0", "processes"),
    ("estimate net.onnx --device a100-80 --estimator oracle", "oracle"),
    ("estimate net.onnx --device a100-80 --precision float13", "float13"),
    ("estimate net.onnx --device a100-80 --beside net.onnx@x --share 50", "net.onnx@x"),
    ("estimate nowhere --device a100-80", "nowhere"),
    ("place --slo-file none.csv", "none.csv"),
    ("place --slo-file empty.csv --gpus a100-80", "empty.csv"),
    ("place --slo-file header.csv --gpus a100-80", "header.csv"),
    ("place --slo-file columns.csv --gpus a100-80", "rate_rps"),
    ("place --slo-file word.csv --gpus a100-80", "fast"),
    ("place --slo-file negative.csv --gpus a100-80", "-5"),
    ("place --slo-file zero.csv --gpus a100-80", "slo_ms"),
    ("place --slo-file nan.csv --gpus a100-80", "nan"),
    ("place --slo-file twice.csv --gpus a100-80", "net"),
    ("place --slo-file percentile.csv --gpus a100-80", "101"),
    ("place --slo-file extra.csv --gpus a100-80", "colour"),
    ("place --slo-file unknown.csv --gpus a100-80 --db DB", "nowhere"),
    ("place --slo-file slo.csv --gpus a100-80:0", "a100-80:0"),
    ("place --slo-file slo.csv --gpus a100-80:many", "many"),
    ("place --slo-file slo.csv --gpus a100-80 --fleet fleet.toml", "--fleet"),
    ("place --slo-file slo.csv --fleet fleet.toml", "fleet.toml"),
    ("place --slo-file slo.csv --fleet fleet2.toml", "fleet2.toml"),
    ("place --slo-file slo.csv --gpus a100-80 --policy best", "best"),
    ("place --slo-file slo.csv --gpus a100-80 -O magic=1", "magic"),
    ("place --slo-file slo.csv --gpus a100-80 --confidence 2", "confidence"),
    ("place --slo-file slo.csv --gpus a100-80 --arrivals sometimes", "sometimes"),
    ("place --slo-file absurd.csv --gpus a100-80:1 --policy ffd", "absurd.csv:2"),
    ("compare --slo-file slo.csv --gpus a100-80 --policies ''", "polic"),
    ("compare --slo-file slo.csv --gpus a100-80 --policies ffd,best", "best"),
    ("check none.json", "none.json"),
    ("check list.json", "list.json"),
    ("check half.json", "half.json"),
    ("check newer.json", "newer"),
    ("check other.json", "other.json"),
    ("check rates.json", "rate_rps"),
    ("explain map.json nowhere", "nowhere"),
    ("explain map.json", "several models (name one: Net/A, b)"),
    ("export map.json --to helm", "helm"),
    ("export map.json --to k8s", "--image"),
    ("simulate map.json --duration soon", "soon"),
    ("simulate map.json --trace trace.csv", "trace.csv"),
    ("simulate map.json --trace trace2.csv", "time_s"),
    ("simulate map.json --arrivals sometimes", "sometimes"),
    ("simulate map.json --fail node9@1s", "node9"),
    ("simulate map.json --rate nowhere=5", "nowhere"),
    ("serve map.json --simulate --node node9", "node9"),
    ("serve map.json --simulate --host 0.0.0.0", "--token-file"),
    ("serve map.json --simulate --token-file token", "token"),
    ("serve map.json --simulate --routing random", "random"),
    ("load http://127.0.0.1:9 --map map.json --duration 1", "127.0.0.1:9"),
    ("load ftp://x --map map.json", "ftp"),
    ("load http://127.0.0.1:9 --map map.json -o out.xlsx", ".csv"),
    ("merge net.onnx -o both.onnx", "two"),
    ("merge a.onnx b.onnx -o both.onnx", "a.onnx"),
    ("merge net.onnx net.onnx -o net.onnx", "net.onnx"),
    ("similarity net.onnx", "two"),
    ("zoo build resnet51", "resnet50"),
    ("zoo build mlp --batch many", "many"),
    ("zoo rebatch text.onnx -o out.onnx", "text.onnx"),
    ("trace make --rate b", "b"),
    ("trace show trace.csv", "trace.csv"),
    ("db sql 'select nothing from models' --db DB", "nothing"),
    ("db sql 'drop table models' --db DB", "select"),
    ("db ls --db none", "none"),
    ("db show cats --db DB", "cats"),
    ("db import none.csv --db db", "none.csv"),
    ("report none", "none"),
    ("train --db none", "none"),
    ("evaluate --db db", "db"),
    ("calibrate --db none --device a100-80", "none"),
    ("apply map.json --port 9", "9"),
    # Found by trying another 190: what these met was a bug, a wait without end, or a message without a remedy.
    ("profile net.onnx --device cpu --time-limit 1e999", "time-limit"),
    ("profile net.onnx --device cpu --share 99999cores", "cores at most"),
    ("profile net.onnx --device cpu --collector os:getcwd", "collect"),
    ("profile net.onnx --device cpu --input-data data.npz", "numpy.savez"),
    ("estimate net.onnx --device a100-80 --estimator os:getcwd", "os:getcwd"),
    ("estimate net.onnx --device x --device-file devices.toml", "[NAME]"),
    ("place --slo-file null.csv --gpus a100-80", "null byte"),
    ("place --slo-file utf16.csv --gpus a100-80", "UTF-8"),
    ("place --slo-file short.csv --gpus a100-80", "2 fields"),
    ("place --slo-file folder --gpus a100-80", "a CSV file"),
    ("place --slo-file slo.csv --gpus a100-80 --policy os:system", "os:system"),
    ("place --slo-file slo.csv --gpus a100-80 --policy os:getcwd", "place()"),
    ("place --slo-file slo.csv --gpus a100-80 --policy nowhere:Policy", "package.module:Class"),
    ("place --slo-file slo.csv --fleet price.toml", "price_per_hour"),
    ("place --slo-file slo.csv --fleet binary.toml", "[[gpus]]"),
    ("check processes.json", "4096"),
    ("serve processes.json --simulate --port 0", "4096"),
    ("check batch.json", "65536"),
    ("check deep.json", "gpuprof place"),
    ("trace show deep.json", "write time_s,model"),
    ("load http://127.0.0.1:9 --map map.json --rate b=1e9", "10,000,000"),
    ("simulate map.json --rate b=1e12", "1,000,000,000"),
    ("zoo build mlp --batch 99999999999999", "65,536"),
    ("run list.yaml", "steps"),
    # Found by trying another 209, named pipes and devices among them: those waited without an end, or were replaced.
    ("profile pipe --device cpu", "pipe"),
    ("profile net.onnx --device cpu --input-data pipe", "named pipe"),
    ("profile net.onnx --device cpu --input-data no_samples.json", "no samples"),
    ("profile net.onnx --device cpu --input-data other_input.json", "lacks the input 'x'"),
    ("profile net.onnx --device cpu --input-data three.json", "size 3"),
    ("profile net.onnx --device cpu --dim batch=3", "beside the batch, which --batch sets or place chooses: none"),
    ("profile net.onnx --device cpu --batch 1:8", "1:8"),
    ("profile --from-report pipe --batch 1", "named pipe"),
    ("profile --from-report /dev/zero --batch 1", "a device"),
    ("profile --from-report cut.sqlite --batch 1", "cut.sqlite"),
    ("profile --from-report events.json --batch 1", "events.json"),
    ("estimate net.onnx --device x --device-file pipe", "named pipe"),
    ("estimate net.onnx --device ''", "empty"),
    ("estimate net.onnx --device a100-80 --device-file catalogue.toml", "a100-80"),
    ("place --slo-file pipe --gpus a100-80", "named pipe"),
    ("place --slo-file /dev/zero --gpus a100-80", "a device"),
    ("place --slo-file semicolon.csv --gpus a100-80", ","),
    ("place --slo-file quote.csv --gpus a100-80", "quotation mark"),
    ("place --slo-file comma.csv --gpus a100-80", "1,5"),
    ("place --slo-file tiny.csv --gpus a100-80:1 --policy ffd", "--best-effort"),
    ("place --slo-file column_twice.csv --gpus a100-80", "twice"),
    ("place --slo-file nameless.csv --gpus a100-80", "model is empty"),
    ("place --slo-file pipe_as_model.csv --gpus a100-80 --db DB", "pipe"),
    ("place --slo-file blank.csv --gpus a100-80", "blank.csv"),
    ("place --slo-file many.csv --gpus a100-80 --db DB", "m0"),
    ("place --slo-file slo.csv --fleet pipe", "named pipe"),
    ("place --slo-file slo.csv --fleet count.toml", "-1"),
    ("place --slo-file slo.csv --fleet no_gpus.toml", "gpus"),
    ("place --slo-file slo.csv --gpus a100-80:1 -o pipe", "named pipe"),
    ("place --slo-file slo.csv --gpus a100-80:1 --arrivals pipe", "pipe"),
    ("check pipe", "named pipe"),
    ("simulate map.json --trace pipe", "named pipe"),
    ("simulate map.json --trace before.csv", "time_s"),
    ("trace show unsorted.csv", "sort"),
    ("serve map.json --simulate --port 0 --token-file pipe", "named pipe"),
    ("serve nodes.json --simulate --port 0", "no replica"),
    ("merge net.onnx pipe -o both.onnx", "pipe"),
    ("zoo build mlp -o /dev/null", "a device"),
    ("zoo rebatch net.onnx -o /dev/null", "a device"),
    ("merge net.onnx net.onnx -o /dev/null", "a device"),
    ("db import pipe --db db", "named pipe"),
    ("report pipe", "named pipe"),
    ("run pipe", "named pipe"),
    ("run itself.yaml", "no step"),
    ("run tag.yaml", "unknown verb"),
    ("run aliases.yaml", "unknown key"),
    ("run tab.yaml", "spaces"),
    ("place --config pipe", "named pipe"),
    # Found by trying another 160.
    ("load 'http://exa mple' --map map.json", "http://127.0.0.1:8000"),
    ("place --slo-file digits.csv --gpus a100-80", "5000 characters"),
    ("profile net.onnx --device cpu --processes 999", "from 1 to 64"),
    (f"profile net.onnx --device cpu --batch {'9' * 5000}", "from 1 to 65,536"),
    ("run listed.yaml", "models: {NAME"),
    ("report future.json", "of another version"),
    ("report slo.csv", "give a database"),
    ("place --slo-file slo.csv --gpus a100-80:99999999999999999999", "999,999,999"),
    # Found by trying another 150.
    ("profile net.onnx --device cpu --input-data large.json", "1e999"),
    ("profile net.onnx --device cpu --input-data base64.json", "b64"),
    ("profile net.onnx --device cpu --input-data negative.json", "[-4]"),
    ("profile net.onnx --device cpu --input-data text_shape.json", "whole numbers from 1"),
    ("profile net.onnx --device cpu --input-data texts.json", "has texts (give numbers)"),
    ("profile net.onnx --device cpu --input-data nothing.json", "null"),
    ("profile net.onnx --device cpu --input-data ragged.json", "rows of different lengths"),
    ("place --slo-file denormal.csv --gpus a100-80:1 --policy ffd", "at least 1e-09"),
    ("merge a=net.onnx net.onnx -o both.onnx --db DB --device cpu-intel-xeon-4c", "a=net.onnx"),
    ("trace show none.csv", "gpuprof trace make"),
    ("db import folder --db db", "no file of folder"),
    ("db export -o net.onnx --db DB", "name a directory"),
    ("db compact --db foreign", "no kernel database"),
    ("report simulated.json", "it has no 'models'"),
    ("report map.json -o page.gif", "one HTML page"),
    ("train --db DB --regressors magic", "magic"),
    ("evaluate --db DB --plot plot.gif", ".svg or .png"),
    ("calibrate --device a100-80 --profile igniter.jsonl --db db", "config.jsonl"),
    ("run short_keys.yaml", "rate_rps"),
    ("run word_of_model.yaml", "rate_rps: 10, slo_ms: 50"),
    ("report circle", "no kernel database"),
    ("report nothing_there", "holds no runs"),
    ("report none.json", "give a database"),
    ("export map.json --to k8s --image 'a b' -o k8s", "'a b'"),
    ("serve map.json --simulate --host 300.1.1.1 --insecure --port 0", "--host"),
    ("profile net.onnx --device cpu --collector nsys", "leave out --collector"),
    ("profile ''", "''"),
    ("profile net.onnx --device ''", "asked for ''"),
    # Found by trying another 137.
    ("simulate map.json --rate b=1 --rate b=2", "the rate of b is given twice: 1 and 2"),
    ("load http://127.0.0.1:9 --map map.json --rate b=1 --rate b=2", "the rate of b is given twice"),
    ("load http://127.0.0.1:9 --map map.json --concurrency b=1 --concurrency b=2", "the concurrency of b"),
    ("trace make --rate b=1 --rate b=2", "the rate of b is given twice"),
    ("place --slo-file slo.csv --gpus a100-80:1 --policy milp -O unshared=true -O unshared=false", "given twice"),
    ("profile offset.onnx --device cpu", "(the model is damaged: export it again)"),
    ("place --slo-file infinite.csv --gpus a100-80", "a finite number above 0 but got inf"),
    ("place --slo-file underscore.csv --gpus a100-80", "must be a number but got '1_0'"),
    ("place --slo-file slo.csv --fleet nan_price.toml", "(write dollars an hour"),
    ("place --slo-file slo.csv --fleet number.toml", "(write [[gpus]]"),
    ("simulate map.json --trace quoted.csv", "(close each quotation mark)"),
    ("run documents.yaml", "(leave out the line ---)"),
    ("load https://127.0.0.1:9 --map map.json --ca-file text.onnx", "(give a file that begins with -----BEGIN)"),
    ("serve map.json --simulate --node node0 --tls-cert text.onnx --tls-key text.onnx --port 0", "-----BEGIN"),
    ("db import cut.parquet --db db", "(fetch it again whole)"),
    # Answered in part, or only after the work.
    ("place --slo-file slo.csv --gpus a100-80:1 --gpus l4:1", "--gpus is given 2 times"),
    ("profile net.onnx --device cpu --batch 1 --batch 2", "--batch is given 2 times"),
    ("zoo build mlp -o a.onnx --output b.onnx", "--output is given 2 times"),
    ("trace make --rate b=1 --seed 1 --seed 2", "--seed is given 2 times"),
    ("db show models --limit 1 --limit 2 --db DB", "--limit is given 2 times"),
    ("db sql 'select 1; select 2' --db DB", "holds 2 statements"),
    ("profile net.onnx --device cpu --db /proc/db", "/proc is not writable"),
    ("place --slo-file slo.csv --gpus a100-80:1 -o /proc/map.json", "cannot write /proc/map.json"),
    ("report map.json --figures /proc/figures", "cannot write to /proc/figures"),
    ("report load_model.json", "model must be a name but is ['a']"),
    ("report load_size.json", "'one'"),
    ("report load_count.json", "negative"),
    ("report setting.json", "setting must be a name but is 1"),
    ("train --db DB --regressors lasso,lasso", "lasso is named twice"),
    ("calibrate --profile keys.jsonl --device a100-80", "hardware"),
    ("db import rows.csv --db fresh", "no row of the form parvagpu"),
    ("db import keys.jsonl --format parvagpu --db fresh", "no row of the form parvagpu"),
    # Found by trying another 170: answered all the same, or with a remedy that did not help.
    ("profile net.pt --device cpu", "as PyTorch and Keras write (export the model with torch.onnx.export"),
    ("profile net.h5 --device cpu", "HDF5"),
    ("estimate net.tflite --device t4", "TensorFlow Lite's (export the model with tf2onnx)"),
    ("merge net.safetensors net.onnx -o both.onnx", "weights without a graph"),
    ("profile pointer.onnx --device cpu", "git lfs pull"),
    ("profile https://example.com/net.onnx --device cpu", "(download it first)"),
    ("place --slo-file url.csv --gpus t4", "(download it first)"),
    ("place slo.csv --gpus t4", "(demands are given by --slo-file slo.csv)"),
    ("zoo build", "see gpuprof zoo build --help"),
    ("db show", "see gpuprof db show --help"),
    ("trace show trace.csv --bins 1", "see gpuprof trace show --help"),
    ("compare --slo-file slo.csv --gpus t4 --policies ffd,ffd", "names a policy twice"),
    ("compare --slo-file slo.csv --gpus t4 --policies all,ffd", "leave the others out, or all"),
    ("serve map.json --simulate --port 8123 --grpc-port 8123", "are both 8123 (give them different ports)"),
    ("load http://127.0.0.1:9/v2?x=1 --map map.json", "has a path, and requests go to /v2 at its root"),
    ("load http://127.0.0.1:9 --map map.json --window 0s", "--window must be at least 0.1 s"),
    ("load http://127.0.0.1:9 --map map.json --duration 1y", "write a number and ms, s, m, h or d"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wrong")
    for name, content in _FILES.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(content, encoding="latin-1")
    os.mkfifo(made / "pipe")
    (made / "circle/itself").symlink_to("itself")
    (made / "nothing_there").mkdir()
    from onnx import helper

    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    write_model(made / "net.onnx", nodes, {"x": ["batch", 4]}, {"y": ["batch", 4]}, {"w": floats(4, 4)})
    _write_broken_model(made)
    return made


def _write_broken_model(folder: Path) -> None:
    """Write a model whose weights stand nowhere in another file."""
    from onnx import TensorProto, load

    model = load(folder / "net.onnx")
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "cut.parquet"), ("offset", "many")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    (folder / "offset.onnx").write_bytes(model.SerializeToString())


@pytest.mark.parametrize(("line", "named"), _WRONG, ids=[line[:80] for line, _ in _WRONG])
def test_a_wrong_input_is_refused_in_one_line_with_a_remedy(
    line: str, named: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("GPUPROF_")]:
        monkeypatch.delenv(name)
    assert main([str(DATABASE) if word == "DB" else word for word in shlex.split(line)]) in {1, 3}
    said = capsys.readouterr().err.strip().splitlines()
    assert said and said[-1].startswith("gpuprof: "), said
    last = said[-1]
    assert "bug:" not in last and "Traceback" not in "".join(said), last
    assert named.lower() in last.lower(), last
    assert last.endswith(")") or " must " in last or ": " in last.removeprefix("gpuprof: "), f"no remedy: {last}"


def test_there_are_more_than_150() -> None:
    assert len({line for line, _ in _WRONG}) == len(_WRONG) > 150
