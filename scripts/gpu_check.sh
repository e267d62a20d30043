#!/usr/bin/env bash
# What docs/gpu.md calls unverified, tried on a machine with one GPU or more; under ten minutes. Prints a line a check.
#
#     scripts/gpu_check.sh [PYTHON]        PYTHON: an interpreter with Meshy's dependencies (default: .venv/bin/python)
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
out=${OUT:-$(mktemp -d)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false
failed=0

check() { # check NAME SECONDS COMMAND...: runs it, says whether it held, keeps its output
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    if timeout "$seconds" bash -c '"$@"' "$name" "$@" >"$out/$name.log" 2>&1; then
        echo "holds   $name ($((SECONDS - began)) s)"
    else
        echo "FAILS   $name ($((SECONDS - began)) s): $(tail -n 1 "$out/$name.log" | cut -c1-160)   whole output: $out/$name.log"
        failed=1
    fi
}

export python recipe=recipes/grpo_sync.py
run() { # run SLOTS SETTINGS...: $recipe on so many GPUs
    local slots=$1
    shift
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$slots" -m meshy.ignitor "$recipe" "$@"
}
export -f run  # for the shells in which `check` runs it

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
echo "$gpus GPU(s): $("$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none")')"
[ "$gpus" -ge 1 ] || { echo "no GPU here: nothing to check"; exit 2; }

check engine 120 "$python" -m pytest tests/inference/test_parity.py
check trainer 150 "$python" -m pytest tests/training/test_engine.py
recipe=recipes/opd.py check distillation 180 run 1 colocated=true steps=3 teacher.evaluate=32 --run-dir "$out/distillation"
if [ "$gpus" -ge 2 ]; then
    check run 180 run 2 steps=5 rollout.eval_prompts=32 --run-dir "$out/run"
    check collective 150 run 2 steps=3 trainer.publish=collective trainer.verify_every=1 --run-dir "$out/collective"
    check shm 150 run 2 steps=3 trainer.publish=shm trainer.verify_every=1 --run-dir "$out/shm"
    check packed_bf16 150 run 2 steps=3 trainer.packing=packed trainer.mixed_precision=bfloat16 --run-dir "$out/packed"
else
    echo "skipped run, collective, shm, packed_bf16: a disaggregated run needs two GPUs"
fi
exit $failed
