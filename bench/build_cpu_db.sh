#!/bin/sh
# Profiles the zoo's architectures on this machine's CPU, batches 1 to 32, for `gpuprof train` and `gpuprof evaluate`.
#
#     bench/build_cpu_db.sh [DATABASE [FOLDER]]
#
# DATABASE (cpu-db) gets the rows, FOLDER (cpu-models) the ONNX files, which must stay: training reads them again.
# BATCHES, MODELS, SHARE and TIME_LIMIT (seconds of timing a row) may be set in the environment. What is there
# already is not made again, so an interrupted build goes on. NAME:SEED is a network of the zoo with that seed: of
# random ones the seed decides the layers. Those exported from transformers need the export extra and are left out
# without it. Run it on an idle machine: rows measured while others work are marked unstable (exit 2), and
# what is trained on them is worth as little.
set -u
database=${1:-cpu-db}
folder=${2:-cpu-models}
batches=${BATCHES:-1,2,4,8,16,32}
share=${SHARE:-100}
limit=${TIME_LIMIT:-10}
python=${PYTHON:-python}
models=${MODELS:-alexnet densenet121 inception_v1 inception_v2 resnet50 shufflenet squeezenet vgg19 zfnet512 \
mlp transformer_encoder lstm_classifier unet mobilenet_v2 resnet18 vit_base bert_base gpt2 t5_small \
$(seq -f random_cnn:%g 0 11) $(seq -f random_transformer:%g 0 7) $(seq -f random_rnn:%g 0 2) $(seq -f random_mlp:%g 0 2)}
mkdir -p "$folder" || exit 3
unstable=0
for model in $models; do
    name=${model%%:*} seed=0
    case $model in *:*) seed=${model##*:} ;; esac
    file=$folder/$(echo "$model" | tr : _).onnx
    if [ ! -f "$file" ]; then
        "$python" -m gpuprof zoo build "$name" --seed "$seed" -o "$file" || { echo "$model is left out" >&2; continue; }
    fi
    "$python" -m gpuprof profile "$file" --batch "$batches" --share "$share" --db "$database" --time-limit "$limit"
    case $? in
        0) ;;
        2) unstable=$((unstable + 1)) ;;
        *) exit 1 ;;
    esac
done
echo "models with unstable rows: $unstable" >&2
[ "$unstable" -eq 0 ] || exit 2
