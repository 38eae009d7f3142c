#!/bin/sh
# A GPU's first ten minutes: is the library right there, and as fast as it should be?
#
#     PYTHON=.venv/bin/python benchmarks/gpu_first.sh [FOLDER]
#
# Each step has its own time limit and prints one line, `name: value (bound)`. FOLDER (runs/gpu-first) gets the logs. The
# status is 1 if a step gave no value, or a test failed; whether a value meets its bound is for the reader. Nothing needs
# a network. Without a GPU the sizes are tiny, which only shows that the steps run. WORKERS: processes of the tests;
# SLOWER: a factor of the time limits.
set -u
cd "$(dirname "$0")/.." || exit 1
script=benchmarks/gpu_first.sh
python=${PYTHON:-python3}
folder=${1:-runs/gpu-first}
mkdir -p "$folder" || exit 1
device=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') || exit 1
failed=0

# step NAME SECONDS COMMAND...: print the last line that the command prints.
step() {
    name=$1 limit=$(($2 * ${SLOWER:-1}))
    shift 2
    timeout -k 10 "$limit" "$@" > "$folder/$name.log" 2>&1
    status=$?
    last=$(grep -v '^[[:space:]]*$' "$folder/$name.log" | tail -n 1)
    case $status in
        0) echo "$last" ;;
        124 | 137) echo "$name: no value in $limit s ($folder/$name.log)" && failed=1 ;;
        *) echo "$name: failed, $last ($folder/$name.log)" && failed=1 ;;
    esac
}

part() {
    step "$2" "$3" "$python" -m burst_attention.cli bench gpu "$1" --device "$device"
}

tests() {
    "$python" -m pytest tests/gpu -q -n "${WORKERS:-10}" -p no:cacheprovider > "$folder/pytest.log" 2>&1
    status=$?
    cat "$folder/pytest.log"
    [ "$status" = 5 ] && [ "$device" = cpu ] && status=0 # no test is collected without a GPU
    echo "tests: $(tail -n 1 "$folder/pytest.log") (none failed)"
    return "$status"
}

if [ "${2:-}" = --tests ]; then # called by itself, for the time limit
    tests
    exit
fi

part explain explain-first 60
part explain explain-again 60
part nan nan 60 # most of it compiles
export PYTHON="$python"
step tests 200 "$script" "$folder" --tests
part kernels kernels 90
part step step 60
part waits waits 30
part packed packed 40
part profile profile 60
part offload offload 60
exit "$failed"
